"""transport.messaging.lines: questions and answers over a Unix socket, and what a bad peer cannot do."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.descriptors import no_descriptor_left
from transport.errors import ChannelError, WireError
from transport.messaging.lines import Line, LineServer
from transport.wire import Decoder, encode

pytestmark = pytest.mark.quick
LIMIT_S = 5.0
MAX_BYTES = 4 * 2**20


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    text: str = ""


NOTES = Decoder(Note, MAX_BYTES)


@pytest.fixture
def server() -> Iterator[LineServer]:
    server = LineServer(NOTES, MAX_BYTES)
    yield server
    server.close()


def arrived(server: LineServer, count: int = 1) -> list[tuple[str, Note]]:
    found: list[tuple[str, Note]] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count and time.monotonic() < deadline:
        assert select.select([server.fd], [], [], LIMIT_S)[0], "nothing comes"
        found += server.receive()
    return found


def line_to(server: LineServer) -> Line:
    return Line(server.name, NOTES, MAX_BYTES)


def test_a_question_is_answered(server: LineServer) -> None:
    line = line_to(server)
    for number in range(3):
        line.send(Note(number), LIMIT_S)
        ((peer, note),) = arrived(server)
        assert note == Note(number)
        assert server.send(peer, Note(number + 10))
        assert line.receive(LIMIT_S) == Note(number + 10)
    line.close()


def test_peers_are_told_apart_by_names_that_no_channel_has(server: LineServer) -> None:
    lines = [line_to(server) for _ in range(3)]
    for number, line in enumerate(lines):
        line.send(Note(number), LIMIT_S)
    found = dict(arrived(server, 3))
    assert len(found) == 3
    assert not any(peer.isprintable() for peer in found)
    for peer, note in found.items():
        server.send(peer, note)
    assert [line.receive(LIMIT_S).number for line in lines] == [0, 1, 2]
    assert not server.send("\0nobody", Note(1))
    for line in lines:
        line.close()


def test_large_messages_pass_in_pieces(server: LineServer) -> None:
    line, text = line_to(server), "x" * 3 * 2**20
    got: list[Note] = []

    def ask() -> None:
        line.send(Note(1, text), LIMIT_S)
        got.append(line.receive(LIMIT_S))

    asker = threading.Thread(target=ask)
    asker.start()
    ((peer, note),) = arrived(server)
    assert note.text == text
    server.send(peer, Note(2, text))
    while asker.is_alive():
        if select.select([server.fd], [], [], 0.05)[0]:
            assert server.receive() == []
    assert got == [Note(2, text)]
    line.send(Note(3), LIMIT_S)
    assert arrived(server) == [(peer, Note(3))]
    line.close()


def test_a_peer_is_read_again_when_its_answer_has_gone_however_little_had_to_wait(server: LineServer) -> None:
    line, answer = line_to(server), Note(2, "x" * 40_000)
    line.send(Note(1), LIMIT_S)
    ((peer, _),) = arrived(server)
    server._peers[peer].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.send(peer, answer)
    assert server._peers[peer].unsent
    got: list[Note] = []
    reader = threading.Thread(target=lambda: got.append(line.receive(LIMIT_S)))
    reader.start()
    while reader.is_alive():
        if select.select([server.fd], [], [], 0.05)[0]:
            assert server.receive() == []
    assert got == [answer]
    line.send(Note(3), LIMIT_S)
    assert arrived(server) == [(peer, Note(3))]
    line.close()


def test_an_end_is_noticed_on_both_sides(server: LineServer) -> None:
    line = line_to(server)
    line.send(Note(1), LIMIT_S)
    ((peer, _),) = arrived(server)
    line.close()
    while not (ended := server.ended()):
        assert select.select([server.fd], [], [], LIMIT_S)[0]
        server.receive()
    assert ended == [peer]
    assert not server.send(peer, Note(1))
    other = line_to(server)
    server.close()
    with pytest.raises(ChannelError):
        other.receive(LIMIT_S)
    other.close()


def test_no_answer_is_an_error_after_its_time(server: LineServer) -> None:
    line = line_to(server)
    with pytest.raises(ChannelError, match="no answer"):
        line.receive(0.05)
    line.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", MAX_BYTES + 1),
        struct.pack("!I", 5) + b"\x01\xff\xff\xff\xff",
        (frame := struct.pack("!I", len(encode(Note(1)))) + encode(Note(1))) + frame,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too large", "malformed", "two at once", "foreign"],
)
def test_garbage_ends_its_own_connection_and_is_counted(server: LineServer, data: bytes) -> None:
    good = line_to(server)
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(f"\0{server.name}")
        bad.sendall(data)
        while not server.dropped:
            assert select.select([server.fd], [], [], LIMIT_S)[0]
            assert server.receive() == []
        assert bad.recv(1) == b""
    assert server.dropped == 1
    good.send(Note(7), LIMIT_S)
    assert arrived(server)[0][1] == Note(7)
    good.close()


def test_another_user_is_refused(server: LineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    line = line_to(server)
    while not server.strangers:
        assert select.select([server.fd], [], [], LIMIT_S)[0]
        server.receive()
    with pytest.raises(ChannelError):
        line.receive(LIMIT_S)
    line.close()


@pytest.mark.parametrize("has_reserve", [True, False])
def test_connections_without_a_descriptor_are_refused_and_the_server_rests(
    server: LineServer, has_reserve: bool
) -> None:
    old = line_to(server)
    old.send(Note(1), LIMIT_S)
    ((peer, _),) = arrived(server)
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_descriptor_left())
        if not has_reserve:  # the descriptor that was freed went to another thread
            server._reserve.close()
            stack.callback(server._reserve._take)
            stack.callback(os.close, os.dup(0))
        for sock in sockets:
            sock.connect(f"\0{server.name}")
        looks = 0
        until = time.monotonic() + 0.3
        while (left := until - time.monotonic()) > 0:
            if select.select([server.fd], [], [], left)[0]:
                assert server.receive() == []
                looks += 1
        assert looks <= 2 * len(sockets), "it spins"
        server.send(peer, Note(2))
        assert old.receive(LIMIT_S) == Note(2), "those that are connected are served"
    assert server.refused >= 1
    if has_reserve:
        assert [sock.recv(1) for sock in sockets] == [b""] * 5
    for sock in sockets:
        sock.close()
    new = line_to(server)
    new.send(Note(3), LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    found: list[tuple[str, Note]] = []
    while not found and time.monotonic() < deadline:
        select.select([server.fd], [], [], 0.05)
        found = server.receive()
    assert [note for _, note in found] == [Note(3)]
    new.close()
    old.close()


def test_a_server_raises_the_limit_on_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        LineServer(NOTES, MAX_BYTES).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_cannot_be_sent_raises_at_its_sender(server: LineServer) -> None:
    line = line_to(server)
    with pytest.raises(WireError):
        line.send(Note(1, "x" * (MAX_BYTES + 1)), LIMIT_S)
    line.close()
    with pytest.raises(ChannelError, match="nobody listens"):
        Line("no such name", NOTES, MAX_BYTES)
