"""Removing single blocks, and rewriting files of which much is dead: now, after a restart, after a crash."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Never

import numpy as np
import pytest

from store.errors import BlockMissing, SegmentFileError, TierWriteError
from store.ssd.segment_writer import SegmentWriter, file_nbytes
from store.ssd.tier import HDF5Tier
from store.ssd.tier_removals import LOG_NAME, RECORD_NBYTES, RemovalLog, read_removals
from tests.store.samples import SMALL, append, failing, fill, loaded, new_tier

pytestmark = pytest.mark.quick


def served(folder: Path, **options) -> list[int]:
    """Keys that a start on this folder finds, all readable, each once."""
    tier = new_tier(folder, **options)
    tier.check()
    keys = tier.blocks()[0]
    assert all(loaded(tier, key) for key in keys)
    assert len(set(keys)) == len(keys)
    tier.close()
    return sorted(keys)


def compact_all(tier: HDF5Tier, **options) -> int:
    """Until there is nothing to do; returns the bytes copied."""
    copied = 0
    while step := tier.compact(SMALL.nbytes, **options):
        copied += step
        tier.check()
    return copied


full_disk = failing(errno.ENOSPC)


def test_a_removed_block_is_gone_now_and_after_a_restart(tier, tmp_path) -> None:
    fill(tier, range(5))
    assert tier.remove([1, 3, 77]) == [1, 3]
    with pytest.raises(BlockMissing):
        loaded(tier, 1)
    assert tier.take_evicted() == []
    tier.check()
    tier.close()
    assert served(tmp_path) == [0, 2, 4]
    assert served(tmp_path) == [0, 2, 4]


def test_a_removal_is_durable_before_it_is_reported(tier_at, tmp_path) -> None:
    """What a process that dies right after it leaves behind."""
    tier = tier_at(tmp_path / "dies")
    fill(tier, range(4))
    tier.remove([2])
    shutil.copytree(tmp_path / "dies", tmp_path / "found")
    tier.close()
    assert served(tmp_path / "found") == [0, 1, 3]


def test_a_block_written_again_after_its_removal_is_served(tier, tmp_path) -> None:
    fill(tier, [1, 2])
    tier.remove([1])
    fill(tier, [1])
    assert loaded(tier, 1)
    tier.close()
    assert served(tmp_path) == [1, 2]


def test_a_file_whose_last_block_is_removed_is_deleted_and_its_number_is_never_used_again(
    tier_at, tmp_path
) -> None:
    tier = tier_at(tmp_path)
    fill(tier, [1])
    tier.remove([1])
    assert not list(tmp_path.glob("*.h5"))
    assert tier.nbytes == 0
    fill(tier, [2])
    tier.close()
    assert [path.name for path in tmp_path.glob("*.h5")] == ["seg-00000002.h5"]
    (tmp_path / "seg-00000002.h5").unlink()
    log = RemovalLog(tmp_path)
    log.add([(9, 0, 5)])
    tier = tier_at(tmp_path)
    fill(tier, [5])
    tier.close()
    assert [path.name for path in tmp_path.glob("*.h5")] == ["seg-00000010.h5"]
    assert served(tmp_path) == [5]


@pytest.mark.parametrize("gone", [[0], [4], [1, 3], [0, 1, 2, 3, 4]])
def test_a_block_removed_before_its_file_is_sealed_never_gets_there(tier, tmp_path, gone) -> None:
    for key in range(5):
        append(tier, key)
    assert tier.remove(gone) == gone
    tier.check()
    left = [key for key in range(5) if key not in gone]
    assert sorted(tier.seal()) == left
    assert all(loaded(tier, key) for key in left)
    tier.close()
    assert served(tmp_path) == left


def test_every_copy_of_a_removed_block_is_dead_whatever_folder_it_lies_in(tier_at, tmp_path) -> None:
    for index in (0, 1):
        tier = tier_at(tmp_path / f"store-{index}")
        fill(tier, [1, 2 + index])
        tier.close()
    tier = tier_at(tmp_path / "store-0", adopted=[tmp_path / "store-1"])
    assert tier.remove([1]) == [1]
    tier.close()
    assert served(tmp_path / "store-0") == [2]
    assert served(tmp_path / "store-1") == [3]


def test_where_a_removal_cannot_be_written_down_its_whole_file_goes(tier, tmp_path, monkeypatch) -> None:
    fill(tier, [1, 2])
    fill(tier, [3])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        assert tier.remove([1]) == [1]
    assert tier.take_evicted() == [2]
    assert tier.stats()["write_errors"] == 1
    tier.check()
    tier.close()
    assert served(tmp_path) == [3]


def test_a_removal_that_can_neither_be_written_nor_done_is_an_error(tier, monkeypatch) -> None:
    fill(tier, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        patch.setattr(Path, "unlink", full_disk)
        with pytest.raises(TierWriteError, match="No space left"):
            tier.remove([1])
    assert 1 not in tier


def test_what_is_deleted_instead_is_gone_for_good_when_that_is_said(tier, monkeypatch) -> None:
    fill(tier, [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        patch.setattr(os, "fsync", full_disk)  # of the folder: a crash could bring the file back
        with pytest.raises(TierWriteError, match="No space left"):
            tier.remove([1])
    assert 1 not in tier


def test_removing_the_same_key_again_and_again_takes_one_record_each_time(tier, tmp_path) -> None:
    for first in range(10, 40, 3):
        fill(tier, [1, first, first + 1, first + 2])  # a third of each file dies: too little to rewrite it
        assert tier.remove([1]) == [1]
    assert (tmp_path / LOG_NAME).stat().st_size == 10 * RECORD_NBYTES
    tier.check()
    tier.close()
    assert 1 not in served(tmp_path)


def test_a_log_about_files_that_are_gone_does_not_grow_for_ever(tier_at, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("store.ssd.tier_removals.STALE_RECORDS", 4)
    tier = tier_at(tmp_path)
    for key in range(30):
        fill(tier, [key])
        tier.remove([key])
    assert (tmp_path / LOG_NAME).stat().st_size <= 5 * RECORD_NBYTES
    assert len(tier._removals._logs[tmp_path].rows) <= 1


def test_blocks_can_be_loaded_while_a_removal_looks_for_its_rows(tier) -> None:
    """Among a million rows that takes a while."""
    fill(tier, [1, 2])
    (file,) = tier._sealed.files()
    keys, locked = file.keys, []

    class Watched:
        def tolist(self) -> list[int]:
            locked.append(tier._sealed._lock.locked())
            return keys.tolist()

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            locked.append(tier._sealed._lock.locked())
            return keys

        def __getitem__(self, row: int) -> np.uint64:
            return keys[row]

    file.keys = Watched()  # type: ignore[assignment]
    assert [row for _, row, _ in tier._sealed.rows_of([2])] == [1]
    assert locked == [False]
    file.keys = keys


def test_a_block_that_cannot_be_taken_out_of_the_open_file_costs_that_file(tier, tmp_path) -> None:
    for key in range(3):
        append(tier, key)
    os.truncate(tmp_path / "seg-00000001.h5.open", 4096)
    with pytest.raises(TierWriteError, match="truncated") as caught:
        tier.remove([0])
    assert caught.value.lost == (0, 1, 2)
    tier.check()
    fill(tier, [5])
    tier.close()
    assert served(tmp_path) == [5]


def test_a_record_cut_off_by_a_crash_is_written_over_and_a_flipped_one_is_counted(tier_at, tmp_path) -> None:
    log = RemovalLog(tmp_path)
    log.add([(1, 0, 10), (1, 1, 11)])
    path = tmp_path / LOG_NAME
    path.write_bytes(path.read_bytes() + b"half a record")
    log = RemovalLog(tmp_path)
    assert (log.rows, log.bad) == ({1: {0: 10, 1: 11}}, 0)
    log.add([(2, 0, 12)])
    assert read_removals(tmp_path) == ([(1, 0, 10), (1, 1, 11), (2, 0, 12)], 0)
    raw = bytearray(path.read_bytes())
    raw[RECORD_NBYTES + 3] ^= 1
    path.write_bytes(raw)
    assert read_removals(tmp_path) == ([(1, 0, 10), (2, 0, 12)], 1)
    tier = tier_at(tmp_path)
    assert tier.notes == [f"{path}: 1 unreadable records ignored"]


def test_the_name_of_the_log_is_durable_though_its_first_record_was_not(tmp_path, monkeypatch) -> None:
    log = RemovalLog(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            log.add([(1, 0, 10)])
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    log.add([(1, 0, 10)])
    assert synced == [tmp_path.stat().st_ino]


def test_the_log_is_written_anew_when_most_of_it_is_about_files_that_are_gone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("store.ssd.tier_removals.STALE_RECORDS", 4)
    log = RemovalLog(tmp_path)
    for number in range(10):
        log.add([(number, 0, number), (number, 1, 100 + number)])
    log.keep({8, 9})
    log.check()
    assert (tmp_path / LOG_NAME).stat().st_size == 4 * RECORD_NBYTES
    assert RemovalLog(tmp_path).rows == {8: {0: 8, 1: 108}, 9: {0: 9, 1: 109}}


def test_files_of_which_half_is_dead_are_rewritten_into_one_and_others_left_alone(tier, tmp_path) -> None:
    for first in (0, 10, 20):
        fill(tier, range(first, first + 4))
    before = tier.nbytes
    tier.remove([0, 1, 10, 11, 12, 20])
    copied = compact_all(tier)
    assert copied == 3 * SMALL.nbytes + SMALL.nbytes  # and the seal
    assert sorted(path.name for path in tmp_path.glob("seg-*")) == ["seg-00000003.h5", "seg-00000004.h5"]
    assert tier.nbytes < before
    assert tier.take_evicted() == []
    assert tier.stats()["files_compacted"] == 2
    left = [2, 3, 13, 21, 22, 23]
    assert all(loaded(tier, key) for key in left)
    tier.close()
    assert served(tmp_path) == left


def test_a_rewritten_file_is_as_hot_as_the_hottest_it_was_made_of(tier, tier_at, tmp_path) -> None:
    for first in (0, 10, 20):
        fill(tier, range(first, first + 4))
    tier.remove([0, 1, 10, 11])
    compact_all(tier)
    order = tier.blocks()[0]
    assert set(order[:4]) == {2, 3, 12, 13}
    assert order[4:] == [20, 21, 22, 23]
    tier.close()
    again = tier_at(tmp_path)
    assert again.blocks()[0] == order


def test_small_files_are_merged_only_when_asked_for(tier_at, tmp_path) -> None:
    tier = tier_at(tmp_path, segment_bytes=8 * SMALL.nbytes)
    for key in range(5):
        fill(tier, [key])
    assert compact_all(tier) == 0
    assert compact_all(tier, merge_small=True)
    assert len(list(tmp_path.glob("*.h5"))) == 1
    assert compact_all(tier, merge_small=True) == 0
    tier.close()
    assert served(tmp_path) == [0, 1, 2, 3, 4]


def test_a_block_removed_while_its_file_is_rewritten_does_not_come_back(tier_at, tmp_path) -> None:
    for steps in range(1, 5):
        folder = tmp_path / str(steps)
        tier = tier_at(folder)
        fill(tier, range(8))
        tier.remove([0, 1, 2, 3])
        for _ in range(steps):
            tier.compact(SMALL.nbytes)
        tier.remove([4, 7])
        compact_all(tier)
        assert sorted(tier.blocks()[0]) == [5, 6]
        tier.close()
        assert served(folder) == [5, 6]


def test_a_block_found_bad_while_its_file_is_rewritten_is_left_out_and_reported(tier, tmp_path) -> None:
    fill(tier, range(6))
    tier.remove([0, 1, 2])
    file, row = tier._sealed.acquire(4, None)
    tier._sealed.give_back(file)
    with (tmp_path / "seg-00000001.h5").open("r+b") as raw:
        raw.seek(int(file.offsets[row]))
        raw.write(b"other bytes")
    compact_all(tier)
    assert tier.take_evicted() == [4]
    tier.close()
    assert served(tmp_path) == [3, 5]


def test_an_eviction_of_what_is_being_rewritten_ends_the_rewriting(tier_at, tmp_path) -> None:
    capacity = 4 * file_nbytes(SMALL, 4)
    tier = tier_at(tmp_path, capacity, segment_bytes=4 * SMALL.nbytes)
    fill(tier, range(4))
    tier.remove([0, 1])
    tier.compact(1)
    for first in range(10, 90, 4):
        fill(tier, range(first, first + 4))
    assert {2, 3} <= set(tier.take_evicted())
    compact_all(tier)
    assert 2 not in tier
    assert not list(tmp_path.glob("*.open"))


def test_rewriting_stays_within_the_capacity(tier_at, tmp_path) -> None:
    capacity = 6 * file_nbytes(SMALL, 4)
    tier = tier_at(tmp_path, capacity, segment_bytes=4 * SMALL.nbytes)
    for first in range(0, 400, 4):
        fill(tier, range(first, first + 4))
        tier.remove([first, first + 1] if first % 8 else [])
        while tier.compact(1):
            assert sum(path.stat().st_size for path in tmp_path.glob("seg-*.h5")) <= capacity
        tier.check()
    tier.close()
    assert len(served(tmp_path, capacity_bytes=capacity)) >= 8


@pytest.mark.parametrize("moment", ["copying", "sealed", "durable", "renamed"])
def test_a_crash_while_files_are_rewritten_leaves_each_block_once(
    tier_at, tmp_path, monkeypatch, moment
) -> None:
    """The folder is copied at one moment of a compaction: that is what a killed process leaves."""
    origin, found = tmp_path / "origin", tmp_path / "found"
    tier = tier_at(origin)
    fill(tier, range(6))
    fill(tier, range(10, 14))
    tier.remove([0, 1, 2, 10, 11])

    def copy_before(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def copied(*args: object, **options: object) -> object:
            if not found.exists():
                shutil.copytree(origin, found)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, copied)

    if moment == "copying":
        tier.compact(2 * SMALL.nbytes)
        shutil.copytree(origin, found)
    elif moment == "sealed":
        copy_before(Path, "rename")
    elif moment == "durable":
        copy_before(tier._folders[0], "sync")
    else:
        copy_before(tier._sealed, "replace")
    compact_all(tier)
    tier.close()
    monkeypatch.undo()
    assert served(found) == [3, 4, 5, 12, 13]
    assert served(found) == [3, 4, 5, 12, 13]
    assert not list(found.glob("*.open"))


def test_a_rewriting_that_fails_leaves_the_old_files(tier, tmp_path, monkeypatch) -> None:
    fill(tier, range(4))
    tier.remove([0, 1])

    def broken(*_) -> Never:
        raise SegmentFileError("new", "libhdf5 is ill")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "seal", broken)
        with pytest.raises(TierWriteError, match="libhdf5 is ill"):
            compact_all(tier)
    assert loaded(tier, 2)
    assert not list(tmp_path.glob("*.open"))
    compact_all(tier)
    tier.close()
    assert served(tmp_path) == [2, 3]
