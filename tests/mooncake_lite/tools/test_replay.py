"""`mooncake-lite replay` against a server of ours that answers from a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from mooncake_lite.cli import main
from mooncake_lite.errors import UserError
from mooncake_lite.tools import replay_client
from mooncake_lite.tools.replay_client import Player, _probe, _refusal_of
from mooncake_lite.workloads.text import prompt_of
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from tests.mooncake_lite.tools.fake_openai import FakeServer, event, refused, running, words
from tests.patience import wait_until

REQUESTS = [TraceRequest(100.0 * n, 512 + n, 3 + n, [7, 8 + n]) for n in range(1, 5)]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(write_trace(Trace(REQUESTS)))
    return path


def run(trace: Path, fake: FakeServer | str, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON if there is one."""
    file = trace.with_name("result.json")
    url = fake if isinstance(fake, str) else fake.url
    code = main(["replay", str(trace), "--url", url, "--json", str(file), *words])
    return code, json.loads(file.read_text()) if file.exists() else {}


def test_a_trace_is_played_and_measured(
    trace: Path, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = trace.with_name("requests.jsonl")
    code, found = run(
        trace, fake, "--save-requests", str(saved), "--slo-ttft-ms", "1e6", "--slo-tbt-ms", "1e6"
    )
    assert code == 0
    assert [body["prompt"] for body in fake.bodies] == [prompt_of(one, 512) for one in REQUESTS]
    assert [body["max_tokens"] for body in fake.bodies] == [4, 5, 6, 7]
    assert all((body["model"], body["ignore_eos"]) == ("fake", True) for body in fake.bodies)
    assert (found["requests"], found["completed"], found["output_tokens"]) == (4, 4, 22)
    assert (found["rejected"], found["failed"], found["slo_share"]) == ({}, {}, 1.0)
    assert found["span_s"] >= 0.3
    assert found["goodput_rps"] == pytest.approx(4 / found["span_s"])
    wanted = sum(one.input_length for one in REQUESTS)
    assert found["prompt_tokens"] == {"wanted": wanted, "counted": wanted}
    assert found["hit_rate"]["all"] == 4 / wanted
    assert all(found[name]["p99"] > 0 for name in ("ttft_s", "tpot_s", "tbt_s", "e2e_s", "itl_s"))
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [line["request"]["timestamp"] for line in lines] == [100, 200, 300, 400]
    sent_s = [line["record"]["arrived_s"] - line["late_s"] for line in lines]
    assert sent_s == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-6)
    assert [len(line["record"]["token_times_s"]) for line in lines] == [4, 5, 6, 7]
    assert lines[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert "4 completed, 0 refused, 0 failed" in capsys.readouterr().out


def test_lengths_times_and_the_number_of_requests_can_be_changed(trace: Path, fake: FakeServer) -> None:
    words = ("--divide-lengths", "64", "--limit-requests", "2", "--speed", "50", "--model", "other")
    code, found = run(trace, fake, *words)
    assert (code, found["requests"]) == (0, 2)
    assert [(len(body["prompt"].split()), body["max_tokens"]) for body in fake.bodies] == [(9, 1), (9, 1)]
    assert fake.bodies[0]["model"] == "other"
    assert found["config"]["divide_lengths"] == 64


def test_a_server_that_refuses_ignore_eos_is_asked_without_it(trace: Path, fake: FakeServer) -> None:
    fake.takes_ignore_eos = False
    code, found = run(trace, fake, "--limit-requests", "1")
    assert (code, found["completed"]) == (0, 1)
    assert "ignore_eos" not in fake.bodies[0]


def test_what_goes_wrong_is_counted_by_its_cause(trace: Path, fake: FakeServer) -> None:
    async def broken() -> Any:
        yield event({"choices": [{"text": " word"}]})

    async def late() -> Any:
        yield event({"choices": [{"text": " word"}]})
        yield event({"error": {"message": "out of luck"}})

    async def strange() -> Any:
        yield 'data: {"choices": [1, 2]}\n\n'

    answers = {4: refused(429, "queue_full"), 5: broken(), 6: late(), 7: strange()}

    def answer(body: dict[str, Any]) -> Response | None:
        found = answers.get(body["max_tokens"])
        return found if found is None or isinstance(found, Response) else StreamingResponse(found)

    fake.answers = answer
    code, found = run(trace, fake)
    assert code == 1
    assert (found["requests"], found["completed"], found["slo_share"]) == (4, 0, 0.0)
    assert found["rejected"] == {"HTTP 429 queue_full": 1}
    causes = "\n".join(found["failed"])
    assert sum(found["failed"].values()) == 3
    assert "broke off" in causes
    assert "the server ended the answer: out of luck" in causes
    assert "an event of another form" in causes


def test_an_answer_of_tokens_without_text_is_an_answer(trace: Path, fake: FakeServer) -> None:
    async def silent() -> Any:
        yield event({"choices": [{"text": ""}]})
        yield "data: [DONE]\n\n"

    fake.answers = lambda body: StreamingResponse(silent())
    code, found = run(trace, fake)
    assert (code, found["completed"], found["output_tokens"]) == (0, 4, 4)


def test_a_request_without_a_whole_answer_in_time_has_failed(trace: Path, fake: FakeServer) -> None:
    fake.answers = lambda body: StreamingResponse(words(body, 60.0)) if body["max_tokens"] == 4 else None
    code, found = run(trace, fake, "--patience-s", "0.5")
    assert (code, found["completed"], found["failed"]) == (0, 3, {"no whole answer within 0.5 s": 1})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1"),
        ("http://[", "no server answers at http://["),
        ("ftp://127.0.0.1", "no server answers at ftp://127.0.0.1"),
    ],
)
def test_a_wrong_url_is_named(trace: Path, url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, url) == (2, {})
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": {"data": []}}, "lists no model; name one with --model"),
        ({"models": [1]}, "does not list its models as the OpenAI API does"),
        ({"answers": lambda body: PlainTextResponse("hello")}, "does not stream as the OpenAI API does"),
        ({"answers": lambda body: refused(401, "x")}, "refuses a completion: no x (HTTP 401)"),
    ],
)
def test_a_server_that_is_no_openai_server_is_refused(
    trace: Path, fake: FakeServer, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    assert run(trace, fake) == (2, {})
    assert words in capsys.readouterr().err


def test_a_server_that_does_not_answer_a_completion_is_told() -> None:
    broken = httpx.MockTransport(Mock(side_effect=httpx.ReadError("reset")))
    with (
        httpx.Client(base_url="http://x", transport=broken) as client,
        pytest.raises(UserError, match="the server at http://x does not answer a completion: reset"),
    ):
        _probe(client, "http://x", {})


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ('{"error": {"code": "queue_full", "type": "t"}}', "HTTP 503 queue_full"),
        ('{"error": {"type": "overloaded"}}', "HTTP 503 overloaded"),
        ('{"error": "no"}', "HTTP 503"),
        ("<html>", "HTTP 503"),
    ],
)
def test_a_refusal_is_counted_by_its_status_and_word(body: str, cause: str) -> None:
    assert _refusal_of(httpx.Response(503, text=body)) == cause


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--speed", "0"), "'--speed'"),
        (("--speed", "nan"), "'--speed'"),
        (("--divide-lengths", "3"), "take a divisor of 512"),
        (("--slo-tbt-ms", "0"), "'--slo-tbt-ms'"),
    ],
)
def test_a_wrong_option_is_named(
    trace: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "http://127.0.0.1:1", *words) == (2, {})
    assert message in capsys.readouterr().err


