"""The prefix index: how long a leading prefix of a prompt each node and each holder has.

Fed by `mooncake_lite.control` with plain calls; the store's directory is the truth, and a test compares the
two. Asked once per placement. Pure. Explained in docs/explain/paper.md, "Scheduling".

    key --_places--> _Places: one object for all keys with the same places
                       bits    2 bits per holder: DRAM at 2 * slot, SSD at 2 * slot + 1
                       nodes   1 bit per node that has the key in DRAM

A million blocks have a few hundred different combinations of places. With one shared object per
combination, a key costs one dictionary entry. The walk over a prompt compares objects by identity, and does
work only where the combination changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["dram", "ssd"]

_TIERS: tuple[Tier, Tier] = ("dram", "ssd")


@dataclass(slots=True, eq=False)
class _Places:
    """One combination of places, and how many keys lie exactly there."""

    bits: int
    nodes: int
    keys: int = 0


@dataclass(slots=True, eq=False)
class Leading:
    """What the pool holds of the leading blocks of one prompt. Lengths are in blocks.

    blocks       longest leading run that is held anywhere, in any mix of holders and tiers
    ssd_blocks   how many blocks of that run lie on SSD only
    by_node      node -> longest leading run in DRAM of that node; nodes without the first block are left out
    """

    blocks: int
    ssd_blocks: int
    by_node: dict[int, int]
    _runs: list[_Places]
    _starts: list[int]
    _slots: dict[int, int]

    def near(self, node: int) -> int:
        """Return the number of leading blocks in DRAM of this node."""
        return self.by_node.get(node, 0)

    def held_by(self, holder: int, tier: Tier) -> int:
        """Count the leading blocks in a holder's tier."""
        slot = self._slots.get(holder)
        if slot is None:
            return 0
        bit = _bit(slot, tier)
        ends = (start for places, start in zip(self._runs, self._starts) if not places.bits & bit)
        return next(ends, self.blocks)


class PrefixIndex:
    """The places of each key.

    Invariants: no key maps to an empty combination. Each combination in use exists once, and counts its keys.
    Holders have the slot numbers 0, 1, 2 and so on; each knows its node.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Places] = {}
        self._combinations: dict[int, _Places] = {}
        self._slots: dict[int, int] = {}
        self._node_of_slot: list[int] = []  # index into _nodes
        self._nodes: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def add_holder(self, holder: int, node: int) -> None:
        """Add a part of the pool that is on this node. Adding it again changes nothing."""
        if node not in self._nodes:
            self._nodes.append(node)
        at = self._nodes.index(node)
        if holder in self._slots:
            assert self._node_of_slot[self._slots[holder]] == at, f"holder {holder} moved to node {node}"
            return
        self._slots[holder] = len(self._slots)
        self._node_of_slot.append(at)

    def stored(self, key: int, holder: int, tier: Tier) -> None:
        """Note that a block can be read from this tier of this holder."""
        places = self._places.get(key)
        self._move(key, (places.bits if places else 0) | _bit(self._slots[holder], tier))

    def removed(self, key: int, holder: int, tier: Tier) -> None:
        """Note that a block can no longer be read from there. Unknown places change nothing."""
        places = self._places.get(key)
        if places is not None and holder in self._slots:
            self._move(key, places.bits & ~_bit(self._slots[holder], tier))

    def leading(self, keys: Sequence[int]) -> Leading:
        """Measure the leading runs of `keys` in one walk. Cost: one lookup per block of the longest run.

        A node counts until the first block that it does not hold. `alive` has the bits of nodes that count.
        """
        get = self._places.get
        first = get(keys[0]) if keys else None
        alive = first.nodes if first else 0
        by_node: dict[int, int] = {}
        runs: list[_Places] = []
        starts: list[int] = []
        last, nodes, blocks, ssd_blocks = None, 0, 0, 0
        for key in keys:
            places = get(key)
            if places is None:
                break
            if places is not last:
                last, nodes = places, places.nodes
                runs.append(places)
                starts.append(blocks)
                fallen = alive & ~nodes
                if fallen:
                    for node in _set_bits(fallen):
                        by_node[self._nodes[node]] = blocks
                    alive ^= fallen
            if not nodes:
                ssd_blocks += 1
            blocks += 1
        for node in _set_bits(alive):
            by_node[self._nodes[node]] = blocks
        return Leading(blocks, ssd_blocks, by_node, runs, starts, self._slots)

    def places(self) -> set[tuple[int, int, Tier]]:
        """Return every (key, holder, tier), for comparison with the store's directory."""
        holder_of = {slot: holder for holder, slot in self._slots.items()}
        named = {
            bits: [(holder_of[place // 2], _TIERS[place % 2]) for place in _set_bits(bits)]
            for bits in self._combinations
        }
        return {(key, *place) for key, places in self._places.items() for place in named[places.bits]}

    def check(self) -> None:
        """Assert the invariants."""
        slots = [*range(len(self._node_of_slot))]
        assert sorted(self._slots.values()) == slots, "two holders share a slot"
        counts: dict[int, int] = {}
        for places in self._places.values():
            assert self._combinations.get(places.bits) is places, "a combination exists twice"
            counts[places.bits] = counts.get(places.bits, 0) + 1
        assert counts == {bits: places.keys for bits, places in self._combinations.items()}
        assert 0 not in counts, "a key without a place is kept"
        for bits, places in self._combinations.items():
            assert places.nodes == self._node_bits(bits)

    def _move(self, key: int, bits: int) -> None:
        """Set the places of a key to exactly those of `bits`."""
        old = self._places.get(key)
        if old is not None:
            if old.bits == bits:
                return
            old.keys -= 1
            if not old.keys:
                del self._combinations[old.bits]
        if not bits:
            if old is not None:
                del self._places[key]
            return
        new = self._combinations.get(bits)
        if new is None:
            new = self._combinations[bits] = _Places(bits, self._node_bits(bits))
        new.keys += 1
        self._places[key] = new

    def _node_bits(self, bits: int) -> int:
        """Return the bits of the nodes that have a holder with its DRAM bit set."""
        nodes = 0
        for place in _set_bits(bits):
            if place % 2 == 0:
                nodes |= 1 << self._node_of_slot[place // 2]
        return nodes


def _bit(slot: int, tier: Tier) -> int:
    return 1 << (2 * slot + (tier == "ssd"))


def _set_bits(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
