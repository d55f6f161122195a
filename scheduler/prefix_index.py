"""The prefix index: the length of the leading prefix of a prompt that each node and each holder has.

Fed by `mooncake_lite.control` with plain calls; the store's directory is the truth, and a test compares the
two. Asked once per placement. Pure. Explained in docs/explain/conductor.md.

    key --_run_of--> _Run: consecutive blocks of one chain that lie in the same places
                       a list of their keys
                       depth   number of blocks before the first one
                       places  one _Places for all runs that lie in the same places
                                 bits    1 bit per tier of a holder that has the blocks
                                 nodes   1 bit per node that has the blocks in DRAM

The key of a block stands for its whole prefix. When a key of a prompt and a key of a run are equal, all keys
before them are equal too. A walk over a prompt therefore compares one key per run, not one per block. A
million blocks are a few thousand runs, and have a few hundred different combinations of places.

Changes split runs. A walk joins neighbouring runs in the same places, so that the next walk is short. The
removal of a single block from its only place does not split its run: the key leaves _run_of and stays in the
list. The next reader of the list splits it at all such keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

Tier = Literal["dram", "ssd"]

_TIERS: tuple[Tier, Tier] = ("dram", "ssd")

MOST_GONE = 0.8
"""Part of a run's keys that may be gone before it is split: a list of keys is at most five times too long."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Places:
    """One combination of places. It never changes, and exists as long as a run lies exactly there.

    node_columns   `nodes` as an index array, from the first time that it is needed
    """

    bits: int
    nodes: int
    node_columns: np.ndarray | None = None

    def columns(self) -> np.ndarray:
        """Return `nodes` as an index array."""
        if self.node_columns is None:
            self.node_columns = _columns(self.nodes)
        return self.node_columns


class _Run(list[int]):
    """The keys of consecutive blocks of one chain. The depth of a single block may be wrong, and is not used.

    It is a list instead of having one: changes of many single blocks mostly wait for objects from memory.

    gone   number of its keys that it no longer has: they are in another run, or in none
    """

    __slots__ = ("depth", "gone", "places")
    depth: int
    gone: int
    places: _Places


@dataclass(slots=True, eq=False)
class Leading:
    """The leading blocks of one prompt that the pool holds. Lengths are in blocks.

    blocks       longest leading run that is held anywhere, in any mix of holders and tiers
    ssd_blocks   how many blocks of that run lie on SSD only
    """

    blocks: int
    ssd_blocks: int
    _places: list[_Places]
    _starts: list[int]
    _index: PrefixIndex

    @property
    def by_node(self) -> dict[int, int]:
        """Return node -> leading blocks in its DRAM. Nodes without the first block are left out."""
        lengths, nodes = self.near_columns(), self._index.nodes
        held = np.flatnonzero(lengths)
        return {nodes[column]: length for column, length in zip(held.tolist(), lengths[held].tolist())}

    def near_columns(self) -> np.ndarray:
        """Return the leading blocks in DRAM of each node: (nodes,) int64, as `PrefixIndex.nodes` has them.

        Run i of the prompt lies in `_places[i]`. It begins with block `_starts[i]` and ends where the next
        run begins, the last one at `blocks`. `nodes` of the places has a bit for each node that has the run
        in DRAM: 1 << column. A node counts until the first run that it does not have. What it has after that
        is of no use. `_columns` turns bits into an index array; `columns()` of places is the one of `nodes`,
        which is kept for the next time. Other prompts share the places, so they must not change. Lengths are
        a new array at each call.
        """
        # labs:begin 7a
        lengths = np.zeros(len(self._index.nodes), np.int64)
        alive = -1  # every node
        columns: np.ndarray
        for places, end in zip(self._places, [*self._starts[1:], self.blocks]):
            left = alive & places.nodes
            if not left:
                break
            if left != alive:
                columns = places.columns() if left == places.nodes else _columns(left)
                alive = left
            lengths[columns] = end
        return lengths
        # labs:end 7a

    def among(self, nodes: int) -> int:
        """Return the leading blocks that are in DRAM of these nodes, each on any: 1 bit per node column."""
        return next((at for one, at in zip(self._places, self._starts) if not one.nodes & nodes), self.blocks)


