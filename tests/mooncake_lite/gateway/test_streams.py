"""What happens to an answer between the ranks' tokens and the client's text, on a live gateway."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

import httpx
import pytest

import mooncake_lite
from mooncake_lite import messages as m
from mooncake_lite.model.tokenizer import Tokenizer
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, FakeCluster, GatewayProcess, answer, posted
from tests.patience import patient


def complete(http: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    reply = http.post(
        "/v1/completions", json={"prompt": "hello", "max_tokens": 100, **fields}, headers=headers
    )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def events(http: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "hello", "max_tokens": 100, "stream": True, **fields}
    reply = http.post("/v1/completions", json=body, headers=headers)
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stop_string_across_tokens_ends_the_answer_and_cancels_the_work(
    http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    ids = [token for char in "all good, END of it and more" for token in tokenizer.encode(char)]

    def talk_on(cluster: FakeCluster, submit: m.Submit) -> None:
        for index, token in enumerate(ids):
            cluster.tokens(1, m.Tokens(submit.request.request_id, index, [token]))

    cluster.behaviour = talk_on
    reply = complete(http, stop=["END", "never"])
    chunks = events(http, stop="END")

    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("all good, ", "stop")
    assert reply["usage"]["completion_tokens"] == len("all good, END")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "all good, "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    for request_id in (reply["id"], chunks[0]["id"]):
        cluster.wait_cancelled(request_id)


def test_no_stop_string_is_looked_for_before_min_tokens(
    http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    ids = [token for char in "one END two END three" for token in tokenizer.encode(char)]
    cluster.behaviour = lambda cluster, submit: answer(cluster, submit, ids)
    early = len("one E")  # a stop string that begins before and ends after it does not count either

    assert complete(http, stop="END")["choices"][0]["text"] == "one "
    assert complete(http, stop="END", min_tokens=early)["choices"][0]["text"] == "one END two "


def test_an_answer_that_ended_by_itself_is_not_cancelled(http: httpx.Client, cluster: FakeCluster) -> None:
    complete(http)
    events(http)
    cluster.behaviour = lambda cluster, submit: cluster.to_gateway(
        m.Fail(submit.request.request_id, "broken")
    )
    assert http.post("/v1/completions", json={"prompt": "hello"}).status_code == 500

    http.get("/metrics")  # answered by the conductor: whatever was sent before has arrived
    assert not cluster.all_of(m.RequestCancelled)


def test_tokens_of_two_ranks_may_overtake_each_other_and_come_twice(
    http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the lazy dog jumps")

    def shuffled(cluster: FakeCluster, submit: m.Submit) -> None:
        last = len(ids) - 1
        cluster.tokens(2, m.Tokens(submit.request.request_id, last + 1, [], "stop"))
        for index in (last, *range(1, last), 1):
            cluster.tokens(2, m.Tokens(submit.request.request_id, index, [ids[index]]))
        cluster.tokens(1, m.Tokens(submit.request.request_id, 0, ids[:1], None, {"dram": 3}))
        cluster.tokens(1, m.Tokens(submit.request.request_id, 0, ids[:2], None, {"dram": 99}))

    cluster.behaviour = shuffled
    reply = complete(http)

    assert reply["choices"][0]["text"] == "the lazy dog jumps"
    assert reply["usage"]["completion_tokens"] == len(ids)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_a_character_over_several_tokens_is_shown_whole(
    http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    text = "naïve 猫 🦊!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    cluster.behaviour = lambda cluster, submit: answer(cluster, submit, ids)

    texts = [chunk["choices"][0]["text"] for chunk in events(http)]

    assert "".join(texts) == text
    assert "�" not in "".join(texts)


def test_half_a_character_at_the_end_is_a_replacement(
    http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("a🦊")[:-1]
    cluster.behaviour = lambda cluster, submit: answer(cluster, submit, ids, "length")

    assert complete(http)["choices"][0]["text"] == tokenizer.decode(ids) == "a�"


def test_the_trace_is_there_for_those_who_ask(http: httpx.Client) -> None:
    trace = {"x-mooncake-lite-trace": "1"}

    reply = complete(http, trace)
    with_usage = events(http, trace, stream_options={"include_usage": True})
    without = events(http, trace)

    prompt_tokens = reply["usage"]["prompt_tokens"]
    expected = {
        "cached_tokens": {"dram": 16, "ssd": 4},
        "spans": [
            {"stage": "prefill", "rank": 1, "seconds": 0.25, "nbytes": 0, "count": prompt_tokens},
            {"stage": "decode", "rank": 2, "seconds": 0.5, "nbytes": 4096, "count": 3},
        ],
    }  # fmt: skip
    for told in (reply, with_usage[-1], without[-1]):
        assert told["mooncake_lite"] == expected
    assert with_usage[-1]["choices"] == []
    assert [chunk for chunk in with_usage[:-1] if "mooncake_lite" in chunk] == []
    assert "mooncake_lite" not in complete(http)
    assert "usage" not in without[-1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_client_that_leaves_is_cancelled_within_a_second(
    gateway: GatewayProcess, cluster: FakeCluster, stream: bool, tokens_first: bool
) -> None:
    def begin(cluster: FakeCluster, submit: m.Submit) -> None:
        if tokens_first:
            cluster.tokens(1, m.Tokens(submit.request.request_id, 0, [70]))

    cluster.behaviour = begin
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()
    with gateway.connect() as client:
        client.sendall(posted("/v1/completions", body))
        submit = cluster.wait_for(m.Submit)
        if stream and tokens_first:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    left = time.monotonic()

    cluster.wait_cancelled(submit.request.request_id)
    assert time.monotonic() - left < patient(1.0)


def test_a_client_that_leaves_while_many_tokens_are_ready_stops_the_writing(
    gateway: GatewayProcess, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    """Nothing more is written to a lost connection, which asyncio would complain of on stderr."""
    token = tokenizer.encode("a")[0]

    def many_at_once(cluster: FakeCluster, submit: m.Submit) -> None:
        for index in range(400):
            cluster.tokens(1, m.Tokens(submit.request.request_id, index, [token]))

    cluster.behaviour = many_at_once
    body = json.dumps({"prompt": "hello", "max_tokens": 500, "stream": True}).encode()
    with gateway.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        client.sendall(posted("/v1/completions", body))
        assert client.recv(20)

    cluster.wait_for(m.RequestCancelled)  # the gateway's stderr must be empty at its end


def test_a_request_for_no_token_is_answered_once_its_prompt_is_computed(
    http: httpx.Client, cluster: FakeCluster
) -> None:
    def tokens_in_metrics() -> list[str]:
        names = (
            "generation_tokens_total",
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
        )
        wanted = tuple(f"mooncake_lite_{name} " for name in names)
        return [line for line in http.get("/metrics").text.splitlines() if line.startswith(wanted)]

    before = tokens_in_metrics()
    reply = complete(http, prompt=[5] * 30, max_tokens=0)
    only, usage = events(http, prompt=[5] * 30, max_tokens=0, stream_options={"include_usage": True})
    body = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 0}
    chat = http.post("/v1/chat/completions", json=body).json()

    assert cluster.wait_for(m.Submit).request.max_tokens == 0
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert (only["choices"][0]["text"], only["choices"][0]["finish_reason"]) == ("", "length")
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["finish_reason"]) == ("", "length")
    assert reply["usage"] == usage["usage"] == {
        "prompt_tokens": 30, "completion_tokens": 0, "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 20},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }  # fmt: skip
    assert tokens_in_metrics() == before
    assert not cluster.all_of(m.RequestCancelled)


def test_texts_go_to_tokens_and_back(http: httpx.Client, cluster: FakeCluster, tokenizer: Tokenizer) -> None:
    reply = http.post("/tokenize", json={"prompt": "hello 🦊"}).json()
    assert reply["tokens"] == tokenizer.encode("hello 🦊")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 512)
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "hello 🦊"}

    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert cluster.wait_for(m.Submit).body.token_ids == chat["tokens"]


def test_metrics_that_the_conductor_cannot_send_are_an_error_500_until_it_can(
    http: httpx.Client, cluster: FakeCluster
) -> None:
    cluster.problem = "MetricsReply has 9 bytes, the limit is 8"
    refused = http.get("/metrics")
    cluster.problem = ""

    assert refused.status_code == 500
    error = refused.json()["error"]
    assert (error["message"], error["code"]) == ("MetricsReply has 9 bytes, the limit is 8", "request_failed")
    assert http.get("/metrics").status_code == 200


def test_metrics_show_the_cluster_and_the_gateway(http: httpx.Client, cluster: FakeCluster) -> None:
    cluster.metrics = [
        m.Metric("prefix_cache_hits_total", "counter", "Tokens reused", {"tier": "dram"}, 64.0),
        m.Metric("prefix_cache_hits_total", "counter", "Tokens reused", {"tier": "ssd"}, 3.0),
        m.Metric("num_requests_running", "gauge", "Running", {"rank": "2"}, 5.0),
        m.Metric(
            "schedule_decision_seconds", "histogram", "Decisions", {}, 3.0,
            [(1e-4, 2), (float("inf"), 3)], 0.5,
        ),
        m.Metric("gateway_open_requests", "gauge", "Taken by the gateway", {}, 77.0),
        m.Metric("no name!", "gauge", "Not for Prometheus", {}, 1.0),
    ]  # fmt: skip
    events(http)
    complete(http)

    # A page of metrics does not wait longer than a second for the conductor.
    until = time.monotonic() + LIMIT_S
    while 'tier="dram"' not in (text := http.get("/metrics").text):
        assert time.monotonic() < until

    for line in (
        'mooncake_lite_prefix_cache_hits_total{tier="dram"} 64.0',
        'mooncake_lite_prefix_cache_hits_total{tier="ssd"} 3.0',
        'mooncake_lite_num_requests_running{rank="2"} 5.0',
        'mooncake_lite_schedule_decision_seconds_bucket{le="0.0001"} 2.0',
        'mooncake_lite_schedule_decision_seconds_bucket{le="+Inf"} 3.0',
        "mooncake_lite_schedule_decision_seconds_count 3.0",
        "mooncake_lite_gateway_open_requests 0.0",
        f'mooncake_lite_server_info{{model="tiny-model",version="{mooncake_lite.__version__}"}} 1.0',
        "mooncake_lite_ready 1.0",
        "mooncake_lite_degraded 0.0",
    ):
        assert line in text.splitlines()
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"
    }
    assert values["mooncake_lite_time_to_first_token_seconds_count"] >= 2
    assert values["mooncake_lite_inter_token_latency_seconds_count"] >= 2
    assert values["mooncake_lite_e2e_request_latency_seconds_count"] >= 2
    assert values['mooncake_lite_request_success_total{finished_reason="stop"}'] >= 2
    assert values['mooncake_lite_http_requests_total{path="/v1/completions",status="200"}'] >= 2
    assert values["mooncake_lite_generation_tokens_total"] >= 2
    assert values["mooncake_lite_uptime_seconds"] > 0
    for channel in ("control", "tokens"):
        assert values[f'mooncake_lite_gateway_zmq_bytes_total{{channel="{channel}",direction="in"}}'] > 0
    assert values['mooncake_lite_gateway_zmq_bytes_total{channel="control",direction="out"}'] > 0
    assert values["mooncake_lite_gateway_zmq_dropped_total"] == 0
    assert text.count("# TYPE mooncake_lite_gateway_open_requests ") == 1
    assert "no name!" not in text
