"""The gateway's beginning and end: what it waits for, what it survives, and how it goes."""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.exposition import GatewayGauges
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.launch.rank_process import RankFile
from tests.mooncake_lite.gateway.conftest import Spawn, Start
from tests.mooncake_lite.gateway.fake_cluster import (
    LIMIT_S,
    FakeCluster,
    GatewayProcess,
    answer,
    echo,
    first_token_only,
    posted,
)
from tests.patience import patient, wait_until
from transport.messaging.curve import CurveKeys

BODY = {"prompt": "hello", "stream": True}


def pings(gateway: GatewayProcess) -> list[tuple[int, bytes]]:
    """Status and body of both forms of /ping."""
    replies = [gateway.http.request(method, "/ping") for method in ("GET", "POST")]
    return [(reply.status_code, reply.content) for reply in replies]


def data_of(lines: Any) -> dict[str, Any]:
    """The next event's data; lines is an iterator that the caller keeps."""
    return dict(json.loads(next(line for line in lines if line).removeprefix("data: ")))


def test_health_is_503_with_the_reason_until_the_cluster_is_ready(start: Start) -> None:
    gateway, cluster = start(ready=False, status=m.ClusterStatus(False, "waiting for rank 2 (decode)"))
    cluster.wait_for(m.GatewayHello)
    while gateway.wait_health(503)["detail"] != "waiting for rank 2 (decode)":
        pass

    for path in ("/v1/completions", "/reset_prefix_cache"):
        refused = gateway.http.post(path, json=BODY)
        assert refused.status_code == 503
        assert "rank 2" in refused.json()["error"]["message"]
    assert pings(gateway) == [(503, b""), (503, b"")]

    cluster.tell_gateway(m.ClusterStatus(True, ""))
    ready = {"status": "ok", "detail": "ready", "weights": "float32", "degraded": []}
    assert gateway.wait_health(200) == ready
    assert pings(gateway) == [(200, b""), (200, b"")]


def test_health_stays_200_and_lists_what_does_not_work_as_it_should(start: Start) -> None:
    gateway, cluster = start()
    full = "rank 3 (store): the SSD tier cannot write: No space left on device (104 blocks dropped)"
    gateway.wait_health(200)
    cluster.tell_gateway(m.ClusterStatus(True, "", [full]))
    while not (degraded := gateway.wait_health(200)["degraded"]):
        pass
    assert degraded == [full]
    cluster.tell_gateway(m.ClusterStatus(True, ""))
    while gateway.wait_health(200)["degraded"]:
        pass


def test_health_is_503_while_no_rank_is_left_for_a_duty_although_requests_are_taken_and_streams_go_on(
    start: Start,
) -> None:
    gateway, cluster = start()
    why = "no rank is left that can prefill"
    cluster.behaviour = first_token_only
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        data_of(lines)
        begun = cluster.wait_for(m.Submit)
        cluster.tell_gateway(m.ClusterStatus(True, why, ["rank 1 (prefill) died"], serves=False))
        health = gateway.wait_health(503)
        assert (health["status"], health["detail"]) == ("unavailable", why)
        assert pings(gateway) == [(503, b""), (503, b"")]
        assert "mooncake_lite_ready 0.0" in gateway.http.get("/metrics").text.splitlines()

        cluster.behaviour = lambda cluster, submit: cluster.to_gateway(
            m.Reject(submit.request.request_id, why, 4.2, "unavailable")
        )
        for body in (BODY, {"prompt": ["hello", "world"]}):
            refused = gateway.http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            error = refused.json()["error"]
            expected = {"message": why, "type": "server_error", "param": None, "code": "service_unavailable"}
            assert error == expected

        cluster.tell_gateway(m.ClusterStatus(True, "ready"))
        assert gateway.wait_health(200)["status"] == "ok"
        cluster.behaviour = echo
        assert gateway.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        rest = m.Tokens(begun.request.request_id, 1, begun.body.token_ids[1:], "stop")
        cluster.do(lambda: cluster.tokens(2, rest))
        assert data_of(lines)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.quick
def test_before_the_first_answer_of_the_conductor_its_metrics_are_infinitely_old(run_dir: Path) -> None:
    """Not as old as the gateway: an alert on their age must not wait when none have ever come."""
    settings_file(run_dir)
    view = ClusterView(read_settings(run_dir), lambda reason, grace_s: None)
    values = {
        family.name: family.samples[0].value
        for family in GatewayGauges(view, "x").collect()
        if family.samples
    }
    view.disconnect()
    assert values["mooncake_lite_cluster_metrics_age_seconds"] == math.inf


