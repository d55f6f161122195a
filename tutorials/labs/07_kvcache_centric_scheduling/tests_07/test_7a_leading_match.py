"""7a: how many leading blocks of a prompt each node has, from the runs of the prompt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Runs = list[tuple[int, list[int]]]
"""The runs of a prompt from its front: blocks, and the columns of the nodes that have it in DRAM."""

NEEDED = 4
"""Operations for a run: two sets are intersected, the result is compared twice, and perhaps converted."""


class Seen(msgspec.Struct):
    """What near_columns() returned, the type and shape of that, and operations on sets."""

    lengths: list[int | float]
    kind: str
    operations: int


class Run(msgspec.Struct):
    """A run after the call: the columns in `nodes` of its places, and in their index array."""

    nodes: list[int]
    columns: list[int]


class Shared(msgspec.Struct):
    """What two prompts got whose runs are the same, in opposite orders, and lie in the same places.

    first, again    lengths of the first prompt, at its two calls
    runs, starts    those of the first prompt after its first call
    other, alone    lengths of the second prompt, after that call, and with places of its own
    """

    first: list[int | float]
    again: list[int | float]
    runs: list[Run]
    starts: list[int]
    other: list[int | float]
    alone: list[int | float]


def ends_of(runs: Runs) -> list[int]:
    """The block that each run begins with, and the end of the last one."""
    return [sum(blocks for blocks, _ in runs[:number]) for number in range(len(runs) + 1)]


def inputs_of(num_nodes: int, runs: Runs) -> dict[str, Any]:
    ends = ends_of(runs)
    nodes = [nodes for _, nodes in runs]
    return {"num_nodes": num_nodes, "nodes": nodes, "starts": ends[:-1], "blocks": ends[-1]}


def near(lab: Judge, num_nodes: int, runs: Runs) -> Seen:
    seen = lab.ask("near", inputs_of(num_nodes, runs), Seen, f"near_columns() of {told(num_nodes, runs)}")
    draw(lab, num_nodes, runs, seen.lengths)
    return seen


def shared(lab: Judge, num_nodes: int, runs: Runs) -> Shared:
    called = f"near_columns() of {told(num_nodes, runs)}; of the same runs in opposite order"
    seen = lab.ask("shared", inputs_of(num_nodes, runs), Shared, called)
    draw(lab, num_nodes, runs, seen.first)
    return seen


def draw(lab: Judge, num_nodes: int, runs: Runs, lengths: list[int | float]) -> None:
    ends = ends_of(runs)
    rows = [[f"{a} to {b - 1}", shown(nodes)] for (a, b), (_, nodes) in zip(pairwise(ends), runs)]
    rows += [[f"-> column {column}", f"{length} blocks came back"] for column, length in enumerate(lengths)]
    title = f"a prompt of {ends[-1]} blocks and {num_nodes} nodes, and what came back"
    columns = ["blocks", "columns of the nodes that have them in DRAM"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})


def shown(nodes: list[int]) -> str:
    """The columns of nodes as a message names them."""
    return "none" if not nodes else " ".join(map(str, nodes)) if len(nodes) < 12 else f"{len(nodes)} nodes"


def told(num_nodes: int, runs: Runs) -> str:
    """The case as a message names it."""
    parts = ", ".join(f"{blocks} blocks on {shown(nodes)}" for blocks, nodes in runs)
    return f"{num_nodes} nodes; runs, each with the columns that have it: {parts or 'none'}"


def model(num_nodes: int, runs: Runs) -> list[int]:
    """Node by node: add up the runs until one that the node does not have."""
    lengths = []
    for node in range(num_nodes):
        length = 0
        for blocks, nodes in runs:
            if node not in nodes:
                break
            length += blocks
        lengths.append(length)
    return lengths


def some_runs(lab: Judge, num_nodes: int, count: int) -> Runs:
    """Runs on random nodes. Most nodes of a run have the next one, and others come in."""
    nodes = set(lab.random.sample(range(num_nodes), lab.random.randint(num_nodes // 2, num_nodes)))
    runs: Runs = []
    for _ in range(count):
        runs.append((lab.random.randint(1, 30), sorted(nodes)))
        nodes = {node for node in nodes if lab.random.random() < 0.7}
        nodes |= set(lab.random.sample(range(num_nodes), lab.random.randint(0, num_nodes // 3)))
    return runs


def blocks(lab: Judge) -> int:
    return lab.random.randint(2, 40)


def test_a_node_counts_up_to_the_first_run_that_it_does_not_have(lab: Judge) -> None:
    a, b, c = (blocks(lab) for _ in range(3))
    runs = [(a, [0, 1, 2]), (b, [1, 2]), (c, [2])]
    lab.expect(
        near(lab, 3, runs).lengths,
        [a, a + b, a + b + c],
        f"near_columns() of {told(3, runs)}",
        "a node that lacks a run has the blocks before it; one that lacks none has all `blocks`",
    )


def test_what_a_node_has_after_a_gap_is_of_no_use(lab: Judge) -> None:
    a, b, c, d = (blocks(lab) for _ in range(4))
    runs = [(a, [0, 1]), (b, [1, 2]), (c, [0, 1, 2]), (d, [0, 2])]
    lab.expect(
        near(lab, 3, runs).lengths,
        [a, a + b + c, 0],
        f"near_columns() of {told(3, runs)}",
        "a node counts until the first run that it does not have, and later runs do not bring it back",
    )


def test_a_node_without_the_first_run_has_nothing(lab: Judge) -> None:
    for runs in ([], [(blocks(lab), [1])], [(blocks(lab), [1]), (blocks(lab), [0, 1])]):
        lab.expect(
            near(lab, 4, runs).lengths,
            [0, sum(count for count, _ in runs), 0, 0],
            f"near_columns() of {told(4, runs)}",
            "each node has a length, also one that has nothing, and also for a prompt without runs",
        )


def test_a_run_that_lies_on_ssd_alone_ends_every_node(lab: Judge) -> None:
    a, b = blocks(lab), blocks(lab)
    runs: Runs = [(a, [0, 2]), (b, []), (b, [0, 1, 2])]
    lab.expect(
        near(lab, 3, runs).lengths,
        [a, 0, a],
        f"near_columns() of {told(3, runs)}",
        "a run on SSD alone is in no node's DRAM, so no node counts after it",
    )


def test_lengths_are_one_int64_array_with_a_place_for_each_node(lab: Judge) -> None:
    num_nodes = lab.random.randint(5, 90)
    runs: Runs = [(blocks(lab), [0, 2]), (blocks(lab), [2])]
    lab.expect(
        near(lab, num_nodes, runs).kind,
        f"int64 [{num_nodes}]",
        f"near_columns() of {told(num_nodes, runs)} (type and shape)",
        "the lengths are (nodes,) int64, by the column of the node",
    )


def test_the_column_of_a_node_is_its_bit(lab: Judge) -> None:
    num_nodes = lab.random.randint(65, 90)
    last = num_nodes - 1
    runs: Runs = [(blocks(lab), [3, 64, last]), (blocks(lab), [64, last])]
    lab.expect(
        {column: length for column, length in enumerate(near(lab, num_nodes, runs).lengths) if length},
        {3: runs[0][0], 64: runs[0][0] + runs[1][0], last: runs[0][0] + runs[1][0]},
        f"near_columns() of {told(num_nodes, runs)} (columns with a length)",
        "column c of the result is the node of bit c, also beyond 64 nodes",
    )


def test_random_prompts_have_the_lengths_that_a_walk_node_by_node_finds(lab: Judge) -> None:
    for _ in range(25):
        num_nodes = lab.random.randint(3, 70)
        runs = some_runs(lab, num_nodes, lab.random.randint(1, 8))
        lab.expect(
            near(lab, num_nodes, runs).lengths,
            model(num_nodes, runs),
            f"near_columns() of {told(num_nodes, runs)}",
            "each node counts until the first run that it does not have",
        )


def test_a_call_leaves_the_runs_as_they_are(lab: Judge) -> None:
    runs = [*some_runs(lab, 20, 5), (blocks(lab), [*range(20)])]
    seen = shared(lab, 20, runs)
    called = f"near_columns() of {told(20, runs)}"
    kept = "the places belong to the index, and other prompts share them: a call does not change them"
    lab.expect(len(seen.runs), len(runs), f"{called} (runs in `_places` then)", "a call does not remove runs")
    for number, (one, (_, nodes)) in enumerate(zip(seen.runs, runs)):
        lab.expect(one.nodes, nodes, f"{called} (`nodes` of run {number} then)", kept)
        lab.expect(
            one.columns,
            nodes,
            f"{called} (`columns()` of run {number} then)",
            f"{kept}, nor the index arrays that they keep",
        )
    lab.expect(
        seen.starts, ends_of(runs)[:-1], f"{called} (`_starts` then)", "a call does not change `_starts`"
    )
    lab.expect(
        seen.again,
        seen.first,
        f"{called}, called a second time (expected: what the first call returned)",
        "a second call returns the same as the first one",
    )


def test_prompts_that_share_places_do_not_disturb_each_other(lab: Judge) -> None:
    runs = [*some_runs(lab, 20, 5), (blocks(lab), [*range(20)])]
    seen = shared(lab, 20, runs)
    lab.expect(
        seen.other,
        seen.alone,
        f"near_columns() of {told(20, runs[::-1])}; after a prompt with these runs in the opposite order "
        "(expected: what you return for this prompt alone)",
        "the places belong to the index, and other prompts share them: a call does not change them",
    )


def test_sets_of_nodes_are_compared_as_a_whole(lab: Judge) -> None:
    num_nodes, count = lab.size.nodes, lab.size.runs
    keeps = [sorted(lab.random.sample(range(num_nodes), num_nodes - 2 * number)) for number in range(count)]
    runs: Runs = [(blocks(lab), sorted(set(nodes) | {0})) for nodes in keeps]
    seen = near(lab, num_nodes, runs)
    lab.cost(seen.operations, 3 * NEEDED * count, needed=NEEDED * count)
    lab.expect(
        seen.lengths,
        model(num_nodes, runs),
        f"near_columns() of {told(num_nodes, runs)}",
        "each node counts until the first run that it does not have",
    )
