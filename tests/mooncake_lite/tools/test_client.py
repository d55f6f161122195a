"""A streamed answer, read from lines with a clock of our own; and the ways in which one goes wrong."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

import mooncake_lite
from mooncake_lite.cli import main
from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.llm import LLM
from mooncake_lite.tools.client import (
    AnswerFailed,
    StreamedAnswer,
    TooLong,
    is_loopback,
    open_client,
    problem_of,
    read_answer,
    stream_answer,
)
from tests.mooncake_lite.tools.fake_openai import FakeServer, running

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


def test_a_server_over_https_is_checked_with_the_certificates_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: "certificates")
    kind = Mock()
    open_client(kind, "https://llm.example", None, 1.0)
    open_client(kind, "http://llm.example", None, 1.0)
    assert [call.kwargs.get("verify") for call in kind.call_args_list] == ["certificates", None]


def test_a_server_that_falls_silent_is_one_clear_error() -> None:
    silent = httpx.MockTransport(Mock(side_effect=httpx.ReadTimeout("")))
    with (
        httpx.Client(base_url="http://127.0.0.1:1", transport=silent, timeout=7) as client,
        pytest.raises(AnswerFailed, match="the server was silent for 7 s"),
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


@pytest.mark.parametrize(
    ("message", "is_too_long"),
    [
        ("This model's maximum context length is 8 tokens. However, you requested 9", True),  # vLLM
        ("the queue is full", False),
    ],
)
def test_a_prompt_that_does_not_fit_is_known_from_other_refusals(message: str, is_too_long: bool) -> None:
    refusing = httpx.MockTransport(lambda _: httpx.Response(400, json={"error": {"message": message}}))
    with (
        httpx.Client(base_url="http://llm.example", transport=refusing) as client,
        pytest.raises(AnswerFailed, match=message[:20]) as caught,
    ):
        stream_answer(client, {"messages": []}, StreamedAnswer(), print)
    assert isinstance(caught.value, TooLong) == is_too_long


# ---------------------------------------------------------------------------------- proxies

PROXIES = [
    {"ALL_PROXY": "socks5://PROXY"},
    {"all_proxy": "socks5h://PROXY"},
    {"http_proxy": "http://PROXY"},
    {"HTTP_PROXY": "ftp://PROXY"},
    {"https_proxy": "http://PROXY", "http_proxy": "PROXY", "NO_PROXY": "[::1"},
    {"SSL_CERT_FILE": "/no/such/file"},
]


@pytest.fixture(params=PROXIES, ids=lambda variables: " ".join(variables))
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener of a proxy that the environment names, and that nothing may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name, value in request.param.items():
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv(name, value.replace("PROXY", place))
        yield listener


@pytest.fixture
def server(proxy: socket.socket) -> Iterator[FakeServer]:
    """A server on loopback, while the environment names a proxy. Checks that the proxy was not asked."""
    with running(FakeServer()) as fake:
        yield fake
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_a_server_on_loopback_is_asked_without_the_environments_proxies(server: FakeServer) -> None:
    for host in ("127.0.0.1", "localhost", "127.1", "LocalHost", "0.0.0.0", "[::ffff:127.0.0.1]"):
        url = server.url.replace("127.0.0.1", host)
        with open_client(httpx.Client, url, None, httpx.Timeout(5)) as client:
            assert client.get("/v1/models").json() == server.models


@pytest.mark.parametrize("words", [["top", "--once"], ["cluster", "status"]])
def test_commands_reach_a_server_on_loopback_beside_a_proxy(
    server: FakeServer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--url", server.url]) == 2
    assert "(HTTP 404)" in capsys.readouterr().err  # our server has no /metrics, and has answered


def test_a_library_reaches_a_server_on_loopback_beside_a_proxy(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_lite.llm.ANSWER_LIMIT_S", 5.0)
    with pytest.raises(ClusterError, match="HTTP 404"):
        LLM(cluster=server.url).chat([{"role": "user", "content": "a secret"}])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "SOCKS proxy"),
        ("http_proxy", "ftp://127.0.0.1:1", "Unknown scheme"),
        ("no_proxy", "[::1", "Invalid port"),
        ("SSL_CERT_FILE", "/no/such/file", "No such file"),
    ],
)
def test_an_environment_that_cannot_be_used_for_another_host_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}.* cannot be used for http://llm.example .*{reason}"):
        open_client(httpx.Client, "http://llm.example", None, httpx.Timeout(5))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.9.8.7", True),
        ("0.0.0.0", True),
        ("::1", True),
        ("::", True),
        ("a.localhost", True),
        ("localhost.", True),
    ]
    + [("128.0.0.1", False), ("localhost.example", False), ("127.0.0.1.example", False), ("", False)],
)
def test_which_hosts_are_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_every_client_of_this_package_knows_of_proxies() -> None:
    """Each is made by open_client, or asks a cluster that its own program has started."""
    calls = re.compile(r"httpx\.(?:Client|AsyncClient|get|post|request|stream)\((?:[^()]|\([^()]*\))*\)")
    found = [
        (path.name, call)
        for path in Path(mooncake_lite.__path__[0]).rglob("*.py")
        for call in calls.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 5
    assert [each for each in found if "trust_env=False" not in each[1]] == []