@pytest.mark.parametrize("silent", [False, True])
def test_a_flood_of_scrapes_and_the_pings_ask_the_conductor_once_per_kept_time(
    spawn: Spawn, silent: bool
) -> None:
    gateway, cluster = spawn()

    def age_s() -> float:
        reply = gateway.http.get("/metrics")
        assert reply.status_code == 200
        return float(re.findall(r"^mooncake_lite_cluster_metrics_age_seconds (\S+)$", reply.text, re.M)[0])

    assert wait_until(lambda: age_s() < math.inf, LIMIT_S), "the conductor never answered"
    cluster.forget()
    cluster.silent = silent

    def asked() -> list[float]:
        return [item.asked_at_s for item in cluster.all_of(m.MetricsRequest)]

    def scrape(_: int) -> None:
        while len(asked()) < 3:
            assert age_s() < patient(1.0) or silent

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(scrape, range(8)))
    assert all(later - one >= 0.9 for one, later in pairwise(asked()))
    cluster.silent = False


def test_the_hello_names_where_tokens_go(start: Start, run_dir: Path) -> None:
    _, cluster = start()

    hello = cluster.wait_for(m.GatewayHello)

    assert hello == m.GatewayHello("gateway-0", [f"ipc://{run_dir}/tokens-gateway-0"])


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "silent"])
def test_a_conductor_that_vanishes_ends_open_requests_and_turns_health_503(
    start: Start, killed: bool
) -> None:
    gateway, cluster = start({"ping_s": 0.2}, dead_after_s=2.0)
    cluster.behaviour = first_token_only
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        data_of(lines)
        if killed:
            cluster.close()
        else:
            cluster.silent = True
        error = data_of(lines)["error"]
        assert (error["code"], error["type"]) == ("service_unavailable", "server_error")
        assert list(lines)[-1:] != ["data: [DONE]"]
    assert gateway.wait_health(503)["status"] == "lost"
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 503
    assert gateway.http.get("/metrics").status_code == 200
    if not killed:
        cluster.silent = False
        gateway.wait_ready()


def test_a_stop_ends_open_requests_with_an_error_and_the_process_within_the_grace(spawn: Spawn) -> None:
    gateway, cluster = spawn()
    cluster.behaviour = first_token_only
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        data_of(lines)
        told = time.monotonic()
        cluster.tell_gateway(m.Stop("Ctrl-C", 3.0))
        assert "the service is stopping: Ctrl-C" in data_of(lines)["error"]["message"]

    assert gateway.finish() == (0, "")
    assert time.monotonic() - told < patient(3.0)


def test_sigterm_ends_a_gateway_quickly_even_beside_an_open_request(spawn: Spawn) -> None:
    gateway, cluster = spawn()
    cluster.behaviour = lambda cluster, submit: None
    body = json.dumps(BODY).encode()
    with gateway.connect() as client:
        client.sendall(posted("/v1/completions", body))
        submit = cluster.wait_for(m.Submit)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.finish(patient(3.0)) == (0, "")
        assert client.recv(20).startswith(b"HTTP/1.1 503")

    cluster.wait_cancelled(submit.request.request_id)


def test_a_request_whose_body_is_still_coming_hears_that_the_service_is_stopping(spawn: Spawn) -> None:
    gateway, _ = spawn()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with gateway.connect() as client:
        client.sendall(head)
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # the body is being waited for
        gateway.process.send_signal(signal.SIGTERM)
        said = client.makefile("rb").read()

    assert said.startswith(b"HTTP/1.1 503 ")
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"].startswith("the service is stopping")
    assert gateway.finish() == (0, "")


def test_a_client_hears_why_the_gateway_was_told_to_end(spawn: Spawn) -> None:
    gateway, cluster = spawn()
    cluster.behaviour = lambda cluster, submit: None
    why = "rank 2 (decode) died: its process 77 ended"
    body = json.dumps(BODY).encode()
    with gateway.connect() as client:
        client.sendall(posted("/v1/completions", body))
        cluster.wait_for(m.Submit)
        RankFile(gateway.run_dir, 0, "steward").write("failed", why)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.finish(patient(3.0)) == (0, "")
        assert f"the service is stopping: {why}" in client.makefile().read()


def test_a_gateway_ends_when_its_parent_is_killed(run_dir: Path, model_folder: Path) -> None:
    cluster = FakeCluster(run_dir)
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.mooncake_lite.gateway.fake_cluster import GatewayProcess\n"
        "gateway = GatewayProcess(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "gateway.wait_ready(); print(gateway.process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir), str(model_folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    watched = os.pidfd_open(pid)
    parent.kill()
    parent.communicate(timeout=LIMIT_S)

    assert select.select([watched], [], [], LIMIT_S)[0], "the gateway outlived its parent"
    os.close(watched)
    cluster.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_used_is_one_line_and_exit_code_2(
    run_dir: Path, model_folder: Path, host: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = GatewayProcess(run_dir, model_folder, port=taken.getsockname()[1], host=host)
        code, written = gateway.finish()

    assert code == 2
    assert len(written.splitlines()) == 1
    assert host in written


def test_a_folder_without_a_tokenizer_is_one_line_and_exit_code_2(run_dir: Path, tmp_path: Path) -> None:
    code, written = GatewayProcess(run_dir, tmp_path).finish()

    assert code == 2
    assert len(written.splitlines()) == 1
    assert "tokenizer.json" in written


def settings_file(run_dir: Path, **changes: Any) -> Path:
    fields = {
        "config": ServeConfig().to_dict(), "model_folder": "/nowhere", "served_id": "x",
        "max_model_len": 64, "fingerprint": "00", "weights": "float32",
    }  # fmt: skip
    path = run_dir / "gateway.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(fields | changes))
    return path


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "xyz"},
        {"max_model_len": 1},
        {"max_model_len": "x"},
        {"extra": 1},
        {"config": {"no": 1}},
    ],
)
def test_settings_that_make_no_sense_are_refused(run_dir: Path, changes: dict[str, Any]) -> None:
    settings_file(run_dir)
    assert read_settings(run_dir).limits.open_requests == 1024
    settings_file(run_dir, **changes)
    with pytest.raises(ConfigError, match=r"gateway\.json"):
        read_settings(run_dir)


