"""The text of files that users write, whatever their editor puts before it.

Used by all that reads such files. Knows no format.
"""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE


def plain_text(raw: bytes) -> bytes:
    """Return UTF-8 text without a byte order mark at its begin. Raises UnicodeDecodeError for UTF-16."""
    if raw.startswith((BOM_UTF16_BE, BOM_UTF16_LE)):
        raise UnicodeDecodeError("utf-8", raw, 0, 2, "this is UTF-16; save it as UTF-8")
    return raw.removeprefix(BOM_UTF8)
