"""Traces: what is wrong in a file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.errors import TraceError
from mooncake_lite.workloads.traces import MOST_LINE_BYTES, read_trace, write_trace
from tests.mooncake_lite.workloads.made import made_trace, write

pytestmark = pytest.mark.quick

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def written(tmp_path: Path, *lines: dict[str, Any] | str) -> Path:
    path = tmp_path / "trace.jsonl"
    words = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(words) + "\n")
    return path


def test_a_trace_is_read_in_its_order(tmp_path: Path) -> None:
    second = {**GOOD, "timestamp": 3000.5, "input_length": 512, "hash_ids": [1], "more": "is ignored"}
    one, two = read_trace(written(tmp_path, GOOD, second, "")).requests
    assert (one.timestamp, one.input_length, one.output_length, one.hash_ids) == (0, 1000, 5, [1, 2])
    assert (two.timestamp, two.hash_ids) == (3000.5, [1])


def test_a_written_trace_reads_as_the_same_one(tmp_path: Path) -> None:
    trace = made_trace(40)
    path = write(tmp_path / "made.jsonl", trace)
    assert read_trace(path) == trace
    assert write_trace(trace) == path.read_bytes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "2: "),
        ("[1]", "2: expected `object`"),
        ('{"timestamp": 0}', "missing required field `input_length`"),
        ({**GOOD, "hash_ids": ["a", "b"]}, "expected `int`, got `str` - at `$.hash_ids[0]`"),
        ({**GOOD, "hash_ids": [1]}, "1 hash_ids, and a prompt of 1000 tokens has 2 blocks of 512"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "3 hash_ids"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "expected `int` >= 1 - at `$.input_length`"),
        ({**GOOD, "timestamp": -1}, "expected `float` >= 0.0 - at `$.timestamp`"),
        ({**GOOD, "output_length": -1}, "expected `int` >= 0 - at `$.output_length`"),
        ({**GOOD, "timestamp": 2}, "timestamp 2 is before 3, that of an earlier line"),
        ('{"timestamp": NaN}', "invalid character"),
        (json.dumps({**GOOD, "timestamp": 0}).replace("0,", "1e999,", 1), "number out of range"),
        ({**GOOD, "timestamp": 10**400}, "number out of range"),
        ({**GOOD, "input_length": 10**400}, "at `$.input_length`"),
        ({**GOOD, "hash_ids": [1, 10**400]}, "at `$.hash_ids[1]`"),
        ({**GOOD, "hash_ids": [1, -1]}, "expected `int` >= 0 - at `$.hash_ids[1]`"),
        (" " * (MOST_LINE_BYTES + 1) + json.dumps(GOOD), "more than 16 MiB"),
        ("\xff", "2: "),
        (
            json.dumps(GOOD)[:-1] + ', "more": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "2: maximum recursion depth",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path, {**GOOD, "timestamp": 3}, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_a_folder_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: no such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(TraceError, match="bytes:1: JSON is malformed"):
        read_trace(path)
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(written(tmp_path, ""))
