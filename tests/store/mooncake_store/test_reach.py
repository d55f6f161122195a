"""Lenders that the master hears and a reader does not: what a get of theirs costs, and others do not pay."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from store import MooncakeDistributedStore, ReplicateConfig
from store.mooncake_store.master.master import Master
from tests.patience import patient
from tests.store.mooncake_store.running import MIB, address, master_thread, new_store, stores

LIMIT_S = 0.5


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", "tcp")
    monkeypatch.setattr("store.mooncake_store.segments.REACH_S", LIMIT_S)
    monkeypatch.setattr("store.mooncake_store.reader.REACH_S", LIMIT_S)


@contextlib.contextmanager
def out_of_reach(master: Master, *lenders: MooncakeDistributedStore) -> Iterator[None]:
    """Readers find, in place of these lenders, one that takes connections and never answers."""
    names = {lender.get_hostname() for lender in lenders}
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port, told = mute.getsockname()[1], dict(master._segments)
        for number, segment in told.items():
            if segment.name in names:
                master._segments[number] = msgspec.structs.replace(segment, port=port)
        yield
        master._segments.update(told)


def on(*lenders: MooncakeDistributedStore) -> ReplicateConfig:
    wish = ReplicateConfig()
    wish.preferred_segments = [lender.get_hostname() for lender in lenders]
    wish.replica_num = len(lenders)
    return wish


def timed(reader: MooncakeDistributedStore, name: str) -> tuple[bytes, float]:
    began = time.monotonic()
    return reader.get(name), time.monotonic() - began


def test_a_get_from_a_lender_out_of_reach_ends_and_other_gets_do_not_wait() -> None:
    with master_thread() as master, stores(address(master), 3) as (far, near, reader):
        assert far.put("far", b"1", on(far)) == 0
        assert near.put("near", b"2", on(near)) == 0
        with out_of_reach(master, far), ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(timed, reader, "far") for _ in range(3)]
            time.sleep(LIMIT_S / 5)
            assert timed(reader, "near")[0] == b"2"
            assert not any(one.done() for one in waiting), "the other get did not wait for these"
            for one in waiting:
                value, took_s = one.result()
                assert (value, took_s < patient(2 * LIMIT_S)) == (b"", True)
            assert timed(reader, "far")[1] < LIMIT_S / 2, "it is not asked again at once"
        deadline = time.monotonic() + patient(20)
        while not reader.get("far") and time.monotonic() < deadline:
            time.sleep(LIMIT_S / 10)
        assert reader.get("far") == b"1", "it is in reach again"


@pytest.mark.parametrize("count", [1, 2])
def test_a_replica_in_reach_is_read_within_the_time_for_those_that_are_not(count: int) -> None:
    with master_thread() as master, stores(address(master), count + 2) as (reader, *lenders):
        assert reader.put("a", b"1" * 1000, on(*lenders)) == 0
        reader.close()
        fresh = new_store(address(master), 0)
        with out_of_reach(master, *lenders[:count]):
            value, took_s = timed(fresh, "a")
        assert (value, took_s < patient(2 * LIMIT_S)) == (b"1" * 1000, True)
        fresh.close()


@pytest.mark.parametrize("nbytes", [1000, MIB])
def test_a_lender_that_stops_answering_on_an_open_connection_costs_the_same(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with master_thread() as master, stores(address(master), 2) as (far, reader):
        assert far.put("a", b"1" * nbytes, on(far)) == 0
        assert reader.get("a") == b"1" * nbytes
        go_on = threading.Event()
        monkeypatch.setattr(far._client._lending.server, "_answer", lambda *_: go_on.wait(20))
        with out_of_reach(master, far):
            value, took_s = timed(reader, "a")
            assert (value, took_s < patient(2 * LIMIT_S + nbytes / 20e6)) == (b"", True)
            took_s = min(timed(reader, "a")[1] for _ in range(2))
            assert took_s < LIMIT_S / 2
        go_on.set()


def test_a_put_to_a_lender_out_of_reach_ends_with_a_code() -> None:
    with master_thread() as master, stores(address(master), 1) as (far,):
        writer = new_store(address(master), 0)
        with out_of_reach(master, far):
            began = time.monotonic()
            assert [writer.put(f"k{number}", b"1") for number in range(4)] == [-800] * 4
            assert time.monotonic() - began < patient(2 * LIMIT_S)
        writer.close()
