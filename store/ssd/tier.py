"""The SSD tier of one store rank: blocks in sealed HDF5 files, found by key.

Called by a store rank: `load` from its loading thread, all else through `store.ssd.tier_writer`. Knows no
messages, and of DRAM only the buffers that it is given. Explained in docs/reference/hdf5-tier.md:

    append -> open segment file -> seal (64 MiB, or 1 s after its first block) -> served, durable
    start:    what was not sealed is deleted, every sealed file is verified, bad ones are set aside
    capacity: whole files go, the least recently used first
    removal:  written to a log; files of which half is dead are rewritten, without it (compaction)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from store import errors
from store.layout import BlockLayout, as_bytes
from store.ssd.compaction import Compaction, worth_rewriting
from store.ssd.sealed_set import SealedSet
from store.ssd.segment_file import MAX_FINGERPRINT_NBYTES, SealedFile, open_sealed
from store.ssd.segment_frame import blocks_at
from store.ssd.segment_writer import SegmentWriter, file_nbytes
from store.ssd.tier_folder import TierFolder, segment_name
from store.ssd.tier_removals import Removals

SEGMENT_NBYTES = 64 << 20
SEAL_AFTER_S = 1.0
"""A file is sealed at this size, or this long after its first block. Smaller files flush the disk more often;
larger ones lose more blocks in a crash, and in an eviction. Any values of this order work."""

RETRY_AFTER_S = 5.0
"""After a failed write the tier tries nothing for this long: a full disk seldom empties sooner, and each try
costs an open file."""

COUNTERS = (
    *("blocks_written", "bytes_written", "files_sealed", "write_errors", "blocks_loaded", "bytes_loaded"),
    *("bad_blocks", "files_bad", "files_unsealed", "blocks_removed", "files_compacted", "bytes_compacted"),
)


def _fingerprint_bytes(text: str) -> bytes:
    try:
        fingerprint = bytes.fromhex(text)
    except ValueError:
        raise errors.TierError(f"the fingerprint {text!r} is not hexadecimal") from None
    if len(fingerprint) > MAX_FINGERPRINT_NBYTES:
        raise errors.TierError(f"a fingerprint of {len(fingerprint)} B; at most {MAX_FINGERPRINT_NBYTES} fit")
    return fingerprint


class HDF5Tier:
    """One tier: its own folder, which it writes, and any number of adopted ones, which it only reads.

        counters   see COUNTERS, since the start
        notes      one line for each problem that was found at the start

    Raises TierInUse, TierFolderError (from any folder), TierError when the capacity holds no block.
    One thread calls append, seal, remove, compact and close. Any thread may call the other methods.
    """

    def __init__(
        self,
        folder: Path | str,
        capacity_bytes: int,
        layout: BlockLayout,
        fingerprint_hex: str,
        *,
        adopted: Sequence[Path | str] = (),
        segment_bytes: int = SEGMENT_NBYTES,
        seal_after_s: float = SEAL_AFTER_S,
    ):
        if capacity_bytes < file_nbytes(layout, 1):
            raise errors.TierError(
                f"a tier of {capacity_bytes} B holds no block of {layout.nbytes} B; "
                f"raise it to at least {file_nbytes(layout, 1)} B"
            )
        self.layout, self.capacity_bytes, self.seal_after_s = layout, capacity_bytes, seal_after_s
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.notes: list[str] = []
        blocks_at(layout.nbytes)  # asks libhdf5: a broken one is met at the start, not at the first write
        self._fingerprint = _fingerprint_bytes(fingerprint_hex)
        # A small tier has small files, so that evicting one of them does not empty it.
        self._segment_bytes = max(min(segment_bytes, capacity_bytes // 4), layout.nbytes)
        self._sealed = SealedSet()
        self._writer: SegmentWriter | None = None
        self._writer_number = 0
        self._compaction: Compaction | None = None
        self._open_keys: set[int] = set()
        self._first_write = self._retry_at = float("-inf")
        self._seal_s_per_byte = 5e-9  # 200 MB/s until measured
        self._folders: list[TierFolder] = []
        try:
            for path in (folder, *adopted):
                self._folders.append(TierFolder(path))
            self._removals = Removals(one.path for one in self._folders)
            self.notes += self._removals.notes
            self._rebuild()
            own = self._folders[0]
            self._next_number = max(own.next_number(), self._removals.last_number(own.path) + 1)
        except BaseException as error:
            self._release_folders()
            if isinstance(error, OSError):
                raise errors.TierFolderError(folder, f"cannot be read: {error.strerror}") from None
            raise
        self._sealed.evict_to(capacity_bytes)

    # ------------------------------------------------------------------------------ questions

    def __contains__(self, key: int) -> bool:
        """Tell whether a sealed file holds this key."""
        return key in self._sealed

    def __len__(self) -> int:
        """Return the number of blocks that can be loaded."""
        return len(self._sealed)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all sealed files."""
        return self._sealed.nbytes

    def blocks(self) -> tuple[list[int], list[int]]:
        """Return (keys, digests) of all blocks that can be loaded, hottest last."""
        return self._sealed.blocks()

    def take_evicted(self) -> list[int]:
        """Return the keys that the tier has evicted since the last call."""
        return self._sealed.take_evicted()

    def stats(self) -> dict[str, int]:
        """Return counters, those of evictions too, and gauges: blocks, bytes, open_bytes, capacity_bytes."""
        sealed = self._sealed
        evicted = {"files_evicted": sealed.files_evicted, "blocks_evicted": sealed.blocks_evicted}
        sizes = {"bytes": sealed.nbytes, "open_bytes": self.open_bytes, "capacity_bytes": self.capacity_bytes}
        return self.counters | evicted | {"blocks": len(sealed)} | sizes

    # ---------------------------------------------------------------------------------- read

    def load(self, key: int, out: object, digest: int | None = None) -> list[int]:
        """Read one block straight into out and verify it; return its checksums per layer.

        out      writable, contiguous, exactly layout.nbytes, e.g. a range of the DRAM segment
        digest   of the wanted tokens; a block with another digest is a miss

        Raises BlockMissing; BadBlock when the bytes are not those that were written (out is undefined
        then, and the key is no longer served); LayoutError for a buffer of another size.
        """
        view = as_bytes(out, self.layout.nbytes)
        if view.readonly:
            raise errors.LayoutError("a block cannot be loaded into a read-only buffer")
        try:
            file, row = self._sealed.acquire(key, digest)
            try:
                sums = file.read_block(row, view)
            finally:
                self._sealed.give_back(file)
        except errors.BadBlock:
            self.forget([key])
            self.counters["bad_blocks"] += 1
            raise
        except OSError:  # of this process, not of the block, which stays
            raise errors.BlockMissing(key) from None
        self.counters["blocks_loaded"] += 1
        self.counters["bytes_loaded"] += len(view)
        return sums

    def forget(self, keys: Iterable[int]) -> None:
        """Stop serving these keys until the next start; unknown ones are ignored."""
        self._sealed.forget(keys)

    # --------------------------------------------------------------------------------- write

    def append(self, key: int, digest: int, checksums: Sequence[int], block: object, now: float) -> bool:
        """Write a block into the open file. False when a sealed file has it already.

        Raises BadBlock when the checksums do not fit the bytes; LayoutError when a number is no u64;
        TierWriteError when it cannot be written, which costs this block alone.
        """
        if not (0 <= key < 1 << 64 and 0 <= digest < 1 << 64):
            raise errors.LayoutError(f"key {key} and digest {digest} of a block are u64")
        view = as_bytes(block, self.layout.nbytes)
        if self.layout.checksums(view) != list(checksums):
            self.counters["bad_blocks"] += 1
            raise errors.BadBlock(key, "DRAM", "checksums differ from those of put_end")
        if key in self._sealed:
            return False
        if self._writer is not None and key in self._open_keys:
            return True
        if now < self._retry_at:
            raise errors.TierPaused(f"waiting {self._retry_at - now:.1f} s after the last failure")
        try:
            self._make_room()
            if self._writer is None:
                self._writer_number, self._writer = self._new_file()
            if not self._writer.keys:
                self._first_write = now
            self._writer.append(key, digest, checksums, view)
        except OSError as error:
            self.counters["write_errors"] += 1
            self._retry_at = now + RETRY_AFTER_S
            raise errors.TierWriteError(_reason(error)) from None
        self._open_keys.add(key)
        self.counters["blocks_written"] += 1
        self.counters["bytes_written"] += len(view)
        return True

    @property
    def open_bytes(self) -> int:
        """Return the bytes of blocks in the open file."""
        return self._writer.nbytes if self._writer else 0

    @property
    def seal_at(self) -> float | None:
        """Return when the open file is to be sealed (at once when it is full); None without one."""
        if not self._writer or not self._writer.keys:
            return None
        if self._writer.nbytes + self.layout.nbytes > self._segment_bytes:
            return float("-inf")
        return self._first_write + self.seal_after_s

    @property
    def seal_estimate_s(self) -> float:
        """Predict how long sealing the open file takes, from the time of the last one."""
        return self.open_bytes * self._seal_s_per_byte

    def seal(self) -> list[int]:
        """Make the open file durable and serve it; return its keys, [] without an open file.

        Raises TierWriteError, with the lost keys, when it cannot be made durable.
        """
        writer, self._writer = self._writer, None
        self._open_keys = set()
        if writer is None:
            return []
        if not writer.keys:
            writer.abandon()
            return []
        started = time.monotonic()
        try:
            file = self._made_durable(writer, self._writer_number)
        except (OSError, errors.SegmentFileError) as error:
            self.counters["write_errors"] += 1
            raise errors.TierWriteError(_reason(error), tuple(writer.keys)) from None
        self._seal_s_per_byte = (time.monotonic() - started) / writer.nbytes
        self.counters["files_sealed"] += 1
        self._sealed.serve(file, new=True)
        self._sealed.evict_to(self.capacity_bytes)
        return list(writer.keys)

    # ------------------------------------------------------------------- removal, compaction

    def remove(self, keys: Iterable[int]) -> list[int]:
        """Remove blocks for good: no restart brings them back. Returns those that were there.

        If the removal cannot be logged, their whole files are deleted. Raises TierWriteError when that fails
        too (`lost`: blocks that were lost with the open file). Removed blocks are no longer served either
        way.
        """
        wanted = set(keys)
        found = sorted({key for key in wanted if key in self._sealed} | (wanted & self._open_keys))
        copies = self._removals.unknown(self._sealed.rows_of(wanted))
        self._sealed.forget(wanted)
        try:
            self._removals.add(copies)
        except OSError as error:
            self.counters["write_errors"] += 1
            if not self._sealed.delete_for_good([file for file, _, _ in copies]):
                raise errors.TierWriteError(_reason(error)) from None
        self._sealed.delete_empty()
        self._removals.prune(self._sealed.files())
        self._discard_unsealed(wanted)
        self.counters["blocks_removed"] += len(found)
        return found

    def compact(self, nbytes: int, *, merge_small: bool = False) -> int:
        """Continue to rewrite files with many dead blocks, about nbytes at a time; return the bytes copied.

        Returns 0 when there was nothing to do. One piece of work, with the seal of the new file, is at most a
        segment. merge_small: see `worth_rewriting`. Raises TierWriteError; the old files stay then.
        """
        if self._compaction is not None and self._compaction.obsolete:
            self._end_compaction()
        try:
            if self._compaction is None and not self._start_compaction(merge_small):
                return 0
            assert self._compaction is not None
            copied = self._compaction.step(nbytes)
            if not copied:
                self._finish_compaction(self._compaction)
                return self.layout.nbytes  # the seal was something to do
        except (OSError, errors.SegmentFileError) as error:
            self._end_compaction()
            self.counters["write_errors"] += 1
            raise errors.TierWriteError(_reason(error)) from None
        self.counters["bytes_compacted"] += copied
        return copied

    def close(self) -> None:
        """Seal the open file, close all files, release the folders. Idempotent; raises TierWriteError."""
        try:
            self._end_compaction()
            if self._folders:
                self.seal()
        finally:
            self._sealed.close()
            self._release_folders()

    def check(self) -> None:
        """Assert the invariants of all parts of the tier (tests)."""
        self._sealed.check()
        self._removals.check()
        assert self._open_keys == set(self._writer.keys if self._writer else ())

    # ------------------------------------------------------------------------------ internals

    def _new_file(self) -> tuple[int, SegmentWriter]:
        number, self._next_number = self._next_number, self._next_number + 1
        path = self._folders[0].path / segment_name(number)
        return number, SegmentWriter(path, self.layout, self._fingerprint)

    def _make_room(self, more_blocks: int = 1) -> None:
        """Evict until the unsealed files and so many more blocks fit into the capacity."""
        unsealed = [self._writer] if self._writer else []
        if self._compaction is not None:
            unsealed.append(self._compaction.writer)
        blocks = sum(len(writer.keys) for writer in unsealed) + more_blocks
        self._sealed.evict_to(self.capacity_bytes - file_nbytes(self.layout, blocks))

    def _made_durable(self, writer: SegmentWriter, number: int) -> SealedFile:
        """Seal a file; delete it when that fails. Raises OSError, SegmentFileError."""
        try:
            file = writer.seal(number)
            self._folders[0].sync()
        except (OSError, errors.SegmentFileError):
            writer.abandon()
            with suppress(OSError):
                writer.path.unlink(missing_ok=True)
            raise
        return file

    def _discard_unsealed(self, keys: set[int]) -> None:
        """Remove blocks from the files that are being written; abandon a file in which that fails."""
        if self._compaction is not None:
            try:
                self._compaction.discard(keys)
            except (OSError, errors.SegmentFileError):
                self._end_compaction()
        for key in keys & self._open_keys:
            assert self._writer is not None
            try:
                self._writer.discard(key)
            except (OSError, errors.SegmentFileError) as error:
                writer, self._writer, self._open_keys = self._writer, None, set()
                writer.abandon()
                raise errors.TierWriteError(_reason(error), tuple(writer.keys)) from None
            self._open_keys.discard(key)

    def _start_compaction(self, merge_small: bool) -> bool:
        old = worth_rewriting(self._sealed.files(), self._segment_bytes, merge_small=merge_small)
        if not old:
            return False
        self._make_room(sum(file.live for file in old))
        if any(file.deleted for file in old):
            return False  # evicted to make room for themselves
        number, writer = self._new_file()
        self._compaction = Compaction(self._sealed, old, writer, number)
        return True

    def _finish_compaction(self, compaction: Compaction) -> None:
        if compaction.writer.keys:
            file = self._made_durable(compaction.writer, compaction.number)
            self._sealed.replace(compaction.old, file)
        else:
            compaction.writer.abandon()
            self._sealed.delete_empty()
        self._compaction = None
        self.counters["files_compacted"] += len(compaction.old)
        self._removals.prune(self._sealed.files())

    def _end_compaction(self) -> None:
        """Abandon the compaction under way; the old files stay as they were."""
        if self._compaction is not None:
            self._compaction.writer.abandon()
            self._compaction = None

    def _rebuild(self) -> None:
        """Verify and index every sealed file of every folder, coldest first; set bad ones aside."""
        found = []
        for folder in self._folders:
            self.counters["files_unsealed"] += folder.delete_open()
            for number, path in folder.sealed():
                with suppress(FileNotFoundError):  # deleted meanwhile, by hand
                    found.append((path.lstat().st_mtime_ns, number, path, folder))
        other_kind = 0
        for _, number, path, folder in sorted(found, key=lambda item: item[:2]):
            try:
                file = open_sealed(path, number, self.layout, self._fingerprint)
            except (errors.SegmentFileError, OSError) as error:
                self.counters["files_bad"] += 1
                self.notes.append(f"tier file {path} set aside as .bad: {_reason(error)}")
                with suppress(OSError):  # then it stays, and is passed over at each start
                    folder.set_aside(path)
                continue
            other_kind += not file.same_kind
            self._sealed.serve(file, new=False, dead=self._removals.dead_rows(file))
        self._sealed.delete_empty()
        self._removals.prune(self._sealed.files())
        if self.counters["files_unsealed"]:
            self.notes.append(f"{self.counters['files_unsealed']} unsealed tier files deleted")
        if other_kind:
            self.notes.append(f"{other_kind} tier files of another model or layout kept, not served")

    def _release_folders(self) -> None:
        for folder in self._folders:
            folder.release()
        self._folders = []


def _reason(error: Exception) -> str:
    """Return one line that says what happened."""
    if isinstance(error, errors.SegmentFileError):
        return error.reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
