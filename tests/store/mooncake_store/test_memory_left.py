"""Segments for which there is no memory: refused at setup, and grown no further than the memory goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from store import MooncakeDistributedStore
from store.mooncake_store import memory_left as left
from store.mooncake_store.memory import WORD_BYTES, Lent, Mapped, used_at
from store.mooncake_store.segments import RESERVE_BYTES
from tests.patience import wait_until
from tests.store.mooncake_store.running import MIB, address, master_thread, new_store, rest, stores

SEGMENT = 64 * MIB
READY = SEGMENT // 4


def segment_of(store: MooncakeDistributedStore) -> Lent:
    return store._client._lending.memory


def taken_bytes(memory: Lent) -> int:
    """Memory that the segment takes. The word behind it has a page of its own."""
    return 512 * os.fstat(memory.fd).st_blocks - 4096


@pytest.mark.parametrize("size", ["2TB", 2**40 + 1, 4 * 2**40])
def test_a_segment_larger_than_what_is_left_is_refused_in_one_line(
    size: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("store.mooncake_store.segments.memory_left", lambda: 2**40)
    with master_thread() as master:
        setup = {"local_hostname": "127.0.0.1", "metadata_server": "x", "global_segment_size": size}
        assert MooncakeDistributedStore().setup({**setup, "master_server_addr": address(master)}) == -200
        assert master.stats()["clients"] == 0
    (record,) = caplog.records
    assert f"{2**40} B of memory are left; lend less (code -200)" in record.message


def test_a_segment_that_is_larger_than_this_machine_is_refused() -> None:
    with master_thread() as master:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "x", 2**43, MIB, "tcp", "", address(master)) == -200
        assert store.setup("127.0.0.1", "x", 16 * MIB, MIB, "tcp", "", address(master)) == 0
        store.close()


@pytest.mark.parametrize("path", ["", "tcp"])
@pytest.mark.parametrize("nbytes", [5000, 3 * MIB])
def test_a_segment_grows_as_far_as_there_is_memory_and_then_puts_fail(
    path: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", path)
    memory = [10 * SEGMENT]
    monkeypatch.setattr("store.mooncake_store.segments.memory_left", lambda: memory[0])
    with master_thread() as master, stores(address(master), 1, SEGMENT) as (lender,):
        writer = new_store(address(master), 0)
        (segment,) = master.catalogue.segments().values()
        assert writer.put("first", b"1" * nbytes) == 0
        rest(writer)
        used = segment.used_until
        memory[0] = RESERVE_BYTES + READY + 2 * 8 * MIB
        assert wait_until(lambda: segment.grows_until - used <= 16 * MIB)
        memory[0] = 0
        assert wait_until(lambda: segment.grows_until == segment.used_until)
        codes = [writer.put(f"k{number}", b"1" * nbytes) for number in range(30)]
        assert codes == sorted(codes, reverse=True), "once a put has failed, the next ones do"
        assert set(codes) <= {0, -200}
        assert codes[-1] == -200
        assert writer.get("first") == b"1" * nbytes, "nothing is evicted in vain"
        assert writer.remove("first", True) == 0
        memory[0] = 10 * SEGMENT
        assert wait_until(lambda: writer.put("k29", b"2" * nbytes) == 0)
        writer.close()
        rest(lender)
        master.catalogue.check()


@pytest.mark.parametrize(("left", "ready"), [(2**40, READY), (SEGMENT, SEGMENT // 8)])
def test_a_segment_takes_a_quarter_or_an_eighth_of_what_is_left_before_it_is_used(
    left: int, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.mooncake_store.segments.memory_left", lambda: left)
    with master_thread() as master, stores(address(master), 1, SEGMENT) as (lender,):
        memory = segment_of(lender)
        assert wait_until(lambda: taken_bytes(memory) >= ready)
        lender._client._keeper.join(0.3)  # several looks: no more is taken
        assert taken_bytes(memory) == ready
        memory.plan(0)
        assert lender.put("a", b"1" * MIB) == 0
        lender._client._keeper.join(0.1)
        assert taken_bytes(memory) == ready, "no memory is left"


@pytest.mark.parametrize("path", ["", "tcp"])
def test_what_others_write_is_told_to_the_lender_who_prepares_more_behind_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", path)
    with master_thread() as master, stores(address(master), 1, SEGMENT + 5) as (lender,):
        memory = segment_of(lender)
        assert wait_until(lambda: memory.is_present(0, READY))
        writer = new_store(address(master), 0)
        for number, nbytes in enumerate((3 * MIB, 5000, 4 * MIB)):
            assert writer.put(f"k{number}", b"1" * nbytes) == 0
        assert writer.remove_all(True) == 3
        assert writer.put("again", b"1" * 10) == 0
        assert 7 * MIB < memory.used_until < 40 * MIB
        assert wait_until(lambda: memory.is_present(0, READY + 7 * MIB))
        assert writer.get("again") == b"1" * 10
        writer.close()


def test_first_puts_find_memory_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    cold: list[int] = []
    monkeypatch.setattr(Mapped, "write_cold", lambda memory, offset, data: cold.append(offset))
    with master_thread() as master, stores(address(master), 1, SEGMENT) as (lender,):
        memory, writer = segment_of(lender), new_store(address(master), 0)
        assert wait_until(lambda: memory.is_present(0, READY))
        for store in (lender, writer):
            for number in range(6):
                assert store.put(f"{store.get_hostname()}{number}", bytes([number]) * MIB) == 0
        assert cold == []
        assert writer.get(f"{writer.get_hostname()}5") == bytes([5]) * MIB
        writer.close()


@pytest.mark.quick
def test_a_word_with_nonsense_or_an_older_figure_changes_nothing() -> None:
    memory = Lent(2 * MIB + 5)
    memory.plan(2**40)
    memory.used[0] = MIB
    assert memory.used_until == MIB
    memory.used[0] = 0
    assert memory.used_until == MIB
    memory.used[0] = 2**63
    assert memory.used_until == memory.nbytes
    assert memory.prepare() is None
    assert used_at(memory.nbytes) % WORD_BYTES == 0
    assert len(memory.whole) == used_at(memory.nbytes) + WORD_BYTES
    memory.close()


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.quick
def test_the_limits_of_a_container_count_and_its_page_cache_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left, "PROC", tmp_path / "proc")
    monkeypatch.setattr(left, "GROUPS", tmp_path / "groups")
    write(tmp_path / "proc", meminfo="MemTotal: 99 kB\nMemAvailable:  50000 kB")
    assert left.memory_left() == 50_000 * 1024
    write(tmp_path / "proc" / "self", cgroup="4:memory:/a/b\n0::/c/d")
    assert left.memory_left() == 50_000 * 1024, "no group is to be seen"
    outer, inner = tmp_path / "groups" / "c", tmp_path / "groups" / "c" / "d"
    stat = "anon 5\ninactive_file 100\nactive_file 20"
    write(outer, memory__max=30_000, memory__current=10_000, memory__stat=stat)
    write(inner, memory__max="max", memory__current=9_000, memory__stat=stat)
    assert left.memory_left() == 20_120
    old = tmp_path / "groups" / "memory" / "a" / "b"
    stat = "inactive_file 1\ntotal_inactive_file 7\ntotal_active_file 3"
    write(old, memory__limit_in_bytes=9000, memory__usage_in_bytes=8000, memory__stat=stat)
    assert left.memory_left() == 1010
    write(old, memory__usage_in_bytes=9999)
    assert left.memory_left() == 0
