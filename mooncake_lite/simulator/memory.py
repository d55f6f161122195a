"""What the segments of a modelled cluster hold, and which ranges are being read and written.

Used by `world.py` and its models. It is what the world holds the control plane against: a range that is given
out twice, or that is freed while it is read, is an assertion here. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Literal, NamedTuple

from mooncake_lite.simulator.kv import NOTHING, Content
from store.objects import BlockRef


class Use(NamedTuple):
    """A range that a rank reads or may write. kind "late": its order has failed, and bytes may still land."""

    kind: Literal["read", "write", "late"]
    ref: BlockRef
    purpose: str


class Memory:
    """The segments: what lies where, and who uses it.

    layers     of a block: as many checksums has it
    _content   (rank, offset) -> Content; absent: never written, or torn bytes
    _uses      (rank, bucket) -> uses that begin in this stretch of nbytes bytes
    _stored    (rank, key) -> ranges that hold a block that ends with this digest
    _written   object ids that were given out for writing
    flips      blocks that were damaged
    """

    def __init__(self, layers: int, nbytes: int) -> None:
        self.layers = layers
        self._nbytes = nbytes
        self._segment_bytes: dict[int, int] = {}
        self._content: dict[tuple[int, int], Content] = {}
        self._uses: dict[tuple[int, int], list[Use]] = {}
        self._stored: dict[tuple[int, int], int] = {}
        self._written: set[int] = set()
        self.flips = 0

    def forget_ids(self) -> None:
        """Let object ids be given out again, by another directory."""
        self._written.clear()

    def add_segment(self, rank: int, nbytes: int) -> None:
        """Add the memory that a rank lends."""
        self._segment_bytes[rank] = nbytes

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
            assert ref.object_id not in self._written, (
                f"object {ref.object_id} is given out twice for writing"
            )
            self._written.add(ref.object_id)
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
        capacity = self._segment_bytes[ref.rank]
        assert ref.nbytes == self._nbytes, f"{ref} is no block of {self._nbytes} B"
        assert 0 <= ref.offset <= capacity - ref.nbytes, f"{ref} is outside of a segment of {capacity} B"
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
        near = self._uses.get((ref.rank, ref.offset // self._nbytes), ())
        assert any(use.kind != "read" and use.ref == ref for use in near), f"{ref} is not to be written"
        self.tear(ref)
        self._content[ref.rank, ref.offset] = content
        where = ref.rank, content.key
        self._stored[where] = self._stored.get(where, 0) + 1

    def tear(self, ref: BlockRef) -> None:
        """Overwrite some bytes of a range, so that it holds nothing whole."""
        old = self._content.pop((ref.rank, ref.offset), None)
        if old is not None and (ref.rank, old.key) in self._stored:
            self._stored[ref.rank, old.key] -= 1

    def rot(self, ref: BlockRef) -> None:
        """Flip a bit of a range, which no rank notices."""
        old = self.content(ref)
        self._content[ref.rank, ref.offset] = old._replace(rotten=True)

    def flip(self, dice: Random) -> None:
        """Change the bytes of some block, so that what is computed on it changes too."""
        if self._content:
            place = dice.choice(list(self._content))
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

    def expect(self, ref: BlockRef, digests: Sequence[int]) -> Content:
        """Return the bytes of a range, which must begin with the KV of these tokens."""
        found = self.content(ref)
        assert found.digests[: len(digests)] == tuple(digests), f"{ref} holds {found}, not {digests}"
        return found

    def expect_key(self, ref: BlockRef, key: int) -> Content:
        """Return the bytes of a range, which must be those of the full block with this key."""
        found = self.content(ref)
        assert found.key == key, f"{ref} holds {found.key:016x}, not {key:016x}"
        return found

    def expect_sums(self, ref: BlockRef, key: int, sums: list[int]) -> None:
        """Assert that a range holds this block with these checksums, unless its bytes have rotted."""
        found = self.expect_key(ref, key)
        assert found.rotten or sums == self.sums(found), f"the checksums of {ref} are of other bytes"

    def holds(self, rank: int, key: int) -> bool:
        """Return whether the segment of a rank holds the block with this key anywhere."""
        return self._stored.get((rank, key), 0) > 0


class NoMemory(Memory):
    """Segments without bytes, where prompts are lengths: every range holds the same."""

    def write(self, ref: BlockRef, content: Content) -> None:
        """Do nothing."""

    def find(self, ref: BlockRef) -> Content | None:
        """Return NOTHING."""
        return NOTHING
