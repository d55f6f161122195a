"""The master's catalogue: whose room comes back when: copies, moves, clients that are cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from store.errors import StoreError
from store.mooncake_store.codes import EXISTS, NO_SPACE, NO_TASK, NOT_FOUND, NOT_READY, OK
from store.mooncake_store.master.catalogue import LATE_WRITES_NS, Catalogue
from store.mooncake_store.master.entries import NEVER_NS
from store.mooncake_store.master.tasks import FAILED, SLOWEST_NS_PER_BYTE, TASK_LIMIT_NS, Tasks
from store.mooncake_store.messages import Grant, Wish
from store.mooncake_store.shared_table import FIRST_SLOTS, MAX_SEGMENT_BYTES, MAX_SEGMENTS, TableWriter
from tests.descriptors import no_descriptor_left

pytestmark = pytest.mark.quick
SECOND = 10**9
LEASE_NS = 10 * SECOND
MIB = 2**20


@pytest.fixture
def books() -> Iterator[Catalogue]:
    made = Catalogue(TableWriter(LEASE_NS, b"t" * 32))
    for number, machine in enumerate(["near", "near", "far"], 1):
        assert made.mount(f"lender{number}", f"segment{number}", machine, MIB) == number
    yield made
    made.check()
    made.close()


def free_bytes(books: Catalogue) -> int:
    return books.stats()["free_bytes"]


def put(books: Catalogue, name: str, where: int) -> None:
    wish = Wish(preferred=[f"segment{where}"])
    grant = books.put_start("writer", "near", name, 4096, wish, False, 0)
    assert isinstance(grant, Grant)
    assert books.put_end("writer", grant.put, 0) == 0


def test_a_copy_of_an_object_that_was_removed_meanwhile_gives_its_room_back(books: Catalogue) -> None:
    tasks, empty = Tasks(books), free_bytes(books)
    put(books, "a", 1)
    task = tasks.start(0, "copier", "a", "", ["segment2"], SECOND, 0)
    assert books.remove("a", SECOND, force=True) == 0
    assert free_bytes(books) == empty - 4096, "the copier may still be writing"
    assert tasks.end("copier", task.task, "", 2 * SECOND, 0) == 0
    assert free_bytes(books) == empty


def test_a_copy_of_an_object_that_was_replaced_meanwhile_gives_its_room_back(books: Catalogue) -> None:
    tasks, empty = Tasks(books), free_bytes(books)
    put(books, "a", 1)
    tasks.start(0, "copier", "a", "", ["segment2"], SECOND, 0)
    grant = books.put_start("writer", "near", "a", 4096, Wish(), True, SECOND)
    assert isinstance(grant, Grant)
    assert books.put_end("writer", grant.put, SECOND) == 0
    tasks.drop_client("copier", 2 * SECOND, 0)
    assert free_bytes(books) == empty - 4096


@pytest.mark.parametrize(("source", "target"), [("", "segment2"), ("segment1", "segment3")])
@pytest.mark.parametrize("end", ["ends it late", "leaves", "dies"])
def test_a_copy_of_a_client_that_is_stopped_pins_its_object_for_a_bounded_time(
    books: Catalogue, source: str, target: str, end: str
) -> None:
    tasks, empty = Tasks(books), free_bytes(books)
    put(books, "a", 1)
    task = tasks.start(0, "copier", "a", source, [target], 0, 0).task
    limit_ns = TASK_LIMIT_NS + 4096 * SLOWEST_NS_PER_BYTE
    tasks.tick(limit_ns, 0)
    assert books.remove("a", limit_ns, force=False) == NOT_READY
    tasks.tick(limit_ns + 1, 0)
    assert tasks.ask(0, task).status == FAILED
    assert books.remove("a", limit_ns + 1, force=False) == 0
    assert free_bytes(books) == empty - 4096, "the copier may go on and write"
    books.check()
    if end == "ends it late":
        assert tasks.end("other", task, "", limit_ns + 2, 0) == NO_TASK
        assert free_bytes(books) == empty - 4096
        assert tasks.end("copier", task, "", limit_ns + 2, 0) == NO_TASK
    else:
        books.drop_client("copier", limit_ns + 2, 0 if end == "leaves" else limit_ns + 3)
        books.tick(limit_ns + 3)
    assert free_bytes(books) == empty


def test_the_source_of_a_move_stays_while_a_reader_elsewhere_may_copy_it(books: Catalogue) -> None:
    tasks, empty = Tasks(books), free_bytes(books)
    put(books, "a", 1)
    task = tasks.start(0, "copier", "a", "segment1", ["segment2"], SECOND, 0)
    assert books.find("a", SECOND, lease=True) is not None
    assert tasks.end("copier", task.task, "", 2 * SECOND, 0) == 0
    assert free_bytes(books) == empty - 2 * 4096
    books.check()
    books.tick(SECOND + LEASE_NS)
    assert free_bytes(books) == empty - 4096


def test_a_source_that_is_kept_goes_with_its_segment(books: Catalogue) -> None:
    tasks = Tasks(books)
    put(books, "a", 1)
    task = tasks.start(0, "copier", "a", "segment1", ["segment2"], SECOND, 0)
    assert books.find("a", SECOND, lease=True) is not None
    tasks.end("copier", task.task, "", 2 * SECOND, 0)
    books.drop_client("lender1", 3 * SECOND)
    books.tick(SECOND + LEASE_NS)
    assert books.stats()["held"] == 0
    assert free_bytes(books) == 2 * MIB - 4096


@pytest.mark.parametrize(("where", "is_kept"), [(1, False), (3, True)])
def test_room_elsewhere_of_a_process_that_ended_waits_for_what_is_under_way(
    books: Catalogue, where: int, is_kept: bool
) -> None:
    """To its own machine it wrote through memory; to another over TCP, whose buffers outlive it."""
    empty = free_bytes(books)
    wish = Wish(preferred=[f"segment{where}"])
    assert isinstance(books.put_start("writer", "near", "a", 4096, wish, False, 0), Grant)
    books.drop_client("writer", SECOND, SECOND + LATE_WRITES_NS, "near")
    assert free_bytes(books) == empty - 4096 * is_kept
    assert isinstance(books.put_start("other", "near", "a", 4096, wish, False, SECOND), Grant)
    books.drop_client("other", SECOND)
    books.tick(SECOND + LATE_WRITES_NS)
    assert free_bytes(books) == empty


def test_upserts_of_one_name_at_once_each_have_space_and_the_last_to_end_stays(books: Catalogue) -> None:
    empty = free_bytes(books)
    made = [
        books.put_start(writer, "near", "a", 4096 * (1 + at), Wish(), True, at)
        for at, writer in enumerate(["w0", "w1", "w2", "w3"])
    ]
    assert books.put_start("w4", "near", "a", 4096, Wish(), False, 5) == EXISTS
    books.check()
    assert books.put_end("w2", made[2].put, 6) == 0
    assert books.put_revoke("w1", made[1].put, 7) == 0
    books.drop_client("w3", 8)
    assert books.find("a", 9, lease=False).nbytes == 3 * 4096
    assert books.put_end("w0", made[0].put, 10) == 0
    assert books.find("a", 11, lease=False).nbytes == 4096
    assert (free_bytes(books), books.stats()["writing"]) == (empty - 4096, 0)


def test_an_upsert_beside_an_unfinished_put_replaces_what_the_put_stores(books: Catalogue) -> None:
    slow = books.put_start("w0", "near", "a", 4096, Wish(), False, 0)
    fast = books.put_start("w1", "near", "a", 8192, Wish(), True, 1)
    assert books.put_end("w1", fast.put, 2) == 0
    assert books.put_end("w0", slow.put, 3) == 0
    assert books.find("a", 4, lease=False).nbytes == 8192, "a put changes nothing that is there"


@pytest.mark.parametrize(("nbytes", "code"), [(MIB, 0), (MIB // 2 + 4096, 0), (MIB + 1, NO_SPACE)])
def test_an_upsert_takes_the_space_of_a_leased_object_when_no_other_is_left(
    books: Catalogue, nbytes: int, code: int
) -> None:
    for lender in ("lender1", "lender2"):
        books.drop_client(lender, 0)
    put(books, "b", 3)
    assert books.remove("b", 0, force=False) == 0
    old = books.put_start("writer", "far", "a", MIB, Wish(), False, 0)
    assert books.put_end("writer", old.put, 0) == 0
    books.table.extend_lease(books.find("a", 0, lease=False).word, 5 * SECOND)
    new = books.put_start("writer", "far", "a", nbytes, Wish(), True, SECOND)
    assert new == code if code else books.put_end("writer", new.put, SECOND) == 0
    assert books.find("a", SECOND, lease=False).nbytes == (MIB if code else nbytes), "kept, or replaced"


def fill(books: Catalogue, first: int, count: int) -> list[int]:
    codes = []
    for number in range(first, first + count):
        grant = books.put_start("writer", "near", f"n{number}", 1, Wish(), False, 0)
        codes.append(books.put_end("writer", grant.put, 0))
    return codes


def test_a_table_grows_when_no_other_descriptor_is_left(books: Catalogue) -> None:
    with no_descriptor_left():
        assert fill(books, 0, 3000) == [0] * 3000
    assert books.stats()["table_slots"] > FIRST_SLOTS


def test_a_table_that_cannot_grow_is_filled_and_then_refuses_until_it_can(
    books: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> tuple[int, Any]:
        raise StoreError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("store.mooncake_store.shared_table.make_memfd", refuse)
        codes = fill(books, 0, FIRST_SLOTS + 9)
        assert codes == [0] * (FIRST_SLOTS - 1) + [NO_SPACE] * 10
        assert books.remove("n5", 0, force=True) == 0
        grant = books.put_start("writer", "near", "n6", 9, Wish(), True, 0)
        assert books.put_end("writer", grant.put, 0) == 0, "an upsert takes no slot"
        spare = books.spares("writer", "near", 9, Wish(), 1, 0)[0]
        assert books.claim("writer", spare.put, "in the slot of n5", 0) == 0
        spare = books.spares("writer", "near", 9, Wish(), 1, 0)[0]
        assert books.claim("writer", spare.put, "one too many", 0) == NO_SPACE
        books.check()
    assert fill(books, FIRST_SLOTS + 9, 2) == [0, 0]


def test_room_of_a_client_that_only_lost_its_connection_waits_for_its_end(books: Catalogue) -> None:
    tasks, empty = Tasks(books), free_bytes(books)
    put(books, "a", 1)
    assert isinstance(books.put_start("writer", "near", "b", 4096, Wish(), False, 0), Grant)
    tasks.start(0, "writer", "a", "", ["segment2"], SECOND, 0)
    assert len(books.spares("writer", "near", 4096, Wish(), 2, SECOND)) == 2
    tasks.drop_client("writer", SECOND, 0, NEVER_NS)
    books.drop_client("writer", SECOND, NEVER_NS)
    books.check()
    books.tick(10**6 * SECOND)
    assert free_bytes(books) == empty - 5 * 4096
    books.settle_client("writer", 10**6 * SECOND)
    assert free_bytes(books) == empty - 4096, "its finished object stays"


def test_a_put_that_took_too_long_is_kept_until_its_client_leaves(books: Catalogue) -> None:
    empty = free_bytes(books)
    assert isinstance(books.put_start("writer", "near", "b", 4096, Wish(), False, 0), Grant)
    books.tick(31 * SECOND)
    assert (books.stats()["held"], free_bytes(books)) == (1, empty - 4096)
    books.drop_client("writer", 40 * SECOND)
    assert (books.stats()["held"], free_bytes(books)) == (0, empty)


@pytest.mark.parametrize(
    ("name", "nbytes", "why"),
    [
        ("segment1", MIB, "lent already"),
        ("another", 0, "0 B"),
        ("another", MAX_SEGMENT_BYTES + 1, f"at most {MAX_SEGMENT_BYTES} B"),
    ],
)
def test_a_segment_that_cannot_be_lent_is_refused(books: Catalogue, name: str, nbytes: int, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        books.mount("lender", name, "near", nbytes)
    assert sorted(books.segments()) == [1, 2, 3]


def test_a_master_numbers_only_as_many_segments_as_a_location_can_name(books: Catalogue) -> None:
    books._next_segment = MAX_SEGMENTS - 1
    assert books.mount("lender", "last", "near", MIB) == MAX_SEGMENTS - 1
    with pytest.raises(StoreError, match="start a new one"):
        books.mount("lender", "one too many", "near", MIB)


def test_a_put_that_was_revoked_or_is_another_clients_is_not_published(books: Catalogue) -> None:
    empty = free_bytes(books)
    grant = books.put_start("writer", "near", "a", 4096, Wish(), False, 0)
    assert isinstance(grant, Grant)
    assert books.put_end("other", grant.put, 0) == NOT_FOUND
    books.tick(31 * SECOND)
    assert free_bytes(books) == empty - 4096, "its writer may still be writing"
    assert books.put_end("writer", grant.put, 32 * SECOND) == NOT_FOUND
    assert (free_bytes(books), books.find("a", 32 * SECOND, lease=False)) == (empty, None)


def test_a_copy_without_room_on_one_of_its_targets_takes_none(books: Catalogue) -> None:
    tasks = Tasks(books)
    put(books, "a", 1)
    full = books.put_start("writer", "far", "b", MIB, Wish(preferred=["segment3"]), False, 0)
    assert isinstance(full, Grant)
    before = free_bytes(books)
    assert tasks.start(0, "copier", "a", "", ["segment2", "segment3"], 0, 0).code == NO_SPACE
    assert free_bytes(books) == before
    assert books.remove("a", 0, force=False) == OK, "no task pins it"


def test_an_object_is_copied_by_one_task_at_a_time_and_the_oldest_finished_ones_are_forgotten(
    books: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.mooncake_store.master.tasks.KEPT_TASKS", 2)
    tasks, done = Tasks(books), []
    put(books, "a", 1)
    for target in ("segment2", "segment3", "segment2"):
        done.append(tasks.start(0, "copier", "a", "", [target], 0, 0).task)
        assert tasks.start(0, "other", "a", "", ["segment3"], 0, 0).code == NOT_READY
        tasks.end("copier", done[-1], "", 0, 0)
    assert [tasks.ask(0, task).code for task in done] == [NO_TASK, OK, OK]


def test_a_client_drops_its_replica_on_one_segment_and_the_other_stays(books: Catalogue) -> None:
    tasks = Tasks(books)
    put(books, "a", 1)
    task = tasks.start(0, "writer", "a", "", ["segment2"], 0, 0)
    tasks.end("writer", task.task, "", 0, 0)
    assert not books.clear("other", "a", "segment1", 0)
    assert books.clear("writer", "a", "segment1", 0)
    assert not books.clear("writer", "a", "segment1", 0)
    entry = books.find("a", 0, lease=False)
    assert entry is not None
    assert [replica.segment for replica in entry.replicas] == [2]


def test_soft_pins_protect_until_they_end_and_tasks_as_long_as_they_run(books: Catalogue) -> None:
    tasks, pin = Tasks(books), Wish(soft_pin_ms=5000, preferred=["segment1"])
    spare = books.spares("writer", "near", 4096, pin, 1, 0)[0]
    assert books.claim("writer", spare.put, "pinned", 0) == OK
    put(books, "copied", 1)
    put(books, "plain", 1)
    tasks.start(0, "copier", "copied", "", ["segment2"], 0, 0)

    def order(now_ns: int) -> list[str]:
        return [entry.name for entry in books._order.coldest(now_ns)]

    assert order(SECOND) == order(SECOND) == ["plain", "pinned"], "what is not evicted keeps its place"
    assert order(6 * SECOND) == ["pinned", "plain"], "its pin has ended, and it is the oldest"
