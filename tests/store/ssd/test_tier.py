"""The HDF5 tier when all goes well: what is sealed is served, now and after a restart."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys

import h5py
import numpy as np
import pytest

from store.errors import BadBlock, BlockMissing, LayoutError, TierError, TierFolderError, TierInUse
from store.layout import BlockLayout
from store.ssd.segment_file import HEADER_NBYTES, MAGIC
from store.ssd.segment_writer import file_nbytes
from store.ssd.tier_folder import adoptable_folders, store_folder
from tests.store.samples import FINGERPRINT, SMALL, append, block_of, digest_of, fill, loaded

pytestmark = pytest.mark.quick


def test_a_block_is_served_only_once_it_is_sealed(tier) -> None:
    assert append(tier, 1)
    assert 1 not in tier
    with pytest.raises(BlockMissing, match="0000000000000001"):
        loaded(tier, 1)
    assert tier.seal() == [1]
    assert loaded(tier, 1)
    assert tier.seal() == []


def test_a_restart_serves_every_sealed_block_hottest_last(tier, tier_at, tmp_path) -> None:
    for keys in ([1, 2], [3], [4, 5]):
        fill(tier, keys)
    assert loaded(tier, 2)  # makes the first file the hottest
    assert tier.blocks() == ([3, 4, 5, 1, 2], [digest_of(key) for key in (3, 4, 5, 1, 2)])
    tier.close()
    again = tier_at(tmp_path)
    assert again.blocks()[0] == [3, 4, 5, 1, 2]
    assert all(loaded(again, key) for key in range(1, 6))
    assert again.notes == []


@pytest.mark.parametrize(
    "layout",
    [SMALL, BlockLayout(3, 2, 16, 64, 4), BlockLayout(1, 1, 16, 301, 2), BlockLayout(5, 3, 64, 8, 4, "int8")],
)
def test_a_sealed_file_is_plain_hdf5_that_other_tools_read(tier_at, tmp_path, layout) -> None:
    tier = tier_at(tmp_path, layout=layout)
    fill(tier, range(1, 40))
    tier.close()
    with h5py.File(tmp_path / "seg-00000001.h5") as file:
        assert file["keys"][:].tolist() == list(range(1, 40))
        assert file["digests"][:].tolist() == [digest_of(key) for key in range(1, 40)]
        assert file["checksums"].shape == (39, layout.layers)
        assert file["blocks"].shape == (39, layout.nbytes)
        assert file["blocks"].chunks is None  # contiguous
        assert all((file["blocks"][key - 1] == block_of(key, layout)).all() for key in range(1, 40))
        assert file.attrs["fingerprint"].decode() == FINGERPRINT
        assert file.attrs["head_dim"] == layout.head_dim
        assert file.userblock_size == HEADER_NBYTES
    raw = (tmp_path / "seg-00000001.h5").read_bytes()
    assert raw.startswith(MAGIC)
    assert raw[HEADER_NBYTES : HEADER_NBYTES + 9] == b"\x89HDF\r\n\x1a\n\x00"  # superblock 0: HDF5 1.0 and up
    assert len(raw) <= file_nbytes(layout, 39)


def test_large_blocks_start_on_a_page(tier_at, tmp_path) -> None:
    layout = BlockLayout(3, 2, 16, 64, 4)
    tier = tier_at(tmp_path, layout=layout)
    fill(tier, [1, 2, 3])
    tier.close()
    with h5py.File(tmp_path / "seg-00000001.h5") as file:
        offsets = file["offsets"][:]
    assert layout.nbytes > 32 << 10
    assert (offsets % 4096 == 0).all()


def test_files_are_the_owners_alone(tier_at, tmp_path) -> None:
    folder = tmp_path / "deep" / "store-0"
    tier = tier_at(folder)
    fill(tier, [1])
    tier.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    tier_at(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_digest_is_a_miss(tier) -> None:
    fill(tier, [1])
    out = np.zeros(SMALL.nbytes, np.uint8)
    with pytest.raises(BlockMissing):
        tier.load(1, out, digest_of(1) + 1)
    assert not out.any()
    assert tier.load(1, out) == SMALL.checksums(block_of(1))


def test_a_block_that_is_there_already_is_not_written_twice(tier) -> None:
    assert append(tier, 1)
    assert append(tier, 1)
    tier.seal()
    assert not append(tier, 1)
    assert tier.seal() == []
    assert tier.stats()["blocks_written"] == 1


def test_bytes_that_do_not_fit_their_checksums_are_not_written(tier, tmp_path) -> None:
    with pytest.raises(BadBlock, match="put_end"):
        tier.append(1, 1, [0, 0], block_of(1), 0.0)
    with pytest.raises(LayoutError):
        tier.append(1, 1, [0, 0], block_of(1)[:-1], 0.0)
    assert tier.seal() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_file_is_due_one_second_after_its_first_block_or_when_it_is_full(tier_at, tmp_path) -> None:
    tier = tier_at(tmp_path, segment_bytes=3 * SMALL.nbytes)
    assert tier.seal_at is None
    append(tier, 1, now=50.0)
    append(tier, 2, now=50.9)
    assert tier.seal_at == 51.0
    append(tier, 3, now=50.95)
    assert tier.seal_at == float("-inf")
    tier.seal()
    assert tier.seal_at is None


def test_beyond_its_capacity_the_least_recently_used_file_goes(tier_at, tmp_path) -> None:
    capacity = 4 * file_nbytes(SMALL, 2)
    tier = tier_at(tmp_path, capacity)
    evicted: list[int] = []
    for first in range(1, 99, 2):
        fill(tier, [first, first + 1])
        if 1 in tier:
            assert loaded(tier, 1)  # stays hot
        evicted += tier.take_evicted()
        assert tier.nbytes <= capacity
        assert sum(path.stat().st_size for path in tmp_path.glob("*.h5")) == tier.nbytes
    assert 1 in tier
    assert 98 in tier
    assert evicted == [key for key in range(3, 99) if key not in tier]
    assert tier.stats()["blocks_evicted"] == len(evicted) > 50
    with pytest.raises(BlockMissing):
        loaded(tier, 3)
    tier.close()
    smaller = tier_at(tmp_path, file_nbytes(SMALL, 2))
    assert smaller.nbytes <= file_nbytes(SMALL, 2)
    assert 1 in smaller  # what was hot at the end


def test_a_capacity_without_room_for_a_block_is_refused_with_the_number_that_has(tier_at, tmp_path) -> None:
    with pytest.raises(TierError, match=f"at least {file_nbytes(SMALL, 1)}"):
        tier_at(tmp_path, SMALL.nbytes)
    tier = tier_at(tmp_path, file_nbytes(SMALL, 1))
    fill(tier, [1])
    fill(tier, [2])
    assert loaded(tier, 2)
    assert tier.take_evicted() == [1]


def test_another_models_files_are_kept_not_served_and_go_first(tier, tier_at, tmp_path) -> None:
    fill(tier, [1])
    tier.close()
    other = tier_at(tmp_path, 4 * file_nbytes(SMALL, 1), fingerprint="ff" * 8)
    assert (len(other), other.notes) == (0, ["1 tier files of another model or layout kept, not served"])
    for key in range(2, 20):
        fill(other, [key])
    assert 1 not in other.take_evicted()
    other.close()
    assert not (tmp_path / "seg-00000001.h5").exists()


def test_switching_back_to_the_first_model_finds_its_blocks(tier_at, tmp_path) -> None:
    for fingerprint, key in (("aa", 1), ("bb", 2), ("aa", 3)):
        tier = tier_at(tmp_path, fingerprint=fingerprint)
        fill(tier, [key])
        tier.close()
    assert tier_at(tmp_path, fingerprint="aa").blocks()[0] == [1, 3]


def test_a_folder_has_one_user_at_a_time_and_the_error_names_it(tier_at, tmp_path) -> None:
    program = (
        "import sys; from tests.store.samples import *;"
        f"tier = new_tier({str(tmp_path)!r});"
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(TierInUse, match=f"{tmp_path}: in use by process {child.pid}"):
            tier_at(tmp_path)
    finally:
        child.kill()
        child.communicate(timeout=30)
    tier_at(tmp_path)
    with pytest.raises(TierInUse, match=f"process {os.getpid()}"):
        tier_at(tmp_path)


def test_who_only_looks_at_a_folder_stops_nobody_from_starting_on_it(tier_at, tmp_path, monkeypatch) -> None:
    """`mooncake-lite store ls` takes the lock for an instant, to tell whether somebody has it."""
    flock, looking = fcntl.flock, [True, True]

    def contended(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and looking and looking.pop():
            raise BlockingIOError
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", contended)
    tier_at(tmp_path).close()
    assert not looking


def test_a_folder_that_cannot_be_written_is_refused_by_name(tier_at, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFolderError, match="file/store-0: cannot be written"):
        tier_at(tmp_path / "file" / "store-0")
    with pytest.raises(TierError, match="not hexadecimal"):
        tier_at(tmp_path, fingerprint="model")


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_key_or_digest_that_is_no_u64_is_refused_and_nothing_else_is_lost(tier, number) -> None:
    append(tier, 1)
    block = block_of(2)
    for key, digest in ((number, 2), (2, number)):
        with pytest.raises(LayoutError, match="are u64"):
            tier.append(key, digest, SMALL.checksums(block), block, 0.0)
    assert tier.remove([number]) == []
    assert tier.seal() == [1]
    assert tier.remove([number]) == []


def test_the_names_of_new_folders_are_durable_before_anything_in_them_can_be(
    tier_at, tmp_path, monkeypatch
) -> None:
    synced, fsync = set(), os.fsync

    def recorded(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    tier_at(tmp_path / "kv" / "deep" / "store-0").close()
    assert synced == {path.stat().st_ino for path in (tmp_path, tmp_path / "kv", tmp_path / "kv" / "deep")}
    synced.clear()
    tier_at(tmp_path / "kv" / "deep" / "store-0").close()
    assert not synced


def test_a_failed_start_gives_the_folders_up_that_it_had(tier_at, tmp_path) -> None:
    tier_at(tmp_path / "b")
    with pytest.raises(TierInUse):
        tier_at(tmp_path / "a", adopted=[tmp_path / "b"])
    tier_at(tmp_path / "a").close()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 2), (3, 2)])
def test_every_block_is_served_once_after_a_restart_with_another_number_of_store_ranks(
    tier_at, tmp_path, before, after
) -> None:
    for index in range(before):
        tier = tier_at(adoptable_folders(tmp_path, index, before)[0])
        fill(tier, [100 + index, 200 + index])
        tier.close()
    served: list[int] = []
    for index in range(after):
        own, *adopted = adoptable_folders(tmp_path, index, after)
        assert own == store_folder(tmp_path, index)
        tier = tier_at(own, adopted=adopted)
        served += tier.blocks()[0]
        assert all(loaded(tier, key) for key in tier.blocks()[0])
        fill(tier, [1000 + index])
        assert (own / f"seg-{2 if index < before else 1:08d}.h5").exists()
        tier.close()
    assert sorted(served) == sorted(k + i for i in range(before) for k in (100, 200))


def test_only_store_folders_are_adopted(tmp_path) -> None:
    for name in ("store-1", "store-02", "store-x", "other", "store-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "store-3").write_text("a file")
    assert adoptable_folders(tmp_path, 0, 1) == [tmp_path / f"store-{i}" for i in (0, 1, 7)]
    assert adoptable_folders(tmp_path / "absent", 1, 2) == [tmp_path / "absent" / "store-1"]
    with pytest.raises(TierFolderError, match="store rank 2 of 2"):
        adoptable_folders(tmp_path, 2, 2)


def test_of_two_files_with_one_key_the_younger_serves_and_the_elder_may_go(tier_at, tmp_path) -> None:
    for name in ("store-0", "store-1"):
        tier = tier_at(tmp_path / name)
        fill(tier, [1])
        tier.close()
    tier = tier_at(tmp_path / "store-0", file_nbytes(SMALL, 1) * 3 // 2, adopted=[tmp_path / "store-1"])
    assert len(tier) == 1
    assert loaded(tier, 1)


def test_an_evicted_file_is_read_to_its_end_by_who_reads_it(tier_at, tmp_path) -> None:
    tier = tier_at(tmp_path, file_nbytes(SMALL, 1))
    fill(tier, [1])
    file, row = tier._sealed.acquire(1, None)
    fill(tier, [2])
    assert tier.take_evicted() == [1]
    out = np.zeros(SMALL.nbytes, np.uint8)
    file.read_block(row, memoryview(out))
    assert (out == block_of(1)).all()
    tier._sealed.give_back(file)
    assert file.fd == -1


def test_many_files_are_read_with_a_limited_number_open(tier_at, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("store.ssd.sealed_set.MAX_OPEN_FILES", 3)
    tier = tier_at(tmp_path)
    for key in range(12):
        fill(tier, [key])
    assert all(loaded(tier, key) for key in range(12))
    assert len(tier._sealed._open) <= 3
    assert all(loaded(tier, key) for key in range(12))
    tier.close()
    assert not tier._sealed._open


def test_a_buffer_of_another_size_or_without_write_access_is_refused(tier) -> None:
    fill(tier, [1])
    with pytest.raises(LayoutError, match="2047 B"):
        tier.load(1, bytearray(SMALL.nbytes - 1))
    with pytest.raises(LayoutError, match="read-only"):
        tier.load(1, bytes(SMALL.nbytes))
    assert loaded(tier, 1)
