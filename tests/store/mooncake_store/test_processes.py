"""Stores in several processes and threads, and what is left when one of them dies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import MooncakeDistributedStore, ReplicateConfig
from store.mooncake_store import messages as say
from store.mooncake_store.tensors import Tensors
from tests.descriptors import no_descriptor_left
from tests.mpi import run_mpi
from tests.patience import patient, wait_until
from tests.store.mooncake_store.running import (
    LIMIT_S,
    MIB,
    address,
    heard,
    master_process,
    master_thread,
    new_store,
    program,
    rest,
    stores,
)

CLIENT = """
import sys
from store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", sys.argv[1]))
for line in sys.stdin:
    print(eval(line))
"""


def say_to(process: object, line: str) -> str:
    process.stdin.write(line + "\n")  # type: ignore[attr-defined]
    process.stdin.flush()  # type: ignore[attr-defined]
    return heard(process)  # type: ignore[arg-type]


def shared_files() -> set[str]:
    """Names in /dev/shm, without Open MPI's: a store starts no MPI, and other tests do meanwhile."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sm_segment.")}


def test_what_one_process_puts_another_reads_at_once() -> None:
    with (
        master_process() as (master, _),
        program(CLIENT, master, "0") as other,
        stores(master) as (store,),
    ):
        assert heard(other) == "0"
        for number in range(20):
            assert say_to(other, f"store.put('k{number}', b'{number}' * 1000)") == "0"
            assert store.get(f"k{number}") == str(number).encode() * 1000
        assert say_to(other, "store.put('big', bytes(range(256)) * 4096 * 5)") == "0"
        assert store.get("big") == bytes(range(256)) * 4096 * 5
        assert say_to(other, "len(store.get('big'))") == str(5 * MIB)


def test_a_killed_lender_takes_what_only_it_held_and_leaves_no_trace() -> None:
    before = shared_files()
    pair = ReplicateConfig()
    pair.replica_num = 2
    with (
        master_process() as (master, _),
        program(CLIENT, master, str(64 * MIB)) as other,
        stores(master) as (store,),
    ):
        assert heard(other) == "0"
        lone = ReplicateConfig()
        lone.preferred_segment = say_to(other, "store.get_hostname()")
        assert store.put("lone", b"1" * 5000, lone) == 0
        assert store.put("pair", b"2" * 5000, pair) == 0
        assert store.get("lone") == b"1" * 5000
        other.send_signal(signal.SIGKILL)
        other.wait(LIMIT_S)
        assert wait_until(lambda: not store.get("lone"))
        assert store.get("pair") == b"2" * 5000
        assert len(store.get_replica_desc("pair")) == 1
        assert store.put("lone", b"3") == 0
    assert wait_until(lambda: shared_files() <= before, 2.0), "files are left in /dev/shm"


def test_the_memory_of_a_lender_that_left_is_free_again() -> None:
    with master_thread() as master:
        first, second = new_store(address(master)), new_store(address(master), 0)
        assert second.put("a", bytes(MIB)) == 0
        views = second._client._segments.views  # type: ignore[union-attr]
        assert len(views) == 1
        first.close()
        assert second.get("a") == b""
        assert wait_until(lambda: not views)
        second.close()


def test_a_put_of_a_killed_writer_is_revoked() -> None:
    with master_thread() as master, program(CLIENT, address(master), "0") as other:
        store = new_store(address(master))
        assert heard(other) == "0"
        started = "store._client.ask(say.PutStart, ['half'], [5000], say.Wish(), False).grants[0].put"
        assert (
            int(say_to(other, f"exec('from store.mooncake_store import messages as say') or {started}")) > 0
        )
        assert store.put("half", b"other") == 0, "somebody is writing it"
        assert store.get("half") == b""
        assert store.remove("half") == -703
        other.kill()
        assert wait_until(lambda: master.catalogue.stats()["writing"] == 0)
        assert store.put("half", b"mine") == 0
        assert store.get("half") == b"mine"
        store.close()
        master.catalogue.check()


