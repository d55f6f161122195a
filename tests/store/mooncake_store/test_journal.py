"""Puts that are published by a word in shared memory: nobody misses one that has returned."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from store import ReplicateConfig
from store.errors import StoreError
from store.mooncake_store.journal import MAX_JOURNALS, MAX_NAME_BYTES, RECORDS, ClientJournals, Journals
from store.mooncake_store.messages import StatsAsk
from tests.store.mooncake_store.running import (
    LIMIT_S,
    address,
    heard,
    master_process,
    master_thread,
    new_store,
    program,
    rest,
    stores,
)

FAR_NS = 1 << 62


@pytest.fixture
def journals() -> Iterator[Journals]:
    made = Journals()
    yield made
    made.close()


def writer_of(journals: Journals) -> ClientJournals:
    journal = journals.open()
    assert journal is not None
    return ClientJournals(os.getpid(), journals.fd, journals.inode, journals.nbytes, journal)


def test_what_a_client_writes_waits_until_it_is_taken(journals: Journals) -> None:
    first, second = writer_of(journals), writer_of(journals)
    assert not second.is_pending()
    assert first.append(7, "näme".encode())
    assert first.append(8)
    assert second.is_pending()
    claims = journals.waiting(FAR_NS)
    assert [(claim.journal, claim.put, claim.name) for claim in claims] == [
        (0, 7, "näme".encode()),
        (0, 8, None),
    ]
    assert second.is_pending(), "they are not in the table yet"
    journals.taken(claims)
    assert not second.is_pending()
    assert journals.waiting(FAR_NS) == []
    first.close()
    second.close()


def test_records_of_all_journals_come_in_the_order_of_their_puts(journals: Journals) -> None:
    writers = [writer_of(journals) for _ in range(3)]
    for number in range(30):
        writers[(7 * number) % 3].append(number + 1)
    claims = journals.waiting(FAR_NS)
    assert [claim.put for claim in claims] == list(range(1, 31))
    cut = claims[19].time_ns
    assert [claim.put for claim in journals.waiting(cut)] == list(range(1, 20)), (
        "the rest is for the next time"
    )
    for writer in writers:
        writer.close()


def test_a_full_ring_refuses_and_goes_on_when_it_has_been_emptied(journals: Journals) -> None:
    writer = writer_of(journals)
    for round_ in range(3):
        assert all(writer.append(number + 1, b"n" * MAX_NAME_BYTES) for number in range(RECORDS)), round_
        assert not writer.append(99)
        claims = journals.waiting(FAR_NS)
        assert [claim.put for claim in claims] == list(range(1, RECORDS + 1))
        journals.taken(claims)
    writer.close()


def test_a_spoilt_record_is_dropped_and_the_next_one_taken(journals: Journals) -> None:
    writer = writer_of(journals)
    writer.append(1, b"spoilt")
    at = bytes(journals.memory).index(b"spoilt")
    journals.memory[at : at + 1] = b"S"
    writer.append(2, b"good")
    assert [(claim.put, claim.name) for claim in journals.waiting(FAR_NS)] == [(0, None), (2, b"good")]
    assert journals.dropped == 1
    writer.close()


def test_a_count_out_of_range_spoils_its_own_journal_alone(journals: Journals) -> None:
    bad, good = writer_of(journals), writer_of(journals)
    bad.words[16] = 1 << 63
    good.append(5)
    assert [claim.put for claim in journals.waiting(FAR_NS)] == [5]
    assert journals.dropped == 1
    assert bad.append(6), "it can be used again"
    bad.close()
    good.close()


def test_a_journal_is_used_again_when_its_client_has_gone(journals: Journals) -> None:
    assert [journals.open() for _ in range(MAX_JOURNALS)] == list(range(MAX_JOURNALS))
    assert journals.open() is None
    journals.release(17)
    assert journals.open() == 17
    with pytest.raises(StoreError, match="not what its owner announced"):
        ClientJournals(os.getpid(), journals.fd, journals.inode + 1, journals.nbytes, 0)


def test_another_client_finds_at_once_what_was_put_without_a_message() -> None:
    with master_process() as (master, _), stores(master, 2) as (first, second):
        for number in range(300):
            assert first.put(f"k{number}", b"%04d" % number * 1000) == 0
            if number % 3:
                assert second.get(f"k{number}") == b"%04d" % number * 1000
            else:
                assert second.is_exist(f"k{number}") == 1
        figures = first._client._link.ask(StatsAsk).values
        assert figures["claims"] >= 300
        assert figures["claims_unknown"] == 0


def test_a_name_that_was_removed_can_be_put_again_and_is_found() -> None:
    with master_process() as (master, _), stores(master, 2) as (first, second):
        for number in range(200):
            assert first.put("same", b"%04d" % number) == 0
            assert second.get("same") == b"%04d" % number
            assert second.remove("same", True) == 0
            assert first.get("same") == b""


def test_of_two_puts_of_one_name_the_earlier_stays() -> None:
    with master_process() as (master, _), stores(master, 3) as (first, second, third):
        for store in (first, second):  # both have room in advance
            assert [store.put(f"{id(store)}-{number}", b"1234") for number in range(4)] == [0] * 4
        for number in range(200):
            one, two = (first, second) if number % 2 else (second, first)
            assert one.put(f"k{number}", b"1st ") == 0
            assert two.put(f"k{number}", b"2nd ") == 0
            assert third.get(f"k{number}") == b"1st "


WRITER = """
import os, sys
from store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", sys.argv[1]) == 0
codes = [store.put(f"k{number}", b"%03d" % number) for number in range(20)]
os.write(1, b"%d" % sum(codes))
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_writer_had_put_is_there() -> None:
    with master_thread() as master:
        store = new_store(address(master))
        with program(WRITER, address(master)) as writer:
            assert heard(writer) == "0"
            writer.wait(LIMIT_S)
        assert [store.get(f"k{number}") for number in range(20)] == [b"%03d" % number for number in range(20)]
        deadline = time.monotonic() + LIMIT_S
        while master.stats()["spares"] and time.monotonic() < deadline:
            rest(store)
        master.catalogue.check()
        assert master.stats()["spares"] == 0, "its room in advance came back"
        store.close()


def test_no_put_goes_into_room_of_a_lender_that_has_left() -> None:
    with master_thread() as master:
        writer = new_store(address(master), 64 * 2**20)
        lender = new_store(address(master), 256 * 2**20)
        wish = ReplicateConfig()
        wish.preferred_segment = lender.get_hostname()
        assert [writer.put(f"a{number}", b"x" * 5000, wish) for number in range(5)] == [0] * 5
        rest(writer)
        assert master.stats()["spares"] > 0
        lender.close()
        assert [writer.put(f"b{number}", b"y" * 5000, wish) for number in range(40)] == [0] * 40
        assert [writer.get(f"b{number}") for number in range(40)] == [b"y" * 5000] * 40
        rest(writer)
        figures = master.stats()
        assert (figures["claims_unknown"], figures["held"]) == (0, 0)
        master.catalogue.check()
        writer.close()
