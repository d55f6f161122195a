"""A client that ends its sending half after a whole request gets its whole answer, unless it leaves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import pytest

from mooncake_lite import messages as m
from mooncake_lite.gateway.half_closed import BEGINNING, AnswerAhead
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import FakeCluster, GatewayProcess, answer, posted, rest_of

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def ask(version: str = "1.1", **fields: Any) -> bytes:
    """A request to generate, as it goes over the wire."""
    body = json.dumps({"prompt": "hello", **fields}).encode()
    return posted("/v1/completions", body, version)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[socket.socket]:
    with gateway.connect() as connection:
        yield connection


def answers_in(said: bytes, count: int = 1) -> list[tuple[int, bytes]]:
    """(status, body) of each response, read as strictly as h11 reads."""
    found = []
    reader = h11.Connection(h11.CLIENT)
    reader.receive_data(said)
    reader.receive_data(b"")
    for number in range(count):
        if number:
            reader.start_next_cycle()
        reader.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        reader.send(h11.EndOfMessage())
        response, body = reader.next_event(), bytearray()
        assert isinstance(response, h11.Response)
        while isinstance(data := reader.next_event(), h11.Data):
            body += data.data
        assert isinstance(data, h11.EndOfMessage)
        found.append((response.status_code, bytes(body)))
    assert reader.trailing_data[0] == b""
    return found


def begin(num_tokens: int) -> Callable[[FakeCluster, m.Submit], None]:
    """The first tokens of an answer, and no more."""

    def behave(cluster: FakeCluster, submit: m.Submit) -> None:
        for index in range(num_tokens):
            cluster.tokens(
                1, m.Tokens(submit.request.request_id, index, submit.body.token_ids[index : index + 1])
            )

    return behave


def go_on(cluster: FakeCluster) -> None:
    submit = cluster.wait_for(m.Submit)
    cluster.do(lambda: answer(cluster, submit, submit.body.token_ids))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_whole_answer_comes_to_a_client_that_sends_no_more(
    client: socket.socket, cluster: FakeCluster, version: str
) -> None:
    cluster.behaviour = begin(1)
    client.sendall(ask(version))
    client.shutdown(socket.SHUT_WR)

    ahead = client.recv(1) + client.recv(1)  # the probes
    go_on(cluster)
    ((status, body),) = answers_in(ahead + rest_of(client))

    assert ahead == BEGINNING[:2]
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")


def test_a_whole_stream_comes_to_a_client_that_sends_no_more(
    client: socket.socket, cluster: FakeCluster
) -> None:
    cluster.behaviour = begin(2)
    client.sendall(ask(stream=True))
    client.shutdown(socket.SHUT_WR)

    said = b""
    while not said.endswith(b"\r\n00"):  # the probes
        said += client.recv(1)
    go_on(cluster)
    ((status, body),) = answers_in(said + rest_of(client))

    *events, last = body.decode().split("\n\n")[:-1]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert (status, last, "".join(texts)) == (200, "data: [DONE]", "hello")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sent_no_more_and_leaves_later_is_cancelled(
    client: socket.socket, cluster: FakeCluster, stream: bool
) -> None:
    cluster.behaviour = begin(1)
    client.sendall(ask(stream=stream))
    client.shutdown(socket.SHUT_WR)
    submit = cluster.wait_for(m.Submit)
    client.recv(1)
    client.close()

    cluster.wait_cancelled(submit.request.request_id)


def test_requests_that_were_sent_before_are_all_answered_and_the_connection_closes(
    client: socket.socket,
) -> None:
    client.sendall(ask() + HEALTH + ask(stream=True) + HEALTH + b"GET /hea")
    client.shutdown(socket.SHUT_WR)

    assert [status for status, _ in answers_in(rest_of(client), 4)] == [200] * 4


def test_half_a_body_has_no_answer(client: socket.socket) -> None:
    client.sendall(ask()[:-1])
    client.shutdown(socket.SHUT_WR)

    assert rest_of(client) == b""


def test_a_stop_is_told_to_a_client_that_sends_no_more(start: Start) -> None:
    gateway, cluster = start()
    cluster.behaviour = begin(1)
    with gateway.connect() as client:
        client.sendall(ask())
        client.shutdown(socket.SHUT_WR)
        ahead = client.recv(1)
        cluster.tell_gateway(m.Stop("Ctrl-C", 3.0))
        ((status, body),) = answers_in(ahead + rest_of(client))

    assert (status, json.loads(body)["error"]["code"]) == (503, "service_unavailable")
    gateway.finish()  # by itself


@pytest.mark.quick
@pytest.mark.parametrize("num_ahead", range(12))
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_bytes_sent_ahead_are_those_of_the_answer(num_ahead: int, version: bytes) -> None:
    said = bytearray()
    server = AnswerAhead()
    server.receive_data(b"GET / HTTP/%s\r\nHost: localhost\r\n\r\n" % version)
    assert isinstance(server.next_event(), h11.Request)
    for event in (
        h11.Response(status_code=200, headers=[]),
        h11.Data(data=b"first"),
        h11.Data(data=b"second"),
        h11.EndOfMessage(),
    ):
        for _ in range(num_ahead):
            said += server.next_byte()
        said += server.send(event)

    assert answers_in(bytes(said)) == [(200, b"firstsecond")]
    assert server.next_byte() == b""