@pytest.mark.quick
def test_settings_that_others_can_read_are_refused(run_dir: Path) -> None:
    path = settings_file(run_dir)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP)

    with pytest.raises(ConfigError, match="640"):
        read_settings(run_dir)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(run_dir / "nowhere")


def test_ranks_on_other_hosts_send_tokens_over_tcp_with_the_clusters_key(start: Start) -> None:
    keys = CurveKeys.generate()
    gateway, cluster = start(keys=keys, curve=asdict(keys))
    cluster.tell_gateway(m.OpenTokens("127.0.0.1"))
    hello = cluster.wait_for(m.GatewayHello, lambda hello: len(hello.token_endpoints) == 2)
    ipc, tcp = hello.token_endpoints
    assert ipc.startswith("ipc://")
    assert tcp.startswith("tcp://127.0.0.1:")

    def over_tcp(cluster: FakeCluster, submit: m.Submit) -> None:
        cluster.tokens(7, m.Tokens(submit.request.request_id, 0, submit.body.token_ids, "stop"), tcp)

    cluster.behaviour = over_tcp
    reply = gateway.http.post("/v1/completions", json={"prompt": "hello"})
    assert reply.json()["choices"][0]["text"] == "hello"


def test_a_stranger_without_the_key_sends_no_tokens(start: Start) -> None:
    keys, wrong = CurveKeys.generate(), CurveKeys.generate()
    stranger = CurveKeys(keys.server_public, "", wrong.client_public, wrong.client_secret)
    gateway, cluster = start(keys=stranger, curve=asdict(keys))
    cluster.tell_gateway(m.OpenTokens("127.0.0.1"))
    tcp = cluster.wait_for(m.GatewayHello, lambda hello: len(hello.token_endpoints) == 2).token_endpoints[1]

    def both(cluster: FakeCluster, submit: m.Submit) -> None:
        cluster.tokens(7, m.Tokens(submit.request.request_id, 0, submit.body.token_ids[::-1], "stop"), tcp)
        answer(cluster, submit, submit.body.token_ids)

    cluster.behaviour = both
    reply = gateway.http.post("/v1/completions", json={"prompt": "hello"})
    assert reply.json()["choices"][0]["text"] == "hello"


def test_a_gateway_without_keys_says_so_and_goes_on(spawn: Spawn) -> None:
    gateway, cluster = spawn()
    cluster.forget()
    cluster.tell_gateway(m.OpenTokens("127.0.0.1"))

    assert len(cluster.wait_for(m.GatewayHello).token_endpoints) == 1
    reply = gateway.http.post("/v1/completions", json={"prompt": "hello"})
    assert reply.status_code == 200
    gateway.process.terminate()
    code, written = gateway.finish()
    assert code == 0
    assert len(written.splitlines()) == 1
    assert "CURVE" in written


def test_malformed_messages_are_dropped_and_counted(start: Start, run_dir: Path) -> None:
    gateway, _ = start()
    context = zmq.Context()
    for identity in (b"rank-9", b"nobody"):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"ipc://{run_dir}/tokens-gateway-0")
        dealer.send(b"\x01garbage")
        dealer.close()
    context.term()

    wanted = "mooncake_lite_gateway_zmq_dropped_total 2.0"
    assert wait_until(lambda: wanted in gateway.http.get("/metrics").text.splitlines(), LIMIT_S)
    assert gateway.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("index", [0, 1], ids=["before the first text", "in a stream"])
def test_a_mistake_inside_is_500_for_the_client_and_one_line_for_the_log(spawn: Spawn, index: int) -> None:
    gateway, cluster = spawn()

    def nonsense(cluster: FakeCluster, submit: m.Submit) -> None:
        ids = [*submit.body.token_ids[:index], 2**60]
        for at, token in enumerate(ids):
            cluster.tokens(1, m.Tokens(submit.request.request_id, at, [token]))

    cluster.behaviour = nonsense
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as stream:
        assert stream.status_code == (200 if index else 500)
        assert "internal error: OverflowError" in stream.read().decode()
    cluster.wait_for(m.RequestCancelled)
    gateway.process.terminate()
    code, written = gateway.finish()

    assert code == 0
    assert len(written.splitlines()) == 1
    assert "this is a bug: OverflowError" in written
