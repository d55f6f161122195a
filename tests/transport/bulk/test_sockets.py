"""Bytes over plain TCP, no MPI: every byte arrives, nobody is trusted, nothing waits for ever."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.mpi import ROOT
from tests.patience import patient, wait_until
from transport.bulk import socket_path, sockets_server
from transport.bulk.batch import Batch
from transport.bulk.jobs import TransferJob
from transport.bulk.socket_io import Connection, greet
from transport.bulk.socket_path import SocketPath
from transport.bulk.sockets import BytesClient, BytesServer
from transport.bulk.sockets_messages import EAGER_BYTES, MAX_RANGES, Read, Refused, Write
from transport.errors import (
    BadTransfer,
    ChannelError,
    EngineClosed,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from transport.wire import encode

pytestmark = pytest.mark.quick

SECRET = secrets.token_bytes(32)
MIB = 2**20
LIMIT_S = 20.0


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, 12 * MIB, np.uint8)


@pytest.fixture
def server(memory: np.ndarray) -> Iterator[BytesServer]:
    server = BytesServer(SECRET)
    server.expose(7, memory)
    yield server
    server.check()
    server.close()


@pytest.fixture
def client(server: BytesServer) -> Iterator[BytesClient]:
    client = BytesClient(*server.address, SECRET, timeout_s=5, connections=2)
    yield client
    client.check()
    client.close()


def greeted(server: BytesServer) -> tuple[Connection, float]:
    """A connection that the server takes for one of a client; until when it may be used."""
    connection = Connection(socket.create_connection(server.address, 5), "server")
    deadline = time.monotonic() + LIMIT_S
    assert greet(connection, SECRET, deadline)
    return connection, deadline


@pytest.mark.parametrize("nbytes", [0, 1, 4096, EAGER_BYTES, EAGER_BYTES + 1, 11 * MIB])
def test_one_range_of_any_length_travels_both_ways(
    server: BytesServer, client: BytesClient, memory: np.ndarray, nbytes: int
) -> None:
    buffer = np.zeros(nbytes + 1, np.uint8)
    client.read(7, [(3, nbytes)], [buffer], 10)
    assert np.array_equal(buffer[:nbytes], memory[3 : 3 + nbytes])
    assert buffer[-1] == 0
    client.write(7, [(5, nbytes)], [255 - buffer], 10)
    assert np.array_equal(memory[5 : 5 + nbytes], 255 - buffer[:nbytes])
    assert wait_until(lambda: server.counters["requests"] == 2)
    assert (server.counters["bytes_read"], server.counters["bytes_written"]) == (nbytes, nbytes)


def test_more_ranges_than_one_request_or_one_system_call_takes(
    client: BytesClient, memory: np.ndarray
) -> None:
    rng = np.random.default_rng(1)
    ranges = [
        (int(rng.integers(0, memory.nbytes - 999)), int(rng.integers(0, 999))) for _ in range(MAX_RANGES + 99)
    ]
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    client.read(7, ranges, buffers, 20)
    assert buffers == [memory[offset : offset + nbytes].tobytes() for offset, nbytes in ranges]
    stripes = [(index * 1000, 999) for index in range(5000)]
    source = [np.full(999, index % 251, np.uint8) for index in range(5000)]
    client.write(7, stripes, source, 20)
    assert (memory[:5_000_000].reshape(5000, 1000)[:, 0] == np.arange(5000) % 251).all()


def test_many_threads_share_a_few_connections(
    server: BytesServer, client: BytesClient, memory: np.ndarray
) -> None:
    wrong: list[int] = []

    def work(start: int) -> None:
        buffer = np.zeros(100_000, np.uint8)
        for offset in range(start, start + 20):
            client.read(7, [(offset, buffer.nbytes)], [buffer], 20)
            if not np.array_equal(buffer, memory[offset : offset + buffer.nbytes]):
                wrong.append(offset)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(0, 8000, 1000)))
    assert wrong == []
    assert wait_until(lambda: server.counters["requests"] == 160)
    assert server.counters["connections"] <= 2
    assert server.counters["queued_bytes"] == 0


@pytest.mark.parametrize(
    ("segment", "ranges", "why"),
    [
        (8, [(0, 1)], "segment 8 is not exposed"),
        (7, [(12 * MIB, 1)], "range 12582912[+]1 is outside the 12582912 bytes of segment 7"),
        (7, [(0, 4), (12 * MIB - 1, 2)], "outside"),
        (7, [(2**62, 2)], "outside"),
        (9, [(0, 4)], "read-only"),
    ],
)
def test_what_the_server_refuses_costs_neither_connection_nor_bytes(
    server: BytesServer,
    client: BytesClient,
    memory: np.ndarray,
    segment: int,
    ranges: list[tuple[int, int]],
    why: str,
) -> None:
    server.expose(9, b"constant", writable=False)
    before = memory.copy()
    buffers = [bytearray(b"????") for _ in ranges]
    with pytest.raises(TransferRefused, match=why):
        client.write(segment, ranges, buffers, 5)
    if segment != 9:
        with pytest.raises(TransferRefused, match=why):
            client.read(segment, ranges, buffers, 5)
    assert all(buffer == b"????" for buffer in buffers)
    client.read(7, [(0, 4)], [buffers[0]], 5)
    assert buffers[0] == memory[:4].tobytes()
    assert np.array_equal(memory, before)
    assert server.counters["connections"] == 1


def test_a_large_write_is_refused_before_its_bytes_are_sent(server: BytesServer, client: BytesClient) -> None:
    with pytest.raises(TransferRefused, match="outside"):
        client.write(7, [(0, 13 * MIB)], [np.zeros(13 * MIB, np.uint8)], 5)
    assert server.counters["refused"] == 1
    assert server.counters["bytes_written"] == 0


@pytest.mark.parametrize(
    ("ranges", "buffers", "why"),
    [
        ([(0, 4)], [], "1 ranges and 0 buffers"),
        ([(0, 5)], [bytearray(4)], "has 4 bytes, the transfer 5"),
        ([(0, 4)], [b"1234"], "not writable"),
        ([(-1, 4)], [bytearray(4)], "range -1[+]4 cannot be"),
        ([(0, 8)], [np.zeros((8, 8))[:, 1]], "not C-contiguous"),
    ],
)
def test_bad_local_buffers_are_named_before_anything_is_sent(
    client: BytesClient, ranges: Any, buffers: Any, why: str
) -> None:
    with pytest.raises(BadTransfer, match=why):
        client.read(7, ranges, buffers, 5)


def test_who_does_not_know_the_secret_gets_nothing_and_is_counted(server: BytesServer) -> None:
    with pytest.raises(TransferRefused, match="secret"):
        BytesClient(*server.address, secrets.token_bytes(32), timeout_s=5)
    assert wait_until(lambda: server.counters["strangers"] == 1)
    with socket.create_connection(server.address, 5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        raw.settimeout(LIMIT_S)
        received = raw.recv(4096)
        while more := _rest(raw):
            received += more
    assert received[32:] in (b"", bytes(32)), "a stranger was told more than a nonce"
    assert wait_until(lambda: server.counters["strangers"] == 2)


def _rest(raw: socket.socket) -> bytes:
    try:
        return raw.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(32))
            sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(bytes(32))
            sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(TransferRefused, match="does not have the same secret"):
            BytesClient(*listener.getsockname(), SECRET, timeout_s=5)
        thread.join(LIMIT_S)


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\4junk",
        b"\0\0\0\0",
        b"\0\0\0\1\1",
        bytes([0, 0, 0, 40]) + encode(Read(7, [1], [2]))[:5] + b"x" * 35,
    ],
)
def test_malformed_frames_end_their_connection_alone(
    server: BytesServer, client: BytesClient, junk: bytes
) -> None:
    connection, deadline = greeted(server)
    connection.send([junk], deadline)
    with pytest.raises(PeerLost):
        connection.receive([bytearray(1)], deadline)
    connection.close()
    assert wait_until(lambda: server.counters["dropped"] == 1)
    client.read(7, [(0, 4)], [bytearray(4)], 5)


def test_lengths_that_do_not_match_are_refused(server: BytesServer) -> None:
    connection, deadline = greeted(server)
    for request in (Read(7, [1, 2], [3]), Read(7, [-1], [1]), Write(7, [0], [-5])):
        data = encode(request)
        connection.send([len(data).to_bytes(4, "big") + data], deadline)
    assert wait_until(lambda: server.counters["refused"] == 3)
    connection.close()


def test_a_server_that_dies_fails_the_transfer_at_once() -> None:
    code = (
        "import sys, time, numpy as np\n"
        "from transport.bulk.sockets import BytesServer\n"
        "server = BytesServer(bytes.fromhex(sys.argv[1]))\n"
        "server.expose(0, np.zeros(2**20, np.uint8))\n"
        "print(server.address[1], flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, SECRET.hex()], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        client = BytesClient("127.0.0.1", int(process.stdout.readline()), SECRET, timeout_s=10)
        buffer = np.zeros(2**20, np.uint8)
        os.kill(process.pid, signal.SIGSTOP)  # it will be in the middle of the transfer when it dies
        os.waitpid(process.pid, os.WUNTRACED)  # it may still run, and answer, until this returns
        threading.Timer(0.1, process.kill).start()
        start = time.monotonic()
        with pytest.raises(PeerLost, match="is lost"):
            client.read(0, [(0, buffer.nbytes)], [buffer], 30)
        assert time.monotonic() - start < patient(5)
        process.wait(LIMIT_S)
        with pytest.raises(PeerLost, match="cannot connect") as caught:
            client.read(0, [(0, 1)], [buffer], 5)
        assert caught.value.nobody_listens
        client.check()
        client.close()
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()


def test_a_server_that_does_not_answer_costs_the_time_allowed_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match="not done in its time"):
            BytesClient(*address, SECRET, timeout_s=0.2)
        assert 0.1 < time.monotonic() - start < patient(3)
    with pytest.raises(PeerLost, match="cannot connect"):
        BytesClient(*address, SECRET, timeout_s=1)


def test_a_read_that_runs_out_of_time_says_so_and_the_next_one_works(
    server: BytesServer, client: BytesClient
) -> None:
    with pytest.raises(TransferTimeout, match="not done in its time"):
        client.read(7, [(0, 12 * MIB)], [np.zeros(12 * MIB, np.uint8)], 0.0)
    client.read(7, [(0, 4)], [bytearray(4)], 5)


def test_withdraw_waits_for_its_transfers_and_cuts_off_who_does_not_end(
    server: BytesServer, memory: np.ndarray
) -> None:
    server.expose(8, bytearray(64 * MIB))
    connection, deadline = greeted(server)
    data = encode(Read(8, [0], [64 * MIB]))
    connection.send([len(data).to_bytes(4, "big") + data], deadline)
    assert wait_until(lambda: server.counters["queued_bytes"] == 64 * MIB)
    start = time.monotonic()
    server.withdraw(8, 0.2)
    assert 0.2 <= time.monotonic() - start < patient(3)
    assert wait_until(lambda: server.counters["queued_bytes"] == 0)
    connection.close()
    server.withdraw(7)
    with pytest.raises(BadTransfer, match=r"segment 7 is not exposed; these are: \[\]"):
        server.withdraw(7)
    server.expose(7, memory)


def test_a_buffer_that_is_lent_cannot_be_resized_or_lent_twice(server: BytesServer) -> None:
    buffer = bytearray(100)
    server.expose(1, buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    with pytest.raises(BadTransfer, match="segment 1 is exposed already"):
        server.expose(1, buffer)
    with pytest.raises(BadTransfer, match="str is no buffer"):
        server.expose(2, "text")
    server.withdraw(1)
    buffer.append(0)


def test_closing_the_client_ends_its_transfers_and_closing_the_server_ends_its_clients(
    server: BytesServer,
) -> None:
    client = BytesClient(*server.address, SECRET, timeout_s=5)
    client.close()
    client.close()
    with pytest.raises(EngineClosed):
        client.read(7, [(0, 1)], [bytearray(1)], 1)
    other = BytesClient(*server.address, SECRET, timeout_s=5)
    server.close()
    server.close()
    with pytest.raises(PeerLost):
        other.read(7, [(0, 1)], [bytearray(1)], 5)
    other.close()


def test_what_cannot_be_opened_is_named() -> None:
    with pytest.raises(ChannelError, match="secret of 3 bytes"):
        BytesServer(b"abc")
    with pytest.raises(ChannelError, match=r"cannot listen at 192\.0\.2\.1"):
        BytesServer(SECRET, "192.0.2.1")
    with pytest.raises(ChannelError, match="cannot listen"):
        BytesServer(SECRET, port=70000)


def test_a_connection_that_the_server_has_closed_meanwhile_costs_no_transfer(
    server: BytesServer, client: BytesClient, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_server, "IDLE_S", 0.01)
    buffer = bytearray(4)
    client.read(7, [(0, 4)], [buffer], 5)
    assert wait_until(lambda: not server._connections)
    monkeypatch.undo()
    client.read(7, [(8, 4)], [buffer], 5)
    assert buffer == memory[8:12].tobytes()
    client.check()


def test_closing_a_client_cuts_off_who_waits_for_a_server_that_does_not_answer() -> None:
    raised: list[BaseException] = []

    def read() -> None:
        try:
            client.read(7, [(0, 4)], [bytearray(4)], 60)
        except BaseException as error:
            raised.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = BytesClient(*listener.getsockname(), SECRET, timeout_s=60, at_once=False)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        listener.settimeout(LIMIT_S)
        sock, _ = listener.accept()
        with sock:
            client.close()
            reader.join(LIMIT_S)
            assert not reader.is_alive()
    assert [type(error) for error in raised] == [EngineClosed]
    client.check()


def test_what_a_refused_request_claims_to_be_long_buys_no_time(server: BytesServer) -> None:
    class Listener:
        def shut(self) -> None: ...

        def send_message(self, message: Refused, deadline: float) -> None:
            assert "outside" in message.reason
            self.deadline = deadline

    connection = Listener()
    server._answer(connection, Read(7, [0] * MAX_RANGES, [2**63] * MAX_RANGES))  # type: ignore[arg-type]
    assert connection.deadline <= time.monotonic() + sockets_server.STALL_S


def test_a_server_that_gets_no_thread_refuses_that_connection_and_takes_the_next(
    server: BytesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(PeerLost):
            BytesClient(*server.address, SECRET, timeout_s=5)
    assert wait_until(lambda: server.counters["refused"] == 1)
    client = BytesClient(*server.address, SECRET, timeout_s=5)
    client.read(7, [(0, 4)], [bytearray(4)], 5)
    client.close()


def test_nobody_waits_while_a_lane_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_path, "CONNECT_S", 60.0)
    ended: list[TransferError | None] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        path = SocketPath.__new__(SocketPath)  # one rank's, without the others
        path.stall_s, path.secret, path.streams, path.on_fatal = 60.0, SECRET, {}, None
        path.addresses = [listener.getsockname()]
        path._lanes, path._lost, path._lock, path._closed = {}, {}, threading.Lock(), False
        path._ended = lambda job, error, safe: ended.append(error)
        jobs = [
            TransferJob("read", 0, 7, Batch([], id, id), [0], [np.zeros(4, np.uint8)], [0]) for _ in range(2)
        ]
        path.start(jobs[0])
        sock, _ = listener.accept()  # and never answers
        with sock:
            second = threading.Thread(target=path.start, args=(jobs[1],), daemon=True)
            second.start()
            second.join(LIMIT_S)
            assert not second.is_alive()
            path.mark_lost(0, "for the test")
            assert wait_until(lambda: len(ended) == 2)
    assert all(isinstance(error, PeerLost) for error in ended)
