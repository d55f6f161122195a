"""Failures that no peer of these tests causes: of MPI, the kernel, and servers that break the protocol."""

from __future__ import annotations

import errno
import select
import socket
import struct
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zmq

from transport import world as world_module
from transport.bulk.lent import MAX_SEGMENTS, LentBuffers
from transport.bulk.segments import Segments
from transport.bulk.slices import Stream
from transport.bulk.socket_io import Connection
from transport.bulk.sockets import BytesClient
from transport.channel import Hub
from transport.errors import (
    BadTransfer,
    ChannelError,
    SegmentError,
    TransferError,
    TransferTimeout,
    WireError,
    WorldError,
)
from transport.messaging import pids
from transport.messaging.address import address_towards
from transport.messaging.curve import CurveKeys
from transport.messaging.lines import LineServer
from transport.wire import Decoder
from transport.world import COLLECTIVE_MAX_BYTES, World, set_defaults

pytestmark = pytest.mark.quick


# ---------------------------------------------------------------------------------------------- world


class MpiError(Exception):
    pass


class Comm:
    """A communicator of one rank. `ends`: what each request's Test answers, or raises."""

    def __init__(self, ends: Any = True):
        self.ends = ends

    def Set_errhandler(self, handler: object) -> None:
        pass

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Split_type(self, kind: object, key: int) -> Comm:
        return self

    def request(self) -> Any:
        return SimpleNamespace(Test=Mock(side_effect=self.ends if callable(self.ends) else lambda: self.ends))

    def Ibarrier(self) -> Any:
        return self.request()

    def Iallgather(self, mine: np.ndarray, all_of_them: np.ndarray) -> Any:
        all_of_them[:] = mine
        return self.request()

    def Iallgatherv(self, mine: list[Any], layout: list[Any]) -> Any:
        layout[0][: len(mine[0])] = np.frombuffer(mine[0], np.uint8)
        return self.request()

    def Ibcast(self, buffer: np.ndarray, root: int) -> Any:
        return self.request()


@pytest.fixture
def world() -> World:
    """A world of one rank over a stand-in for MPI."""
    mpi = SimpleNamespace(
        COMM_WORLD=Comm(),
        ERRORS_RETURN=None,
        COMM_TYPE_SHARED=None,
        BYTE=None,
        Exception=MpiError,
        Is_finalized=lambda: True,
    )
    return World(mpi, 0.01)


def test_collective_steps_that_do_not_end_fail_or_are_too_large_are_errors(world: World) -> None:
    assert world.allgather_bytes(b"abc") == [b"abc"]
    assert world.bcast_bytes(b"abc") == b"abc"
    too_large = memoryview(bytes(COLLECTIVE_MAX_BYTES + 1))
    with pytest.raises(WorldError, match=f"allgather of {COLLECTIVE_MAX_BYTES + 1} bytes, the limit is"):
        world.allgather_bytes(too_large)  # type: ignore[arg-type]
    with pytest.raises(WorldError, match=f"broadcast of {COLLECTIVE_MAX_BYTES + 1} bytes, the limit is"):
        world.bcast_bytes(too_large)  # type: ignore[arg-type]
    world.comm.ends = False
    with pytest.raises(WorldError, match=r"rank 0: barrier did not end within 0\.01 s"):
        world.barrier()
    assert len(world._unended) == 1, "MPI may still write into its buffers"
    assert not world.finish(0.05), "its barrier does not end either"

    def failed() -> bool:
        raise MpiError("a process has failed")

    world.comm.ends = failed
    with pytest.raises(WorldError, match="rank 0: barrier failed: a process has failed"):
        world.barrier()


def test_a_rank_without_failures_of_others_asks_mpi_for_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "survives_a_rank", False)
    assert world.failed_ranks() == []


def test_an_mpi_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match="profile 'slow' is unknown; use "):
        set_defaults("slow")
    monkeypatch.setattr(world_module, "set_defaults", lambda profile: None)
    poor = SimpleNamespace(Query_thread=lambda: 1, THREAD_MULTIPLE=3)
    mpi4py = SimpleNamespace(rc=SimpleNamespace(), MPI=poor)
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    with pytest.raises(WorldError, match="does not give MPI_THREAD_MULTIPLE"):
        World.start()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match=r"MPI cannot be loaded: .*; install mooncake-lite\[mpi\]"):
        World.start()


def test_a_window_that_mpi_cannot_make_is_told_with_its_bytes(world: World) -> None:
    info = SimpleNamespace(Set=lambda *_: None, Free=Mock())
    world.mpi.Info = SimpleNamespace(Create=lambda: info)
    world.mpi.Win = SimpleNamespace(Allocate_shared=Mock(side_effect=MpiError("no memory")))
    with pytest.raises(SegmentError, match="MPI cannot make a window of 4096 bytes: no memory"):
        Segments._allocate(SimpleNamespace(), world, 4096)  # type: ignore[arg-type]
    assert info.Free.called


