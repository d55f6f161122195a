"""7b: Algorithm 1 of the paper, on views that are made by hand, and against a loop over random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

PREDICTED = 3
"""Predictions for each instance: its fetch, and its prefill after either prefix."""
UNIT_S = 1 / 64
"""Times of the cases are multiples of it, so that sums are exact in any order."""

Terms = tuple[float, float, float, float]
"""Of an instance: score, reused, transfer_s, prefill_s."""


class Seen(msgspec.Struct):
    """The columns that rank() returned, how many rows it had predicted, and which arrays it changed."""

    score: list[float]
    reused: list[float]
    transfer_s: list[float]
    prefill_s: list[float]
    fetch: list[bool]
    predicted: int
    changed: list[str]


@dataclass
class Instance:
    """One instance of a view. block_s: predicted seconds to compute a block of the prompt."""

    near: int
    queue_s: float
    fetch_s: float
    block_s: float

    def prefill_s(self, blocks: int, reused: int) -> float:
        """A prefill of a prompt of so many blocks, and of one more that is not full."""
        return self.block_s * (blocks - reused + 1)


@dataclass
class Case:
    """One view: blocks of the prompt, the longest prefix, how much of it is on SSD alone, the threshold."""

    blocks: int
    best: int
    ssd_blocks: int
    threshold: float
    instances: list[Instance]

    def inputs(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "best": self.best,
            "ssd_blocks": self.ssd_blocks,
            "near": [one.near for one in self.instances],
            "queue_s": [one.queue_s for one in self.instances],
            "fetch_s": [one.fetch_s for one in self.instances],
            "prefill_s": [
                [one.prefill_s(self.blocks, reused) for reused in range(self.blocks + 1)]
                for one in self.instances
            ],
        }

    def fetches(self, one: Instance) -> bool:
        """Algorithm 1, and the decisions where the paper is silent."""
        if self.best <= self.threshold * one.near and self.best - one.near > self.ssd_blocks:
            return False
        near_s, best_s = one.prefill_s(self.blocks, one.near), one.prefill_s(self.blocks, self.best)
        return one.fetch_s + best_s < near_s

    def expected(self, one: Instance) -> Terms:
        """Return score, reused, transfer_s and prefill_s of an instance."""
        fetches = self.fetches(one)
        reused = self.best if fetches else one.near
        transfer_s = one.fetch_s if fetches else 0.0
        prefill_s = one.prefill_s(self.blocks, reused)
        return one.queue_s + transfer_s + prefill_s, reused, transfer_s, prefill_s

    def told(self, row: int) -> str:
        one = self.instances[row]
        near_s, best_s = one.prefill_s(self.blocks, one.near), one.prefill_s(self.blocks, self.best)
        ssd = f", {self.ssd_blocks} of them on SSD alone" if self.ssd_blocks else ""
        return (
            f"best {self.best} blocks{ssd}; threshold {self.threshold:g}; instance {row}: near {one.near}, "
            f"queue {one.queue_s:g} s, fetch {one.fetch_s:g} s, prefill {near_s:g} s after near, "
            f"{best_s:g} s after best"
        )


def rank(lab: Judge, case: Case) -> tuple[Seen, list[Terms]]:
    """Rank a case. Returns what was seen, and the terms of each row."""
    seen = lab.ask(
        "rank", case.inputs(), Seen, f"rank() of {case.told(0)}, and {len(case.instances) - 1} more"
    )
    came = list(zip(seen.score, seen.reused, seen.transfer_s, seen.prefill_s))
    rows = []
    for number, (one, of) in enumerate(zip(case.instances, came)):
        given = [str(number), str(one.near), f"{one.queue_s:g}", f"{one.fetch_s:g}"]
        rows.append([*given, *(f"{value:g}" for value in of), str(seen.fetch[number])])
    columns = [
        "instance",
        "near",
        "queue_s",
        "fetch_s",
        "score",
        "reused",
        "transfer_s",
        "prefill_s",
        "fetch",
    ]
    about = f"best {case.best}, {case.ssd_blocks} on SSD alone, threshold {case.threshold:g}"
    title = f"{about}: what rank() returned"
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen, came


NAMES = "(score, reused, transfer_s, prefill_s)"


def expect_rows(lab: Judge, case: Case, breaks: str | Callable[[Instance], str]) -> None:
    _, came = rank(lab, case)
    for row, one in enumerate(case.instances):
        rule = breaks if isinstance(breaks, str) else breaks(one)
        lab.expect(came[row], case.expected(one), f"rank() of {case.told(row)} {NAMES}", rule)


def seconds(lab: Judge, most: int = 64) -> float:
    return lab.random.randint(1, most) * UNIT_S


def threshold_of(lab: Judge) -> float:
    return lab.size.threshold_percent / 100


def test_an_instance_with_the_longest_prefix_computes_the_rest(lab: Judge) -> None:
    best = lab.random.randint(10, 30)
    case = Case(
        best + 8, best, 0, threshold_of(lab), [Instance(best, seconds(lab), 0.5, 0.25) for _ in range(3)]
    )
    expect_rows(lab, case, "TTFT = queue + prefill(near): there is nothing to fetch")


def test_a_much_longer_prefix_is_fetched_and_its_transfer_counts(lab: Judge) -> None:
    best = lab.random.randint(20, 30)
    near = [best // 4, best // 3, best // 2]
    instances = [Instance(length, seconds(lab), seconds(lab), 0.5) for length in near]
    case = Case(best + 8, best, 0, threshold_of(lab), instances)
    expect_rows(lab, case, "best is more than threshold x near: TTFT = queue + transfer + prefill(best)")


def test_a_prefix_that_is_just_threshold_times_as_long_is_not_fetched(lab: Judge) -> None:
    threshold = threshold_of(lab)
    near = 4 * lab.random.randint(3, 8)
    best = int(threshold * near)
    instances = [Instance(length, seconds(lab), UNIT_S, 0.5) for length in (near, near - 1, near + 1)]
    case = Case(best + 8, best, 0, threshold, instances)

    def breaks(one: Instance) -> str:
        if best > threshold * one.near:
            return (
                f"best is more than {threshold:g} x near, so it is fetched; the threshold is self.threshold"
            )
        return "best must be more than threshold x near; equal is not enough; the threshold is self.threshold"

    expect_rows(lab, case, breaks)


def test_where_nothing_is_near_every_prefix_is_much_longer(lab: Judge) -> None:
    instances = [Instance(0, seconds(lab), UNIT_S, 0.5) for _ in range(2)]
    for best in (1, lab.random.randint(2, 5)):
        case = Case(12, best, 0, threshold_of(lab), instances)
        expect_rows(lab, case, "any best above 0 is more than threshold x 0")
    case = Case(12, 0, 0, threshold_of(lab), instances)
    expect_rows(lab, case, "where the pool has nothing, nothing is fetched, and 0 of 0 blocks are reused")


def test_blocks_on_ssd_alone_are_fetched_without_regard_to_the_threshold(lab: Judge) -> None:
    best, ssd = lab.random.randint(20, 30), lab.random.randint(2, 4)
    instances = [Instance(best - lacks, seconds(lab), UNIT_S, 0.5) for lacks in (ssd - 1, ssd, ssd + 1)]
    case = Case(best + 8, best, ssd, threshold_of(lab), instances)

    def breaks(one: Instance) -> str:
        lacks = f"it lacks {best - one.near} of the blocks, and {ssd} lie on SSD alone"
        if best - one.near <= ssd:
            return f"{lacks}: at most as many, so it may fetch them, whatever the threshold is"
        return f"{lacks}: more than these, so best must be more than threshold x near"

    expect_rows(lab, case, breaks)


def test_a_prefix_is_fetched_only_where_that_is_faster_than_computing_it(lab: Judge) -> None:
    best, near = lab.random.randint(20, 30), lab.random.randint(0, 5)
    compute_s = 0.25 * (best - near)
    fetches = (compute_s - UNIT_S, compute_s, compute_s + UNIT_S)
    instances = [Instance(near, seconds(lab), fetch_s, 0.25) for fetch_s in fetches]
    case = Case(best + 8, best, 0, threshold_of(lab), instances)
    expect_rows(lab, case, "transfer + prefill(best) must be less than prefill(near); equal is not faster")
    instances = [Instance(best - 1, seconds(lab), fetch_s, 0.25) for fetch_s in (0.25, 1.0)]
    case = Case(best + 8, best, best, threshold_of(lab), instances)
    expect_rows(lab, case, "blocks on SSD, too, are fetched only where that is faster; equal is not faster")


def random_case(lab: Judge, count: int) -> Case:
    """A random view. Neither lengths nor times are just equal: other tests ask what holds then."""
    blocks = lab.random.randint(8, 40)
    best = lab.random.choice([0, *range(3, blocks + 1)])
    ssd = lab.random.choice([0, 0, lab.random.randint(0, best)])
    instances = [
        Instance(lab.random.randint(0, best), seconds(lab), seconds(lab, 256) + UNIT_S / 2, seconds(lab, 24))
        for _ in range(count)
    ]
    return Case(blocks, best, ssd, lab.random.choice([1.26, 1.51, 1.74, 2.01, 2.99]), instances)


def test_the_column_fetch_is_true_where_the_longest_prefix_is_reused(lab: Judge) -> None:
    best = lab.random.randint(20, 30)
    instances = [Instance(near, seconds(lab), UNIT_S, 0.25) for near in (best, best - 1, 2, 0)]
    instances += [Instance(0, seconds(lab), 100.0, 0.25), Instance(best + 3, seconds(lab), UNIT_S, 0.25)]
    case = Case(best + 8, best, 0, threshold_of(lab), instances)
    seen, _ = rank(lab, case)
    for row, one in enumerate(instances):
        reused = case.expected(one)[1]
        lab.expect(
            seen.fetch[row],
            reused == best,
            f"rank() of {case.told(row)} (fetch)",
            f"{reused} blocks are reused, and the best prefix has {best}: fetch is true where these are "
            "equal, also if all of them are near; it is false where near is more",
        )


def test_a_view_is_not_changed(lab: Judge) -> None:
    best = lab.random.randint(20, 30)
    instances = [Instance(near, seconds(lab), UNIT_S, 0.25) for near in (best, best // 2, 2, 0)]
    case = Case(best + 8, best, 0, threshold_of(lab), instances)
    seen, _ = rank(lab, case)
    lab.expect(
        seen.changed,
        [],
        f"rank() of {case.told(1)} (arrays of the view that were changed)",
        "the view's arrays must not change: write to a copy of them",
    )


def test_random_views_get_the_terms_of_algorithm_1_row_by_row(lab: Judge) -> None:
    for _ in range(30):
        expect_rows(
            lab,
            random_case(lab, lab.random.randint(1, 8)),
            "the terms of each instance are those of Algorithm 1; the threshold is self.threshold",
        )


def test_each_prediction_is_asked_for_once(lab: Judge) -> None:
    best = lab.random.randint(20, 30)
    instances = [
        Instance(lab.random.choice([0, best]), seconds(lab), seconds(lab), seconds(lab))
        for _ in range(lab.size.instances)
    ]
    case = Case(best + 8, best, 0, threshold_of(lab), instances)
    seen, came = rank(lab, case)
    count = len(instances)
    lab.cost(seen.predicted, (PREDICTED + 1) * count, needed=PREDICTED * count)
    lab.expect(
        came,
        [case.expected(one) for one in instances],
        f"rank() of {count} instances {NAMES}",
        "the terms of each instance are those of Algorithm 1",
    )
