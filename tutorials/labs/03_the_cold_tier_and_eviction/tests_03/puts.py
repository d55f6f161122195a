"""What the tests of 3b share: how puts are played to the directory, and what is seen of its books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Step = tuple[Any, ...]


class After(msgspec.Struct):
    """The books of the directory after one step. A put is named by the number of its step, from 0.

    said       what the step came to
    visible    key -> the put that lookups find
    states     put -> state, of all that are there
    waiting    puts that are unsaved
    policies   rank -> keys that the policy of its segment may evict
    told       (key, parent, time) of each block that a policy was told about in this step
    used       put -> time of its last use
    events     since the step before
    owners     with anything of their own
    skipped, copies   counters: saves_skipped, copies_stored
    """

    said: str
    visible: dict[str, int]
    states: dict[str, str]
    waiting: list[int]
    policies: dict[str, list[int]]
    told: list[tuple[Any, Any, Any]]
    used: dict[str, Any]
    events: list[str]
    owners: list[str]
    skipped: int
    copies: int


Segments = Sequence[tuple[int, int, int | None]]
"""(rank, blocks, saver) of each."""


def play(
    lab: Judge,
    segments: Segments,
    steps: Sequence[Step],
    share: float = 0.5,
    only: str = "",
    head_dim: int = 8,
) -> list[After]:
    """Play steps, and return what was seen after each, or after those of one verb.

    head_dim   of the blocks, which have 32 bytes for each. A range takes 256 bytes or a multiple of that
    """
    inputs = {"segments": segments, "max_unsaved_share": share, "steps": steps, "only": only}
    inputs["head_dim"] = head_dim
    what = f"{len(steps)} steps: {'; '.join(map(words, steps))}"
    seen = lab.ask("puts", inputs, list[After], called=what)
    if only:
        return seen
    rows = [
        [
            f"#{number}",
            words(step),
            after.said,
            " ".join(f"{key}=#{put}" for key, put in after.visible.items()),
            " ".join(f"#{put}" for put in after.waiting),
        ]
        for number, (step, after) in enumerate(zip(steps, seen))
    ]
    title = "each step, which put lookups find under each key, and unsaved puts; #3 is the put of step #3"
    columns = ["step", "call", "came back", "visible", "unsaved"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def words(step: Step) -> str:
    """The step as a message names it."""
    verb, *more = step
    forms = {
        "put": "put_start(owner={}, rank={}, key={})",
        "copy": "put_copy(owner={}, rank={}, of #{})",
        "end": "put_end(#{})",
        "find": "lookup({})",
        "release": "release({})",
        "take": "take_saves()",
        "saved": "saved(rank={}, key={})",
        "durable": "durable(rank={}, key={})",
    }
    return forms[verb].format(*more)


def called(steps: Sequence[Step], number: int, what: str) -> str:
    return f"step #{number}: {words(steps[number])} ({what})"


def keys_of(lab: Judge, count: int) -> list[int]:
    return lab.random.sample(range(100, 1000), count)


TIER: Segments = [(0, 8, 0)]
"""One segment of eight blocks, whose rank has a tier."""

NO_TIER: Segments = [(0, 4, None)]
ONE = 0
"""The only rank of both."""
