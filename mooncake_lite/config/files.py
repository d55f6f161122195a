"""Files that are replaced at once. Used by all parts that write one which others read meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file, or make it: a reader never sees a part of it, and an error leaves nothing behind.

    Raises OSError.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(content)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
