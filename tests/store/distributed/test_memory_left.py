"""Segments for which there is no memory: refused at setup, and grown no further than the memory goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import MooncakeDistributedStore
from store.distributed import memory_left as left
from store.distributed.memory import READY_BYTES
from store.distributed.segments import RESERVE_BYTES
from tests.patience import wait_until
from tests.store.distributed.running import MIB, address, master_thread, new_store, rest, stores

SEGMENT = 64 * MIB
KEPT = RESERVE_BYTES + min(READY_BYTES, SEGMENT // 8)


@pytest.mark.parametrize("size", ["2TB", 2**40 + 1, 4 * 2**40])
def test_a_segment_larger_than_what_is_left_is_refused_in_one_line(
    size: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("store.distributed.segments.memory_left", lambda: 2**40)
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
    monkeypatch.setattr("store.distributed.segments.memory_left", lambda: memory[0])
    with master_thread() as master, stores(address(master), 1, SEGMENT) as (lender,):
        writer = new_store(address(master), 0)
        (segment,) = master.catalogue.segments().values()
        assert writer.put("first", b"1" * nbytes) == 0
        rest(writer)
        used = segment.used_until
        memory[0] = KEPT + 2 * 8 * MIB
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
