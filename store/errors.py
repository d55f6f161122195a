"""Every error of the pool. Each names the situation and carries the numbers; each is one line.

StoreError
  TokenError          a token id that has no u32 form, a block of the wrong length
  LayoutError         a buffer or a checksum list that does not fit the block's layout
  PoolFull            no free space, and nothing more may be evicted
  UnknownObject       an object, segment or range that is not there (any more)
  WrongState          an object that is there but not in the state that this step needs
  ObjectInUse         an object that is leased or being written, or that its tier still has to write
  CopyExists          a second copy of an object for one segment
  UnknownPolicy       no eviction policy of this name, or none that can run there
  TierError           the SSD tier
    TierFolderError   its folder cannot be used
      TierInUse       because another process has it
    SegmentFileError  a file in it is torn, corrupt or foreign
    TierWriteError    a block could not be written (disk full)
      TierPaused      because nothing is tried for a while after a failure
    BlockMissing      it does not hold this key
    BadBlock          it does, but the bytes are not those that were written
"""

from __future__ import annotations

from dataclasses import dataclass


class StoreError(Exception):
    """Base of all errors of the pool."""


class TokenError(StoreError, ValueError):
    """Tokens that cannot be hashed."""


class LayoutError(StoreError, ValueError):
    """A size, a buffer or a list does not fit the layout of a block."""


@dataclass(kw_only=True, eq=False)
class PoolFull(StoreError):
    """No space for `needed_bytes`. All other fields say what holds the pool (bytes)."""

    needed_bytes: int
    capacity_bytes: int
    free_bytes: int
    evictable_bytes: int
    leased_bytes: int
    writing_bytes: int
    unsaved_bytes: int

    def __str__(self) -> str:
        return (
            f"pool full: {self.needed_bytes} B needed of {self.capacity_bytes} B; free {self.free_bytes}, "
            f"evictable {self.evictable_bytes}, leased or pinned {self.leased_bytes}, being written "
            f"{self.writing_bytes}, not yet on SSD {self.unsaved_bytes}"
        )


class UnknownObject(StoreError, KeyError):
    """Nothing of this id, rank or offset is known (any more)."""

    def __init__(self, what: str, number: int):
        self.number = number
        super().__init__(f"{what} {number} is not known")

    def __str__(self) -> str:
        return str(self.args[0])


class WrongState(StoreError):
    """An object is not in the state that this step needs."""

    def __init__(self, object_id: int, state: str, wanted: str):
        self.object_id = object_id
        super().__init__(f"object {object_id} is {state}, not {wanted}")


LEASED = "leased"


class ObjectInUse(StoreError):
    """An object cannot be removed now: it is being read or written, or its tier has not saved it yet."""

    def __init__(self, key: int, rank: int, why: str):
        self.key, self.rank, self.forceable = key, rank, why == LEASED
        super().__init__(f"object {key:016x} on rank {rank} is {why}")


class CopyExists(StoreError):
    """The segment has this object, or is about to."""

    def __init__(self, key: int, rank: int | None):
        self.key, self.rank = key, rank
        super().__init__(f"rank {rank} has a copy of object {key:016x} already, or is being given one")


class UnknownPolicy(StoreError, ValueError):
    """No eviction policy of this name, or none that can run here; the message lists those that can."""


class TierError(StoreError):
    """Base of the SSD tier's errors."""


class TierFolderError(TierError):
    """The tier's folder cannot be used."""

    def __init__(self, folder: object, reason: str):
        self.folder = str(folder)
        super().__init__(f"tier folder {folder}: {reason}")


class TierInUse(TierFolderError):
    """Another process has the tier's folder; `pid` is 0 when it cannot be told."""

    def __init__(self, folder: object, pid: int):
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(folder, f"in use by {holder}; stop it or give another folder")


class SegmentFileError(TierError):
    """A segment file is torn, corrupt or foreign; `reason` says which check it failed."""

    def __init__(self, path: object, reason: str):
        self.path, self.reason = str(path), reason
        super().__init__(f"{path}: {reason}")


class TierWriteError(TierError):
    """A block or its file could not be written; `lost` are the keys that went with the file.

    `reason` is what the operating system says, in a few words.
    """

    def __init__(self, reason: str, lost: tuple[int, ...] = ()):
        self.lost, self.reason = lost, reason
        super().__init__(f"tier write failed: {reason} ({len(lost)} blocks of the open file lost)")


class TierPaused(TierWriteError):
    """A block was not written, because nothing is tried for a while after a failure."""


class BlockMissing(TierError, KeyError):
    """The tier does not hold this key."""

    def __init__(self, key: int):
        self.key = key
        super().__init__(f"block {key:016x} is not in the tier")

    def __str__(self) -> str:
        return str(self.args[0])


class BadBlock(TierError):
    """The bytes on SSD are not those that were written; the key is no longer served."""

    def __init__(self, key: int, path: object, reason: str):
        self.key = key
        super().__init__(f"block {key:016x} in {path}: {reason}")
