"""A client that is refused while it sends its body gets the answer, and cannot send for long."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from mooncake_lite.config.origins import Origins
from mooncake_lite.gateway import connection
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, GatewayProcess
from tests.patience import wait_until

LONG = b" " * (24 << 20)
JSON = {"Content-Type": "application/json"}
CLOSE = {"Connection": "close"}
Client = Callable[[str, dict[str, str], bytes], tuple[int, bytes]]


def with_urllib(url: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(request, timeout=LIMIT_S)
    with caught.value as error:
        return error.code, error.read()


def with_http_client(url: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    asked = httpx.URL(url)
    client = http.client.HTTPConnection(asked.host, asked.port, timeout=LIMIT_S)
    try:
        client.request("POST", asked.path, body, {**headers, **CLOSE})
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def with_httpx(url: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    pieces: Iterator[bytes] = (body[at : at + 2**20] for at in range(0, len(body), 2**20))
    answer = httpx.post(url, content=pieces, headers={**headers, **CLOSE}, timeout=LIMIT_S, trust_env=False)
    return answer.status_code, answer.content


def with_a_socket(url: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """As HTTP/1.0, which says with no header that the connection ends; reads until it does."""
    asked = httpx.URL(url)
    lines = [f"POST {asked.path} HTTP/1.0", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((asked.host, asked.port or 80), LIMIT_S) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("client", [with_urllib, with_http_client, with_httpx, with_a_socket])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", JSON, 413),
        ("/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
        ("/v1/nothing", JSON, 404),
        ("/tokenize", {**JSON, "Origin": "https://evil.example"}, 403),
    ],
)
def test_every_client_reads_why_its_long_body_is_refused(
    gateway: GatewayProcess, client: Client, path: str, headers: dict[str, str], status: int
) -> None:
    found, body = client(gateway.url + path, headers, LONG)
    assert found == status
    assert json.loads(body)["error"]["message"]


# ---------------------------------------------------------------------------------- the limits


@contextmanager
def refusing() -> Iterator[tuple[str, int]]:
    """A server in this process that answers without a look at a body: its address."""
    kind = connection.connection_type(10.0, 10.0, Origins())
    config = uvicorn.Config(
        PlainTextResponse("no", 413), http=kind, ws="none", lifespan="off", log_level="critical"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert wait_until(lambda: server.started, LIMIT_S)
            yield listener.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def sent_until_cut(
    address: tuple[str, int], header: bytes, piece: bytes, pause_s: float
) -> tuple[int, float]:
    """Send a body without end, and read nothing: the bytes and the seconds until the server cuts it off."""
    began, sent = time.monotonic(), 0
    with socket.create_connection(address, LIMIT_S) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n" + header + b"\r\n")
        assert client.recv(9) == b"HTTP/1.1 "
        while time.monotonic() - began < LIMIT_S:
            try:
                client.sendall(piece)
            except OSError:
                return sent, time.monotonic() - began
            sent += len(piece)
            time.sleep(pause_s)
    raise AssertionError("the client was not cut off")


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_a_refused_client_cannot_send_bytes_without_end(
    header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_BYTES", 2 << 20)
    with refusing() as address:
        sent, _ = sent_until_cut(address, header, bytes(1 << 18), 0.0)
    assert 2 << 20 <= sent < 32 << 20  # the kernels hold some more


def test_a_refused_client_cannot_send_slowly_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)
    with refusing() as address:
        _, took_s = sent_until_cut(address, b"Connection: close\r\n", b" ", 0.01)
    assert took_s >= 0.3
