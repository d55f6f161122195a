"""What the tests of both policies share: how events and traces are played to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .data import made_trace

Step = tuple[Any, ...]

ALL = 1000
"""More items than any policy here has."""

MOST_SHOWN = 24
"""Items of one answer in a table."""


class Offer(msgspec.Struct):
    """What one step was offered: items in order, the victim, and the policy before it as a table shows it."""

    offered: list[int]
    victim: int | None
    drawn: list[str]


class Replayed(msgspec.Struct):
    """The victims of a trace in order, the hits, and what was read for all evictions."""

    victims: list[int]
    hits: int
    steps: int


def offers(
    lab: Judge, policy: str, capacity: int, steps: Sequence[Step], title: str, columns: Sequence[str]
) -> list[Offer]:
    """Play events, and return what each step that asked the policy was offered."""
    inputs = {"policy": policy, "capacity": capacity, "steps": steps}
    seen = lab.ask("events", inputs, list[Offer], called=f"victims() after {in_words(steps)}")
    rows = []
    for step, offer in zip((step for step in steps if step[0] in ("offer", "evict")), seen):
        told = [
            *map(str, offer.offered[:MOST_SHOWN]),
            *([f"({len(offer.offered) - MOST_SHOWN} more)"] if len(offer.offered) > MOST_SHOWN else ()),
            *(() if offer.victim is None else [f"{offer.victim} evicted"]),
        ]
        rows.append([in_words([step]), *offer.drawn, " ".join(told) or "nothing"])
    table = {"kind": "table", "title": title, "columns": ["step", *columns, "came back"], "rows": rows}
    lab.trace(table)
    return seen


def in_words(steps: Sequence[Step]) -> str:
    """The steps as a message names them."""
    forms = {"use": "hit {0}", "delete": "delete {0}", "offer": "ask for {0}"}
    told = []
    for verb, *more in steps:
        if verb == "insert":
            told.append(f"insert {more[0]}" + ("" if more[1] is None else f" after {more[1]}"))
        elif verb == "evict":
            told.append(f"evict, {more[0]} held" if more[0] else "evict")
        elif more == [ALL]:
            told.append("ask for all")
        else:
            told.append(forms[verb].format(*more))
    return ", ".join(told)


def names(lab: Judge, count: int) -> list[int]:
    """Items of the small cases; their numbers mean nothing."""
    return lab.random.sample(range(10, 100), count)


def trace_of(lab: Judge) -> list[list[int]]:
    """The blocks of each request of the trace of this seed."""
    return [request.hash_ids for request in made_trace(lab.draw("trace"), lab.size.requests)]


def replayed(
    lab: Judge, policy: str, requests: Sequence[list[int]], *, insert_first: bool, held: Sequence[int] = ()
) -> Replayed:
    """Play a trace to a policy."""
    inputs = {"policy": policy, "capacity": lab.size.pool_blocks, "requests": requests, "held": held}
    inputs["insert_first"] = insert_first
    return lab.ask(
        "replay", inputs, Replayed, called=f"victims() while {len(requests)} requests are replayed"
    )


def expect_same(
    lab: Judge, seen: Replayed, victims: list[int], hits: int, requests: Sequence[list[int]], how: str
) -> None:
    """Compare a replay with that of a model."""
    wrong = next((n for n, pair in enumerate(zip(seen.victims, victims)) if pair[0] != pair[1]), 0)
    references = sum(map(len, requests))
    lab.expect(
        (len(seen.victims), seen.hits, seen.victims[wrong : wrong + 3]),
        (len(victims), hits, victims[wrong : wrong + 3]),
        f"replay of {references:,} references, {lab.size.pool_blocks} places, {how} (victims, hits, "
        f"victims from number {wrong})",
        "the same references evict the same blocks, in the same order",
    )
