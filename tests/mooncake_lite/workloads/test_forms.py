"""Forms of traces: each is recognised, what it lacks is said, and what is wrong is named with its line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.errors import TraceError
from mooncake_lite.workloads.forms import Assumed, coarsened, read_any
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import MOST_LINE_BYTES, Trace, TraceRequest, read_trace
from tests.mooncake_lite.workloads.made import made_trace, write

VARIABLE = "MOONCAKE_LITE_TRACES"

BAILIAN = {
    "chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132,
    "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091],
}  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
TALK = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "Q" * 4096},
        {"from": "gpt", "value": "A" * 100},
        {"from": "human", "value": "B" * 8},
        {"from": "gpt", "value": "C"},
    ],
}


def file_of(folder: Path, *lines: Any, end: str = "\n") -> Path:
    path = folder / "trace"
    words = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes((end.join(words) + end).encode())
    return path


@pytest.mark.quick
def test_mooncakes_form_is_read_as_ever(tmp_path: Path) -> None:
    path = write(tmp_path / "made.jsonl", made_trace(40))
    assert read_any(path).trace == read_trace(path)
    assert read_any(path).notes == []
    assert read_any(path, most=7).trace == read_trace(path).first(7)


@pytest.mark.quick
def test_bailians_form_has_blocks_of_16_and_times_in_seconds(tmp_path: Path) -> None:
    second = {**BAILIAN, "timestamp": 62, "parent_chat_id": 159, "input_length": 17, "hash_ids": [1089, 7]}
    found = read_any(file_of(tmp_path, BAILIAN, second))
    assert found.trace.block_tokens == 16
    assert found.trace.requests == [
        TraceRequest(0, 33, 132, [1089, 1090, 1091]),
        TraceRequest(886, 17, 132, [1089, 7]),
    ]
    assert found.notes == []
    assert cached_tokens(found.trace) == [0, 16]
    unnamed = read_any(file_of(tmp_path, {k: v for k, v in BAILIAN.items() if k != "hash_ids"}))
    assert [len(one.hash_ids) for one in unnamed.trace.requests] == [3]
    assert "the prefixes of 1 prompts are not known (Bailian)" in unnamed.notes[0]


@pytest.mark.quick
def test_small_blocks_become_blocks_of_512_that_name_the_same_prefixes() -> None:
    ids = list(range(100, 166))
    trace = Trace(
        [
            TraceRequest(0, 1056, 1, ids),
            TraceRequest(1, 1024, 1, ids[:64]),
            TraceRequest(2, 1024, 1, [*ids[:63], 7]),
            TraceRequest(3, 500, 1, ids[:32]),
        ],
        16,
    )
    coarse = coarsened(trace)
    assert coarse.block_tokens == 512
    assert [one.hash_ids for one in coarse.requests] == [[131, 163, 165], [131, 163], [131, 7], [131]]


@pytest.mark.quick
@pytest.mark.parametrize(
    "lines",
    [
        (AZURE, "2023-11-16 18:17:03.9799600,1000,10", "2023-11-16 18:17:04.0319600,20,0"),
        (AZURE, "2024-05-10 00:00:00+00:00,1000,10", "2024-05-10 02:00:00.052+02:00,20,0"),
        ('\ufeffMore,"TIMESTAMP",GeneratedTokens, ContextTokens ', "x,2024-05-10T00:00:00,10,1000",
         '"a ""b"", c","2024-05-10T00:00:00.052",0,"20"'),
        (BURST, "5,ChatGPT,1000,10,1010,Conversation log", "5.052,GPT-4,20,0,20,API log"),
        (f"{BURST},Session ID", "5,ChatGPT,1000,10,1010,API log,", "5.052,GPT-4,20,0,20,API log,7"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_lengths_and_times_are_read_and_that_prefixes_lack_is_said(
    tmp_path: Path, lines: tuple[str, ...], end: str
) -> None:
    found = read_any(file_of(tmp_path, *lines, end=end))
    assert [(one.timestamp, one.input_length, one.output_length) for one in found.trace.requests] == [
        (0, 1000, 10),
        (52, 20, 0),
    ]
    ids = [block for one in found.trace.requests for block in one.hash_ids]
    assert len(set(ids)) == len(ids) == 3
    (note,) = found.notes
    assert "the prefixes of 2 prompts are not known" in note
    shared = read_any(file_of(tmp_path, *lines, end=end), Assumed(prefix=600)).trace.requests
    assert [one.hash_ids[0] == 0 for one in shared] == [True, False]


@pytest.mark.quick
def test_requests_without_a_prompt_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [
        BURST,
        *(f"{second},GPT-4,{tokens},0,0,API log" for second, tokens in enumerate((0, 9, 0, 8, 7))),
    ]
    found = read_any(file_of(tmp_path, *lines), most=2)
    assert [(one.timestamp, one.input_length) for one in found.trace.requests] == [(0, 9), (2000, 8)]
    assert "2 requests without a prompt are left out" in found.notes[1]


@pytest.mark.quick
@pytest.mark.parametrize("lines", [([TALK, TALK],), (TALK, TALK)])
def test_conversations_share_equal_beginnings_and_a_prompt_has_the_answers_before_it(
    tmp_path: Path, lines: tuple[Any, ...]
) -> None:
    path = file_of(tmp_path, *lines)
    with pytest.raises(TraceError, match=r"conversations have no times; .* --assume-rate"):
        read_any(path)
    found = read_any(path, Assumed(rate=2.0))
    requests = found.trace.requests
    assert sorted((one.input_length, one.output_length) for one in requests) == [
        (1024, 25), (1024, 25), (1051, 1), (1051, 1)
    ]  # fmt: skip
    assert len({tuple(one.hash_ids) for one in requests}) == 2
    assert len({tuple(one.hash_ids[:2]) for one in requests}) == 1
    assert "times are made up, at 2 requests/s; 4 characters of text count as a token" in found.notes[0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a,b"], ":1: no known form of a trace begins like this; .* TIMESTAMP, ContextTokens"),
        (["TIMESTAMP,ContextTokens", "1,2"], ":1: no known form .* GeneratedTokens"),
        ([AZURE], ": there is no request in it; Azure's form"),
        ([AZURE, "2023-11-16 18:17:03,1"], ":2: 2 cells, and the first line names 3 columns"),
        ([AZURE, "", "2023-11-16,1,1"], ":3: invalid RFC3339 encoded datetime - at `.*TIMESTAMP`"),
        ([AZURE, "2023-11-16 18:17:03,1.5,1"], ":2: expected `int`, got `str` - at `.*ContextTokens`"),
        ([AZURE, "2023-11-16 18:17:03,-1,1"], ":2: expected `int` >= 0 - at `.*ContextTokens`"),
        ([AZURE, "2023-11-16 18:17:03,99999999,1"], ":2: expected `int` <= 16777216"),
        ([AZURE, "2023-11-16 18:17:03,1_0,1"], ":2: expected `int`, got `str`"),
        ([AZURE, '2023-11-16 18:17:03,"1,1'], ":2: "),
        (
            [AZURE, "2023-11-16 18:17:03,1,1", "2023-11-16 18:17:02,1,1"],
            ":3: it is 1000 ms before an earlier line",
        ),
        ([BURST, "nan,GPT-4,1,1,2,x"], ":2: expected `float` >= 0.0 - at `.*Timestamp`"),
        ([BURST, "1e999,GPT-4,1,1,2,x"], ":2: number out of range - at `.*Timestamp`"),
        ([BURST, "-1,GPT-4,1,1,2,x"], ":2: expected `float` >= 0.0"),
        ([BAILIAN, {**BAILIAN, "hash_ids": [1]}], ":2: 1 hash_ids, .* 33 tokens has 3 blocks of 16"),
        ([BAILIAN, {**BAILIAN, "timestamp": 61}], ":2: it is 114 ms before an earlier line"),
        ([BAILIAN, "{"], ":2: input data was truncated"),
        ([[{"conversations": [{"from": 1, "value": "x"}]}]], r": expected `str`, got `int` - at `\$\[0\]"),
        (["[" * 100_000], ": "),
        ([{**TALK, "conversations": []}], ": there is no question with an answer in it"),
        ([AZURE + " " * MOST_LINE_BYTES, "x"], ":1: more than 16 MiB"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, lines: list[Any], words: str) -> None:
    path = file_of(tmp_path, *lines)
    with pytest.raises(TraceError, match=f"^{path}{words}") as caught:
        read_any(path, Assumed(rate=1.0))
    assert "\n" not in str(caught.value)


STARTS = [b"", b"\xef\xbb\xbf", b"[", b'[{"conversations": [', b"{", b'{"chat_id": 1, ', b'"', b"\xff\xfe"]
STARTS += [f"{columns}\n".encode() for columns in (AZURE, BURST, f'"{AZURE}')]
PIECES = [
    b",",
    b'"',
    b"\n",
    b"\r",
    b"\0",
    b"1",
    b"1e999",
    b"nan",
    b"2023-11-16 18:17:03",
    b"{}",
    b"]",
    b"5,a,1,1,2,x\n",
]


@pytest.mark.quick
@given(st.sampled_from(STARTS), st.lists(st.sampled_from(PIECES) | st.binary(max_size=9), max_size=12))
def test_any_bytes_are_a_trace_or_an_error_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(start + b"".join(pieces))
    try:
        count, words = len(read_any(path, Assumed(rate=1.0)).trace.requests), ""
    except TraceError as error:
        count, words = 0, str(error)
    assert count or words.startswith(str(path))


@pytest.mark.quick
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(BAILIAN).encode())
    os.close(writing)
    assert len(read_any(Path(f"/dev/fd/{reading}")).trace.requests) == 1
    os.close(reading)


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder")
@pytest.mark.parametrize(("kind", "rows", "tokens"), [("code", 8_819, 2_047.8), ("conv", 19_366, 1_154.7)])
def test_azures_traces_of_2023_are_read(kind: str, rows: int, tokens: float) -> None:
    trace = read_any(Path(os.environ[VARIABLE]) / f"AzureLLMInferenceTrace_{kind}.csv").trace
    assert len(trace.requests) == rows
    assert sum(one.input_length for one in trace.requests) / rows == pytest.approx(tokens, abs=0.1)
    assert 3_400 < trace.requests[-1].timestamp / 1e3 < 3_600
