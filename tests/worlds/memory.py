"""What the segments of the fault world hold, and which ranges are being read and written.

It is what the world holds the control plane against: a range that is given out twice, or that is freed while
it is read, is an assertion here.

    UseKey        what a use is for: "work" or "swap", rank, request id and attempt; "save", rank and key;
                  "put" and object; "load", "copy" or "check", and the number of the order
    OVERWRITTEN   part of the writes under way of which bytes land after their rank has joined a new conductor

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

from mooncake_lite.control import events as ev
from mooncake_lite.simulator.bytes import Bytes
from store.objects import BlockRef
from tests.worlds.faults import LATE_WRITE_S

OVERWRITTEN = 0.1
UseKey = tuple[str | int, ...]


class Content(NamedTuple):
    """The bytes of one block. digests: the emulated KV of its tokens; what follows them is of no meaning.

    rotten   the bytes are not those that were put, and nothing has found that yet
    """

    digests: tuple[int, ...]
    rotten: bool = False

    @property
    def key(self) -> int:
        """Return the key of the block, if it is full."""
        return self.digests[-1] if self.digests else 0

    def sums(self, layers: int) -> list[int]:
        """Return the checksums of these bytes, by layer."""
        if not self.digests:
            return [0] * layers
        return [(hash(self.digests) + layer) % 2**63 ^ self.rotten for layer in range(layers)]


NOTHING = Content(())


class Unit(NamedTuple):
    """One head's keys or values of one layer, as a member writes it.

    number   which unit of a block its bytes are: another one than that of its place is a wrong one
    """

    number: int
    digests: tuple[int, ...]


class Use(NamedTuple):
    """A range that a rank reads or may write. kind "late": its order has failed, and bytes may still land."""

    kind: Literal["read", "write", "late"]
    ref: BlockRef
    purpose: str


class Memory(Bytes):
    """The segments: what lies where, and who uses it.

    _content   (rank, offset) -> Content; absent: never written, or torn bytes
    _uses      (rank, bucket) -> uses that begin in this stretch of nbytes bytes
    _stored    (rank, key) -> ranges that hold a block that ends with this digest
    _units     place -> units of a block that members write one by one, until all are there and fit together
    unsummed   places that members have written, and of which no checksums were made yet
    written    object ids that a directory gave out for writing
    segment_bytes   that each rank lends
    flips      blocks that were damaged
    """

    def __init__(self, layers: int, nbytes: int) -> None:
        super().__init__(layers)
        self._nbytes = nbytes
        self.segment_bytes, self.written, self.flips = dict[int, int](), set[int](), 0
        self._content: dict[tuple[int, int], Content] = {}
        self._units, self.unsummed = dict[tuple[int, int], dict[int, Unit]](), set[tuple[int, int]]()
        self._uses: dict[tuple[int, int], list[Use]] = {}
        self._stored: Counter[tuple[int, int]] = Counter()

    def sums(self, content: Content) -> list[int]:
        """Return the checksums of these bytes, by layer."""
        return content.sums(self.layers)

    # ------------------------------------------------------------------------------ uses

    def begin_read(self, refs: Iterable[BlockRef], purpose: str) -> list[Use]:
        """Note that ranges are read. They must not be written meanwhile."""
        return [self._begin(Use("read", ref, purpose)) for ref in refs]

    def begin_write(self, refs: Iterable[BlockRef], purpose: str) -> list[Use]:
        """Note that ranges are given out for writing. Nothing else may use them, and their bytes are gone."""
        uses = []
        for ref in refs:
            assert ref.object_id not in self.written, f"{ref} is given out twice for writing"
            self.written.add(ref.object_id)
            uses.append(self._begin(Use("write", ref, purpose)))
            self.tear(ref)
        return uses

    def end(self, uses: Iterable[Use]) -> None:
        """End these uses."""
        for use in uses:
            self._uses[use.ref.rank, use.ref.offset // self._nbytes].remove(use)

    def end_late(self, use: Use) -> Use:
        """Turn a write that has failed into one whose last bytes have not landed yet."""
        self.end([use])
        return self._begin(use._replace(kind="late"))

    def _begin(self, use: Use) -> Use:
        ref = use.ref
        assert ref.nbytes == self._nbytes, f"{ref} is no block of {self._nbytes} B"
        assert 0 <= ref.offset <= self.segment_bytes[ref.rank] - ref.nbytes, f"{ref} is outside"
        bucket = ref.offset // self._nbytes
        for near in (bucket - 1, bucket, bucket + 1):
            for other in self._uses.get((ref.rank, near), ()):
                if abs(other.ref.offset - ref.offset) < ref.nbytes:
                    assert other.kind == use.kind == "read", f"{use} overlaps with {other}"
        self._uses.setdefault((ref.rank, bucket), []).append(use)
        return use

    # ------------------------------------------------------------------------------ bytes

    def write(self, ref: BlockRef, content: Content) -> None:
        """Write all bytes of a range, which its writer has not given back."""
        self._may_write(ref)
        self.tear(ref)
        self._hold(ref, content)

    def write_units(self, ref: BlockRef, units: dict[int, Unit], count: int) -> None:
        """Write some units of a range, by their places in the block. count: units of a block."""
        self._may_write(ref)
        there = {**self._units.get((ref.rank, ref.offset), {}), **units}
        self.tear(ref)
        if len(there) == count:
            self.unsummed.add((ref.rank, ref.offset))
            kinds = {unit.digests for unit in there.values()}
            if len(kinds) == 1 and all(unit.number == at for at, unit in there.items()):
                self._hold(ref, Content(kinds.pop()))
                return
            self._hold(ref, Content((hash(tuple(sorted(there.items()))) % 2**63,)))
        self._units[ref.rank, ref.offset] = there

    def units(self, ref: BlockRef, count: int) -> dict[int, Unit]:
        """Return the units of a range, as far as they were written. count: units of a block."""
        there, whole = self._units.get((ref.rank, ref.offset)), self.find(ref)
        if there is not None or whole is None:
            return there or {}
        return {unit: Unit(unit, whole.digests) for unit in range(count)}

    def _may_write(self, ref: BlockRef) -> None:
        near = self._uses.get((ref.rank, ref.offset // self._nbytes), ())
        assert any(use.kind != "read" and use.ref == ref for use in near), f"{ref} is not to be written"

    def _hold(self, ref: BlockRef, content: Content) -> None:
        self._content[ref.rank, ref.offset] = content
        self._stored[ref.rank, content.key] += 1

    def tear(self, ref: BlockRef) -> None:
        """Overwrite some bytes of a range, so that it holds nothing whole."""
        self._units.pop((ref.rank, ref.offset), None)
        self.unsummed.discard((ref.rank, ref.offset))
        old = self._content.pop((ref.rank, ref.offset), None)
        if old is not None:
            self._stored[ref.rank, old.key] -= 1

    def rot(self, ref: BlockRef) -> None:
        """Flip a bit of a range, which no rank notices."""
        self._content[ref.rank, ref.offset] = self.content(ref)._replace(rotten=True)

    def flip(self, dice: Random) -> None:
        """Change the bytes of some block, so that what is computed on it changes too.

        Nobody can notice what happens to a block before its checksums are made.
        """
        if places := [place for place in self._content if place not in self.unsummed]:
            place = dice.choice(places)
            old = self._content[place]
            self.tear(BlockRef(0, *place, self._nbytes))
            self._content[place] = Content((*old.digests[:-1], old.digests[-1] ^ 1 << 40))
            self.flips += 1

    def find(self, ref: BlockRef) -> Content | None:
        """Return the bytes of a range; None when it holds nothing whole."""
        return self._content.get((ref.rank, ref.offset))

    def content(self, ref: BlockRef) -> Content:
        """Return the bytes of a range, which must have been put there."""
        found = self.find(ref)
        assert found is not None, f"{ref} holds nothing that was put"
        return found

    def expect(self, ref: BlockRef, digests: Sequence[int]) -> None:
        """Assert that a range begins with the KV of these tokens."""
        found = self.content(ref).digests[: len(digests)]
        assert found == tuple(digests), f"{ref} holds {found}, not {digests}"

    def expect_sums(self, ref: BlockRef, key: int, sums: list[int]) -> None:
        """Assert that a range holds this block with these checksums, unless its bytes have rotted."""
        found = self.content(ref)
        assert found.key == key, f"{ref} holds {found.key:016x}, not {key:016x}"
        assert found.rotten or sums == self.sums(found), f"the checksums of {ref} are of other bytes"

    def holds(self, rank: int, key: int) -> bool:
        """Return whether the segment of a rank holds the block with this key anywhere."""
        return self._stored[rank, key] > 0


class Uses:
    """The ranges in use.

    _by            rank that uses them
    _late          rank -> places that bytes of its failed transfers may still reach
    _gone          ranks that are lost; _ended: those whose end was seen
    _unreachable   uses of those that may still write
    doubts         blocks may have other bytes than the conductor thinks: an earlier conductor has died, or
                   blocks are damaged
    _known         ranks that have joined it
    _begun         uses that the present order has begun
    """

    def __init__(self, world: Any) -> None:
        self._world, self._memory, self._clock, self._dice = world, world.memory, world.clock, world.dice
        self._uses, self._late = dict[UseKey, list[Use]](), dict[int, list[Use]]()
        self._by, self._begun, self.doubts = dict[UseKey, int](), list[UseKey](), False
        self._gone, self._known, self._unreachable = set[int](), set[int](), set[UseKey]()
        self._ended = set[int]()

    @property
    def in_use(self) -> dict[UseKey, list[Use]]:
        """Return what reachable ranks use; at the end of a run that is nothing."""
        return {key: uses for key, uses in self._uses.items() if key not in self._unreachable}

    def _begin(self, key: UseKey, reads: list[BlockRef], writes: list[BlockRef], rank: int) -> None:
        self._by[key] = rank
        self._begun.append(key)
        purpose = " ".join(map(str, key))
        assert key not in self._uses, f"{purpose} is ordered twice"
        uses = self._memory.begin_read(reads, purpose) + self._memory.begin_write(writes, purpose)
        if uses:
            self._uses[key] = uses

    def _end(self, key: UseKey, *, late: bool = False) -> None:
        for use in self._uses.pop(key, ()):
            self._end_use(use, self._by[key], late=late and use.kind == "write")

    def _end_reads(self, key: UseKey) -> None:
        """End the reads of an order whose lease has run out."""
        if key in self._uses:
            self._memory.end(use for use in self._uses[key] if use.kind == "read")
            self._uses[key] = [use for use in self._uses[key] if use.kind != "read"]

    def _end_writes(self, key: UseKey, places: Sequence[BlockRef], rank: int) -> None:
        """End the writes of an order to places that have all their bytes. The rest may have failed."""
        for uses in (self._uses.get(key, []), self._late.get(rank, [])):
            written = [use for use in uses if use.kind != "read" and use.ref in places]
            self._memory.end(written)
            uses[:] = [use for use in uses if use not in written]

    def _end_use(self, use: Use, rank: int, *, late: bool) -> None:
        if not late:
            self._memory.end([use])
        elif rank not in self._known:  # only an earlier conductor would have kept the place
            self._overwrite([use])
        else:
            self._late.setdefault(rank, []).append(waiting := self._memory.end_late(use))
            self._clock.after(self._dice.random() * LATE_WRITE_S, lambda: self._land(waiting, rank))

    def _land(self, use: Use, rank: int) -> None:
        """Let the last bytes of a failed transfer land, unless its rank has died."""
        if use in self._late.get(rank, ()):
            self._late[rank].remove(use)
            self._memory.tear(use.ref)
            self._memory.end([use])

    def forget_late(self) -> None:
        """Keep no place any more for late bytes: a new conductor knows of none. They land on others."""
        self.doubts = True
        for key in [key for key in self._uses if key in self._unreachable]:
            self._overwrite(self._uses.pop(key))
        for uses in self._late.values():
            self._overwrite(uses)
        self._late.clear()
        self._known.clear()

    def _overwrite(self, uses: Sequence[Use]) -> None:
        """Let bytes land in places that are no longer kept."""
        self._memory.end(uses)
        for use in uses:
            self._clock.after(self._dice.random() * LATE_WRITE_S, partial(self._memory.tear, use.ref))

    def _leave(self, rank: int, late: float) -> None:
        """End all uses of a rank. late: part of its writes of which the last bytes come later."""
        for key in [key for key in self._uses if self._by[key] == rank]:
            uses = self._uses.pop(key)
            writes = [use for use in uses if use.kind == "write" and self._dice.random() < late]
            self._memory.end(use for use in uses if use not in writes)
            self._overwrite(writes)

    def _end_saves(self, gone: Callable[[BlockRef], bool]) -> None:
        """End the saves of blocks that are gone. Whoever saves them compares them too."""
        for key in [key for key in self._uses if key[0] == "save"]:
            if any(gone(use.ref) for use in self._uses[key]):
                self._end(key)

    def _lost(self, event: ev.RankLost) -> None:
        """End the uses of an instance that is dead as a whole: any rank may write what it was granted.

        An unreachable one may write at any time.
        """
        self._end_saves(lambda ref: ref.rank == event.rank)
        self._gone.add(event.rank)
        self._ended |= {event.rank} if event.ended else set()
        instance = self._world.shape.config.instance_of(event.rank)
        first, ended = instance[0], self._ended.issuperset(instance)
        if first not in self._gone:
            return
        if self.doubts and not ended and first not in self._known:  # a new conductor keeps none of its places
            self._leave(first, 1.0)
        for key in [key for key in self._uses if self._by[key] == first]:
            if ended:
                self._end(key)
            else:
                self._end_reads(key)
                self._unreachable.add(key)
        if ended:
            self._memory.end(self._late.pop(first, ()))
