"""Hints over HTTP: what the conductor is asked, what the client is told, and that a hint fails no request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mooncake_lite import messages as m
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway import hints
from mooncake_lite.gateway.bodies import parse_completion
from mooncake_lite.gateway.cluster_view import ClusterState, ClusterView
from mooncake_lite.gateway.problems import Unavailable
from mooncake_lite.gateway.prompt_work import PromptWork
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.model.tokenizer import Tokenizer
from store.keys import block_digests, prefix_keys
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, FakeCluster, answer, write_settings
from tests.mooncake_lite.gateway.test_process import settings_file
from tests.mooncake_lite.gateway.test_service import bearer

if TYPE_CHECKING:
    import openai

IDS = list(range(2, 202))
"""Three full blocks and a part."""

CHAT = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog 0123456789 " * 10}]


def given(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/v1/kv/hints", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize(
    "named",
    [
        {"prompt": IDS},
        {"prompt": CHAT[0]["content"]},
        {"messages": CHAT},
        {"messages": CHAT, "add_special_tokens": True, "cache_salt": "mine"},
    ],
)
def test_a_hint_names_the_blocks_of_a_request_with_the_same_prompt(
    http: httpx.Client, cluster: FakeCluster, named: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in named else "/v1/completions"
    assert http.post(path, json={**named, "max_tokens": 1}).status_code == 200
    request = cluster.wait_for(m.Submit).request
    told = given(http, verb="retain", seconds=30, **named)

    hint = cluster.wait_for(m.HintArrived)
    assert (hint.keys, hint.digests) == (request.keys, request.digests)
    assert (hint.verb, hint.seconds, hint.class_id, hint.session) == ("retain", 30, request.class_id, "")
    count = len(request.keys)
    assert count >= 2
    assert told == {
        "object": "kv.hint", "verb": "retain", "outcome": "accepted", "blocks": count, "affected": count,
        "lasts_s": 30.0, "reason": "as asked",
    }  # fmt: skip


def test_another_salt_names_other_blocks(http: httpx.Client, cluster: FakeCluster) -> None:
    for salt in ("", "mine", "yours"):
        given(http, verb="demote", prompt=IDS, cache_salt=salt)
    named = [set(hint.keys) for hint in cluster.all_of(m.HintArrived)]
    assert [len(keys) for keys in named] == [3, 3, 3]
    assert len(set.union(*named)) == 9


@pytest.mark.parametrize("outcome", ["accepted", "clipped", "deferred", "rejected"])
def test_every_outcome_reaches_the_client(
    http: httpx.Client, cluster: FakeCluster, outcome: m.HintOutcome
) -> None:
    cluster.hint_outcome = outcome
    try:
        told = given(http, verb="share", copies=2, session="agent")
    finally:
        cluster.hint_outcome = "accepted"
    hint = cluster.wait_for(m.HintArrived)
    assert (hint.verb, hint.copies, hint.session, hint.keys) == ("share", 2, "agent", [])
    assert told["outcome"] == outcome


def test_a_prompt_counts_beside_a_session_whatever_the_latest_prompt_of_the_session_was(
    http: httpx.Client, cluster: FakeCluster
) -> None:
    given(http, verb="pin", prompt=IDS, session="agent")
    hint = cluster.wait_for(m.HintArrived)
    assert (len(hint.keys), hint.session) == (3, "agent")
    assert given(http, verb="pin", prompt=IDS[:63], session="agent")["outcome"] == "rejected"
    assert len(cluster.all_of(m.HintArrived)) == 1


def test_a_prompt_without_a_full_block_is_rejected_and_the_conductor_is_not_asked(
    http: httpx.Client, cluster: FakeCluster
) -> None:
    told = given(http, verb="pin", prompt=IDS[:63])
    assert (told["outcome"], told["blocks"], told["affected"]) == ("rejected", 0, 0)
    assert "no full block" in told["reason"]
    given(http, verb="pin", prompt=IDS[:64])
    assert [len(hint.keys) for hint in cluster.all_of(m.HintArrived)] == [1]


def test_a_long_body_names_the_same_blocks(http: httpx.Client, cluster: FakeCluster) -> None:
    """More than 32 KiB are the work of a process."""
    for padding in (0, 40_000):
        given(http, verb="prefetch", seconds=2.5, prompt=IDS, user="x" * padding)
    short, long = cluster.all_of(m.HintArrived)
    assert (short.keys, short.digests, short.seconds) == (long.keys, long.digests, long.seconds)
    reply = http.post("/v1/kv/hints", json={"verb": "pin", "prompt": IDS * 3, "user": "x" * 40_000})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_tenants_have_sessions_of_their_own_and_a_stranger_has_none(start: Start) -> None:
    keys = {"alice": {"key": "a-key", "class": "batch"}, "bob": {"key": "b-key"}}
    gateway, cluster = start(tenants=json.dumps(keys))
    body = {"verb": "pin", "session": "agent"}
    assert gateway.http.post("/v1/kv/hints", json=body).status_code == 401
    for key in ("a-key", "b-key"):
        request = {"prompt": IDS, "max_tokens": 2, "session": "agent", "kv_hints": {"demote": True}}
        assert gateway.http.post("/v1/completions", json=request, headers=bearer(key)).status_code == 200
        assert gateway.http.post("/v1/kv/hints", json=body, headers=bearer(key)).status_code == 200
    submits = [each.request for each in cluster.all_of(m.Submit)]
    assert [(each.tenant, each.session) for each in submits] == [("alice", "agent"), ("bob", "agent")]
    told = [(hint.verb, hint.tenant, hint.class_id) for hint in cluster.all_of(m.HintArrived)]
    assert told == [("demote", "alice", 2), ("pin", "alice", 2), ("demote", "bob", 1), ("pin", "bob", 1)]
    higher = gateway.http.post(
        "/v1/kv/hints", json=body, headers=bearer("a-key") | {"x-service-class": "interactive"}
    )
    assert (higher.status_code, higher.json()["error"]["param"]) == (400, "x-service-class")


# ---------------------------------------------------------------------------------- in a request


def left_by(submit: m.Submit, answer: list[int]) -> tuple[list[int], list[int]]:
    """Keys and digests of the full blocks with KV: the last token of an answer was never an input."""
    tokens = [*submit.body.token_ids, *answer[:-1]]
    return prefix_keys(tokens, 64, submit.body.salt), block_digests(tokens, 64)


@pytest.mark.parametrize("stream", [False, True])
def test_hints_in_a_request_are_about_its_prompt_and_its_answer(
    client: openai.OpenAI, cluster: FakeCluster, stream: bool
) -> None:
    cluster.behaviour = lambda self, submit: answer(self, submit, IDS[:57])
    more = {"session": "agent", "kv_hints": {"retain": 30, "share": 2, "demote": False}}
    reply: Any = client.completions.create(
        model="default", prompt=IDS, max_tokens=57, stream=stream, extra_body=more
    )
    if stream:
        *before, reply = list(reply)
        assert not any(hasattr(chunk, "kv_hints") for chunk in before)
        assert reply.choices[0].finish_reason == "stop"

    submit = cluster.wait_for(m.Submit)
    assert submit.request.session == "agent"
    share, retain = cluster.all_of(m.HintArrived)
    assert (share.verb, share.copies, retain.verb, retain.seconds) == ("share", 2, "retain", 30)
    for hint in (share, retain):
        assert (hint.keys, hint.digests) == left_by(submit, IDS[:57])
        assert hint.session == "agent"
        assert len(hint.keys) == 4
    assert [told["verb"] for told in reply.kv_hints] == ["share", "retain"]
    assert reply.kv_hints[1]["affected"] == 4
    assert "as asked" in reply.kv_hints[1]["reason"]


def test_hints_in_a_long_body_are_given_too(http: httpx.Client, cluster: FakeCluster) -> None:
    """More than 32 KiB are the work of a process."""
    every = {"share": 2, "prefetch": 1, "demote": True, "pin": 0, "retain": 2.5}
    body = {"prompt": IDS, "max_tokens": 2, "kv_hints": every, "user": "x" * 40_000}
    reply = http.post("/v1/completions", json=body)
    assert [hint["verb"] for hint in reply.json()["kv_hints"]] == list(every)
    told = [(hint.verb, hint.seconds, hint.copies) for hint in cluster.all_of(m.HintArrived)]
    assert told == [
        ("share", None, 2), ("prefetch", 1, 1), ("demote", None, 1), ("pin", 0, 1), ("retain", 2.5, 1)
    ]  # fmt: skip


def test_the_last_token_of_an_answer_completes_no_block(client: openai.OpenAI, cluster: FakeCluster) -> None:
    cluster.behaviour = lambda self, submit: answer(self, submit, IDS[:56])  # 256 tokens with the prompt
    client.completions.create(model="default", prompt=IDS, max_tokens=56, extra_body={"kv_hints": {"pin": 1}})
    assert len(cluster.wait_for(m.HintArrived).keys) == 3


def test_an_answer_without_hints_says_nothing_of_them(http: httpx.Client, cluster: FakeCluster) -> None:
    for body in ({}, {"kv_hints": {}}, {"kv_hints": None, "session": None}):
        reply = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1, **body})
        assert "kv_hints" not in reply.json()
    assert not cluster.all_of(m.HintArrived)


def test_a_request_that_fails_gives_no_hint(http: httpx.Client, cluster: FakeCluster) -> None:
    cluster.behaviour = lambda self, submit: self.to_gateway(m.Fail(submit.request.request_id, "g", "lost"))
    body = {"prompt": IDS, "max_tokens": 1, "kv_hints": {"retain": 5}}
    assert http.post("/v1/completions", json=body).status_code == 500
    assert not cluster.all_of(m.HintArrived)


def test_an_answer_is_whole_although_the_conductor_says_nothing_to_its_hints(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "IN_REQUEST_LIMIT_S", 0.05)
    gateway, cluster = start()

    def answer_and_fall_silent(cluster: FakeCluster, submit: m.Submit) -> None:
        answer(cluster, submit, IDS[:3])
        cluster.silent = True

    cluster.behaviour = answer_and_fall_silent
    body = {"prompt": IDS, "max_tokens": 3, "kv_hints": {"demote": True, "retain": 5}}
    reply = gateway.http.post("/v1/completions", json=body)
    cluster.silent = False
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 3
    told = [(hint["verb"], hint["outcome"], hint["reason"]) for hint in reply.json()["kv_hints"]]
    reason = "the conductor has not answered for 0.05 s"
    assert told == [("demote", "rejected", reason), ("retain", "rejected", reason)]


@pytest.mark.quick
@pytest.mark.parametrize("lost", [False, True])
def test_a_conductor_that_is_gone_is_not_waited_for(run_dir: Path, lost: bool) -> None:
    settings_file(run_dir)
    cluster = FakeCluster(run_dir)
    view = ClusterView(read_settings(run_dir), lambda reason, grace_s: None)

    async def ask() -> None:
        running = asyncio.create_task(view.run())
        while view.state is not ClusterState.READY:
            await asyncio.sleep(0.01)
        cluster.silent = True
        view._silence_s = 0.05 if lost else LIMIT_S
        try:
            hint = m.HintArrived("h", "gateway-0", "pin", [1], [1])
            await hints.give_hint(view, hint, LIMIT_S if lost else 0.05)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            view.sockets.close()

    with pytest.raises(Unavailable, match="silent for more than" if lost else "not answered for 0.05 s"):
        asyncio.run(ask())
    cluster.close()


# ---------------------------------------------------------------------------------- wrong bodies


@pytest.fixture(scope="module")
def work(model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PromptWork:
    run_dir = tmp_path_factory.mktemp("run")
    write_settings(run_dir, model_folder)
    return PromptWork(read_settings(run_dir), tokenizer)


PIN = {"verb": "pin", "prompt": "x"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "x"}, "verb", "missing required field `verb`"),
        ({"verb": "keep", "prompt": "x"}, "verb", "Invalid enum value 'keep'"),
        ({"verb": "pin"}, "prompt", "give prompt or messages, or else a session"),
        ({**PIN, "messages": CHAT}, "prompt", "give prompt or messages, or else a session"),
        ({"verb": "pin", "prompt": ["x", "y"]}, "prompt[0]", "Expected `int`"),
        ({"verb": "pin", "messages": []}, "messages", "at least one is needed"),
        ({"verb": "pin", "session": "s" * 257}, "session", "the length of session must be at most 256"),
        ({**PIN, "seconds": -1}, "seconds", "seconds=-1 must be at least 0"),
        ({**PIN, "seconds": 86_401}, "seconds", "seconds=86401 must be at most 86400"),
        ({**PIN, "seconds": "30"}, "seconds", "Expected `float | null`, got `str`"),
        ({**PIN, "copies": 2}, "copies", "copies belongs to share, not to pin"),
        ({**PIN, "verb": "demote", "seconds": 2}, "seconds", "seconds belongs to prefetch, pin, retain, not"),
        ({**PIN, "verb": "share", "copies": 0}, "copies", "copies=0 must be at least 1"),
        ({**PIN, "tools": [{}]}, "tools", "tools is not supported"),
        ({"verb": "pin", "prompt": [10**6]}, "prompt[0]", "token id 1000000 is not in the vocabulary"),
        ({"verb": "pin", "prompt": [5] * 512}, "prompt", "maximum context length is 512 tokens"),
    ],
)
def test_a_wrong_hint_is_refused_in_one_line(
    work: PromptWork, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        work.do("hint", "h", json.dumps(body).encode())
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"kv_hints": {"retian": 5}}, "kv_hints", "unknown field `retian`"),
        ({"kv_hints": {"retain": -1}}, "kv_hints.retain", "Expected `float` >= 0"),
        ({"kv_hints": {"retain": True}}, "kv_hints.retain", "got `bool`"),
        ({"kv_hints": {"share": 1.5}}, "kv_hints.share", "got `float`"),
        ({"kv_hints": []}, "kv_hints", "got `array`"),
        ({"session": ""}, "session", "the length of session must be at least 1"),
        ({"session": "a", "prompt": ["x", "y"]}, "session", "belongs to one prompt, and prompt has 2"),
        ({"kv_hints": {"pin": 0}, "prompt": ["x", "y"]}, "kv_hints", "one prompt, and prompt has 2"),
    ],
)
def test_a_request_with_a_wrong_hint_is_refused_in_one_line(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(json.dumps({"prompt": "x", **fields}).encode())
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.quick
def test_hints_are_given_in_the_order_of_the_verbs_and_3_0_is_3() -> None:
    hints = {"retain": 3, "demote": True, "share": 2.0, "pin": 0, "prefetch": 1.5}
    ask = parse_completion(json.dumps({"prompt": "x", "kv_hints": hints}).encode())
    assert list(ask.hints.items()) == [
        ("share", 2), ("prefetch", 1.5), ("demote", True), ("pin", 0), ("retain", 3)
    ]  # fmt: skip


def test_a_hint_at_a_gateway_that_is_not_ready_is_refused_with_503(start: Start) -> None:
    gateway, cluster = start(ready=False, status=m.ClusterStatus(False, "waiting for rank 2"))
    gateway.wait_health(503)
    reply = gateway.http.post("/v1/kv/hints", json={"verb": "pin", "session": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "service_unavailable")
    assert not cluster.all_of(m.HintArrived)