def test_a_stream_that_is_given_up_keeps_what_mpi_still_holds() -> None:
    class Failed(Exception):
        def Get_error_class(self) -> int:
            return 1

    stream: Any = SimpleNamespace(_sending=False, _more=True)
    ended, open_, dead = (SimpleNamespace(Cancel=Mock(), Test=Mock(return_value=end)) for end in (1, 0, 1))
    dead.Test.side_effect = Failed()
    stream._flying = [(ended,), (open_,), (dead,)]
    assert Stream.abandon(stream) == [(open_,)]
    assert (stream._more, stream._flying) == (False, [])
    assert ended.Cancel.called
    dead.Test.side_effect = KeyError("a bug of ours")
    stream._flying = [(dead,)]
    with pytest.raises(KeyError):
        Stream.abandon(stream)


# ------------------------------------------------------------------------------------ sockets, lent memory


def test_no_more_segments_are_lent_than_the_limit_and_a_loan_that_stays_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lent = LentBuffers()
    lent.expose(1, bytearray(8))
    monkeypatch.setattr("transport.bulk.lent.MAX_SEGMENTS", 1)
    with pytest.raises(BadTransfer, match="1 segments are exposed already, which is the limit"):
        lent.expose(2, bytearray(8))
    cuts: list[bool] = []
    lent._segments[1].loans.append(SimpleNamespace(cut=lambda: cuts.append(True)))  # type: ignore[arg-type]
    with pytest.raises(TransferTimeout, match="segment 1 is still used by 1 transfers"):
        lent.withdraw(1, 0.01)
    assert cuts == [True]
    assert MAX_SEGMENTS > 1


def test_a_server_that_answers_out_of_turn_fails_the_transfer_alone() -> None:
    client: Any = SimpleNamespace(name="there", _put_back=Mock(), _idle_one=lambda deadline: connection)
    connection = SimpleNamespace(receive_message=lambda *_: b"not asked for")
    with pytest.raises(WireError, match="there answered bytes instead of int"):
        BytesClient._expect(client, connection, int, 0.0)  # type: ignore[arg-type]
    with (
        pytest.raises(TransferError, match="there: a frame of nonsense"),
        BytesClient._connection(client, 0.0),
    ):
        raise WireError("a frame of nonsense")
    client._put_back.assert_called_once_with(connection, False)


def test_a_transfer_waits_for_a_connection_no_longer_than_it_may() -> None:
    busy: Any = SimpleNamespace(
        _changed=threading.Condition(), _closed=False, _idle=[], _all={1}, _opening=0, _most=1, name="there"
    )
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="there: 1 connections stayed in use"):
        BytesClient._idle_one(busy, began + 0.02)
    assert time.monotonic() - began >= 0.02


def test_a_connection_that_was_reset_has_ended() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        with socket.create_connection(door.getsockname()) as ours:
            theirs, _ = door.accept()
            connection = Connection(ours, "there")
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            assert select.select([ours], [], [], 5.0)[0]
            assert connection.has_ended()


# ------------------------------------------------------------------------------------------- messaging


def test_a_message_to_a_peer_that_has_gone_is_not_sent_and_its_end_is_told() -> None:
    server = LineServer(Decoder(int, 100), 100)
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(f"\0{server.name}")
            select.select([server.fd], [], [], 5.0)
            server.receive()
            peer.send(b"\x01")  # a part of a length
            select.select([server.fd], [], [], 5.0)
            assert server.receive() == []
        (name,) = server._peers
        server._peers[name].socket.shutdown(socket.SHUT_RDWR)
        assert not server.send(name, 5)  # type: ignore[arg-type]
        assert server.ended() == [name]
        assert not server.send(name, 5), "it is unknown now"  # type: ignore[arg-type]
    finally:
        server.close()


def test_a_socket_that_cannot_be_bound_and_missing_curve_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("transport.messaging.lines.secrets.token_hex", lambda count: "x" * 200)
        with pytest.raises(ChannelError, match="a Unix socket cannot be bound: AF_UNIX path too long"):
            LineServer(Decoder(int, 100), 100)
    monkeypatch.setattr(zmq, "curve_keypair", Mock(side_effect=zmq.ZMQError(errno.ENOTSUP)))
    with pytest.raises(ChannelError, match=r"this ZeroMQ has no CURVE: .*; install the pyzmq wheel"):
        CurveKeys.generate()


def test_a_peer_whose_name_is_no_text_has_none() -> None:
    hub: Any = SimpleNamespace(_may_join=None)
    assert [Hub._name(hub, name) for name in (b"a", b"\xff", b"\n")] == ["a", None, None]


def test_a_process_of_another_user_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pids.os, "kill", Mock(side_effect=PermissionError))
    assert pids.process_exists(1)
    assert pids._state(2**22 + 1) == ""


def test_a_host_that_no_packet_reaches_has_no_address_towards_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(side_effect=OSError(errno.ENETUNREACH, "Network is unreachable"))
    monkeypatch.setattr(socket, "socket", probe)
    assert address_towards("192.0.2.1") is None
    assert probe.called
