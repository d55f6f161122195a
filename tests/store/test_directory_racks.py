"""What the directory does with racks: blocks stay in them, and each may have a copy of its own."""

from __future__ import annotations

import pytest

from store.directory import Directory
from store.objects import PoolObject, Wanted
from tests.store.samples import SMALL, digest_of

pytestmark = pytest.mark.quick
BLOCK = SMALL.nbytes


def racked(blocks: int = 4) -> Directory:
    """Ranks 1, 2 and 3 on nodes 0, 1 and 2, with as many blocks each; nodes 0 and 1 are one rack."""
    directory = Directory(SMALL)
    directory.rack_of, directory.has_racks = (lambda node: node // 2), True
    for rank in (1, 2, 3):
        directory.add_segment(rank, blocks * BLOCK, rank - 1)
    return directory


def put(directory: Directory, key: int, node: int, sums: int = 1, now: float = 0.0) -> PoolObject:
    (obj,) = directory.allocate_many("put", [Wanted(BLOCK, key, digest_of(key))], now=now, node=node)
    directory.put_end(obj.object_id, [sums] * SMALL.layers, now)
    directory.check()
    return obj


def nearest(directory: Directory, key: int, node: int) -> int:
    (found,) = directory.lookup([key], [digest_of(key)], 0.0, node=node)
    return found.rank


def test_a_block_that_a_second_rack_computes_becomes_its_copy() -> None:
    directory = racked()
    put(directory, 7, 0)
    put(directory, 7, 2)
    assert [nearest(directory, 7, node) for node in (0, 1, 2)] == [1, 1, 3]
    assert directory.stats()["copies_dram"] == 2
    directory.remove(7, digest_of(7), 0.0, rank=1)
    assert nearest(directory, 7, 0) == 3


def test_a_rack_gets_no_second_copy_and_none_with_other_bytes() -> None:
    directory = racked()
    put(directory, 7, 0)
    put(directory, 7, 1)
    put(directory, 7, 2, sums=2)
    assert [nearest(directory, 7, node) for node in (1, 2)] == [1, 1]
    assert directory.counters["puts_duplicate"] == 2
    assert directory.counters["copies_bad"] == 0


def test_without_racks_a_block_that_is_computed_again_stays_private() -> None:
    directory = racked()
    directory.has_racks = False
    put(directory, 7, 0)
    put(directory, 7, 2)
    assert nearest(directory, 7, 2) == 1


def test_a_full_rack_evicts_its_own_blocks_before_another_rack_gets_new_ones() -> None:
    directory = racked(blocks=1)
    ranks = [put(directory, key, 0, now=key).rank for key in (1, 2, 3)]
    assert ranks == [1, 2, 1], "rank 3 is empty"


def test_another_rack_takes_what_fits_in_no_other_way() -> None:
    directory = racked(blocks=1)
    for key in (1, 2):
        obj = put(directory, key, 0)
        directory.lease("reader", [obj.object_id], 0.0, 99.0)
    assert put(directory, 3, 0).rank == 3
