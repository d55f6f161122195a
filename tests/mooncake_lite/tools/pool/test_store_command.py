"""`mooncake-lite store`: blocks at rest, their exit codes, one line for every wrong wish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from store.tier import HDF5Tier
from tests.store.samples import FINGERPRINT, SMALL, append, block_of

pytestmark = pytest.mark.quick


@pytest.fixture
def root(tmp_path) -> Path:
    """The blocks 1 to 4 in two folders of a tier; 2 is removed."""
    for index, keys in enumerate(([1, 2], [3, 4])):
        tier = HDF5Tier(tmp_path / f"store-{index}", 1 << 30, SMALL, FINGERPRINT)
        for key in keys:
            append(tier, key)
        tier.seal()
        tier.remove([2])
        tier.close()
    return tmp_path


def as_json(capsys, *arguments: str) -> list[dict]:
    assert main(["store", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_lists_every_block_with_its_place_and_its_state(root, capsys) -> None:
    rows = as_json(capsys, "ls", str(root))
    assert [(row["key"], row["file"], row["row"], row["state"]) for row in rows] == [
        ("0000000000000001", "store-0/seg-00000001.h5", 0, "served"),
        ("0000000000000002", "store-0/seg-00000001.h5", 1, "removed"),
        ("0000000000000003", "store-1/seg-00000001.h5", 0, "served"),
        ("0000000000000004", "store-1/seg-00000001.h5", 1, "served"),
    ]
    assert main(["store", "ls", str(root / "store-1")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_stat_sums_up_each_folder(root, capsys) -> None:
    (root / "store-1" / "seg-00000009.h5").write_bytes(b"no segment")
    first, second = as_json(capsys, "stat", str(root))
    assert (first["files"], first["blocks"], first["dead"], first["broken"]) == (1, 1, 1, 0)
    assert (second["files"], second["blocks"], second["dead"], second["broken"]) == (1, 2, 0, 1)
    assert second["held by"] == ""


def test_get_writes_the_blocks_own_bytes(root, tmp_path, capfdbinary) -> None:
    assert main(["store", "get", str(root), "3"]) == 0
    assert capfdbinary.readouterr().out == block_of(3).tobytes()
    out = tmp_path / "block"
    assert main(["store", "get", str(root), "0000000000000004", "--out", str(out)]) == 0
    assert out.read_bytes() == block_of(4).tobytes()
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("key", ["2", "77", "not-hex", "-1", "1" * 17])
def test_a_key_that_is_not_there_or_is_none_is_one_line_and_exit_code_2(root, capsys, key) -> None:
    assert main(["store", "get", str(root), "--", key]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "block" in error or "KEY" in error


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "compact"])
def test_a_folder_that_is_no_tier_is_one_line_and_exit_code_2(tmp_path, capsys, command) -> None:
    for where in (tmp_path, tmp_path / "absent", Path("/dev/null")):
        assert main(["store", command, str(where)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(where) in error


def test_verify_says_what_is_bad_and_ends_with_1(root, capsys) -> None:
    assert main(["store", "verify", str(root)]) == 0
    path = root / "store-1" / "seg-00000001.h5"
    raw = bytearray(path.read_bytes())
    raw[raw.index(block_of(3).tobytes()) + 5] ^= 1
    path.write_bytes(raw)
    capsys.readouterr()
    assert main(["store", "verify", str(root), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["blocks"], first["bad"], first["problem"]) == (1, 0, "")
    assert (second["blocks"], second["bad"]) == (2, 1)
    assert "0000000000000003" in second["problem"]
    assert main(["store", "get", str(root), "3"]) == 2


def test_verify_counts_a_file_that_is_no_segment_any_more(root, capsys) -> None:
    path = root / "store-0" / "seg-00000001.h5"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["store", "verify", str(root)]) == 1
    assert "truncated" in capsys.readouterr().out


def test_compact_rewrites_what_is_half_dead(root, capsys) -> None:
    before = (root / "store-0" / "seg-00000001.h5").stat().st_size
    assert main(["store", "compact", str(root)]) == 0
    assert "store-0" in capsys.readouterr().out
    (path,) = (root / "store-0").glob("*.h5")
    assert path.stat().st_size < before
    assert [row["key"][-1] for row in as_json(capsys, "ls", str(root))] == ["1", "3", "4"]


def test_compact_touches_nothing_while_any_of_the_folders_is_in_use(root, capsys) -> None:
    tier = HDF5Tier(root / "store-1", 1 << 30, SMALL, FINGERPRINT)
    assert main(["store", "compact", str(root)]) == 2
    assert "store-1: in use by process" in capsys.readouterr().err
    assert (root / "store-0" / "seg-00000001.h5").exists()
    tier.close()


def test_rm_removes_for_good_all_or_none(root, capsys) -> None:
    assert main(["store", "rm", str(root), "1", "77"]) == 2
    assert "holds no block 0000000000000077" in capsys.readouterr().err
    assert main(["store", "rm", str(root), "1", "3"]) == 0
    assert capsys.readouterr().out == "removed 2 blocks\n"
    served = [row["key"][-1] for row in as_json(capsys, "ls", str(root)) if row["state"] == "served"]
    assert served == ["4"]
    assert main(["store", "rm", str(root), "--all"]) == 0
    assert capsys.readouterr().out == "removed 1 blocks\n"
    assert [row for row in as_json(capsys, "ls", str(root)) if row["state"] == "served"] == []


def test_rm_wants_to_know_what_and_a_folder_that_nobody_uses(root, capsys) -> None:
    for wish in ([], ["1", "--all"]):
        assert main(["store", "rm", str(root), *wish]) == 2
        assert "name the blocks to be removed, or give --all" in capsys.readouterr().err
    tier = HDF5Tier(root / "store-1", 1 << 30, SMALL, FINGERPRINT)
    assert main(["store", "rm", str(root), "1"]) == 2
    assert "store-1: in use by process" in capsys.readouterr().err
    tier.close()
    assert as_json(capsys, "ls", str(root))[0]["state"] == "served"


def test_only_a_running_pool_has_pins(root, capsys) -> None:
    for wish in (["pin", str(root), "1"], ["unpin", str(root), "1"]):
        assert main(["store", *wish]) == 2
        assert "is no running cluster" in capsys.readouterr().err
    assert main(["store", "pin", "live", "1", "--soft", "-1"]) == 2
    assert "more than 0" in capsys.readouterr().err
