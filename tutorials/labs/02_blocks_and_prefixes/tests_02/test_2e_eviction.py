"""2e: the hand of SIEVE, on small cases and on a trace."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from mooncake_lite.labs.judging import Judge
from mooncake_lite.workloads.traces import read_trace

from .data import made_trace


class Seen(msgspec.Struct):
    """The victims in order, the hits, the steps of the hand, and the items that would be offered next.

    rings   of a small case, before each eviction: the items from old to new, and the one evicted
    """

    victims: list[int]
    hits: int
    steps: int
    offered: list[int]
    rings: list[tuple[str, str]]


def replay(
    lab: Judge,
    references: list[int],
    capacity: int,
    *,
    insert_first: bool = False,
    leased: tuple[int, ...] = (),
    asks: int = 1,
) -> Seen:
    inputs = {"references": references, "capacity": capacity, "insert_first": insert_first, "leased": leased}
    inputs["asks"] = asks
    seen = lab.ask("replay", inputs, Seen)
    if seen.rings:
        title = "the items before each eviction: * was hit, > is where the hand is, () is the end of the ring"
        columns = ["from old to new", "evicted"]
        lab.trace(
            {"kind": "table", "title": title, "columns": columns, "rows": [list(row) for row in seen.rings]}
        )
    return seen


class Paper:
    """SIEVE as its paper draws it, on a plain list from the oldest item to the newest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: list[int] = []
        self.hot: set[int] = set()
        self.hand = 0
        self.victims: list[int] = []
        self.hits = self.steps = 0

    def refer(self, item: int) -> None:
        if item in self.items:
            self.hot.add(item)
            self.hits += 1
            return
        if len(self.items) == self.capacity:
            self.evict()
        self.items.append(item)

    def evict(self) -> None:
        self.hand %= len(self.items)
        self.steps += 1
        while self.items[self.hand] in self.hot:
            self.hot.remove(self.items[self.hand])
            self.hand = (self.hand + 1) % len(self.items)
            self.steps += 1
        self.victims.append(self.items.pop(self.hand))
        # The newest item was evicted: the hand has reached the end, and begins anew at the oldest one.
        self.hand = 0 if self.hand == len(self.items) else self.hand


def trace_of(lab: Judge) -> list[int]:
    return [item for request in made_trace(lab.draw("trace"), lab.size.requests) for item in request.hash_ids]


def names(lab: Judge, count: int) -> list[int]:
    """Items of the small cases; their numbers mean nothing."""
    return lab.random.sample(range(1000), count)


