"""What the engine finds before it moves a byte: buffers, ranges, memory, addresses. No MPI."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.patience import wait_until
from transport.bulk import segments
from transport.bulk.batch import byte_view
from transport.bulk.copier import PIECE_BYTES
from transport.bulk.segments import Segments, shortage
from transport.engine import Transfer, TransferEngine
from transport.errors import BadTransfer, ChannelError, EngineClosed, PeerLost, SegmentError, TransferTimeout
from transport.messaging.address import address_towards, reachable_address, tcp_endpoint

pytestmark = pytest.mark.quick


class OneRank:
    """The part of World that one rank alone needs; its window is plain memory."""

    rank, size, one_node = 0, 1, True
    node_of, node_ranks, hostnames = [0], [0], ["here"]
    mpi = SimpleNamespace()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def bcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def allocate(self: Segments, world: OneRank, nbytes: int) -> dict[int, np.ndarray]:
        return {0: np.ones(nbytes, np.uint8)}

    monkeypatch.setattr(Segments, "_allocate", allocate)
    engine = TransferEngine(OneRank(), 8 * 2**20)  # type: ignore[arg-type]
    engine.local[:] = np.arange(engine.local.nbytes, dtype=np.uint32).astype(np.uint8)
    yield engine
    engine.close()


def read(local: Any, nbytes: int, offset: int = 0, **other: Any) -> Transfer:
    values = {"op": "read", "rank": 0, "segment": 0} | other
    return Transfer(local=local, offset=offset, nbytes=nbytes, **values)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, PIECE_BYTES + 1, 8 * 2**20])
def test_reads_and_writes_of_any_length_move_exactly_their_bytes(engine: Any, nbytes: int) -> None:
    buffer = np.full(nbytes + 1, 7, np.uint8)
    engine.submit([read(buffer, nbytes)]).wait(5)
    assert np.array_equal(buffer[:nbytes], engine.local[:nbytes])
    assert buffer[-1] == 7
    engine.submit([Transfer("write", 255 - buffer, 0, 0, 0, nbytes)]).wait(5)
    assert np.array_equal(engine.local[:nbytes], 255 - buffer[:nbytes])
    counters = engine.counters["shared"]
    assert (counters["bytes_read"], counters["bytes_written"]) == (nbytes, nbytes)


def test_moved_bytes_are_counted_by_rank_and_direction_without_those_of_the_own_rank(engine: Any) -> None:
    engine._size, engine._sizes = 2, [*engine.sizes, 2 * PIECE_BYTES]
    engine._near[1] = np.zeros(2 * PIECE_BYTES, np.uint8)
    buffer = bytearray(2 * PIECE_BYTES)
    engine.submit([read(buffer, 100), read(buffer, 7, rank=1), read(buffer, 2, rank=1)]).wait(5)
    engine.submit([read(buffer, 2 * PIECE_BYTES, rank=1, op="write")]).wait(5)
    assert engine.moved_bytes == {(1, "read"): 9, (1, "write"): 2 * PIECE_BYTES}


def test_any_contiguous_buffer_will_do(engine: Any) -> None:
    array = np.zeros((4, 8), np.float32)
    raw = bytearray(128)
    engine.submit([read(array, 128), read(raw, 128), read(memoryview(raw), 64), read((0, 2**20), 128)]).wait(
        5
    )
    assert array.tobytes() == bytes(raw) == engine.local[2**20 : 2**20 + 128].tobytes()
    engine.submit([Transfer("write", b"bytes are fine to read from", 0, 0, 3, 5)]).wait(5)
    assert engine.local[3:8].tobytes() == b"bytes"


@pytest.mark.parametrize(
    ("transfer", "why"),
    [
        (read(np.zeros(9, np.uint8), 10), "has 9 bytes, the transfer 10"),
        (read(b"0123456789", 10), "not writable"),
        (read(np.zeros((8, 8))[:, 1], 8), "not C-contiguous"),
        (read(object(), 8), "no contiguous buffer"),
        (read(bytearray(8), 8, offset=8 * 2**20 - 7), "outside the 8388608 bytes of rank 0"),
        (read(bytearray(8), -1), "outside"),
        (read((0, 8 * 2**20), 1), "outside"),
        (read((1, 0), 1), "segment 1 of rank 0 is not there"),
        (read(bytearray(8), 8, rank=1), "there are ranks 0 to 0"),
        (read(bytearray(8), 8, segment=3), "segment 3 of rank 0 is not there"),
        (read(bytearray(8), 8, op="swap"), "use read or write"),
    ],
)
def test_what_can_never_work_is_refused_before_anything_moves(
    engine: Any, transfer: Transfer, why: str
) -> None:
    fine = bytearray(8)
    with pytest.raises(BadTransfer, match=why):
        engine.submit([read(fine, 8), transfer])
    assert fine == bytes(8)


def test_a_lost_rank_fails_its_transfers_by_name_and_index(engine: Any) -> None:
    engine.mark_lost(0, "its process ended")
    batch = engine.submit([read(bytearray(8), 8), read(bytearray(8), 8)])
    assert batch.poll()
    assert sorted(batch.failures) == [0, 1]
    with pytest.raises(PeerLost, match="rank 0 is lost: its process ended"):
        batch.wait(0)


def test_a_closed_engine_takes_no_more_and_has_finished_what_it_had(engine: Any) -> None:
    buffer = np.zeros(8 * 2**20, np.uint8)
    batch = engine.submit([read(buffer, buffer.nbytes)])
    engine.close()
    assert batch.poll()
    assert np.array_equal(buffer, engine.local)
    with pytest.raises(EngineClosed):
        engine.submit([read(buffer, 1)])
    with pytest.raises(EngineClosed):
        engine.register(bytearray(8))
    engine.close()


def test_a_path_that_is_unknown_or_cannot_reach_all_ranks_is_refused() -> None:
    with pytest.raises(BadTransfer, match="path 'slow' is unknown; use one of "):
        TransferEngine(OneRank(), 4096, path="slow")  # type: ignore[arg-type]
    two_nodes = OneRank()
    two_nodes.one_node = False
    with pytest.raises(BadTransfer, match="path 'shared' cannot reach the ranks of other nodes"):
        TransferEngine(two_nodes, 4096, path="shared")  # type: ignore[arg-type]


def test_a_buffer_is_let_go_of_when_its_copies_have_ended(engine: Any) -> None:
    buffer = np.zeros(8 * 2**20, np.uint8)
    kept = weakref.ref(buffer)
    batch = engine.submit([read(buffer, buffer.nbytes)])
    assert wait_until(batch.poll)  # the worker alone copies it
    del buffer, batch
    assert wait_until(lambda: kept() is None), "the worker keeps it until the next one comes"


def test_registered_buffers_of_others_are_reached_where_only_memory_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two ranks on one node, the second one is this process as well."""

    class TwoRanks(OneRank):
        size, node_of, node_ranks, hostnames = 2, [0, 0], [0, 1], ["here", "here"]

        def allgather_bytes(self, data: bytes) -> list[bytes]:
            return [data, data]

    def allocate(self: Segments, world: OneRank, nbytes: int) -> dict[int, np.ndarray]:
        return {rank: np.zeros(nbytes, np.uint8) for rank in (0, 1)}

    monkeypatch.setattr(Segments, "_allocate", allocate)
    engine = TransferEngine(TwoRanks(), 4096, path="shared")  # type: ignore[arg-type]
    number = engine.register(bytearray(b"lent to others"))
    got = bytearray(4)
    engine.submit([read(got, 4, rank=1, segment=number)]).wait(20)
    assert got == b"lent"
    engine.close()


