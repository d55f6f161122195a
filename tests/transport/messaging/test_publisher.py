"""Numbered messages to listeners, gaps and replays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.patience import patient
from transport.errors import ChannelError
from transport.messaging.publisher import END, Publisher

pytestmark = pytest.mark.quick

LIMIT_MS = 20_000


@pytest.fixture
def listener() -> Iterator[Callable[[int, str], zmq.Socket]]:
    """Makes sockets that listen; they are closed behind the test."""
    context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def connected(kind: int, endpoint: str) -> zmq.Socket:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        if kind == zmq.SUB:
            socket.subscribe(b"kv-events")
        socket.connect(endpoint)
        return socket

    yield connected
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def replayed(asking: zmq.Socket, publisher: Publisher, first: bytes) -> list[tuple[int, bytes]]:
    """What a listener gets that asks as vLLM's do: REQ's empty frame, then eight bytes."""
    asking.send_multipart([b"", first])
    until = time.monotonic() + LIMIT_MS / 1000
    while not asking.poll(10):
        publisher.serve()
        assert time.monotonic() < until
    found = []
    while True:
        _, number, payload = asking.recv_multipart()
        if number == END:
            return found
        found.append((int.from_bytes(number, "big"), payload))


def test_messages_come_numbered_and_those_that_were_missed_come_again(
    listener: Callable[[int, str], zmq.Socket],
) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv-events", kept=3)
    try:
        publisher.publish(b"nobody listens")
        hearing = listener(zmq.SUB, publisher.endpoints[0])
        asking = listener(zmq.DEALER, publisher.endpoints[1])
        until = time.monotonic() + LIMIT_MS / 1000
        while not hearing.poll(10):  # a subscription takes its time, and PUB drops what is before it
            publisher.publish(b"again")
            assert time.monotonic() < until
        topic, first, payload = hearing.recv_multipart()
        assert (topic, payload) == (b"kv-events", b"again")
        assert int.from_bytes(first, "big") > 0
        while hearing.poll(0):
            hearing.recv_multipart()
        publisher.publish(b"last")
        last = int.from_bytes(hearing.recv_multipart()[1], "big") + 1

        for payload in (b"x", b"y", b"z"):
            publisher.publish(payload)
        kept = [(last, b"x"), (last + 1, b"y"), (last + 2, b"z")]
        assert replayed(asking, publisher, bytes(8)) == kept  # of older ones only three are kept
        assert replayed(asking, publisher, (last + 2).to_bytes(8, "big")) == kept[2:]
        assert replayed(asking, publisher, (last + 9).to_bytes(8, "big")) == []
        asking.send_multipart([b"no", b"question", b"at all"])
        assert replayed(asking, publisher, (last + 1).to_bytes(8, "big")) == kept[1:]
    finally:
        publisher.close()
        publisher.close()


def test_a_listener_that_is_not_there_keeps_nobody_waiting() -> None:
    def publish() -> None:
        publisher = Publisher("tcp://127.0.0.1:*", kept=10, hwm=1)
        for number in range(1000):
            publisher.publish(bytes([number % 256]) * 1000)
        publisher.serve()  # without replays: nothing to do
        publisher.close()

    publishing = threading.Thread(target=publish, daemon=True)
    publishing.start()
    publishing.join(patient(2))
    assert not publishing.is_alive()


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:1", "inproc://x", "5557"]
)
def test_an_endpoint_that_others_could_reach_is_refused(endpoint: str) -> None:
    with pytest.raises(ChannelError, match=r"use tcp://127\.0\.0\.1:PORT or ipc://PATH"):
        Publisher(endpoint)


def test_a_port_that_is_taken_is_named_and_a_socket_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "events"
    publisher = Publisher(f"ipc://{path}", "tcp://127.0.0.1:*")
    taken = publisher.endpoints[1]
    with pytest.raises(ChannelError, match=f"{taken} cannot be bound: Address already in use"):
        Publisher("tcp://127.0.0.1:*", taken)
    assert path.exists()
    publisher.close()
    assert not path.exists()
