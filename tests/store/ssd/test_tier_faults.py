"""The HDF5 tier when things go wrong: a kill, a flipped bit, a short file, a full disk. Always a miss and
a count, never a wrong byte, never an end."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from store.errors import BadBlock, BlockMissing, SegmentFileError, TierFolderError, TierWriteError
from store.ssd.segment_file import HEADER_NBYTES, open_sealed
from store.ssd.tier import HDF5Tier
from store.ssd.tier_folder import TierFolder
from tests.store.samples import SMALL, append, failing, fill, loaded, new_tier

ROOMY = 1 << 30
KEYS = (1, 2, 3)


@pytest.fixture
def sealed(tmp_path) -> Path:
    """A sealed file with the blocks KEYS, alone in its folder."""
    tier = new_tier(tmp_path / "origin")
    fill(tier, KEYS)
    tier.close()
    return tmp_path / "origin" / "seg-00000001.h5"


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """A limit on the size of files, as a file system or a quota would set one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if nbytes is None else (nbytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def append_all(tier: HDF5Tier, keys: Iterable[int], now: float = 0.0) -> None:
    for key in keys:
        append(tier, key, now)


def start_with(raw: bytes, folder: Path) -> HDF5Tier:
    """A tier on a new folder that holds one sealed file with these bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "seg-00000001.h5").write_bytes(raw)
    return new_tier(folder)


def assert_set_aside(tier: HDF5Tier, folder: Path) -> None:
    """Nothing is served, the file is out of the way, one line says so, and writing goes on."""
    assert len(tier) == 0
    assert tier.stats()["files_bad"] == 1
    assert len(tier.notes) == 1
    assert "set aside" in tier.notes[0]
    assert "\n" not in tier.notes[0]
    assert (folder / "seg-00000001.h5.bad").exists()
    fill(tier, [9])
    assert loaded(tier, 9)
    tier.close()


def test_what_a_killed_process_left_unsealed_is_deleted_and_counted(tier_at, tmp_path) -> None:
    (tmp_path / "seg-00000007.h5.open").write_bytes(b"half a file")
    tier = tier_at(tmp_path)
    assert tier.notes == ["1 unsealed tier files deleted"]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_only_looks_unsealed_stays_and_stops_no_start(tier_at, tmp_path) -> None:
    (tmp_path / "notes.open").write_text("of a person")
    (tmp_path / "seg-00000007.h5.open").mkdir()
    tier = tier_at(tmp_path)
    assert tier.notes == []
    append(tier, 1)
    assert tier.seal() == [1]
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock",
        "notes.open",
        "seg-00000007.h5.open",
        "seg-00000008.h5",
    ]


def test_a_file_that_vanishes_during_the_start_is_passed_over(tier_at, sealed, monkeypatch) -> None:
    (sealed.parent / "seg-00000002.h5").write_bytes(sealed.read_bytes())
    listed = TierFolder.sealed

    def and_deleted(folder: TierFolder) -> Iterator[tuple[int, Path]]:
        names = list(listed(folder))
        sealed.unlink()
        return iter(names)

    monkeypatch.setattr(TierFolder, "sealed", and_deleted)
    tier = tier_at(sealed.parent)
    assert all(loaded(tier, key) for key in KEYS)


def test_a_folder_that_cannot_be_listed_is_a_named_error_and_is_given_up(
    tier_at, sealed, monkeypatch
) -> None:
    broken = failing(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(TierFolder, "sealed", broken)
        with pytest.raises(TierFolderError, match="cannot be read: Input/output error"):
            tier_at(sealed.parent)
    tier_at(sealed.parent).close()


def test_a_start_on_a_full_disk_serves_what_there_is(tier_at, sealed, small_files) -> None:
    small_files(0)
    try:
        tier = tier_at(sealed.parent)
    finally:
        small_files(None)
    assert all(loaded(tier, key) for key in KEYS)


def test_a_file_cut_short_or_grown_is_set_aside(tmp_path, sealed) -> None:
    raw = sealed.read_bytes()
    lengths = [0, 1, HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 9, len(raw) // 2, len(raw) - 1]
    for length in lengths:
        assert_set_aside(start_with(raw[:length], tmp_path / "cut"), tmp_path / "cut")
    assert_set_aside(start_with(raw + b"\0", tmp_path / "grown"), tmp_path / "grown")


def test_a_foreign_file_is_set_aside_whatever_it_is(tier_at, tmp_path, sealed) -> None:
    folder = tmp_path / "foreign"
    assert_set_aside(start_with(os.urandom(9000), folder), folder)
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["keys"] = np.arange(3, dtype=np.uint64)
    assert_set_aside(start_with((tmp_path / "plain.h5").read_bytes(), folder), folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "seg-00000001.h5").symlink_to(sealed)
    tier = tier_at(folder)
    assert tier.stats()["files_bad"] == 1
    tier.close()
    assert sealed.exists()


@pytest.mark.parametrize(
    ("at", "kind", "number", "says"),
    [
        (8, "<I", 9, "format version 9; this program reads 2"),
        (24, "<Q", 0, "impossible sizes: 0 blocks"),
        (32, "<Q", 1, "impossible sizes: 3 blocks of 1 B"),
        (40, "<Q", 4095, "the table of offsets at 4095 lies outside the file"),
        (72, "<I", 0, "impossible layout: layers=0"),
        (92, "<I", 77, "impossible layout: codec 77 is unknown"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused_though_its_hash_is_right(
    sealed, at: int, kind: str, number: int, says: str
) -> None:
    raw = bytearray(sealed.read_bytes())
    struct.pack_into(kind, raw, at, number)
    struct.pack_into("<Q", raw, 4088, xxh3_64_intdigest(raw[:4088]))
    sealed.write_bytes(raw)
    with pytest.raises(SegmentFileError, match=says):
        open_sealed(sealed, 1)


def test_blocks_that_overlap_are_refused(sealed) -> None:
    raw = bytearray(sealed.read_bytes())
    (table,) = struct.unpack_from("<Q", raw, 40)
    raw[table + 8 : table + 16] = raw[table : table + 8]
    sealed.write_bytes(raw)
    with pytest.raises(SegmentFileError, match="blocks overlap"):
        open_sealed(sealed, 1)


def test_a_file_that_shrinks_while_it_is_served_is_a_miss(tier, tmp_path) -> None:
    fill(tier, KEYS)
    os.truncate(tmp_path / "seg-00000001.h5", HEADER_NBYTES)
    for key in KEYS:
        with pytest.raises(BadBlock, match="truncated"):
            loaded(tier, key)
    assert tier.stats()["bad_blocks"] == 3


def test_a_file_that_vanishes_while_it_is_served_is_a_miss(tier, tmp_path) -> None:
    fill(tier, [1])
    (tmp_path / "seg-00000001.h5").unlink()
    with pytest.raises(BadBlock, match="No such file"):
        loaded(tier, 1)
    assert 1 not in tier


def test_a_process_that_may_open_no_more_files_loses_no_block(tier, monkeypatch) -> None:
    """Neither by reading, which is a miss, nor by rewriting, which is given up."""
    append_all(tier, KEYS)
    tier.seal()
    tier.remove([1, 2])
    real = os.open

    def none_left(path, flags: int, *mode: int) -> int:
        if str(path).endswith(".h5"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        with pytest.raises(BlockMissing):
            loaded(tier, 3)
        with pytest.raises(TierWriteError, match="Too many open files"):
            tier.compact(ROOMY)
    assert loaded(tier, 3)
    assert tier.compact(ROOMY)
    assert tier.compact(ROOMY)
    assert loaded(tier, 3)
    assert tier.stats()["bad_blocks"] == 0
    tier.check()


def test_a_full_disk_drops_the_block_keeps_the_earlier_ones_and_is_tried_again_later(
    tier_at, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("store.ssd.segment_writer.RESERVE_NBYTES", 0)
    tier = tier_at(tmp_path)
    append(tier, 1)

    full = failing(errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierWriteError, match="No space left") as caught:
            append(tier, 2, now=10.0)
    assert caught.value.lost == ()
    with pytest.raises(TierWriteError, match="waiting 4"):
        append(tier, 3, now=11.0)
    assert append(tier, 3, now=15.1)
    assert tier.seal() == [1, 3]
    assert loaded(tier, 1)
    assert loaded(tier, 3)
    assert tier.stats()["write_errors"] == 1


def test_a_file_system_that_refuses_to_grow_a_file_costs_the_block_alone(
    tier_at, tmp_path, small_files, monkeypatch
) -> None:
    monkeypatch.setattr("store.ssd.segment_writer.RESERVE_NBYTES", 8 << 10)
    tier = tier_at(tmp_path)
    append(tier, 1)
    append(tier, 2)
    small_files((tmp_path / "seg-00000001.h5.open").stat().st_size)
    with pytest.raises(TierWriteError, match="File too large") as caught:
        append_all(tier, range(3, 100))
    small_files(None)
    assert caught.value.lost == ()
    durable = tier.seal()
    assert durable[:2] == [1, 2]
    assert all(loaded(tier, key) for key in durable)


def test_where_no_room_can_be_set_aside_a_full_disk_costs_what_cannot_be_written(
    tier_at, tmp_path, small_files, monkeypatch
) -> None:
    """The tables have no room then either: the seal fails, and what was sealed before is as it was."""

    unsupported = failing(errno.EOPNOTSUPP)

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    tier = tier_at(tmp_path)
    fill(tier, [1])
    small_files(40 << 10)
    with pytest.raises(TierWriteError, match="File too large") as caught:
        append_all(tier, range(2, 100), now=10.0)
    assert caught.value.lost == ()
    assert tier.open_bytes == 16 * SMALL.nbytes
    with pytest.raises(TierWriteError, match="File too large") as caught:
        tier.seal()
    small_files(None)
    assert caught.value.lost == tuple(range(2, 18))
    assert not list(tmp_path.glob("*.open"))
    assert loaded(tier, 1)
    assert append(tier, 50, now=20.0)
    assert tier.seal() == [50]
    assert loaded(tier, 50)


def test_a_seal_that_fails_loses_its_blocks_and_no_others(tier, tier_at, tmp_path, monkeypatch) -> None:
    fill(tier, [1])
    append(tier, 2)
    append(tier, 3)

    broken = failing(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(TierWriteError, match="Input/output error") as caught:
            tier.seal()
    assert caught.value.lost == (2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "seg-00000001.h5"]
    append(tier, 2)
    assert tier.seal() == [2]
    tier.close()
    again = tier_at(tmp_path)
    assert again.blocks()[0] == [1, 2]
