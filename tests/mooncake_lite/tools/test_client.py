"""A streamed answer, read from lines with a clock of our own; and the ways in which one goes wrong."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mooncake_lite.tools.client import AnswerFailed, StreamedAnswer, problem_of, read_answer, stream_answer

pytestmark = pytest.mark.quick

SPAN = {"stage": "load", "rank": 1, "seconds": 0.01, "nbytes": 1000, "count": 2}


def line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}"


def text(content: str) -> str:
    return line({"choices": [{"index": 0, "delta": {"content": content}}]})


END = [
    line({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    line(
        {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "mooncake_lite": {"cached_tokens": {"dram": 64, "ssd": 0}, "spans": [SPAN]},
        }
    ),
    "data: [DONE]",
]


def ticking() -> Callable[[], float]:
    """A clock that is one second later at each look."""
    ticks: Iterator[int] = iter(range(1, 1000))
    return lambda: float(next(ticks))


def read(*lines: str, on_text: Callable[[str], None] = lambda piece: None) -> StreamedAnswer:
    answer = StreamedAnswer()
    read_answer(lines, answer, on_text, ticking())
    return answer


def test_the_first_text_gives_ttft_and_the_last_one_the_end() -> None:
    role = line({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    answer = read(role, "", text("Hel"), ": a comment", text("lo"), text("!"), *END)

    assert (answer.text, answer.finish) == ("Hello!", "stop")
    assert (answer.ttft_s, answer.answer_s) == (1.0, 3.0)
    assert answer.tpot_s == 1.0


def test_usage_and_trace_come_with_the_last_chunk() -> None:
    answer = read(text("a"), *END)

    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)
    assert answer.trace == {"cached_tokens": {"dram": 64, "ssd": 0}, "spans": [SPAN]}


def test_each_piece_of_text_is_shown_as_it_comes() -> None:
    seen: list[str] = []

    read(text("a"), text("b"), *END, on_text=seen.append)

    assert seen == ["a", "b"]


def test_an_answer_of_one_token_has_no_gaps() -> None:
    assert StreamedAnswer(usage={"completion_tokens": 1}, ttft_s=1, answer_s=1).tpot_s == 0.0


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "broke off in the middle"),
        ([text("a")], "broke off in the middle"),
        (["data: {oops"], "not JSON: '{oops'"),
        (["data: 5"], "no object"),
        ([line({"error": {"message": "rank 2 is gone"}})], "ended the answer: rank 2 is gone"),
    ],
)
def test_a_broken_stream_is_one_clear_error(lines: list[str], says: str) -> None:
    with pytest.raises(AnswerFailed, match=says):
        read(*lines)


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with (
        httpx.Client(base_url="http://127.0.0.1:1", trust_env=False) as client,
        pytest.raises(AnswerFailed, match="the connection to the server broke"),
    ):
        stream_answer(client, {"messages": []}, StreamedAnswer(), print)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"error": {"message": "queue full"}}', "queue full"),
        ("<p>\n bad", "<p> bad"),
        ("a\x1b]0;", "a ]0;"),
        ("", "no reason given"),
    ],
)
def test_an_error_is_told_in_the_servers_own_words(body: str, says: str) -> None:
    assert problem_of(httpx.Response(503, text=body)) == f"{says} (HTTP 503)"
