"""Checks reports of ranks before any book changes: lengths must agree with each other and with orders.

Used by `machine.py`. The types are checked when a message is decoded. A rank that sends what no sound rank
sends is treated as lost, with the reason; see docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from mooncake_lite.control import events as ev

NO_PROBLEM = ""

HAVE_LENGTHS = frozenset(
    {
        *(ev.TierIndexed, ev.Preempted, ev.SwapWanted, ev.Swapped, ev.PutsWanted, ev.PutsEnded),
        *(ev.ChunkStored, ev.PrefillEnded, ev.BlocksLoaded, ev.BlocksCopied, ev.BlocksChecked),
    }
)
"""Events that can be malformed: each has lists that must agree."""


def malformed(event: ev.RankEvent, layers: int, expected: int | None) -> str:
    """Return what is wrong with an event; "" for a sound one.

    layers     of a block, and so checksums of each
    expected   blocks of the order that the event answers; None: it answers none that is open
    """
    match event:
        case ev.PutsWanted():
            return _differ(
                keys=event.keys, digests=event.digests, before=event.before, requests=event.requests
            )
        case ev.PutsEnded():
            found = _differ(object_ids=event.object_ids, checksums=event.checksums)
            return found or _checksums(event.checksums, layers)
        case ev.ChunkStored():
            found = _inside(event.first, len(event.checksums), expected)
            return found or _checksums(event.checksums, layers)
        case ev.PrefillEnded():
            return _count("checksums", event.checksums, expected) or _checksums(event.checksums, layers)
        case ev.BlocksLoaded():
            found = _differ(ok=event.ok, checksums=event.checksums) or _count("ok", event.ok, expected)
            return found or _checksums([s for s, ok in zip(event.checksums, event.ok) if ok], layers)
        case ev.BlocksCopied():
            found = _count("checksums", event.checksums, expected)
            return found or _checksums([sums for sums in event.checksums if sums], layers)
        case ev.BlocksChecked():
            return _count("good", event.good, expected)
        case ev.TierIndexed() | ev.Preempted() | ev.SwapWanted() | ev.Swapped():
            return _differ(keys=event.keys, digests=event.digests)
    return NO_PROBLEM


def _differ(**fields: Sized) -> str:
    """Describe fields that must have one length and have not."""
    lengths = {name: len(value) for name, value in fields.items()}
    if len(set(lengths.values())) == 1:
        return NO_PROBLEM
    return ", ".join(f"{name} has {length}" for name, length in lengths.items()) + ", one length is right"


def _count(name: str, values: Sized, expected: int | None) -> str:
    if expected is None or len(values) == expected:
        return NO_PROBLEM
    return f"{name} has {len(values)}, its order has {expected} blocks"


def _inside(first: int, count: int, expected: int | None) -> str:
    if expected is None or 0 <= first <= first + count <= expected:
        return NO_PROBLEM
    return f"it names blocks {first} .. {first + count - 1}, its order has {expected}"


def _checksums(checksums: Sequence[Sized], layers: int) -> str:
    wrong = next((len(sums) for sums in checksums if len(sums) != layers), layers)
    return NO_PROBLEM if wrong == layers else f"{wrong} checksums for a block of {layers} layers"
