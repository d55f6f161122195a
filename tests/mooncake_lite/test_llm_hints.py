"""Hints to `LLM`: on the pages of this process, which has no pool, and as requests to a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_lite import LLM, SamplingParams
from mooncake_lite.errors import ClusterError, RequestError
from mooncake_lite.gateway.answer_types import HintAnswer
from tests.cluster.tiny import tiny_folder
from tests.mooncake_lite.test_llm import of_a_server

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def document(number: int) -> list[int]:
    """Two full blocks and half a block: 10 of the 42 pages."""
    return [10 + number, 8, 7, 6] * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("qwen3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["hash", "radix"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(folder), kv_cache_bytes="1MiB", threads=1, prefix_sharing=request.param)


def cached(llm: LLM, number: int) -> int:
    """Ask about a document; return how many of its first 128 tokens were there."""
    (output,) = llm.generate([*document(number), 5], PARAMS)
    return min(128, output.num_cached_tokens)


def flood(llm: LLM, first: int = 50, count: int = 8) -> None:
    for number in range(first, first + count):
        cached(llm, number)


def outcome(answer: HintAnswer) -> tuple[str, int, int]:
    return answer.outcome, answer.blocks, answer.affected


def test_retained_blocks_outlast_all_others_until_their_time_is_over(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [cached(llm, 1), cached(llm, 2)] == [0, 0]
    told = llm.retain(document(1), seconds=1000)
    assert (outcome(told), told.lasts_s) == (("accepted", 2, 2), 1000)
    flood(llm)
    assert llm.retain(document(1), seconds=5).outcome == "accepted"  # a shorter time changes nothing
    assert [cached(llm, 1), cached(llm, 2)] == [128, 0]
    now = time.monotonic()
    monkeypatch.setattr("mooncake_lite.llm.time.monotonic", lambda: now + 999)
    flood(llm)
    assert cached(llm, 1) == 128
    monkeypatch.setattr("mooncake_lite.llm.time.monotonic", lambda: now + 1001)
    flood(llm)
    assert cached(llm, 1) == 0


def test_a_retained_begin_stays_longer_than_an_end_that_it_shares(llm: LLM) -> None:
    begin = document(1)[:64]
    for end, seconds in ((20, 1000), (21, 1e-6)):
        llm.generate([*begin, *[end] * 70], PARAMS)
        assert outcome(llm.retain([*begin, *[end] * 70], seconds=seconds)) == ("accepted", 2, 2)
    flood(llm)
    assert outcome(llm.retain([*begin, *[20] * 70], seconds=1)) == ("accepted", 2, 2)
    assert outcome(llm.retain([*begin, *[21] * 70], seconds=1)) == ("clipped", 2, 1)
    llm._answering._rank.state.prefix.check()  # type: ignore[attr-defined]


def test_retained_blocks_give_way_to_a_request_that_needs_their_pages(llm: LLM) -> None:
    flood(llm, count=4)
    for number in range(50, 54):
        assert llm.retain(document(number), seconds=60).outcome != "rejected"
    outputs = llm.generate([[9] * 320, [11] * 320], PARAMS)  # 21 pages each: all that there are
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
    assert llm.retain(document(53), seconds=60).outcome == "rejected"


def test_a_hint_about_a_session_is_about_its_latest_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, session="agent")
    llm.generate([document(1), document(2)], params)
    assert outcome(llm.retain(session="agent", seconds=60)) == ("accepted", 2, 2)
    flood(llm)
    assert [cached(llm, 2), cached(llm, 1)] == [128, 0]
    assert outcome(llm.retain(document(9), session="agent", seconds=60)) == ("rejected", 2, 0)
    unknown = llm.retain(session="another", seconds=60)
    assert outcome(unknown) == ("rejected", 0, 0)
    assert "'another'" in unknown.reason


def test_what_one_process_cannot_do_is_rejected_with_the_reason(llm: LLM) -> None:
    cached(llm, 1)
    for told, why in (
        (llm.share(document(1), copies=2), "no stores"),
        (llm.prefetch(document(1), seconds=3), "no SSD tier"),
        (llm.demote(document(1)), "by their last use"),
        (llm.pin(document(1)), "retain keeps blocks longest"),
    ):
        assert outcome(told) == ("rejected", 2, 0)
        assert why in told.reason
    assert outcome(llm.retain(document(7), seconds=60)) == ("rejected", 2, 0)
    assert outcome(llm.retain([5, 6], seconds=60)) == ("rejected", 0, 0)


def test_a_process_without_a_prefix_cache_rejects_hints(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_bytes="1MiB", threads=1, enable_prefix_caching=False)
    cached(llm, 1)
    assert outcome(llm.retain(document(1), seconds=60)) == ("rejected", 0, 0)


def test_answers_are_the_same_with_hints_and_without(folder: Path) -> None:
    plain, hinted = (LLM(str(folder), kv_cache_bytes="1MiB", threads=1, batch_invariant=True) for _ in "ab")
    hints: list[Callable[..., HintAnswer]] = [
        partial(hinted.retain, seconds=60),
        hinted.demote,
        hinted.pin,
        hinted.share,
        hinted.prefetch,
    ]
    for round in range(2):
        for number in range(8):
            (output,) = hinted.generate(document(number), PARAMS)
            assert output.outputs == plain.generate(document(number), PARAMS)[0].outputs
            hints[(number + round) % 5](document(number))


def test_wrong_hints_are_refused_as_by_a_cluster(llm: LLM) -> None:
    with pytest.raises(RequestError, match="seconds=-1"):
        llm.retain(document(1), seconds=-1)
    with pytest.raises(RequestError, match="seconds=nan must be a finite number"):
        llm.retain(document(1), seconds=float("nan"))
    with pytest.raises(RequestError, match="give prompt or messages, or else a session"):
        llm.pin()


def test_a_cluster_is_asked_as_http_md_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "object": "kv.hint", "verb": "pin", "outcome": "clipped", "blocks": 3, "affected": 2, "lasts_s": 9.0,
        "reason": "limit",
    }  # fmt: skip
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=told)

    llm = of_a_server(monkeypatch, httpx.Response(400, json={"error": {"message": "no such verb"}}))
    with pytest.raises(ClusterError, match="no such verb"):
        llm.pin("text")
    monkeypatch.setattr(
        "mooncake_lite.llm.open_client",
        lambda *_: httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server"),
    )
    chat = [{"role": "user", "content": "hello"}]
    assert llm.pin("text", seconds=9) == HintAnswer("pin", "clipped", 3, 2, 9.0, "limit")
    llm.share(chat, copies=2)
    llm.prefetch(session="agent")
    llm.demote([1, 2])
    assert bodies == [
        ("/v1/kv/hints", {"verb": "pin", "prompt": "text", "seconds": 9}),
        ("/v1/kv/hints", {"verb": "share", "messages": chat, "copies": 2}),
        ("/v1/kv/hints", {"verb": "prefetch", "session": "agent"}),
        ("/v1/kv/hints", {"verb": "demote", "prompt": [1, 2]}),
    ]
