"""Every wrong request is an OpenAI error object, and the service goes on."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mooncake_lite import messages as m
from mooncake_lite.gateway.connection import HEAD_BYTES
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import (
    LIMIT_S,
    MAX_MODEL_LEN,
    SERVED_ID,
    FakeCluster,
    GatewayProcess,
    first_token_only,
    rest_of,
)
from tests.patience import wait_until

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    yield gateway.http
    # whatever was wrong before, the next request is served
    assert gateway.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {"messages": HELLO, "model": "gpt-4"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": "x"}, 400, "temperature", None),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": MAX_MODEL_LEN}, 400, "max_tokens",
         "context_length_exceeded"),
        ("/v1/completions", {"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "prompt[1]", None),
        ("/v1/completions", {"prompt": ["a"] * 65}, 400, "prompt", None),
        ("/tokenize", {}, 400, "prompt", None),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, 404, "model", "model_not_found"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", None),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens[0]", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_names_its_field(
    http: httpx.Client,
    cluster: FakeCluster,
    path: str,
    body: Any,
    status: int,
    param: str,
    code: Any,
    stream: bool,
) -> None:
    error = error_of(http.post(path, json={**body, "stream": stream}), status)

    assert (error["param"], error["code"]) == (param, code)
    openais_words = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, "
    assert error["message"].startswith(openais_words) is (code == "context_length_exceeded")
    assert not cluster.all_of(m.Submit)


def test_a_long_chat_is_told_how_long_it_is(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "0123456789" * 100}]

    error = error_of(http.post("/v1/chat/completions", json={"messages": long}), 400)

    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens. ")


def test_what_is_no_json_object_is_400(http: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error = error_of(http.post(path, content=b"[" * 50_000, headers=JSON), 400)
        assert error["type"] == "invalid_request_error"


def test_a_body_over_8_mib_is_413_with_and_without_a_length(http: httpx.Client) -> None:
    chunk = b" " * 2**20

    error = error_of(http.post("/v1/completions", content=chunk * 9, headers=JSON), 413)
    assert error["code"] == "body_too_large"
    error_of(http.post("/v1/completions", content=(chunk for _ in range(9)), headers=JSON), 413)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "Content-Type: '' must be application/json; with curl add -H 'Content-Type: application/json'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "must be application/json; with curl"),
        ({"Content-Type": "text/plain; application/json"}, "must be application/json"),
        (
            JSON | {"Content-Encoding": "gzip"},
            "Content-Encoding: 'gzip' is not supported; send the body as it is",
        ),
    ],
)
def test_a_body_that_is_not_marked_as_plain_json_is_415(
    http: httpx.Client, headers: dict[str, str], message: str
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error = error_of(http.post(path, content=b'{"prompt": "x"}', headers=headers), 415)
        assert message in error["message"]


def test_json_may_have_parameters_and_the_coding_identity(http: httpx.Client) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Content-Encoding": "identity"}
    assert http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_long_bodies_that_come_slowly_leave_room_for_shorter_ones(start: Start) -> None:
    gateway, _ = start({"bodies_bytes": 2**20})
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % 2**19
    quarter = json.dumps({"prompt": "x" * 2**18}).encode()

    http = gateway.http
    with gateway.connect() as slow:
        slow.sendall(head)
        assert slow.recv(100).startswith(b"HTTP/1.1 100 ")  # its half of the bytes is taken
        with gateway.connect() as second:
            second.sendall(head)
            assert second.recv(100).startswith(b"HTTP/1.1 429 ")  # before it is read
        for content in (quarter, (quarter[i : i + 4096] for i in range(0, len(quarter), 4096))):
            refused = http.post("/tokenize", content=content, headers=JSON)
            assert error_of(refused, 429)["message"].startswith("other bodies have 524288 of 1048576 bytes")
            assert refused.headers["retry-after"] == "1"
        fits = quarter[: 2**17] + b'"}'
        assert http.post("/tokenize", content=fits, headers=JSON).status_code == 200
    # Until the slow one is known to be gone.
    assert wait_until(
        lambda: http.post("/tokenize", content=quarter, headers=JSON).status_code != 429, LIMIT_S
    )


def test_a_path_that_is_not_there_is_404_and_a_wrong_method_405(http: httpx.Client) -> None:
    assert error_of(http.get("/v2/nothing"), 404)["type"] == "not_found_error"
    reply = http.get("/v1/chat/completions")
    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"


def test_the_api_key_guards_what_costs_and_not_the_health(start: Start) -> None:
    gateway, _ = start(api_key="secret")
    right = {"Authorization": "Bearer secret"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            error = error_of(gateway.http.post(path, json={"prompt": "x"}, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics"):
            error_of(gateway.http.get(path, headers=headers), 401)
    assert gateway.http.get("/v1/models", headers=right).json()["data"][0]["id"] == SERVED_ID
    assert gateway.http.post("/v1/completions", json={"prompt": "x"}, headers=right).status_code == 200
    assert gateway.http.get("/metrics", headers=right).status_code == 200
    for path in ("/health", "/version"):
        assert gateway.http.get(path).status_code == 200


def test_an_api_key_may_have_letters_beyond_ascii(start: Start) -> None:
    gateway, _ = start(api_key="schlüssel")
    for key, status in (("schlüssel", 200), ("schluessel", 401)):
        headers = {b"Authorization": f"Bearer {key}".encode()}
        assert gateway.http.get("/v1/models", headers=headers).status_code == status


def test_one_request_too_many_is_429_and_there_is_room_again_later(start: Start) -> None:
    gateway, cluster = start({"open_requests": 1})
    cluster.behaviour = first_token_only
    with gateway.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)  # kept: a stream whose iterator is gone is closed
        refused = gateway.http.post("/v1/completions", json={"prompt": "x"})
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
    cluster.wait_for(m.RequestCancelled)
    cluster.forget()
    assert gateway.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_request_without_a_token_for_too_long_fails_and_is_cancelled(start: Start) -> None:
    gateway, cluster = start({"token_timeout_s": 0.2})
    cluster.behaviour = lambda cluster, submit: None

    reply = gateway.http.post("/v1/completions", json={"prompt": "x"})

    assert "no token came for 0.2 s" in error_of(reply, 500)["message"]
    cluster.wait_for(m.RequestCancelled)


def test_headers_and_bodies_that_do_not_come_are_not_waited_for(start: Start) -> None:
    gateway, _ = start({"header_timeout_s": 0.3, "body_timeout_s": 0.3})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    with gateway.connect() as silent:
        assert silent.recv(100) == b""
    with gateway.connect() as half_a_header:
        half_a_header.sendall(head)
        assert half_a_header.recv(100) == b""
    with gateway.connect() as half_a_body:
        half_a_body.sendall(head + b"Content-Length: 10\r\n\r\n{")
        status, error = error_in(rest_of(half_a_body))  # the connection is closed: the rest is no new request
        assert (status, error["type"]) == (b"HTTP/1.1 408 Request Timeout", "invalid_request_error")


def error_in(said: bytes) -> tuple[bytes, dict[str, Any]]:
    """The status line of an answer, and its error object."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return head.split(b"\r\n")[0], dict(json.loads(body)["error"])