def test_clients_of_a_dead_master_get_codes_soon() -> None:
    with master_process() as (master, process), stores(master) as (store,):
        assert store.put("a", b"1") == 0
        rest(store)
        process.kill()
        process.wait(LIMIT_S)
        began = time.monotonic()
        assert store.put("b", b"1") < 0
        assert store.remove("a") < 0
        assert store.health_check() == 2
        assert store.remove_all() < 0
        assert time.monotonic() - began < patient(5)
        assert store.get("a") == b"1", "what was published can still be read"


def test_the_masters_host_may_be_a_name() -> None:
    with master_thread() as master, stores(address(master).replace("127.0.0.1", "localhost")) as (store,):
        assert store.put("a", b"1") == 0


def test_a_master_that_is_not_there_is_a_code_within_seconds() -> None:
    store = MooncakeDistributedStore()
    began = time.monotonic()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", "127.0.0.1:1") == -900
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", "no port") == -900
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", "192.0.2.1:50051") == -900
    assert time.monotonic() - began < patient(10)


def test_garbage_on_the_masters_port_is_dropped_and_counted() -> None:
    with master_thread() as master:
        host, port = address(master).split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as web:
            web.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        store = new_store(address(master))
        link = store._client._link  # type: ignore[union-attr]
        link._spoke._socket.send(b"\x01\xff\xff nothing of ours")
        assert store.put("a", b"1") == 0
        assert wait_until(lambda: master.stats()["channel_dropped"] == 1)
        store.close()


def test_busy_local_clients_do_not_keep_the_master_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with master_process() as (master, _), stores(master) as (near,):
        monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", "tcp")
        far, stop = new_store(master), threading.Event()

        def ask() -> None:
            while not stop.is_set():
                near.remove("none")

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            began = time.monotonic()
            assert [far.put(f"k{number}", b"1") for number in range(20)] == [0] * 20
            assert time.monotonic() - began < patient(5)
        finally:
            stop.set()
            thread.join()
            far.close()


def test_who_cannot_read_the_masters_memory_is_not_let_in() -> None:
    with master_thread() as master:
        store = new_store(address(master))
        joined = store._client.ask(say.Join, b"guess", "", 0, "me", None)  # type: ignore[union-attr]
        assert joined.code == -600
        assert master.stats()["strangers"] == 1
        store.close()


def test_clients_beyond_the_descriptors_are_refused_in_one_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("store.mooncake_store.master.master.raise_limit", lambda: 64 + 3 * 2 + 2)
    with master_thread() as master, stores(address(master), 2) as (first, second):
        for _ in range(3):
            refused = MooncakeDistributedStore()
            assert refused.setup("127.0.0.1", "x", MIB, MIB, "tcp", "", address(master)) == -600
        assert first.put("a", b"1") == 0
        assert second.get("a") == b"1"
        second.close()
        with stores(address(master)) as (third,):
            assert third.get("a") == b"1"
    lines = [record.message for record in caplog.records if "refused" in record.message]
    assert lines == [
        "more clients are refused: 2 clients have joined; raise the limit on open files (ulimit -n)"
    ]


def test_a_program_without_descriptors_gets_a_code_and_lives(caplog: pytest.LogCaptureFixture) -> None:
    """With a few left, libzmq would abort it."""
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put("a", b"1" * 5000) == 0
        for left in (0, 1, 3, 5, 8, 11, 16):
            with no_descriptor_left(but=left):
                assert (
                    MooncakeDistributedStore().setup("127.0.0.1", "x", 0, MIB, "tcp", "", address(master)) < 0
                )
                assert store.get("a") == b"1" * 5000
                assert store.upsert("b", b"2" * 5000) == 0
        assert "descriptors are left" in caplog.text
        with stores(address(master), 1, 0) as (other,):
            assert other.get("b") == b"2" * 5000


def test_several_stores_in_one_process_share_their_objects() -> None:
    with master_thread() as master, stores(address(master), 3) as made:
        for number, store in enumerate(made):
            assert store.put(f"k{number}", bytes([number]) * 100) == 0
        for store in made:
            assert [store.get(f"k{number}") for number in range(3)] == [bytes([n]) * 100 for n in range(3)]
        rest(*made)
        assert len({store.get_hostname() for store in made}) == 3
        master.catalogue.check()


