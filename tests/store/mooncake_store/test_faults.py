"""What a store survives: interrupted and unanswered questions, forks, closing under writers, long names."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from store import MooncakeDistributedStore, ReplicateConfig
from store.mooncake_store import messages as say
from store.mooncake_store.codes import CodeError
from store.mooncake_store.link import Link
from store.mooncake_store.master.master import MAX_LISTINGS
from store.mooncake_store.segments import LocalSegment, Segments
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


def link_of(store: MooncakeDistributedStore) -> Link:
    return store._client._link


def test_more_long_names_than_a_message_holds_are_served_in_portions() -> None:
    names = [f"{number:03d}" + "x" * 60_000 for number in range(300)]
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put_batch(names, [b"1"] * 300) == 0
        assert store.remove_by_regex("none of these") == 0
        assert len(store.batch_get_replica_desc(names)) == 300
        assert store.batch_remove(names[:200]) == [0] * 200
        assert store.remove_by_regex("^2") == 100
        rest(store)
        assert master.stats()["objects"] == 0


def test_portions_hold_every_name_once_and_none_is_too_large() -> None:
    names = ["n" * 60_000] * 300 + ["short"] * 9000
    cut = [names[some] for some in say.portions(names)]
    assert [name for some in cut for name in some] == names
    assert all(len(some) <= say.MAX_KEYS and sum(map(len, some)) <= say.NAMES_BYTES for some in cut)
    assert list(say.portions([])) == []


def test_a_segment_name_that_cannot_be_is_a_code_and_costs_nothing_else() -> None:
    long = "x" * 2000
    wish = ReplicateConfig()
    wish.preferred_segments = [long]
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put("a", b"1") == 0
        assert store.create_copy_task("a", [long]) == ((0, 0), -600)
        assert store.create_move_task("a", long, "b") == ((0, 0), -600)
        assert store.create_copy_task("a", ["b"] * 100) == ((0, 0), -600)
        assert store.batch_replica_clear(["a"], long) == []
        assert store.put("b", b"2", wish) == 0
        assert (store.health_check(), store.get("a"), store.get("b")) == (0, b"1", b"2")
        other = MooncakeDistributedStore()
        assert other.setup(long, "x", MIB, MIB, "tcp", "", address(master)) == -600


def test_names_that_no_object_can_have_are_missing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", "tcp")
    with master_thread() as master, stores(address(master)) as (store,):
        began = time.monotonic()
        for name in ("", "k" * 70_000):
            assert (store.get(name), store.get_buffer(name), store.get_into(name, 1, 1)) == (b"", None, -704)
        assert time.monotonic() - began < patient(1)


def test_a_process_that_cannot_be_is_not_let_in_and_the_master_goes_on() -> None:
    with master_thread() as master, stores(address(master)) as (store,):
        link = Link(address(master), None)
        link.shorten()
        with pytest.raises(CodeError, match="gone"):
            link.ask(
                say.Join, store._client.reader.table.token, link.welcome.table.machine, 2**40, "me", None
            )
        link.close()
        assert store.health_check() == 0


def test_a_question_that_ctrl_c_interrupts_costs_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put("a", b"1") == 0
        line = link_of(store)._line

        def interrupted(timeout_s: float) -> Any:
            monkeypatch.undo()
            raise KeyboardInterrupt

        for name in ("b", "c"):
            monkeypatch.setattr(line, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put(name, b"2" * 500)
            assert store.put(f"{name}2", b"3" * 700) == 0
        assert (store.get("a"), store.get("b2"), store.health_check()) == (b"1", b"3" * 700, 0)
        store._client._writer.rest()
        assert store.put("b", b"4") == 0
        assert store.get("b") == b"4", "the room of the put that was broken off came back"
        rest(store)
        assert (master.stats()["writing"], master.stats()["clients"]) == (0, 1)


def test_a_master_that_was_stopped_for_a_while_is_the_same_afterwards() -> None:
    with master_process() as (master, process), stores(master) as (store,):
        assert store.put("a", b"1") == 0
        rest(store)
        process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(CodeError, match="has not answered"):
                    link_of(store).ask(say.Remove, ["a"], True, limit_s=0.1)
        finally:
            process.send_signal(signal.SIGCONT)
        assert store.put("b", b"2") == 0
        assert (store.get("a"), store.get("b")) == (b"", b"2"), "what had been asked was done, once"


PARENT = """
import os, sys
from store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2**24, 2**24, "tcp", "", sys.argv[1]) == 0
assert [store.put(f"k{number}", b"old") for number in range(5)] == [0] * 5
child = os.fork()
if not child:
    told = [store.put("child", b"1"), store.get("k1"), store.close()]
    told += [store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", sys.argv[1])]
    told += [store.put("k9", b"child"), store.get("k1"), store.close()]
    print(told, flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print([store.put("k5", b"new"), store.get("k9"), store.get("k1"), store.health_check()], flush=True)
"""


def test_a_forked_process_starts_without_a_store_and_leaves_its_parents_alone() -> None:
    with master_process() as (master, _), program(PARENT, master) as process:
        assert heard(process) == "[-600, b'', 0, 0, 0, b'old', 0]"
        assert heard(process) == "[0, b'child', b'old', 0]"


def test_closing_waits_for_a_put_before_its_room_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    write = LocalSegment.write

    def slow(self: LocalSegment, offset: int, parts: Sequence[memoryview]) -> None:
        began.set()
        assert go_on.wait(LIMIT_S)
        write(self, offset, parts)

    with master_thread() as master, stores(address(master)) as (lender,):
        writer = new_store(address(master), 0)
        codes: list[int] = []
        putting = threading.Thread(target=lambda: codes.append(writer.put("a", b"1" * 5000)))
        closing = threading.Thread(target=writer.close)
        monkeypatch.setattr(LocalSegment, "write", slow)
        putting.start()
        assert began.wait(LIMIT_S)
        closing.start()
        closing.join(0.2)
        rest(lender)
        assert (closing.is_alive(), master.stats()["writing"]) == (True, 1)
        go_on.set()
        putting.join(LIMIT_S)
        closing.join(LIMIT_S)
        assert codes == [0]
        assert lender.get("a") == b"1" * 5000, "a put that has returned is there"
        assert writer.put("b", b"1") == -600


def test_room_of_a_writer_that_lost_its_line_is_kept_until_its_process_ends() -> None:
    with master_thread() as master, stores(address(master)) as (lender,):
        writer = new_store(address(master), 0)
        link = link_of(writer)
        assert type(link.ask(say.PutStart, ["a"], [5000], say.Wish(), False).grants[0]) is say.Grant
        link._line._socket.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda: not master.stats()["writing"], LIMIT_S)
        assert master.stats()["held"] == 1
        assert lender.put("a", b"2") == 0, "the name is free"
        with stores(address(master), 1, 0) as (other,):
            journals = [store._client._journals for store in (writer, other)]  # type: ignore[union-attr]
            assert journals[0]._journal != journals[1]._journal, "two would write to one ring"
        writer.close()
        master.catalogue.check()


def test_a_read_that_fails_leaves_the_own_segment_to_others() -> None:
    def fails(segment: object, offset: int, nbytes: int) -> int:
        raise ValueError("nothing was copied")

    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put("a", b"1" * 5000) == 0
        with pytest.raises(CodeError):
            store._client.reader.read("a", fails)
        assert store.get("a") == b"1" * 5000
        with stores(address(master), 1, 0) as (other,):
            assert other.get("a") == b"1" * 5000
            assert other._client._segments.views, "mapped, not read over TCP"


def test_segments_are_looked_after_while_others_are_opened() -> None:
    gone, closed = set(range(1, 1000, 2)), set[int]()
    there: Any = object()
    segments = Segments(lambda number: None if number in gone else there, "")
    for number in range(1, 1000):
        segment: Any = SimpleNamespace(close=partial(closed.add, number))
        segments._open[number] = segment
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(1000, 1200):
                segments._open[number] = None  # type: ignore[assignment]
            for number in range(1000, 1200):
                del segments._open[number]

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for turn in range(100_000):
            segments.look_after(turn)
            if turn >= 3000 and len(closed) == len(gone):
                break
    finally:
        stop.set()
        thread.join()
    assert closed == gone
    assert segments._open.keys() == set(range(1, 1000)) - gone


def test_an_interrupted_close_from_a_signal_ends() -> None:
    """A handler that closes runs in the middle of whatever its thread does, locks held."""
    text = """
import os, signal, sys
from store import MooncakeDistributedStore
from store.mooncake_store import client, messages
client.CLOSE_S = 0.2
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2**24, 2**24, "tcp", "", sys.argv[1]) == 0
def close(*_):
    print("closed", store.close(), flush=True)
    sys.exit()
signal.signal(signal.SIGALRM, close)
held = store._client._link._lock
with held:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.pause()
"""
    with master_process() as (master, _), program(text, master) as process:
        assert heard(process) == "closed 0"


CLOSED_BY_A_SIGNAL = """
import os, signal, sys, threading, time
from store import MooncakeDistributedStore
master, pid = sys.argv[1], int(sys.argv[2])
acts = {
    "put": lambda store: store.put("b", b"1" * 500),
    "upsert_batch": lambda store: store.upsert_batch(["a", "c"], [b"1", b"2"]),
    "remove": lambda store: store.remove("a", True),
    "get_replica_desc": lambda store: store.get_replica_desc("a"),
    "health_check": lambda store: store.health_check(),
    "remove_all": lambda store: store.remove_all(True),
}
for name, act in acts.items():
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2**22, 2**22, "tcp", "", master) == 0
    assert store.put("a", b"1") == 0
    def close(*_):
        closed.extend([store.close(), store.close()])
    closed = []
    signal.signal(signal.SIGALRM, close)
    os.kill(pid, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        code = act(store)
        took_s = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "store end":
            thread.join(10)
    threads = [thread.name for thread in threading.enumerate()]
    print(name, code, took_s < 2, closed, store.close(), store.put("a", b"1"), threads, flush=True)
"""


@pytest.mark.parametrize("path", ["", "tcp"])
def test_a_signal_handler_may_close_while_a_call_waits_for_the_master(path: str) -> None:
    codes = {"upsert_batch": "-900", "get_replica_desc": "[]", "health_check": "2"}
    with (
        master_process() as (master, running),
        stores(master, segment=0) as (other,),
        program(CLOSED_BY_A_SIGNAL, master, str(running.pid), MOONCAKE_LITE_STORE_PATH=path) as process,
    ):
        for name in ("put", "upsert_batch", "remove", "get_replica_desc", "health_check", "remove_all"):
            expected = f"{name} {codes.get(name, '-900')} True [0, 0] 0 -600 ['MainThread']"
            assert heard(process) == expected
            stats = link_of(other).ask(say.StatsAsk).values
            assert (stats["segments"], stats["clients"]) == (0, 1), "the segment was given back"


def test_all_objects_are_removed_in_portions_between_which_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("store.mooncake_store.master.master.REMOVED_AT_ONCE", 7)
    names = [f"n{number}" for number in range(50)]
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put_batch(names, [b"1"] * 50) == 0
        assert store.is_exist("n3") == 1
        assert store.remove_all() == 49
        assert store.remove_all(True) == 1
        assert store.remove_all() == 0
        assert master.stats()["objects"] == 0


def test_names_are_listed_once_for_all_pages_and_for_each_thread_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("store.mooncake_store.messages.MAX_KEYS", 7)
    names = [f"{letter}{number}" for number in range(50) for letter in "abcd"]
    with master_thread() as master, stores(address(master)) as (store,):
        assert store.put_batch(names, [b"1"] * 200) == 0
        listed: list[int] = []
        all_names = master.catalogue.all_names

        def listing() -> list[str]:
            listed.append(1)
            return all_names()

        monkeypatch.setattr(master.catalogue, "all_names", listing)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(store.remove_by_regex, ["^a", "^b", "^c", "^d0"])) == [50, 50, 50, 1]
        assert len(listed) == 4
        assert store.remove_by_regex("") == 49
        assert store.remove_by_regex("") == 0
        rest(store)
        (client,) = master._clients.values()
        assert client.listings == {}
        for number in range(100):  # of threads that were interrupted
            assert store.put_batch(names, [b"1"] * 200) == 0
            assert len(link_of(store).ask(say.NamesAsk, number, False).names) == 7
        assert len(client.listings) == MAX_LISTINGS
        assert link_of(store).ask(say.NamesAsk, 5, True).names == [], "forgotten"


def counts() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_store_without_a_reference_gives_back_its_segment_threads_and_descriptors() -> None:
    with master_thread() as master, stores(address(master), segment=0) as (other,):
        before = counts()
        for _ in range(5):
            holder = [new_store(address(master), MIB)]
            assert holder[0].put("a", b"1") == 0
            assert other.is_exist("a") == 1
            holder.append(holder)  # type: ignore[arg-type]  # a cycle, which only the collector finds
            del holder
            gc.collect()
            assert other.is_exist("a") == 0
        assert wait_until(lambda: counts() == before)


@pytest.mark.parametrize("where", ["below a lock of its own", "on a thread of its own"])
def test_a_store_may_lose_its_last_reference_anywhere(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.mooncake_store.session.LEAVE_S", 0.1)
    with master_thread() as master:
        holder = [new_store(address(master), MIB)]
        client, session = holder[0]._client, holder[0]._session
        if where == "on a thread of its own":
            monkeypatch.setattr(client._writer, "rest", holder.clear)
        else:
            with client._link._lock, session._lock:
                holder.clear()
        assert wait_until(lambda: not holder and master.stats()["clients"] == 0)


def test_a_program_may_end_with_its_store_in_use() -> None:
    text = """
import sys, threading
from store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2**24, 2**24, "tcp", "", sys.argv[1]) == 0
began = threading.Event()
def put():
    while True:
        store.upsert("a", b"1")
        began.set()
threading.Thread(target=put, daemon=True).start()
began.wait()
"""
    with master_thread() as master, program(text, address(master)) as process:
        assert process.wait(LIMIT_S) == 0


def test_descriptors_and_threads_do_not_grow_with_setups() -> None:
    with master_process() as (master, _):
        store = MooncakeDistributedStore()
        before: tuple[int, int] | None = None
        for _ in range(25):
            assert store.setup("127.0.0.1", "x", 2**22, 2**22, "tcp", "", master) == 0
            assert store.put("a", b"1" * 5000) == 0
            assert store.close() == 0
            assert store.setup("127.0.0.1", "x", 2**22, 2**22, "tcp", "", "no port") == -900
            before = before or counts()
        assert counts() == before
