"""The prefix index as sentences, and against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Leading, PrefixIndex
from scheduler.prefix_index import Tier

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
    assert index.leading([1, 2, 3]).near(1) == 1


def test_two_holders_of_one_node_make_one_run_there() -> None:
    leading = index_of((1, 6, "dram"), (2, 7, "dram"), (3, 6, "dram")).leading([1, 2, 3])
    assert leading.near(1) == 3
    assert leading.held_by(6, "dram") == 1
    assert leading.held_by(7, "dram") == 0


def test_the_longest_run_mixes_tiers_and_holders_but_a_node_counts_its_dram_only() -> None:
    leading = index_of((1, 5, "dram"), (2, 5, "ssd"), (3, 8, "dram"), (1, 5, "ssd")).leading([1, 2, 3, 4])
    assert (leading.blocks, leading.ssd_blocks) == (3, 1)
    assert leading.by_node == {0: 1}
    assert (leading.held_by(5, "dram"), leading.held_by(5, "ssd"), leading.held_by(8, "dram")) == (1, 2, 0)


def test_nothing_is_held_of_an_unknown_prompt_or_of_none_by_an_unknown_node_or_holder() -> None:
    for keys in ([9], []):
        leading = index_of((1, 5, "dram")).leading(keys)
        assert (leading.blocks, leading.ssd_blocks, leading.by_node) == (0, 0, {})
        assert (leading.near(77), leading.held_by(77, "dram"), leading.held_by(5, "dram")) == (0, 0, 0)


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
        for holder in self.nodes:
            for tier in ("dram", "ssd"):
                runs = [(key, holder, tier) in self.places for key in keys]
                assert leading.held_by(holder, tier) == (runs.index(False) if False in runs else len(runs))


CHANGES = st.tuples(
    st.sampled_from(["stored", "stored", "stored", "removed"]),
    st.integers(0, 7),
    st.sampled_from([*HOLDERS]),
    st.sampled_from(["dram", "ssd"]),
)


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(CHANGES, max_size=80), st.lists(st.integers(0, 7), max_size=8, unique=True))
def test_any_changes_leave_what_a_set_of_places_would_say(
    changes: list[tuple[str, int, int, Tier]], keys: list[int]
) -> None:
    index, model = index_of(), Model()
    for verb, key, holder, tier in changes:
        if verb == "stored":
            index.stored(key, holder, tier)
            model.places.add((key, holder, tier))
        else:
            index.removed(key, holder, tier)
            model.places.discard((key, holder, tier))
        index.check()
    assert index.places() == model.places
    assert len(index) == len({key for key, _, _ in model.places})
    model.check(index.leading(keys), keys)
