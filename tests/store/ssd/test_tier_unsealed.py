"""Blocks that are removed from files which are not sealed yet: the open one, and one of a rewriting."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import pytest

from store.errors import BadBlock, TierWriteError
from store.ssd.segment_file import SealedFile
from store.ssd.segment_writer import SegmentWriter, file_nbytes
from tests.store.samples import SMALL, append, failing, fill
from tests.store.ssd.test_tier_removal import compact_all, served

pytestmark = pytest.mark.quick

full_disk = failing(errno.ENOSPC)


def test_where_a_block_cannot_be_taken_out_of_an_unsealed_file_that_file_is_lost(
    tier, tmp_path, monkeypatch
) -> None:
    fill(tier, [1])
    for key in (2, 3):
        append(tier, key)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "discard", full_disk)
        with pytest.raises(TierWriteError, match="No space left") as caught:
            tier.remove([2])
    assert caught.value.lost == (2, 3)
    tier.check()
    assert not list(tmp_path.glob("*.open"))
    fill(tier, [4])
    tier.close()
    assert served(tmp_path) == [1, 4]


def test_where_a_block_cannot_be_taken_out_of_a_rewritten_file_the_old_files_stay(
    tier, tmp_path, monkeypatch
) -> None:
    fill(tier, range(6))
    tier.remove([0, 1, 2])
    assert tier.compact(SMALL.nbytes) == SMALL.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "discard", full_disk)
        assert tier.remove([5]) == [5]
    assert tier._compaction is None
    tier.check()
    assert compact_all(tier) == 3 * SMALL.nbytes
    tier.close()
    assert served(tmp_path) == [3, 4]


def test_a_rewriting_whose_last_blocks_are_removed_meanwhile_leaves_no_file(tier, tmp_path) -> None:
    fill(tier, range(4))
    tier.remove([0, 1, 2])
    assert tier.compact(SMALL.nbytes) == SMALL.nbytes
    assert tier.remove([3]) == [3]
    compact_all(tier)
    tier.check()
    assert not list(tmp_path.glob("seg-*"))


def test_a_rewriting_that_finds_every_block_bad_leaves_no_file(tier, tmp_path, monkeypatch) -> None:
    fill(tier, range(4))
    tier.remove([0, 1, 2])
    monkeypatch.setattr(SealedFile, "read_block", Mock(side_effect=BadBlock(3, "a file", "a flipped bit")))
    compact_all(tier)
    assert not list(tmp_path.glob("seg-*"))
    assert tier.take_evicted() == [3]


def test_a_file_that_is_evicted_to_make_room_for_its_own_copy_is_not_rewritten(tier_at, tmp_path) -> None:
    tier = tier_at(tmp_path, capacity_bytes=file_nbytes(SMALL, 4))
    fill(tier, range(4))
    tier.remove([0, 1])
    assert tier.compact(SMALL.nbytes) == 0
    assert (tier.take_evicted(), tier.nbytes) == ([2, 3], 0)
    tier.check()
