"""Ranges into which late bytes may land: no object gets them, and not one of them is lost for good."""

from __future__ import annotations

from math import inf

import pytest

from store.books.quarantine import QUARANTINE_S
from store.directory import Directory
from store.errors import PoolFull
from store.objects import PoolObject, Wanted
from tests.store.samples import SMALL, digest_of

pytestmark = pytest.mark.quick
BLOCK = SMALL.nbytes
WRITER, OTHER = 1, 2


def pool(blocks: int = 2) -> Directory:
    directory = Directory(SMALL)
    directory.add_segment(3, blocks * BLOCK, 0)
    return directory


def failed(directory: Directory, owner: str, now: float, writer: int | None = WRITER) -> PoolObject:
    """A put whose transfer has failed, so that late bytes may land in its range."""
    obj = directory.allocate(owner, BLOCK, now=now)
    directory.revoke_owner(owner, now, writer_may_live=True, writer=writer)
    directory.check()
    return obj


def quarantined(directory: Directory) -> int:
    directory.check()
    return directory.stats()["quarantined_bytes"] // BLOCK


def test_the_range_of_a_failed_transfer_is_given_to_another_object_when_its_time_is_over() -> None:
    directory = pool(1)
    obj = failed(directory, "r", now=10)
    with pytest.raises(PoolFull):
        directory.allocate("x", BLOCK, now=10 + QUARANTINE_S - 0.1)
    assert directory.next_deadline() == 10 + QUARANTINE_S
    assert directory.allocate("x", BLOCK, now=10 + QUARANTINE_S).offset == obj.offset
    assert directory.counters["quarantines_expired"] == 1
    directory.check()


def test_expire_ends_a_quarantine_and_says_so() -> None:
    directory = pool()
    failed(directory, "a", now=0)
    failed(directory, "b", now=5)
    assert directory.expire(QUARANTINE_S - 1) == 0
    assert directory.expire(QUARANTINE_S) == 1
    assert quarantined(directory) == 1
    assert directory.expire(QUARANTINE_S + 5) == 1
    assert quarantined(directory) == 0
    assert directory.next_deadline() == inf


def test_the_loss_of_the_writer_ends_the_quarantine_of_what_it_wrote_and_of_nothing_else() -> None:
    directory = pool(4)
    for owner, writer in (("a", WRITER), ("b", OTHER), ("c", None), ("d", WRITER)):
        failed(directory, owner, now=0, writer=writer)
    assert directory.settle_writer(WRITER) == 2
    assert quarantined(directory) == 2
    assert directory.settle_writer(WRITER) == 0
    assert directory.settle("c") == 1
    assert directory.settle_writer(OTHER) == 1
    assert quarantined(directory) == 0


def test_one_object_of_an_owner_may_be_quarantined_and_the_others_go_on() -> None:
    directory = pool()
    late = directory.allocate("r", BLOCK, now=0)
    fine = directory.allocate("r", BLOCK, now=0, key=1, digest=digest_of(1))
    directory.put_revoke(late.object_id, now=1, writer_may_live=True, writer=WRITER)
    assert directory.put_end(fine.object_id, [1] * SMALL.layers, 1)
    directory.revoke_owner("r", 2)  # the request is over: that ends no quarantine
    assert quarantined(directory) == 1
    assert directory.settle_writer(WRITER) == 1
    assert quarantined(directory) == 0


def test_a_quarantine_ends_with_the_segment_that_it_lies_in() -> None:
    directory = pool()
    failed(directory, "r", now=0)
    assert directory.remove_segment(3) == ["r"]
    directory.check()
    assert directory.next_deadline() == inf
    assert directory.settle_writer(WRITER) == 0


def test_a_transfer_that_failed_without_late_bytes_quarantines_nothing() -> None:
    directory = pool(1)
    directory.allocate("r", BLOCK, now=0)
    directory.revoke_owner("r", 0)
    assert quarantined(directory) == 0
    assert directory.allocate("x", BLOCK, now=0)


def test_the_next_deadline_is_that_of_what_ends_first() -> None:
    directory = pool()
    obj = directory.allocate("put", BLOCK, now=0, key=1, digest=digest_of(1))
    directory.put_end(obj.object_id, [1] * SMALL.layers, 0)
    assert directory.next_deadline() == inf
    failed(directory, "r", now=0)
    directory.lease("long", [obj.object_id], 0, until=500)
    assert directory.next_deadline() == QUARANTINE_S
    directory.lease("short", [obj.object_id], 0, until=50)
    assert directory.next_deadline() == 50
    directory.release("short", 1)
    assert directory.next_deadline() == QUARANTINE_S


def test_what_is_freed_by_itself_makes_a_request_fit_and_what_is_pinned_hard_does_not() -> None:
    directory = pool(4)
    keys = [1, 2]
    wanted = [Wanted(BLOCK, key, digest_of(key)) for key in keys]
    made = directory.allocate_many("put", wanted, now=0)
    directory.put_end_many([obj.object_id for obj in made], [[1] * SMALL.layers] * 2, 0)
    directory.lease("reader", [made[0].object_id], 0, until=100)
    directory.allocate("writer", BLOCK, now=0)
    failed(directory, "late", now=0)
    assert directory.will_fit([BLOCK] * 4)
    assert not directory.will_fit([BLOCK] * 5)
    for key in keys:
        directory.pin(key, digest_of(key), hard=True)
    assert directory.will_fit([BLOCK] * 2)
    assert not directory.will_fit([BLOCK] * 3)
    assert not directory.will_fit([2 * BLOCK, 1])
    directory.pin(1, digest_of(1), hard=False)
    assert directory.will_fit([BLOCK] * 3)
    directory.remove(2, digest_of(2), 1)
    assert directory.will_fit([BLOCK] * 4)
    directory.check()


def test_what_is_left_over_at_the_end_of_each_segment_fits_no_block() -> None:
    directory = Directory(SMALL)
    for rank in range(4):
        directory.add_segment(rank, 2 * BLOCK + BLOCK // 2, 0)
    assert directory.will_fit([BLOCK] * 8)
    assert not directory.will_fit([BLOCK] * 9)
    assert directory.will_fit([BLOCK // 2] * 20)
    directory.remove_segment(2)
    assert not directory.will_fit([BLOCK] * 7)
    assert not Directory(SMALL).will_fit([BLOCK])


def test_a_quarantine_without_a_limit_ends_when_its_owner_is_settled_and_not_before() -> None:
    directory = Directory(SMALL, quarantine_s=float("inf"))
    directory.add_segment(3, BLOCK, 0)
    failed(directory, "r", now=0)
    assert directory.next_deadline() == inf
    assert directory.expire(1e12) == 0
    assert quarantined(directory) == 1
    assert directory.settle("r") == 1
    assert quarantined(directory) == 0


def test_what_a_rank_that_cannot_be_reached_may_write_is_held_until_it_is_known_to_be_dead() -> None:
    directory = pool(3)
    failed(directory, "r", now=0)
    failed(directory, "other", now=1, writer=OTHER)
    directory.hold_writer(WRITER)
    assert directory.next_deadline() == 1 + QUARANTINE_S
    assert directory.expire(1e12) == 1
    assert quarantined(directory) == 1
    assert directory.next_deadline() == inf
    assert directory.settle_writer(WRITER) == 1
    assert quarantined(directory) == 0


def test_a_held_range_is_gone_with_its_segment() -> None:
    directory = pool(2)
    failed(directory, "r", now=0)
    directory.hold_writer(WRITER)
    assert directory.remove_segment(3) == ["r"]
    assert not directory.has_segments
    assert directory.settle_writer(WRITER) == 0
    directory.check()