def test_two_clients_upsert_and_put_one_name_at_once() -> None:
    codes: list[int] = []
    with master_thread() as master, stores(address(master), 2) as (first, second):

        def write(act: Callable[[str, bytes], int], letter: bytes) -> None:
            codes.extend(act("a", letter * size) for size in range(1000, 5000, 100))

        acts = [first.upsert, second.upsert, first.upsert, second.put]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, acts, [b"A", b"B", b"C", b"D"]))
        assert codes == [0] * 160
        assert len(set(first.get("a"))) == 1, "one value, and not parts of several"
        assert second.get("a") == first.get("a")
        rest(first, second)
        assert master.stats()["writing"] == 0
        master.catalogue.check()


def test_eight_threads_put_and_get_a_hundred_megabytes_each() -> None:
    values = [np.random.default_rng(number).bytes(MIB) for number in range(8)]
    wrong: list[str] = []
    with master_thread() as master:
        store = new_store(address(master), 1024 * MIB)

        def work(thread: int) -> None:
            for number in range(100):
                if store.put(f"t{thread}-{number}", values[thread]) != 0:
                    wrong.append(f"put {thread} {number}")
            for number in range(100):
                if store.get(f"t{thread}-{number}") != values[thread]:
                    wrong.append(f"get {thread} {number}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        store.close()
        master.catalogue.check()
    assert wrong == []


def test_a_segment_of_many_gigabytes_is_only_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.mooncake_store.segments.memory_left", lambda: 2**40)
    with master_thread() as master:
        began = time.monotonic()
        with stores(address(master), 1, 512 * 2**30) as (store,):
            assert store.put("a", b"1") == 0
            assert time.monotonic() - began < patient(5)


@pytest.mark.parametrize("path", ["", "tcp"])
def test_clients_join_the_next_master_at_the_address_of_the_last(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", path)
    with master_process() as (master, process), stores(master, 2) as (first, second):
        hosts = {first.get_hostname(), second.get_hostname()}
        assert [first.put(f"old{number}", b"1" * MIB) for number in range(6)] == [0] * 6
        process.kill()
        process.wait(LIMIT_S)
        with master_process(port=master.rpartition(":")[2]) as (again, _):
            assert again == master
            assert wait_until(lambda: first.health_check() == 0 and second.health_check() == 0)
            assert second.get("old1") == b"", "a new master starts empty"
            assert [first.put(f"new{number}", b"2" * MIB) for number in range(6)] == [0] * 6
            assert [second.get(f"new{number}") for number in range(6)] == [b"2" * MIB] * 6
            assert {first.get_hostname(), second.get_hostname()} == hosts
            first.close()
            second.close()


def test_a_table_grows_under_its_readers() -> None:
    with master_process() as (master, _), stores(master, 2) as (writer, reader):
        names = [f"n{number}" for number in range(6000)]
        for first in range(0, 6000, 1000):
            some = names[first : first + 1000]
            assert writer.put_batch(some, [name.encode() for name in some]) == 0
            assert reader.get(names[first]) == names[first].encode()
        assert reader.get_batch(names) == [name.encode() for name in names]
        assert reader.remove_all(True) == 6000
        assert writer.get("n5") == b""


def test_a_moved_object_leaves_its_source() -> None:
    with master_thread() as master, stores(address(master), 2) as (first, second):
        config = ReplicateConfig()
        config.preferred_segment = first.get_hostname()
        assert first.put("m", b"x" * 3 * MIB, config) == 0
        task, code = first.create_move_task("m", first.get_hostname(), second.get_hostname())
        assert code == 0
        assert wait_until(lambda: first.query_task(task)[0].status.name == "SUCCESS")  # type: ignore[union-attr]
        (where,) = second.get_replica_desc("m")
        assert where.get_memory_descriptor().buffer_descriptor.transport_endpoint_ == second.get_hostname()
        first.close()
        assert second.get("m") == b"x" * 3 * MIB
        rest(second)
        master.catalogue.check()


def test_tensors_come_back_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    with master_thread() as master, stores(address(master)) as (store,):
        tensors = [
            torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
            torch.arange(24).reshape(4, 6).t(),
            torch.randn(5, dtype=torch.bfloat16),
            torch.tensor(7, dtype=torch.int64),
            torch.tensor([True, False]),
        ]
        names = [f"t{number}" for number in range(len(tensors))]
        assert store.batch_put_tensor(names, tensors) == [0] * len(tensors)
        for made, expected in zip(store.batch_get_tensor(names), tensors):
            assert made.dtype == expected.dtype
            assert torch.equal(made, expected)
        assert store.put_tensor("no", "tensor") == -600
        assert store.get_tensor("none") is None
        store.put("bytes", b"mlT1" + b"\xff" * 50)
        assert store.get_tensor("bytes") is None


class Kept(Tensors):
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def _put(self, name: str, parts: Any, config: Any, *, upsert: bool) -> int:
        if upsert or name not in self.objects:
            self.objects[name] = b"".join(parts)
        return 0


def test_an_upsert_replaces_a_tensor_and_damaged_ones_are_none() -> None:
    torch = pytest.importorskip("torch")
    store = Kept()
    assert (store.put_tensor("t", torch.zeros(6)), store.put_tensor("t", torch.ones(6))) == (0, 0)
    assert store.get_tensor("t").sum() == 0
    assert store.upsert_tensor("t", torch.ones(2, 3)) == 0
    assert store.get_tensor("t").sum() == 6
    assert store.put_tensor("empty", torch.zeros(0)) == -600
    assert store.put_tensor("unsigned", torch.ones(2, dtype=torch.uint16)) == -600
    assert store.batch_put_tensor(["t", "b"], [torch.ones(1)]) == [-600] * 2

    whole = store.objects["t"]
    store.objects["short"] = whole[:-4]
    store.objects["no header"] = whole.replace(b"float32", b"float99")
    store.objects["garbage"] = whole[:8] + b"\xff" * (len(whole) - 8)
    store.objects["negative"] = whole.replace(b"\x92\x02\x03", b"\x92\xff\x03")
    assert [store.get_tensor(name) for name in ("short", "no header", "garbage", "negative")] == [None] * 4


def test_a_key_file_lets_clients_in_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    with master_process(10_000, "--key-file", str(keys)) as (master, _):
        assert keys.stat().st_mode & 0o777 == 0o600
        stranger = MooncakeDistributedStore()
        assert stranger.setup("127.0.0.1", "x", MIB, MIB, "tcp", "", master) == -900
        monkeypatch.setenv("MOONCAKE_LITE_STORE_KEYS", str(keys))
        with stores(master) as (store,):
            assert store.put("a", b"1") == 0
            assert store.get("a") == b"1"


def test_the_master_ends_within_two_seconds_of_a_signal() -> None:
    began = time.monotonic()
    with master_process() as (master, process):
        assert time.monotonic() - began < patient(5)  # two on a machine that has nothing else to do
        store = new_store(master)
        for number in (signal.SIGTERM, signal.SIGINT):
            if process.poll() is None:
                process.send_signal(number)
        began = time.monotonic()
        assert process.wait(LIMIT_S) == 0
        assert time.monotonic() - began < patient(2)
        store.close()


def test_a_store_works_under_mpirun(tmp_path: Path) -> None:
    text = "import sys; from mpi4py import MPI; from store import MooncakeDistributedStore as S; s = S(); "
    text += "assert s.setup('127.0.0.1', 'x', 1 << 22, 1 << 22, 'tcp', '', sys.argv[1]) == 0; "
    text += "assert s.put('a', b'1') == 0; "
    text += "MPI.COMM_WORLD.Barrier(); "  # a put beside another's put of the name is 0 before the other ends
    text += "print('got', s.get('a')); "
    text += "MPI.COMM_WORLD.Barrier(); s.close()"  # the segment that holds it stays until both got it
    with master_process() as (master, _):
        program = tmp_path / "program.py"
        program.write_text(text)
        done = run_mpi(2, program, [master]).check()
    assert done.output.count("got b'1'") == 2


def test_loading_the_class_loads_neither_torch_nor_mpi_nor_numba() -> None:
    text = "import sys, store; store.MooncakeDistributedStore; "
    text += "print(sorted({'torch', 'mpi4py', 'numba', 'h5py'} & set(sys.modules)))"
    with program(text) as process:
        assert heard(process) == "[]"
