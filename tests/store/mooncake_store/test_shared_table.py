"""store.mooncake_store.shared_table: what a reader may see while the master writes, and what it must not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.errors import StoreError
from store.mooncake_store.shared_table import (
    FIRST_SLOTS,
    HEADER_WORDS,
    MAX_LOAD,
    SLOT_WORDS,
    Busy,
    Found,
    Retired,
    TableReader,
    TableWriter,
    free_slots,
    name_hash,
)
from tests.conftest import examples

pytestmark = pytest.mark.quick
SECOND = 10**9


@pytest.fixture
def writer() -> Iterator[TableWriter]:
    made = TableWriter(10 * SECOND, b"t" * 32)
    yield made
    made.close()


@pytest.fixture
def reader(writer: TableWriter) -> Iterator[TableReader]:
    made = reader_of(writer)
    yield made
    made.close()


def reader_of(writer: TableWriter) -> TableReader:
    return TableReader(os.getpid(), writer.fd, writer.inode, writer.nbytes)


def whole(name: str) -> int:
    key, digest = name_hash(name)
    return digest << 64 | key


def insert(writer: TableWriter, name: str, nbytes: int = 100) -> int:
    return writer.insert(*name_hash(name), nbytes, [1 << 44 | 64], 0)


def seen(reader: TableReader, name: str) -> Found:
    found = reader.find(whole(name))
    assert found is not None
    return found


def test_an_object_is_found_where_the_master_has_put_it(writer: TableWriter, reader: TableReader) -> None:
    assert reader.find(whole("a")) is None
    word = insert(writer, "a")
    assert seen(reader, "a") == Found(word, writer.words[word], 100, (1 << 44 | 64,))
    writer.remove(word)
    assert reader.find(whole("a")) is None
    writer.check()


def test_a_reader_notices_that_an_object_went_while_it_copied(
    writer: TableWriter, reader: TableReader
) -> None:
    word = insert(writer, "a")
    found = seen(reader, "a")
    assert reader.is_still(found)
    writer.remove(word)
    assert not reader.is_still(found)
    insert(writer, "a")
    assert not reader.is_still(found)


def test_a_lease_is_extended_and_never_shortened(writer: TableWriter, reader: TableReader) -> None:
    word = insert(writer, "a")
    found = seen(reader, "a")
    assert reader.extend_lease(found, 5 * SECOND)
    assert reader.extend_lease(found, 3 * SECOND)
    assert writer.lease_until_ns(word, 0) == 5 * SECOND


def test_a_client_cannot_lease_for_longer_than_one_lease(writer: TableWriter, reader: TableReader) -> None:
    word = insert(writer, "a")
    reader.extend_lease(seen(reader, "a"), 2**63)
    assert writer.lease_until_ns(word, 7 * SECOND) == 17 * SECOND


def test_what_is_leased_is_shown_again_and_the_rest_is_hidden(
    writer: TableWriter, reader: TableReader
) -> None:
    leased, free = insert(writer, "leased"), insert(writer, "free")
    reader.extend_lease(seen(reader, "leased"), 9 * SECOND)
    assert writer.lock_unleased([leased, free], SECOND) == [False, True]
    assert seen(reader, "leased").word == leased
    with pytest.raises(Busy):
        reader.find(whole("free"))
    writer.unlock(free)
    assert seen(reader, "free").word == free


def test_a_damaged_slot_is_not_believed(writer: TableWriter, reader: TableReader) -> None:
    word = insert(writer, "a")
    writer.words[word + 4] += 64  # another offset
    with pytest.raises(Busy):
        reader.find(whole("a"))


def test_objects_that_meet_in_one_place_are_told_apart(writer: TableWriter, reader: TableReader) -> None:
    keys = [5 + FIRST_SLOTS * number for number in range(4)]
    words = [writer.insert(key, 7, 10 + number, [64], 0) for number, key in enumerate(keys)]
    writer.remove(words[1])
    sizes = [(found := reader.find(7 << 64 | key)) and found.nbytes for key in keys]
    assert sizes == [10, None, 12, 13]
    assert writer.insert(keys[1], 7, 99, [64], 0) == words[1], "a place that was used is used again"
    writer.check()


def test_a_table_grows_and_keeps_leases_and_versions(writer: TableWriter, reader: TableReader) -> None:
    count = int(MAX_LOAD * FIRST_SLOTS) + 1
    placed = [insert(writer, f"n{number}") for number in range(count)]
    reader.extend_lease(seen(reader, "n7"), 9 * SECOND)
    assert writer.is_crowded
    larger, moved = writer.regrown()
    assert larger.slots > writer.slots
    with pytest.raises(Retired):
        reader.find(whole("n7"))
    new = reader_of(larger)
    try:
        assert all(seen(new, f"n{number}").word == moved[word] for number, word in enumerate(placed))
        assert larger.lease_until_ns(moved[placed[7]], 0) == 9 * SECOND
        larger.check()
    finally:
        new.close()
        larger.close()


def test_memory_that_is_no_table_is_refused(writer: TableWriter) -> None:
    writer.words[0] = 1
    with pytest.raises(StoreError, match="another layout"):
        reader_of(writer)
    with pytest.raises(StoreError, match="not what its owner announced"):
        TableReader(os.getpid(), writer.fd, writer.inode + 1, writer.nbytes)
    with pytest.raises(StoreError, match="cannot be opened"):
        TableReader(os.getpid(), 9999, 1, writer.nbytes)


def test_a_reader_beside_a_busy_writer_never_sees_a_mixture(writer: TableWriter, reader: TableReader) -> None:
    """The writer keeps size and offset equal; a snapshot of two states would show them different."""
    word = insert(writer, "a", 64)
    stop = threading.Event()

    def churn() -> None:
        number = 1
        while not stop.is_set():
            number = number % 1000 + 1
            writer.replace(word, *name_hash("a"), 64 * number, [64 * number])

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        looks = 0
        while looks < 3000:
            try:
                found = reader.find(whole("a"))
            except Busy:
                continue
            assert found.locations in ((found.nbytes,), (1 << 44 | 64,))
            looks += 1
    finally:
        stop.set()
        thread.join()


names = st.sampled_from([f"name-{number}" for number in range(12)])


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "grow"]), names), max_size=60))
def test_a_table_is_a_dictionary(steps: list[tuple[str, str]]) -> None:
    writer = TableWriter(SECOND, b"t" * 32, slots=64)
    held: dict[str, tuple[int, int]] = {}
    for nbytes, (act, name) in enumerate(steps, 1):
        if act == "put" and name not in held:
            held[name] = (insert(writer, name, nbytes), nbytes)
        elif act == "remove" and name in held:
            writer.remove(held.pop(name)[0])
        elif act == "grow":
            old = writer
            writer, moved = old.regrown()
            held = {one: (moved[word], size) for one, (word, size) in held.items()}
            old.close()
        writer.check()
    reader = reader_of(writer)
    for number in range(12):
        found = reader.find(whole(f"name-{number}"))
        expected = held.get(f"name-{number}")
        assert (found and (found.word, found.nbytes)) == expected
    reader.close()
    writer.close()


def test_the_layout_is_the_one_that_the_page_draws() -> None:
    assert (HEADER_WORDS, SLOT_WORDS) == (512, 16)


def probes(keys: list[int], found: list[int], slots: int) -> bool:
    """Tell whether linear probing finds each key in its slot."""
    table = dict(zip(found, keys))
    assert len(table) == len(keys), "two keys in one slot"
    for key, slot in zip(keys, found):
        at = key % slots
        while at != slot:
            if at not in table:
                return False
            at = (at + 1) % slots
    return True


@given(keys=st.lists(st.integers(0, 2**64 - 1).map(lambda key: key | 15 << 2), max_size=20, unique=True))
def test_all_keys_are_placed_at_once_where_probing_finds_them(keys: list[int]) -> None:
    """Their last bits are set, so that many want the last slots and go on at the start."""
    found = free_slots(np.array(keys, np.uint64), 64)
    assert probes(keys, found.tolist(), 64)


def calls_of(act: Callable[[], tuple[TableWriter, dict[int, int]]]) -> tuple[int, TableWriter]:
    """The calls of Python and of C while it acts, and the table that it returns."""
    calls = []
    sys.setprofile(lambda frame, event, what: calls.append(event))
    try:
        made, _ = act()
    finally:
        sys.setprofile(None)
    return len(calls), made


def test_growing_takes_as_many_steps_for_many_objects_as_for_few() -> None:
    """The master answers nothing meanwhile, so no step may be one object's."""
    counts = set()
    for objects in (3_000, 12_000):
        writer = TableWriter(10**9, b"t" * 32, slots=2**15)
        for number in range(objects):
            writer.insert(*name_hash(f"{number}"), 1, [64], 0)
        count, larger = calls_of(writer.regrown)
        counts.add(count)
        larger.check()
        for table in (writer, larger):
            table.close()
    assert max(counts) - min(counts) < 100
