"""`mooncake-lite workload`: traces that are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_lite.cli import main
from mooncake_lite.tools.workload_make import sessions_of
from mooncake_lite.workloads.traces import read_trace

pytestmark = pytest.mark.quick


def test_equal_seeds_make_equal_traces_that_share_documents(tmp_path: Path) -> None:
    file, again, other = (tmp_path / name for name in ("a", "b", "c"))
    for path, seed in ((file, "1"), (again, "1"), (other, "2")):
        words = ["--requests", "50", "--rate", "2", "--seed", seed, "--out", str(path)]
        assert main(["workload", "make", "sessions", *words]) == 0
    assert file.read_bytes() == again.read_bytes() != other.read_bytes()
    trace = read_trace(file)
    assert trace == sessions_of(50, 2.0, 1)
    ids = [item for request in trace.requests for item in request.hash_ids]
    assert sorted(set(ids)) == list(range(len(set(ids))))
    assert len(set(ids)) < len(ids)
    partial = [one.hash_ids[-1] for one in trace.requests if one.input_length % 512]
    assert all(ids.count(item) == 1 for item in partial)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make", "sessions", "--out", "x", "--rate", "0"], "'--rate'"),
        (["make", "sessions"], "Missing option '--out'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", *words]) == 2
    assert message in capsys.readouterr().err
