"""store.distributed.catalogue: whose room comes back when: copies, moves, clients that are cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from store.distributed.catalogue import LATE_WRITES_NS, Catalogue
from store.distributed.entries import NEVER_NS
from store.distributed.messages import Grant, Wish
from store.distributed.shared_table import TableWriter
from store.distributed.tasks import Tasks

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
    made.table.close()


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
