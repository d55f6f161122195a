"""Shared memory that some client of the same user has written into: an error, never a crash or a hang."""

from __future__ import annotations

import ctypes
import os
import struct

import pytest
from xxhash import xxh3_64_intdigest

from store.errors import StoreError
from store.mooncake_store import journal
from store.mooncake_store.journal import (
    MAX_JOURNALS,
    ClientJournals,
    Journals,
)
from store.mooncake_store.shared_table import (
    FIRST_SLOTS,
    HEADER_WORDS,
    SLOT_WORDS,
    TableReader,
    TableWriter,
    name_hash,
)
from tests.store.mooncake_store.running import address, master_thread, rest, stores

MOST = (1 << 64) - 1
FAR_NS = 1 << 62
WRITTEN, TAKEN = 16, 16 + MAX_JOURNALS


def client_of(journals: Journals) -> ClientJournals:
    journal = journals.open()
    assert journal is not None
    return ClientJournals(os.getpid(), journals.fd, journals.inode, journals.nbytes, journal)


@pytest.mark.quick
@pytest.mark.parametrize("stray", [0, 5, MOST - 1, MOST])
@pytest.mark.parametrize("word", [0, 1, WRITTEN, TAKEN, WRITTEN + 1, TAKEN + 1])
def test_a_stray_count_stops_no_journal(word: int, stray: int) -> None:
    journals = Journals()
    first, second = client_of(journals), client_of(journals)
    for put in range(1, 4):
        assert first.append(put)
    journals.taken(journals.waiting(FAR_NS))
    journals.words[word] = stray
    first.is_pending()
    journals.note_loss()
    for _ in range(2):
        journals.taken(journals.waiting(FAR_NS))
    third = client_of(journals)
    for put, client in enumerate([first, second, third], 10):
        assert client.append(put), "there is room again"
        journals.taken(claims := journals.waiting(FAR_NS))
        assert [claim.put for claim in claims] == [put]
        assert not client.is_pending()
    assert first.losses == 1
    journals.release(0)
    for client in (first, second, third):
        client.close()
    journals.close()


@pytest.mark.quick
def test_a_count_that_changes_while_records_are_taken_is_not_believed() -> None:
    journals = Journals()
    client = client_of(journals)
    assert client.append(1)
    claims = journals.waiting(FAR_NS)
    journals.words[TAKEN] = MOST
    journals.taken(claims)
    assert (journals.words[TAKEN], journals.waiting(FAR_NS)) == (1, [])
    client.close()
    journals.close()


@pytest.mark.quick
def test_a_record_from_the_future_is_taken_now_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    journals = Journals()
    client = client_of(journals)
    now_ns = journal.time.monotonic_ns()
    with monkeypatch.context() as patch:
        patch.setattr(journal.time, "monotonic_ns", lambda: now_ns + 10**12)
        assert client.append(1)
    assert client.append(2)
    later_ns = journal.time.monotonic_ns()
    assert [claim.put for claim in journals.waiting(later_ns)] == [2, 1]
    client.close()
    journals.close()


@pytest.mark.quick
def test_memory_that_is_no_journal_is_refused() -> None:
    journals = Journals()
    for nbytes, number in ((journals.nbytes - 4096, 0), (journals.nbytes, MAX_JOURNALS), (4096, -1)):
        with pytest.raises(StoreError):
            ClientJournals(os.getpid(), journals.fd, journals.inode, nbytes, number)
    journals.close()


@pytest.mark.quick
def test_a_table_full_of_stray_keys_still_takes_objects_and_grows() -> None:
    writer = TableWriter(10**9, b"t" * 32)
    kept = writer.insert(*name_hash("kept"), 100, [64], 0)
    for at in range(FIRST_SLOTS):
        writer.words[HEADER_WORDS + at * SLOT_WORDS + 1] = 77
        writer.words[HEADER_WORDS + at * SLOT_WORDS] = MOST
    gone = writer.insert(*name_hash("gone"), 100, [64], 0)
    writer.remove(gone)
    writer.replace(kept, *name_hash("kept"), 200, [128])
    larger, moved = writer.regrown()
    reader = TableReader(os.getpid(), larger.fd, larger.inode, larger.nbytes)
    key, digest = name_hash("kept")
    found = reader.find(digest << 64 | key)
    assert (found.word, found.nbytes) == (moved[kept], 200)
    larger.check()
    for table in (reader, writer, larger):
        table.close()


def test_a_slot_that_points_beyond_its_segment_is_an_error_and_nothing_is_copied() -> None:
    """A forged slot with a check of its own: whoever may write there may also write the bytes."""
    with master_thread() as master, stores(address(master), 2) as (first, second):
        assert first.put("a", b"1" * 5000) == 0
        rest(first)
        entry = master.catalogue._entries["a"]
        table = master.catalogue.table
        raw = list(struct.unpack_from("<7Q", table.memory, 8 * entry.word))
        buffer = bytearray(b"-" * 5000)
        ptr = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for size, location in ((1 << 47, raw[4]), (5000, raw[4] + (1 << 43)), (5000, 999 << 44)):
            forged = struct.pack("<7Q", *raw[:3], size | 1 << 56, location, 0, 0)
            table.memory[8 * entry.word : 8 * entry.word + 64] = forged + struct.pack(
                "<Q", xxh3_64_intdigest(forged)
            )
            for store in (first, second):
                assert store.get("a") == b""
                assert store.get_into("a", ptr, 1 << 48) < 0
        assert buffer == b"-" * 5000
        assert first.put("b", b"2" * 5000) == 0
        assert second.get("b") == b"2" * 5000
