"""Sides that others connect to: with few file descriptors they take what they can, and refuse the others."""

from __future__ import annotations

import resource
import secrets
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.patience import wait_until
from transport.bulk.sockets import BytesClient, BytesServer
from transport.channel import Hub, Spoke
from transport.errors import TransferError
from transport.messaging.lines import Line, LineServer
from transport.wire import Decoder

pytestmark = pytest.mark.quick

SECRET = secrets.token_bytes(32)
CROWD = 200
"""Connections of a test, with two descriptors each in its process: more than FEW allow, and fewer than any
server takes that has the descriptors."""

FEW = 256
LIMIT_S = 20.0


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


NOTES = Decoder(Note, max_bytes=1000)


@contextmanager
def soft_limit(count: int) -> Iterator[None]:
    """A process whose soft limit is `count`, until something raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hub_asked_in_a_crowd(folder: Path, crowd: Callable[..., None]) -> None:
    path = f"{folder}/hub"
    with Hub([f"ipc://{path}"], NOTES) as hub:
        crowd(path)
        with Spoke(f"ipc://{path}", "late", NOTES) as spoke:
            assert spoke.send(Note(5))
            assert wait_until(lambda: ("late", Note(5)) in hub.receive(0.05))


def lines_asked_in_a_crowd(folder: Path, crowd: Callable[..., None]) -> None:
    with closing(LineServer(NOTES, 1000)) as server:
        for _ in range(CROWD // 40):
            crowd(f"\0{server.name}", 40)  # 64 may wait until it accepts
            while select.select([server.fd], [], [], 0)[0]:
                server.receive()
        with closing(Line(server.name, NOTES, 1000)) as line:
            line.send(Note(5), LIMIT_S)
            assert wait_until(lambda: [note for _, note in server.receive()] == [Note(5)])


def bytes_asked_in_a_crowd(folder: Path, crowd: Callable[..., None]) -> None:
    with closing(BytesServer(SECRET)) as server:
        server.expose(7, bytearray(b"hello"), writable=False)
        crowd(server.address)
        assert read(server) == b"hello"


def read(server: BytesServer) -> bytes:
    with closing(BytesClient(*server.address, SECRET, timeout_s=LIMIT_S)) as client:
        into = bytearray(5)
        client.read(7, [(0, 5)], [into], LIMIT_S)
        return bytes(into)


@pytest.mark.parametrize("asked", [hub_asked_in_a_crowd, lines_asked_in_a_crowd, bytes_asked_in_a_crowd])
def test_a_server_serves_more_connections_than_its_soft_limit_allows(asked: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def crowd(address: Any, count: int = CROWD) -> None:
            family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
            for _ in range(count):
                stack.enter_context(socket.socket(family)).connect(address)

        with soft_limit(FEW):
            asked(tmp_path, crowd)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [("raise_limit", lambda: 2 * 3 + 1, "see ulimit -n"), ("MAX_CONNECTIONS", 3, "that is the limit")],
)
def test_a_server_of_bytes_closes_connections_beyond_half_of_the_descriptors_and_says_so_once(
    name: str, value: Any, hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"transport.bulk.sockets_server.{name}", value)
    with closing(BytesServer(SECRET)) as server, ExitStack() as stack:
        server.expose(7, bytearray(b"hello"), writable=False)
        inside = [stack.enter_context(socket.create_connection(server.address)) for _ in range(3)]
        for _ in range(4):
            with pytest.raises(TransferError):
                read(server)
        inside[1].close()
        assert wait_until(lambda: len(server._connections) == 2)
        assert read(server) == b"hello"
        server.check()
    lines = [record.message for record in caplog.records]
    assert lines == [f"more connections are refused: 3 are open ({hint})"]
