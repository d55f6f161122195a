"""Formats an event or an effect as one line of text, for reports of differences and failures.

Used by `mooncake-lite replay-events` and `mooncake_lite.simulator.world`. Pure. See docs/explain/control.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from store.objects import BlockRef

SHOWN = 4
"""Items of a list that are shown; the rest is only counted, so that an event stays one line."""

HASHED = ("key", "keys", "digests", "checksums")
"""Fields whose numbers are hashes, shown in hexadecimal."""


def readable(record: Any) -> str:
    """Return e.g. `PutsWanted(rank=2, epoch=0, number=1, keys=[9f3c..], ...)` for an event or an effect."""
    names = getattr(record, "_fields", None) or msgspec.structs.asdict(record)
    values = [f"{name}={_value(getattr(record, name), name in HASHED)}" for name in names]
    return f"{type(record).__name__}({', '.join(values)})"


def _value(value: Any, hashed: bool) -> str:
    if isinstance(value, BlockRef):
        return f"{value.object_id}@{value.rank}:{value.offset}"
    if isinstance(value, list | tuple):
        shown = [_value(item, hashed) for item in value[:SHOWN]]
        more = [f"... {len(value)}"] if len(value) > SHOWN else []
        return f"[{', '.join(shown + more)}]"
    if isinstance(value, msgspec.Struct):
        return readable(value)
    if hashed and isinstance(value, int):
        return f"{value:016x}"
    return f"{value:g}" if isinstance(value, float) else repr(value)