def test_prompts_that_would_become_equal_are_not_sent(
    tmp_path: Path, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "many.jsonl"
    trace.write_bytes(write_trace(Trace([TraceRequest(0, 1024, 1, [7, 8 + n]) for n in range(300)])))
    assert run(trace, fake, "--divide-lengths", "512") == (2, {})
    assert "divide by 256 at most" in capsys.readouterr().err
    assert run(trace, fake, "--divide-lengths", "512", "--limit-requests", "4")[0] == 0
    assert len({body["prompt"] for body in fake.bodies}) == 4


def test_a_lost_server_ends_the_run_and_what_came_before_counts(trace: Path, fake: FakeServer) -> None:
    """Of ten requests within a second, the server takes two and is gone."""
    requests = [TraceRequest(100.0 * n, 5, 2, [n]) for n in range(10)]
    stopped = threading.Event()

    def answer(body: dict[str, Any]) -> None:
        if len(fake.bodies) == 2 and not stopped.is_set():
            stopped.set()
            threading.Timer(0.05, fake.stop).start()

    fake.answers = answer

    async def play() -> Player:
        async with httpx.AsyncClient(base_url=fake.url) as client:
            player = Player(client, Trace(requests), replay_client.STREAMED, 30.0, lost_s=0.3)
            await player.play()
        return player

    player = asyncio.run(play())
    outcomes = [one.record.outcome for one in player.played]
    assert outcomes.count("completed") >= 2
    assert "failed" in outcomes
    assert player.sent == len(player.played) < 10
    assert player.stopped == "the server has taken no connection for 0.3 s"


def test_after_ctrl_c_what_has_ended_is_kept(
    trace: Path, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers = lambda body: StreamingResponse(words(body, 60.0)) if body["max_tokens"] == 7 else None

    def interrupt() -> None:
        assert wait_until(lambda: len(fake.bodies) == 4, 30)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    code, found = run(trace, fake)
    assert (code, found["requests"], found["completed"]) == (130, 3, 3)
    assert "interrupted; requests that had not ended: 1" in capsys.readouterr().err
