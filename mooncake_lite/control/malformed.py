"""Checks what others send before any book changes: lengths must agree with each other and with orders.

Used by `machine.py`, `dispatch.py` and `requests.py`. The types are checked when a message is decoded. A rank
that sends what no sound rank sends is treated as lost, with the reason. A request of which a gateway sends
such things is refused, or fails. See docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import compress

from mooncake_lite.control import events as ev

NO_PROBLEM = ""

HAVE_LENGTHS = {ev.TierIndexed, ev.Preempted, ev.SwapWanted, ev.Swapped, ev.PutsWanted, ev.PutsEnded}
HAVE_LENGTHS |= {ev.ChunkStored, ev.PrefillEnded, ev.BlocksLoaded, ev.BlocksCopied, ev.BlocksChecked}
"""Events of ranks that can be malformed: each has lists that must agree."""


def wrong_request(arrived: ev.RequestArrived, classes: int, block_tokens: int) -> str:
    """Return what is wrong with a request; "" for a sound one. classes: number of service classes."""
    if not 0 <= arrived.class_id < classes:
        return f"service class {arrived.class_id} is unknown"
    if min(arrived.num_tokens, arrived.n) < 1:
        return f"{arrived.n} answers to a prompt of {arrived.num_tokens} tokens: at least 1 of each is needed"
    wrong = _keys(arrived, arrived.num_tokens // block_tokens)
    return wrong or wrong_answers(arrived.answers, arrived.num_tokens, block_tokens)


def wrong_answers(answers: Sequence[ev.AnswerSoFar], prompt_tokens: int, block_tokens: int) -> str:
    """Return what is wrong with what a gateway has of the answers to a prompt; "" for sound ones."""
    wrong = (_keys(one, (prompt_tokens + one.num_tokens) // block_tokens) for one in answers)
    return next(filter(None, wrong), NO_PROBLEM)


def malformed(event: ev.RankEvent, layers: int, expected: int | None) -> str:
    """Return what is wrong with an event; "" for a sound one.

    layers     of a block, and so checksums of each
    expected   blocks of the order that the event answers, or full blocks of its tokens; None: it answers no
               order that is open
    """
    match event:
        case ev.PutsWanted(keys=keys, digests=digests, before=before, requests=requests):
            return _differ(keys=keys, digests=digests, before=before, requests=requests)
        case ev.PutsEnded(object_ids=ids, checksums=sums):
            return _differ(object_ids=ids, checksums=sums) or _checksums(sums, layers)
        case ev.ChunkStored(first=first, checksums=sums):
            return _inside(first, len(sums), expected) or _checksums(sums, layers)
        case ev.PrefillEnded(checksums=sums):
            return _count("checksums", sums, expected) or _checksums(sums, layers)
        case ev.BlocksLoaded(ok=ok, checksums=sums):
            found = _differ(ok=ok, checksums=sums) or _count("ok", ok, expected)
            return found or _checksums([*compress(sums, ok)], layers)
        case ev.BlocksCopied(checksums=sums):
            return _count("checksums", sums, expected) or _checksums([*filter(None, sums)], layers)
        case ev.BlocksChecked():
            return _count("good", event.good, expected)
        case ev.TierIndexed() | ev.BranchEvent():
            return _keys(event, expected or 0)
    return NO_PROBLEM


def _differ(**fields: Sized) -> str:
    """Describe fields that must have one length and have not."""
    lengths = {name: len(value) for name, value in fields.items()}
    if len(set(lengths.values())) == 1:
        return NO_PROBLEM
    return ", ".join(f"{name} has {length}" for name, length in lengths.items()) + ", one length is right"


def _keys(about: ev.RequestArrived | ev.AnswerSoFar | ev.TierIndexed | ev.BranchEvent, blocks: int) -> str:
    """Compare keys and digests. Either there are none, or at least one of each for every full block."""
    if about.keys and len(about.keys) < blocks:
        return f"keys has {len(about.keys)}, its tokens are {blocks} full blocks"
    return _differ(keys=about.keys, digests=about.digests)


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
