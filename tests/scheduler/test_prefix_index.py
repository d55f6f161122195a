"""The prefix index as sentences, and against a plain model of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import Leading, PrefixIndex
from scheduler.prefix_index import Tier
from tests.scheduler.cluster import runs

pytestmark = pytest.mark.quick

HOLDERS = {5: 0, 6: 1, 7: 1, 8: 2}
"""holder -> its node"""


def index_of(*places: tuple[int, int, Tier]) -> PrefixIndex:
    index = PrefixIndex()
    for holder, node in HOLDERS.items():
        index.add_holder(holder, node)
    for key, holder, tier in places:
        index.stored(key, holder, tier)
    return index


def test_a_run_ends_at_the_first_key_that_is_held_nowhere() -> None:
    leading = index_of((1, 5, "dram"), (2, 5, "dram"), (4, 5, "dram")).leading([1, 2, 3, 4])
    assert (leading.blocks, leading.ssd_blocks, leading.by_node) == (2, 0, {0: 2})


def test_a_node_counts_leading_blocks_only() -> None:
    """Node 1 has blocks 2 and 3 of the prompt. Without block 1 they are worth nothing there."""
    index = index_of((1, 5, "dram"), (2, 6, "dram"), (3, 6, "dram"))
    assert index.leading([1, 2, 3]).by_node == {0: 1}
    index.stored(1, 6, "dram")
    assert index.leading([1, 2, 3]).by_node == {0: 1, 1: 3}
    index.removed(2, 6, "dram")
    assert index.leading([1, 2, 3]).by_node[1] == 1


def test_two_holders_of_one_node_make_one_run_there() -> None:
    leading = index_of((1, 6, "dram"), (2, 7, "dram"), (3, 6, "dram")).leading([1, 2, 3])
    assert leading.by_node == {1: 3}


def test_the_longest_run_mixes_tiers_and_holders_but_a_node_counts_its_dram_only() -> None:
    leading = index_of((1, 5, "dram"), (2, 5, "ssd"), (3, 8, "dram"), (1, 5, "ssd")).leading([1, 2, 3, 4])
    assert (leading.blocks, leading.ssd_blocks) == (3, 1)
    assert leading.by_node == {0: 1}


def test_nothing_is_held_of_an_unknown_prompt_or_of_none_by_an_unknown_node() -> None:
    for keys in ([9], []):
        leading = index_of((1, 5, "dram")).leading(keys)
        assert (leading.blocks, leading.ssd_blocks, leading.by_node) == (0, 0, {})


def test_a_block_in_both_tiers_stays_when_it_leaves_one() -> None:
    index = index_of((1, 5, "dram"), (1, 5, "ssd"))
    index.removed(1, 5, "dram")
    assert (index.leading([1]).blocks, index.leading([1]).ssd_blocks) == (1, 1)
    index.removed(1, 5, "ssd")
    assert len(index) == 0


def test_a_holder_cannot_move_to_another_node() -> None:
    index = index_of()
    index.add_holder(5, 0)
    with pytest.raises(AssertionError, match="moved to node 1"):
        index.add_holder(5, 1)


def test_blocks_of_a_chain_in_the_same_places_are_one_run() -> None:
    index, keys = index_of(), [*range(100, 160)]
    index.stored_run(keys, 0, 5, "dram")
    index.stored_run(keys, 0, 6, "dram")
    assert len(runs(index)) == 1
    index.removed_run(keys[20:], 6, "dram")
    assert len(runs(index)) == 2
    assert index.leading(keys).by_node == {0: 60, 1: 20}
    index.removed(130, 5, "dram")
    assert len(runs(index)) == 3
    assert index.leading(keys).by_node == {0: 30, 1: 20}


def test_a_walk_joins_what_lies_in_the_same_places() -> None:
    """Where single blocks stand in a chain is not known before."""
    index, keys = index_of(), [*range(100, 120)]
    for key in reversed(keys):
        index.stored(key, 5, "dram")
    index.stored(103, 6, "dram")
    assert len(runs(index)) == 20
    assert index.leading(keys).by_node == {0: 20}
    assert len(runs(index)) == 3
    index.removed(103, 6, "dram")
    index.leading(keys)
    assert len(runs(index)) == 1
    index.check()


@pytest.mark.parametrize("every", [1, 7, 60])
def test_blocks_that_are_removed_one_by_one_in_any_order_are_gone_for_each_walk(every: int) -> None:
    """A removal leaves its key in the list of its run until the run is walked or mostly gone."""
    index, keys = index_of(), [*range(100, 160)]
    index.stored_run(keys, 0, 5, "dram")
    order = random.Random(every).sample(keys, len(keys))
    for number, key in enumerate(order, 1):
        index.removed(key, 5, "dram")
        index.check()
        left = {*order[number:]}
        assert {key for key, _, _ in index.places()} == left
        if number % every == 0:
            first_gone = next(at for at, key in enumerate(keys) if key not in left)
            assert index.leading(keys).blocks == first_gone
            index.check()
    assert runs(index) == []


def test_a_block_that_comes_back_joins_the_run_that_it_has_left() -> None:
    index, keys = index_of(), [*range(100, 110)]
    index.stored_run(keys, 0, 5, "dram")
    index.removed(104, 5, "dram")
    index.removed(107, 5, "dram")
    index.stored(104, 5, "dram")
    index.check()
    assert index.leading(keys).blocks == 7
    assert sorted(map(len, runs(index))) == [2, 7]


def test_a_prompt_that_leaves_a_run_in_the_middle_counts_up_to_there() -> None:
    for shared in range(30):
        index, other = index_of(), [*range(100, 130)]
        keys = [*other[:shared], *range(200, 230)]
        index.stored_run(other, 0, 5, "dram")
        assert index.leading(keys).blocks == shared
        index.stored_run(keys[shared:], shared, 6, "dram")
        assert index.leading(keys).by_node == ({0: shared} if shared else {1: 30})
        assert index.leading(keys).blocks == shared + 30


def test_keys_that_collide_at_different_depths_cost_a_hit_at_most() -> None:
    index = index_of()
    index.stored_run([1, 2, 3, 4], 0, 5, "dram")
    for keys in ([3, 9], [8, 1, 2], [1, 4], [4, 3, 2, 1], [1, 2, 2, 3, 4]):
        assert index.leading(keys).blocks <= len(keys)
        index.stored_run(keys, 0, 6, "dram")
        index.removed_run(keys, 5, "dram")
        index.check()


def test_lengths_by_column_are_those_by_node() -> None:
    index = PrefixIndex()
    for holder in range(70):
        index.add_holder(holder, 1000 - holder)
    keys = [*range(100, 140)]
    for holder in range(0, 70, 2):
        index.stored_run(keys[: 40 - holder // 2], 0, holder, "dram")
    leading = index.leading(keys)
    columns = leading.near_columns()
    assert columns.shape == (70,)
    assert {node: n for node, n in zip(index.nodes, columns) if n} == leading.by_node
    assert leading.by_node[1000 - 68] == 6
    assert [*index.leading([1]).near_columns()] == [0] * 70


class Model:
    """A set of places, measured block by block and holder by holder."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int, Tier]] = set()
        self.nodes = dict(HOLDERS)

    def run(self, keys: list[int], nodes: set[int], tiers: tuple[Tier, ...]) -> int:
        """Leading keys that some holder of these nodes has in one of these tiers."""
        holders = [holder for holder, node in self.nodes.items() if node in nodes]
        for length, key in enumerate(keys):
            if not any((key, holder, tier) in self.places for holder in holders for tier in tiers):
                return length
        return len(keys)

    def check(self, leading: Leading, keys: list[int]) -> None:
        every = set(self.nodes.values())
        assert leading.blocks == self.run(keys, every, ("dram", "ssd"))
        in_dram = [any((key, h, "dram") in self.places for h in self.nodes) for key in keys[: leading.blocks]]
        assert leading.ssd_blocks == in_dram.count(False)
        assert leading.by_node == {n: near for n in sorted(every) if (near := self.run(keys, {n}, ("dram",)))}
        assert [*leading.near_columns()] == [leading.by_node.get(node, 0) for node in sorted(every)]