class PrefixIndex:
    """The places of each key.

        nodes   of the holders, in the order in which their first holders were added

    Invariants: each key is in one run, once. No run is without keys, and none has an empty combination of
    places. A combination exists once. Each tier of a holder has a bit of its own.
    """

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self._run_of: dict[int, _Run] = {}
        self._combinations = WeakValueDictionary[int, _Places]()
        self._bit_of: dict[tuple[int, Tier], int] = {}
        self._place_of_bit: list[tuple[int, Tier]] = []
        self._column_of_holder: dict[int, int] = {}
        self._column_of_node: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def add_node(self, node: int) -> int:
        """Add a node, with or without holders; return its number in `nodes`. Again: nothing changes."""
        if node not in self._column_of_node:
            self._column_of_node[node] = len(self.nodes)
            self.nodes.append(node)
        return self._column_of_node[node]

    def add_holder(self, holder: int, node: int) -> None:
        """Add a part of the pool that is on this node. Adding it again changes nothing."""
        column = self.add_node(node)
        if holder in self._column_of_holder:
            assert self._column_of_holder[holder] == column, f"holder {holder} moved to node {node}"
            return
        self._column_of_holder[holder] = column
        for tier in _TIERS:
            self._bit_of[holder, tier] = 1 << len(self._place_of_bit)
            self._place_of_bit.append((holder, tier))

    # ------------------------------------------------------------------------------ changes

    def stored(self, key: int, holder: int, tier: Tier) -> None:
        """Note that a block can be read from this tier of this holder. Its depth need not be known."""
        self.stored_run([key], 0, holder, tier)

    def removed(self, key: int, holder: int, tier: Tier) -> None:
        """Note that a block can no longer be read from there. Unknown places change nothing."""
        run = self._run_of.get(key)
        if run is None or run.places.bits != self._bit_of.get((holder, tier)):
            self.removed_run([key], holder, tier)
            return
        del self._run_of[key]
        run.gone += 1
        if MOST_GONE * len(run) < run.gone < len(run):
            self._tidy(run)

    def stored_run(self, keys: list[int], depth: int, holder: int, tier: Tier) -> None:
        """Note that consecutive blocks of one chain can be read from this tier of this holder.

        depth   number of blocks before the first one
        """
        bit, at = self._bit_of[holder, tier], 0
        while at < len(keys):
            run = self._run_with(keys[at])
            if run is None:
                count = self._num_unknown(keys, at)
                self._add(keys[at : at + count], depth + at, self._places_of(bit))
            else:
                start, count = _shared(run, keys, at)
                if not run.places.bits & bit:
                    self._move(run, start, count, run.places.bits | bit)
            at += count

    def removed_run(self, keys: list[int], holder: int, tier: Tier) -> None:
        """Note that blocks can no longer be read from there. Fast for blocks in the order of their chain."""
        bit, at = self._bit_of.get((holder, tier), 0), 0
        while at < len(keys):
            run = self._run_with(keys[at])
            if run is None:
                at += 1
                continue
            start, count = _shared(run, keys, at)
            if run.places.bits & bit:
                self._move(run, start, count, run.places.bits ^ bit)
            at += count

    def _run_with(self, key: int) -> _Run | None:
        """Return the run that has a key, without keys that are gone."""
        run = self._run_of.get(key)
        if run is None or not run.gone:
            return run
        self._tidy(run)
        return self._run_of[key]

    def _tidy(self, run: _Run) -> None:
        """Split a run at its keys that are gone. The longest part stays in this run."""
        get = self._run_of.get
        holes = [at for at, key in enumerate(run) if get(key) is not run]
        parts = [(one + 1, two) for one, two in zip([-1, *holes], [*holes, len(run)]) if two - one > 1]
        longest = max(parts, key=lambda part: part[1] - part[0], default=(0, 0))
        for start, end in parts:
            if start != longest[0]:
                self._add(run[start:end], run.depth + start, run.places)
        run[:] = run[slice(*longest)]
        run.depth += longest[0]
        run.gone = 0

    def _num_unknown(self, keys: list[int], at: int) -> int:
        """Count the keys from keys[at] on until one that is in a run."""
        if self._run_of.keys().isdisjoint(keys):
            return len(keys) - at
        known = (number for number in range(at, len(keys)) if keys[number] in self._run_of)
        return next(known, len(keys)) - at

    def _move(self, run: _Run, start: int, count: int, bits: int) -> None:
        """Set the places of `count` blocks of a run to exactly those of `bits`."""
        keys: list[int] = run
        if count < len(run):
            keys, depth = run[start : start + count], run.depth + start
            self._take_out(run, start, start + count)
            if bits:
                self._add(keys, depth, self._places_of(bits))
        elif bits:
            run.places = self._places_of(bits)
        if not bits:
            for key in keys:
                del self._run_of[key]

    def _add(self, keys: list[int], depth: int, places: _Places) -> None:
        """Make a run of keys that are in no run, or no longer in theirs."""
        run = _Run(keys)
        run.depth, run.places, run.gone = depth, places, 0
        run_of = self._run_of
        for key in keys:  # faster than an update from another dictionary, which hashes every key twice
            run_of[key] = run

    def _take_out(self, run: _Run, start: int, end: int) -> None:
        """Leave run[:start] and run[end:]: the longer part here, the other in a new run."""
        after = len(run) - end
        if start > after:
            if after:
                self._add(run[end:], run.depth + end, run.places)
            del run[start:]
        else:
            if start:
                self._add(run[:start], run.depth, run.places)
            del run[:end]
            run.depth += end

    def _places_of(self, bits: int) -> _Places:
        """Return the combination of these bits."""
        places = self._combinations.get(bits)
        if places is None:
            places = self._combinations[bits] = _Places(bits, self._node_bits(bits))
        return places

    def _node_bits(self, bits: int) -> int:
        """Return the bits of the nodes that have a holder with its DRAM bit set."""
        nodes = 0
        for number in _columns(bits):
            holder, tier = self._place_of_bit[number]
            if tier == "dram":
                nodes |= 1 << self._column_of_holder[holder]
        return nodes

    # ------------------------------------------------------------------------------ the walk

    def leading(self, keys: Sequence[int]) -> Leading:
        """Measure the leading runs of the keys of a prompt, from its first block on.

        Costs one lookup and one comparison per run. Joins neighbouring runs that lie in the same places: a
        later walk becomes faster, and its result stays the same.
        """
        places: list[_Places] = []
        starts: list[int] = []
        get, last, at, ssd_blocks = self._run_of.get, None, 0, 0
        while at < len(keys):
            run = get(keys[at])
            if run is None:
                break
            if run.gone:
                self._tidy(run)
                run = self._run_of[keys[at]]
            count = _num_equal(run, keys, at)
            if last is None or run.places is not last.places:
                places.append(run.places)
                starts.append(at)
            elif run.depth == at == last.depth + len(last):
                run = self._join(last, run)
            if not run.places.nodes:
                ssd_blocks += count
            last = run
            at += count
        return Leading(at, ssd_blocks, places, starts, self)

    def _join(self, one: _Run, two: _Run) -> _Run:
        """Make one run of two in the same places, the second of which continues the first."""
        if len(one) < len(two):
            self._run_of.update(dict.fromkeys(one, two))
            two[:0], two.depth = one, one.depth
            return two
        self._run_of.update(dict.fromkeys(two, one))
        one += two
        return one

    # ------------------------------------------------------------------------------ inspection

    def places(self) -> set[tuple[int, int, Tier]]:
        """Return every (key, holder, tier), for comparison with the store's directory."""
        named = {bits: [self._place_of_bit[n] for n in _columns(bits)] for bits in self._combinations}
        return {(key, *place) for key, run in self._run_of.items() for place in named[run.places.bits]}

    def check(self) -> None:
        """Assert the invariants."""
        assert self._bit_of == {place: 1 << n for n, place in enumerate(self._place_of_bit)}
        assert self.nodes == sorted(self._column_of_node, key=self._column_of_node.__getitem__)
        runs = {id(run): run for run in self._run_of.values()}
        listed = sum(len(run) - run.gone for run in runs.values())
        assert listed == len(self._run_of), "a key is in two runs, or in none"
        for run in runs.values():
            assert run.gone == sum(self._run_of.get(key) is not run for key in run) < len(run)
            assert run.gone <= MOST_GONE * len(run)
            assert self._combinations.get(run.places.bits) is run.places, "a combination exists twice"
        assert 0 not in self._combinations, "a run without a place is kept"
        for bits, places in self._combinations.items():
            assert places.nodes == self._node_bits(bits)
            assert places.node_columns is None or [*places.node_columns] == [*_columns(places.nodes)]