@pytest.mark.parametrize(
    "words",
    [
        b"garbage\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_object(
    http: httpx.Client, gateway: GatewayProcess, words: bytes
) -> None:
    status, error = error_in(gateway.said_to(words))

    assert status.startswith(b"HTTP/1.1 400")
    assert error == {
        "message": "this is not valid HTTP/1.1", "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip


SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "version", "lengths", "message"),
    [
        (
            "/v1/completions",
            "1.1",
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "contradict each other",
        ),
        ("/v2/nothing", "1.1", "Transfer-Encoding: chunked\r\nContent-Length: 0", "contradict each other"),
        ("/v1/completions", "1.0", "Transfer-Encoding: chunked", "HTTP/1.0 has no Transfer-Encoding"),
    ],
)
def test_a_request_of_two_lengths_is_refused_and_nothing_behind_it_is_read(
    http: httpx.Client, gateway: GatewayProcess, path: str, version: str, lengths: str, message: str
) -> None:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\n{lengths}\r\n\r\n"
    status, error = error_in(gateway.said_to(head.encode() + b"0\r\n\r\n" + SMUGGLED))

    assert status.startswith(b"HTTP/1.1 400")
    assert message in error["message"]


def test_a_target_may_be_a_whole_url(http: httpx.Client, gateway: GatewayProcess) -> None:
    url = f"http://127.0.0.1:{gateway.port}".encode()
    body = b'{"prompt": "hello"}'
    said = gateway.said_to(
        b"POST %s/v1/completions?x=1 HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%s"
        b"GET HTTP://x/v1/models/tiny%%2Dmodel HTTP/1.1\r\nHost: localhost\r\n\r\n"
        b"GET http://x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        % (url, b"Content-Type: application/json\r\n", len(body), body)
    )

    assert re.findall(rb"HTTP/1\.1 (\d+)", said) == [b"200", b"200", b"404"]
    assert b'"text":"hello"' in said
    assert b'"/ is not a path of this server"' in said


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (b"HEAD /health HTTP/1.1\r\nHost: localhost", 200, b"content-length: "),
        (b"HEAD /v1/completions HTTP/1.1\r\nHost: localhost", 405, b"allow: POST"),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost", 405, b"does not take OPTIONS"),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost", 404, b'"/* is not a path'),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: localhost", 404, b"not_found_error"),
        (b"BREW /health HTTP/1.1\r\nHost: localhost", 405, b"does not take BREW"),
        (b"GET /%68ealth HTTP/1.1\r\nHost: localhost", 200, b'"status":"ok"'),
        (b"GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: localhost", 404, b"not_found_error"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**20, 431, b"headers are too long"),
        (b"GET /health HTTP/1.0", 200, b'"status":"ok"'),
        (b"GET /health HTTP/1.1", 400, b"not valid HTTP"),
    ],
)
def test_an_unusual_request_gets_its_answer_or_an_error_object(
    http: httpx.Client, gateway: GatewayProcess, words: bytes, status: int, part: bytes
) -> None:
    said = gateway.said_to(words + b"\r\nConnection: close\r\n\r\n")

    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    assert part in said
    if body and status >= 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("length", "status"), [(HEAD_BYTES, 200), (HEAD_BYTES + 1, 431), (50_000, 431)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_headers_have_one_limit_however_they_arrive(
    http: httpx.Client, gateway: GatewayProcess, length: int, status: int, pieces: int
) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: %s\r\n\r\n"
    head %= b"a" * (length + 2 - len(head))
    with gateway.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, length, 1 + length // pieces):
            client.sendall(head[start : start + 1 + length // pieces])
        said = rest_of(client)

    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert (b'"the headers are too long; 16384 bytes are the limit"' in said) is (status == 431)


def test_a_client_that_waits_for_100_continue_gets_it_before_its_answer(
    http: httpx.Client, gateway: GatewayProcess
) -> None:
    body = b'{"prompt": "hello"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"
    )
    head += b"Content-Type: application/json\r\n"
    with gateway.connect() as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_breaks_after_its_answer_is_no_bug_of_ours(start: Start) -> None:
    gateway, _ = start()
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    with gateway.connect() as client:
        client.sendall(head)
        assert client.recv(65536).startswith(b"HTTP/1.1 404")  # who has no such path reads no body
        client.sendall(b"no number\r\n")
        rest_of(client)

    gateway.close()  # it has said nothing on stderr


def test_one_connection_too_many_is_told_so(start: Start) -> None:
    gateway, _ = start({"connections": 1})

    with gateway.connect():
        said = gateway.said_to(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")

    status, error = error_in(said)

    assert status.startswith(b"HTTP/1.1 503")
    assert error["message"] == "1 connections are open, which is the limit; come back later"
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")


def test_a_client_that_takes_nothing_for_too_long_loses_its_connection(start: Start) -> None:
    gateway, _ = start({"connections": 1, "write_timeout_s": 0.5})
    body = json.dumps({"prompt": "x" * 4 * 2**20}).encode()  # the answer is too long for the kernel's buffers
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)

    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(LIMIT_S)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(head + body)
        # Until then its place is taken.
        assert wait_until(lambda: gateway.http.get("/version").status_code != 503, LIMIT_S)
