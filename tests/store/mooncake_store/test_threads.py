"""The threads of a store that die: their jobs fail with a reason, and the program goes on."""

from __future__ import annotations

import threading

import pytest

from store import MooncakeDistributedStore
from store.mooncake_store.client import Client
from store.mooncake_store.codes import NO_MASTER, CodeError
from store.mooncake_store.memory import Lent
from store.mooncake_store.replicas import TaskStatus
from store.mooncake_store.segments import LocalSegment, Warmer
from store.mooncake_store.writer import Writer
from tests.store.mooncake_store.running import LIMIT_S, MIB, address, master_thread, stores


def a_bug(*_: object) -> None:
    raise KeyError("a bug of ours")


def client_of(store: MooncakeDistributedStore) -> Client:
    assert store._client is not None
    return store._client


def test_a_copy_whose_thread_dies_has_failed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with master_thread() as master, stores(address(master), 2) as (first, second):
        assert first.put("a", b"1") == 0
        monkeypatch.setattr(client_of(first), "copy", a_bug)
        task, code = first.create_copy_task("a", [second.get_hostname()])
        assert (code, first._copying is not None) == (0, True)
        for thread in first._copying._threads:  # type: ignore[union-attr]
            thread.join(LIMIT_S)

        answer, code = first.query_task(task)
        assert (code, answer.status) == (0, TaskStatus.FAILED)
        assert answer.message == "thread store copy died: KeyError: 'a bug of ours'"
        assert first.put("b", b"2") == 0


def test_a_store_whose_beats_end_leaves_its_master_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with master_thread() as master, stores(address(master), 2) as (first, second):
        client = client_of(first)
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "rest", lambda writer: a_bug() if writer is client._writer else None)
            client._keeper.join(LIMIT_S)

        assert not client._keeper.is_alive()
        assert first.put("a", b"1") == NO_MASTER
        with pytest.raises(CodeError, match="thread store client died: KeyError: 'a bug of ours'"):
            client._check_open()
        assert master.stats()["clients"] == 1
        assert second.put("a", b"1") == 0


def test_a_warmer_that_dies_drops_what_waits_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    warmer, memory, began = Warmer(), Lent(MIB), threading.Event()

    def wait_and_die(*_: int) -> None:
        assert began.wait(LIMIT_S)
        a_bug()

    monkeypatch.setattr(memory, "warm_around", wait_and_die)
    for _ in range(5):
        warmer.settle(LocalSegment(memory), 0, MIB)
    began.set()
    warmer._thread.join(LIMIT_S)
    assert warmer._work.empty()
    warmer.prepare(memory)
    assert warmer._work.empty()
    warmer.close()
    memory.close()


def test_a_range_that_a_put_waits_for_is_mapped_before_further_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    warmer, memory, order, asked = Warmer(), Lent(MIB), [], threading.Event()

    def step() -> float | None:
        order.append("step")
        if len(order) == 1:
            for _ in range(3):
                warmer.settle(LocalSegment(memory), 0, MIB)
        if len(order) == 6:
            asked.set()
            return None
        return 0.0

    monkeypatch.setattr(memory, "prepare", step)
    monkeypatch.setattr(memory, "warm_around", lambda *_: order.append("range"))
    warmer.prepare(memory)
    assert asked.wait(LIMIT_S)
    assert order == ["step", "range", "range", "range", "step", "step"]
    warmer.close()
    memory.close()
