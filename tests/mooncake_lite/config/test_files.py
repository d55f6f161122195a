"""Files that are replaced at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_lite.config.files import replace_file

pytestmark = pytest.mark.quick


def test_a_file_is_replaced_whole_and_a_failure_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"1")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
