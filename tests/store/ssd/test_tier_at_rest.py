"""A tier's folders, looked at from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from store.errors import BadBlock, BlockMissing, TierFolderError, TierInUse
from store.layout import BlockLayout
from store.ssd.tier_at_rest import blocks, compact, find_folders, look, read_block, verify
from tests.store.samples import SMALL, append, block_of, fill, new_tier

pytestmark = pytest.mark.quick
OTHER = BlockLayout(3, 2, 16, 8, 4)


def filled(folder: Path, *groups: range, layout: BlockLayout = SMALL) -> None:
    """One sealed file for each group of keys."""
    tier = new_tier(folder, layout=layout)
    for keys in groups:
        fill(tier, keys)
    tier.close()


def states(where: Path) -> dict[str, list[int]]:
    """state -> keys."""
    found: dict[str, list[int]] = {}
    for block in blocks(map(look, find_folders(where))):
        found.setdefault(block.state, []).append(block.key)
    return found


def test_folders_are_found_by_the_root_or_by_themselves_and_nothing_else_is_taken_for_one(tmp_path) -> None:
    for index in (0, 2):
        filled(tmp_path / f"store-{index}", range(2))
    assert find_folders(tmp_path) == [tmp_path / "store-0", tmp_path / "store-2"]
    assert find_folders(tmp_path / "store-2") == [tmp_path / "store-2"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TierFolderError, match="no tier"):
        find_folders(tmp_path / "empty")
    with pytest.raises(TierFolderError, match="cannot be read: No such file"):
        find_folders(tmp_path / "absent")


def test_every_block_is_named_once_as_served_removed_or_a_copy(tier_at, tmp_path) -> None:
    filled(tmp_path / "store-0", range(4))
    filled(tmp_path / "store-1", range(2, 6))
    tier = tier_at(tmp_path / "store-1")
    tier.remove([5])
    tier.close()
    assert states(tmp_path) == {"served": [0, 1, 2, 3, 4], "copy": [2, 3], "removed": [5]}


def test_blocks_are_read_and_verified_beside_a_running_tier(tier, tmp_path) -> None:
    fill(tier, range(3))
    append(tier, 9)
    found = look(tmp_path)
    assert found.held_by == os.getpid()
    assert [path.suffix for path in found.unsealed] == [".open"]
    rows = blocks([found])
    assert [read_block(row) for row in rows] == [block_of(key).tobytes() for key in range(3)]
    assert [problem for _, problem in verify(rows)] == ["", "", ""]
    with pytest.raises(TierInUse):
        compact(tmp_path, lambda nbytes: None)
    assert tier.seal() == [9]
    tier.close()
    assert look(tmp_path).held_by is None


def test_verifying_finds_a_bad_block_and_looking_finds_a_broken_file(tmp_path) -> None:
    filled(tmp_path, range(3), range(10, 13))
    (first, second) = look(tmp_path).files
    raw = bytearray(first.path.read_bytes())
    raw[int(first.offsets[1]) + 7] ^= 4
    first.path.write_bytes(raw)
    second.path.write_bytes(second.path.read_bytes()[:-1])
    found = look(tmp_path)
    assert [(path.name, reason[:9]) for path, reason in found.broken] == [("seg-00000002.h5", "truncated")]
    bad = {block.key: problem for block, problem in verify(blocks([found])) if problem}
    assert list(bad) == [1]
    assert "checksum of layer 0 differs" in bad[1]
    assert second.path.exists()  # looking changes nothing


def test_a_file_that_vanishes_meanwhile_is_no_fault(tmp_path) -> None:
    filled(tmp_path, range(2))
    rows = blocks([look(tmp_path)])
    (tmp_path / "seg-00000001.h5").unlink()
    assert list(verify(rows)) == []
    with pytest.raises(BlockMissing):
        read_block(rows[0])
    os.mkfifo(tmp_path / "seg-00000002.h5")
    assert [path.name for path, _ in look(tmp_path).broken] == ["seg-00000002.h5"]
    rows[0].file.path.symlink_to(tmp_path / "seg-00000002.h5")
    with pytest.raises(BadBlock):
        read_block(rows[0])


def test_compacting_merges_small_files_of_each_model_and_drops_what_is_dead(tier_at, tmp_path) -> None:
    filled(tmp_path, range(3), range(10, 13))
    filled(tmp_path, range(20, 22), range(30, 32), layout=OTHER)
    tier = tier_at(tmp_path)
    tier.remove([0, 10])
    tier.close()
    copied: list[int] = []
    compact(tmp_path, copied.append)
    found = look(tmp_path)
    assert len(found.files) == 2
    left = states(tmp_path)
    assert {state: sorted(keys) for state, keys in left.items()} == {"served": [1, 2, 11, 12, 20, 21, 30, 31]}
    assert sum(copied) > 0
    assert all(problem == "" for _, problem in verify(blocks([found])))
    copied.clear()
    compact(tmp_path, copied.append)
    assert copied == []