TIERS: tuple[Tier, Tier] = ("dram", "ssd")

PROMPT_BLOCKS = 12


def prompt_of(fork: int, branch: int) -> list[int]:
    """The keys of a prompt that follows the trunk for `fork` blocks, and then a branch of its own."""
    first = 1000 * (1 + fork * 3 + branch)
    return [first + depth if depth >= fork else depth for depth in range(PROMPT_BLOCKS)]


PROMPTS = st.builds(prompt_of, st.integers(0, PROMPT_BLOCKS - 1), st.integers(0, 1))
CHANGES = st.tuples(
    st.sampled_from(["stored run", "stored run", "stored", "removed run", "removed", "walk"]),
    PROMPTS,
    st.integers(0, PROMPT_BLOCKS - 1),
    st.integers(1, PROMPT_BLOCKS),
    st.sampled_from([*HOLDERS]),
    st.sampled_from(TIERS),
)


@given(st.lists(CHANGES, max_size=60))
def test_any_changes_leave_what_a_set_of_places_would_say(
    changes: list[tuple[str, list[int], int, int, int, Tier]],
) -> None:
    """Blocks go and come in any order: a block may be there without those before it."""
    index, model = index_of(), Model()
    for verb, prompt, start, count, holder, tier in changes:
        keys = prompt[start : start + count]
        places = {(key, holder, tier) for key in keys}
        if verb == "walk":
            model.check(index.leading(prompt), prompt)
        elif verb == "stored run":
            index.stored_run(keys, start, holder, tier)
            model.places |= places
        elif verb == "removed run":
            index.removed_run(keys, holder, tier)
            model.places -= places
        elif verb == "stored":
            index.stored(keys[0], holder, tier)
            model.places.add((keys[0], holder, tier))
        else:
            index.removed(keys[0], holder, tier)
            model.places.discard((keys[0], holder, tier))
        index.check()
    assert index.places() == model.places
    assert len(index) == len({key for key, _, _ in model.places})
    for _, prompt, *_ in changes:
        model.check(index.leading(prompt), prompt)
        index.check()
    assert index.places() == model.places