def test_an_item_that_was_hit_survives_one_that_was_not(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    seen = replay(lab, [a, b, c, a, d], 3)
    lab.expect(
        seen.victims,
        [b],
        f"3 places; {a}, {b}, {c} come in, {a} is hit, and {d} needs a place (victims)",
        "the hand clears the bit of the oldest item and evicts the next one, whose bit is clear",
    )


def test_the_hand_goes_on_from_where_it_stopped(lab: Judge) -> None:
    a, b, c, d, e, f = names(lab, 6)
    seen = replay(lab, [a, b, c, d, a, e, f], 4)
    lab.expect(
        seen.victims,
        [b, c],
        f"4 places; {a} was hit and passed, {b} evicted for {e}; now {f} needs a place (victims)",
        "survivors stay in place, and the hand does not begin at the oldest item again",
    )


def test_when_all_bits_are_set_the_hand_clears_them_and_comes_round(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    seen = replay(lab, [a, b, c, c, b, a, d], 3)
    lab.expect(
        seen.victims,
        [a],
        f"3 places; {a}, {b}, {c} are all hit, and {d} needs a place (victims)",
        "the hand clears all three bits, comes back to the oldest item and evicts it",
    )


def test_the_newest_item_is_judged_last_when_it_came_in_first(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    seen = replay(lab, [a, b, c, a, b, c, d], 3, insert_first=True)
    lab.expect(
        seen.victims,
        [a],
        f"3 places; {a}, {b}, {c} are all hit, and {d} is inserted before one is evicted (victims)",
        "with more items than its capacity, the newest one has just come in: the hand passes it, and it is "
        "yielded last",
    )
    lab.expect(
        replay(lab, [a, b, c, a, b, c, d], 3, insert_first=True, leased=(a, b, c)).victims,
        [d],
        f"the same, with {a}, {b} and {c} leased (victims)",
        "the newest item is yielded last, so it goes when no other may",
    )


def test_an_item_that_may_not_go_is_passed(lab: Judge) -> None:
    a, b, c, d, e = names(lab, 5)
    seen = replay(lab, [a, b, c, d, e], 3, leased=(a,))
    lab.expect(
        seen.victims,
        [b, c],
        f"3 places; {a} is leased; {d} and {e} need places (victims)",
        "when the caller asks for another item, the hand passes the one that it has yielded",
    )


def test_every_item_is_offered_exactly_once(lab: Judge) -> None:
    items = names(lab, 12)
    hit = lab.random.sample(items, 5)
    seen = replay(lab, [*items, *hit], 12)
    cold = [item for item in items if item not in hit]
    lab.expect(
        seen.offered,
        [*cold, *(item for item in items if item in hit)],
        f"victims() of {items}, of which {sorted(hit)} were hit (all that is yielded)",
        "first the items with a clear bit, from old to new; in the next round the others; each once",
    )


def test_whoever_asks_again_is_offered_the_same_item(lab: Judge) -> None:
    a, b, c, d, e, f = names(lab, 6)
    seen = replay(lab, [a, b, c, d, a, e, f], 4, asks=2)
    lab.expect(
        seen.victims,
        [b, c],
        f"4 places; {a} is hit; {e} and {f} need places, and victims() is asked twice for each (victims)",
        "an item that was yielded and not evicted is offered first again: the hand stays until it is passed",
    )


def test_a_pool_that_inserts_first_evicts_the_same_items(lab: Judge) -> None:
    references = trace_of(lab)
    paper = Paper(lab.size.pool_blocks)
    for item in references:
        paper.refer(item)
    seen = replay(lab, references, lab.size.pool_blocks, insert_first=True)
    wrong = next((n for n, pair in enumerate(zip(seen.victims, paper.victims)) if pair[0] != pair[1]), 0)
    lab.expect(
        (len(seen.victims), seen.victims[wrong : wrong + 3]),
        (len(paper.victims), paper.victims[wrong : wrong + 3]),
        f"replay of {len(references):,} references, inserted first (victims, victims from number {wrong})",
        "the hand passes the newest item and leaves its bit, so the victims are those of the paper",
    )


def test_the_victims_on_a_trace_are_those_of_the_paper(lab: Judge) -> None:
    references = trace_of(lab)
    paper = Paper(lab.size.pool_blocks)
    for item in references:
        paper.refer(item)
    seen = replay(lab, references, lab.size.pool_blocks)
    wrong = next((n for n, pair in enumerate(zip(seen.victims, paper.victims)) if pair[0] != pair[1]), 0)
    lab.expect(
        (len(seen.victims), seen.hits, seen.victims[wrong : wrong + 3]),
        (len(paper.victims), paper.hits, paper.victims[wrong : wrong + 3]),
        f"replay of {len(references):,} references (victims, hits, victims from number {wrong})",
        "the same references evict the same blocks, in the same order",
    )
    lab.cost(seen.steps, 2 * paper.steps, needed=paper.steps)


@pytest.mark.skipif("MOONCAKE_LITE_TRACES" not in os.environ, reason="MOONCAKE_LITE_TRACES names no folder")
def test_the_victims_on_the_public_trace_are_those_of_the_paper(lab: Judge) -> None:
    trace = read_trace(Path(os.environ["MOONCAKE_LITE_TRACES"]) / "conversation_trace.jsonl")
    requests = trace.requests[:600]
    references = [item for request in requests for item in request.hash_ids]
    paper = Paper(10 * lab.size.pool_blocks)
    for item in references:
        paper.refer(item)
    lab.expect(
        replay(lab, references, 10 * lab.size.pool_blocks).victims,
        paper.victims,
        f"replay of the first {len(requests)} requests of the public trace (victims)",
        "the same references evict the same blocks, in the same order",
    )