def _shared(own: list[int], keys: list[int], at: int) -> tuple[int, int]:
    """Return which key of a run keys[at] is, and how many keys from there on the two have in common."""
    if len(own) == 1:
        return 0, 1
    start = own.index(keys[at])
    count = min(len(own) - start, len(keys) - at)
    if count > 1 and own[start : start + count] != keys[at : at + count]:
        count = next(n for n in range(count) if own[start + n] != keys[at + n])
    return start, count


def _num_equal(run: _Run, keys: Sequence[int], at: int) -> int:
    """Return how many keys of a prompt from keys[at] on are in this run, which has keys[at].

    Compares one key if the shorter of the two ends first, and else bisects.
    """
    if len(run) == 1:
        run.depth = at  # known now
        return 1
    start = at - run.depth
    low, high = 1, min(len(run) - start, len(keys) - at)
    if start < 0 or high < 1 or run[start] != keys[at]:
        return 1  # equal keys at different depths: chains that collide
    if run[start + high - 1] == keys[at + high - 1]:
        return high
    while high - low > 1:  # at least `low` keys are equal, and fewer than `high`
        middle = (low + high) // 2
        if run[start + middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle
    return low


def _columns(bits: int) -> np.ndarray:
    """Return the numbers of the bits that are set as an index array, lowest first."""
    as_bytes = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))
