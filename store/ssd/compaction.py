"""Compaction: rewrite sealed files with many dead blocks into one new file, a few blocks at a time.

Used by `store.ssd.tier`, in the thread that writes. The old files are deleted once the new one is durable, so
that a crash at any moment leaves each block in one file or in two. Explained in
docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from store.errors import BadBlock, BlockMissing
from store.ssd.sealed_set import SealedSet
from store.ssd.segment_file import SealedFile
from store.ssd.segment_writer import SegmentWriter

DEAD_SHARE = 0.5
"""A file is worth rewriting when at least this share of its blocks is dead: each byte written then gives
back at least two."""


def worth_rewriting(
    files: Sequence[SealedFile], segment_bytes: int, *, merge_small: bool = False
) -> list[SealedFile]:
    """Choose which of these files (coldest first) to rewrite together; return [] when it does not pay.

    merge_small   also files of less than half a segment, two at least; else only those with DEAD_SHARE dead

    Chooses neighbours in recency, whose live blocks together fit into one segment.
    """
    chosen: list[SealedFile] = []
    nbytes = 0
    for file in files:
        dead = file.header.blocks - file.live
        small = merge_small and 2 * file.live * file.header.layout.nbytes < segment_bytes
        if not file.same_kind or not (small or dead >= DEAD_SHARE * file.header.blocks):
            continue
        live = file.live * file.header.layout.nbytes
        if chosen and nbytes + live > segment_bytes:
            break
        chosen.append(file)
        nbytes += live
    if len(chosen) == 1 and chosen[0].live == chosen[0].header.blocks:
        return []  # small, and nothing to merge it with
    return chosen


class Compaction:
    """One compaction under way.

        old      the files that are rewritten
        number   of the new file

    Not thread-safe; other threads may load from the old files meanwhile.
    """

    def __init__(self, sealed: SealedSet, old: Sequence[SealedFile], writer: SegmentWriter, number: int):
        self.old, self.writer, self.number = list(old), writer, number
        self._sealed = sealed
        self._keys = [int(file.keys[row]) for file in old for row in sealed.served_rows(file)]
        self._block = memoryview(bytearray(writer.layout.nbytes))

    @property
    def obsolete(self) -> bool:
        """Tell whether an old file was deleted meanwhile: its blocks must not come back with the new file."""
        return any(file.deleted for file in self.old)

    def step(self, nbytes: int) -> int:
        """Copy live blocks until nbytes are read; return the bytes copied, 0 when all blocks have been.

        A block that is bad is left out, and counts as evicted. Raises OSError when one cannot be written.
        """
        copied = 0
        while self._keys and copied < nbytes:
            key = self._keys.pop()
            copied += len(self._block)
            try:
                self._copy(key)
            except BlockMissing:  # removed meanwhile
                continue
            except BadBlock:
                self._sealed.forget([key], tell=True)
        return copied

    def _copy(self, key: int) -> None:
        file, row = self._sealed.acquire(key, None, use=False)
        try:
            sums = file.read_block(row, self._block)
        finally:
            self._sealed.give_back(file)
        if file in self.old:
            self.writer.append(key, int(file.digests[row]), sums, self._block)

    def discard(self, keys: set[int]) -> None:
        """Leave removed keys out of the new file. Raises OSError, SegmentFileError."""
        for key in keys.intersection(self.writer.keys):
            self.writer.discard(key)