def test_a_wait_that_runs_out_says_so_and_the_batch_goes_on(engine: Any) -> None:
    batch = engine.submit([])
    batch.wait(0)
    batch.add_parts(1)
    with pytest.raises(TransferTimeout, match=r"not done after 0\.01 s"):
        batch.wait(0.01)
    batch.end_parts(1)
    batch.wait(0)


def test_a_segment_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    assert shortage(4096, tmp_path) == ""
    assert "need 1152921504606846976 bytes of shared memory" in shortage(2**60, tmp_path)
    assert "cannot be used" in shortage(1, tmp_path / "missing")


def test_memory_counts_beside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100 * 2**20))
    assert "the machine has 104857600 available" in shortage(50 * 2**20, tmp_path)
    assert shortage(30 * 2**20, tmp_path) == ""


def test_a_refused_segment_is_an_error_before_any_window_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "shortage", lambda need, folder: f"need {need}")
    with pytest.raises(SegmentError, match="host here: need 8192"):
        TransferEngine(OneRank(), 4097)  # type: ignore[arg-type]
    with pytest.raises(SegmentError, match="segment of -1 bytes"):
        TransferEngine(OneRank(), -1)  # type: ignore[arg-type]


def test_a_view_of_an_array_is_no_copy() -> None:
    array = np.zeros((2, 3), np.uint16)
    byte_view(array, 12, writable=True)[:] = 255
    assert (array == 65535).all()


def test_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") is None
    assert address_towards("no.such.host.invalid") is None
    monkeypatch.setattr("transport.messaging.address.address_towards", lambda host: None)
    with pytest.raises(ChannelError, match="no address"):
        reachable_address(["node-2"])
    assert reachable_address(["node-2"], override="10.1.2.3") == "10.1.2.3"


def test_the_first_host_that_can_be_reached_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"node-2": None, "node-3": "10.0.0.7"}
    monkeypatch.setattr("transport.messaging.address.address_towards", known.get)
    assert reachable_address(["node-2", "node-3"]) == "10.0.0.7"


def test_ipv6_addresses_stand_in_brackets() -> None:
    assert tcp_endpoint("fd00::1", 5) == "tcp://[fd00::1]:5"
    assert tcp_endpoint("10.0.0.1", "*") == "tcp://10.0.0.1:*"
