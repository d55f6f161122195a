"""Exchanges between members that compute in lockstep: sums and gathers in which every member takes part.

Tensor parallelism and attention over several ranks use them. Members are processes of one node with common
memory (SharedExchange), or ranks on several nodes (MpiExchange). Knows nothing of layers or KV.

All members make the same exchanges in the same order. An exchange is a row of turns. In each turn a member
puts a piece of its data, awaits the pieces of all members, and reads them. The first piece comes with a
header, by which every member checks that all make the same exchange. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from transport.bulk.futex import Counters
from transport.errors import ExchangeError, MemberLost

Waits = Callable[[], object] | None

LIMIT_S = 600.0
"""Longest wait for the other members, unless the caller says otherwise."""

TICK_S = 0.05
"""A member that waits calls `waits` this often."""

SPINS_S = 5e-6, 200e-6
"""A member looks for so long before it sleeps: the least, and the most. To wake up takes 25 us and more, so
members that come nearly at the same time gain. After a longer wait, which says that others have the cores, it
looks half as long the next time."""

MPI_FIRST_BYTES, MPI_PIECE_BYTES = 16 * 2**10, 2**20
"""Over MPI: data in the first message of an exchange, which always has this size because nobody knows yet how
much the others send; and the most in a later one."""

MPI_PAUSES_S = (0.00005, 0.001)
"""Over MPI: the shortest and the longest sleep between two looks; in between, a 64th of the time waited. Data
moves only while MPI is entered: after an eighth, 1 MiB over TCP took 4.6 ms instead of 3.2."""

SUM, GATHER = 0, 1

_HEADER = struct.Struct("<QQ8sQQ")
"""The exchange's number, its kind, the dtype, the bytes of this member's data, the most bytes of a piece."""

_LINE_BYTES = 64
"""Of memory that is written by one member at a time: a cache line."""


@cache
def _name(dtype: np.dtype) -> bytes:
    name = dtype.str.encode()
    if dtype.hasobject or len(name) > 8:
        raise ExchangeError(f"arrays of {dtype} cannot be exchanged: send their bytes")
    return name.ljust(8, b"\0")


class Exchange:
    """What both kinds of exchange have in common. Each member makes one object and uses it by one thread.

    member, count   this member, of how many
    pieces          most bytes of the first piece of an exchange, and of later ones
    limit_s         longest wait for the other members
    waits           called every 50 ms of waiting. It may raise, which ends the wait.

    After an error this member can make no more exchanges: MemberLost after a loss, ExchangeError otherwise.
    """

    def __init__(self, member: int, count: int, pieces: tuple[int, int], limit_s: float, waits: Waits):
        if not 0 <= member < count:
            raise ExchangeError(f"member {member} of {count}: must be from 0 to {count - 1}")
        self.member, self.count = member, count
        self._pieces, self._limit_s, self._waits = pieces, limit_s, waits
        self._begun = self._ended = 0
        self._lost = ""

    def sum(self, x: np.ndarray) -> None:
        """Replace x by the sum of all members' x, added in the order of members: all get the same bits.

        x   float32, C-contiguous, with the same number of elements at all members
        Raises ExchangeError when members disagree, MemberLost when the wait for them was ended.
        """
        if not x.flags.carray:
            raise ExchangeError("sum: x must be C-contiguous, aligned and writable; pass a copy")
        flat = x.reshape(-1)
        for start, parts, _ in self._turns(SUM, flat):
            mine = flat[start // 4 : (start + parts[0].nbytes) // 4]
            first, *others = (part.view(np.float32) for part in parts)
            for other in others:
                first = np.add(first, other, mine)

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        """Return copies of the x of all members, flat, in the order of members.

        x   C-contiguous, of the same dtype at all members. Lengths may differ and may be 0.
        Raises ExchangeError when members disagree, MemberLost when the wait for them was ended.
        """
        if not x.flags.c_contiguous:
            raise ExchangeError("gather: x must be C-contiguous; pass a copy")
        found: list[np.ndarray] = []
        for start, parts, sizes in self._turns(GATHER, x.reshape(-1)):
            found = found or [np.empty(size, np.uint8) for size in sizes]
            for whole, part in zip(found, parts):
                whole[start : start + part.nbytes] = part
        return [whole.view(x.dtype) for whole in found]

    def lose(self, why: str) -> None:
        """End the wait of this process, and all later ones, with MemberLost. Any thread may call this."""
        self._lost = self._lost or why

    def close(self) -> None:
        """End the exchange for this member; a wait of another thread ends, too. May be called twice."""
        self.lose("the exchange is closed")

    def _turns(self, kind: int, flat: np.ndarray) -> Iterator[tuple[int, list[np.ndarray], list[int]]]:
        """Make one exchange. Yields for each turn:

        start     of the pieces within the data, in bytes
        pieces    of all members, in order, uint8. They are valid until the next turn.
        sizes     bytes of the whole data of each member
        """
        self._refuse_if_lost()
        if self._begun != self._ended:
            raise ExchangeError(f"exchange {self._begun} has failed or has not ended: no other can begin")
        header = _HEADER.pack(self._begun + 1, kind, _name(flat.dtype), flat.nbytes, self._pieces[1])
        raw, start, step = flat.view(np.uint8), 0, self._pieces[0]
        self._begun += 1
        headers, buffers = self._turn(raw[:step], header, step)
        sizes = _agreed(headers)
        yield 0, [buffer[: min(size, step)] for buffer, size in zip(buffers, sizes)], sizes
        while (start := start + step) < max(sizes):
            step = self._pieces[1]
            spans = [min(max(size - start, 0), step) for size in sizes]
            _, buffers = self._turn(raw[start : start + step], b"", max(spans))
            yield start, [buffer[:span] for buffer, span in zip(buffers, spans)], sizes
        self._ended = self._begun

    def _turn(self, mine: np.ndarray, header: bytes, most: int) -> tuple[list[bytes], Sequence[np.ndarray]]:
        """Put this member's piece and await those of all. Returns (headers, buffers) of all members.

        header    in the first turn of an exchange only, and only then headers are returned
        most      bytes of the longest piece, or more
        buffers   uint8; each begins with the member's piece
        """
        raise NotImplementedError

    def _looks(self, who: str) -> Iterator[float]:
        """Yield the seconds waited before each look for others, while the wait may go on.

        Raises MemberLost after a loss or at the limit, and what `waits` raises.
        """
        began_s = now_s = asked_s = time.monotonic()
        while True:
            yield now_s - began_s
            now_s = time.monotonic()
            if now_s - began_s > self._limit_s:
                self.lose(f"{who} did not come to exchange {self._begun} within {self._limit_s:g} s")
            self._refuse_if_lost()
            if self._waits is not None and now_s - asked_s >= TICK_S:
                self._waits()
                asked_s = now_s

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise MemberLost(f"member {self.member} of {self.count}: {self._lost}")


def _agreed(headers: list[bytes]) -> list[int]:
    """Return the bytes of each member's data. If members disagree, all raise the same ExchangeError."""
    said = [_HEADER.unpack(header) for header in headers]
    first, sums = said[0], said[0][1] == SUM
    for member, one in enumerate(said):
        if one != first and (sums or (*one[:3], one[4]) != (*first[:3], first[4])):
            both = f"member 0 makes {_told(*first)}, member {member} {_told(*one)}"
            raise ExchangeError(f"{both}; all must make the same exchanges in the same order")
    if sums and first[2] != _name(np.dtype(np.float32)):
        raise ExchangeError(f"all members make {_told(*first)}; a sum must be of float32")
    return [nbytes for _, _, _, nbytes, _ in said]


def _told(number: int, kind: int, dtype: bytes, nbytes: int, piece_bytes: int) -> str:
    what = f"{'gather' if kind == GATHER else 'sum'} of {nbytes} B of {dtype.decode().rstrip(chr(0))}"
    return f"exchange {number}, a {what} in pieces of {piece_bytes} B"


class SharedExchange(Exchange):
    """An exchange over memory that all members map. It makes no file of its own.

    memory    uint8, nbytes(count, piece_bytes) bytes, zero before the first member begins, at an address that
              is a multiple of 8. The size of a piece follows from its length. It stays mapped until this
              object is deleted.

    Each member has a counter of its turns, and two headers and two buffers, which it uses alternately. Two
    are enough, because no member can be two turns ahead: it puts turn n + 2 only after all have put turn
    n + 1, and each puts turn n + 1 only after it has read turn n. So the buffers of turn n are free by then.
    """

    HEAD_BYTES = 3 * _LINE_BYTES
    """Of each member, before all buffers: the counter, then two headers."""

    def __init__(
        self, memory: np.ndarray, member: int, count: int, limit_s: float = LIMIT_S, waits: Waits = None
    ):
        piece = (memory.nbytes // max(count, 1) - self.HEAD_BYTES) // 2 // _LINE_BYTES * _LINE_BYTES
        if piece <= 0 or memory.ctypes.data % 8:
            least = f"{self.nbytes(count, 1)} B or more, at a multiple of 8"
            raise ExchangeError(f"memory of {memory.nbytes} B for {count} members: must be {least}")
        super().__init__(member, count, (piece, piece), limit_s, waits)
        heads, rest = memory[: count * self.HEAD_BYTES], memory[count * self.HEAD_BYTES :]
        self._counters = Counters(heads, self.HEAD_BYTES)
        lines = [heads.data[start:][: _HEADER.size] for start in range(0, heads.nbytes, _LINE_BYTES)]
        self._heads = lines[1::3], lines[2::3]
        self._buffers = [list(half) for half in rest[: 2 * count * piece].reshape(2, count, piece)]
        self._put, self._spin_s = self._counters.value(member), SPINS_S[1]

    @classmethod
    def nbytes(cls, count: int, piece_bytes: int) -> int:
        """Return the bytes of memory for so many members and pieces of piece_bytes, rounded up to 64."""
        return count * (cls.HEAD_BYTES + 2 * (-(-piece_bytes // _LINE_BYTES) * _LINE_BYTES))

    def lose(self, why: str) -> None:
        """End the wait of this process as Exchange.lose does, at once; the other members' only by chance."""
        super().lose(why)
        self._counters.wake()

    def _turn(self, mine: np.ndarray, header: bytes, most: int) -> tuple[list[bytes], Sequence[np.ndarray]]:
        counters, before = self._counters, self._put % 2**32
        heads, buffers = self._heads[self._put % 2], self._buffers[self._put % 2]
        if header:
            heads[self.member][:] = header
        buffers[self.member][: mine.size] = mine
        counters.step(self.member)
        self._put += 1
        for other in range(self.count):
            if counters.value(other) == before:
                self._await(other, before)
        counters.settle(self.member)
        return [bytes(head) for head in heads] if header else [], buffers

    def _await(self, other: int, before: int) -> None:
        """Wait while another member's counter is as before: shortly without the kernel, then asleep."""
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + self._spin_s:
            if self._counters.value(other) != before:
                return
        for _ in self._looks(f"member {other}"):
            self._counters.wait(other, before, min(TICK_S, self._limit_s))
            if self._counters.value(other) != before:
                break
        least_s, most_s = SPINS_S
        took_s = time.perf_counter() - began_s
        self._spin_s = most_s if took_s < most_s else max(self._spin_s / 2, least_s)


class MpiExchange(Exchange):
    """An exchange between ranks, also of several nodes, over MPI's Iallgather.

    comm    an mpi4py communicator that has the members alone, and that nothing else uses. It stays the
            caller's. MPI returns its errors from now on.

    Where MPI outlives a killed rank (ULFM), lose() and a limit revoke comm: that ends all members' waits.
    After a loss MPI may still write into buffers of this object: keep it until MPI has ended.
    """

    def __init__(self, comm: Any, limit_s: float = LIMIT_S, waits: Waits = None):
        from mpi4py import MPI

        self._error, self._comm = MPI.Exception, comm
        super().__init__(comm.Get_rank(), comm.Get_size(), (MPI_FIRST_BYTES, MPI_PIECE_BYTES), limit_s, waits)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._put = np.zeros(MPI_PIECE_BYTES, np.uint8)
        self._got = np.zeros(self.count * MPI_PIECE_BYTES, np.uint8)
        self._request: Any = None

    def lose(self, why: str) -> None:
        """End the wait of this process within a millisecond, and with ULFM those of all members."""
        super().lose(why)
        with contextlib.suppress(self._error, NotImplementedError):
            self._comm.Revoke()

    def close(self) -> None:
        """End the exchange for this member alone. May be called twice."""
        super().lose("the exchange is closed")

    def _turn(self, mine: np.ndarray, header: bytes, most: int) -> tuple[list[bytes], Sequence[np.ndarray]]:
        head, nbytes = len(header), len(header) + most
        self._put[:head] = memoryview(header)
        self._put[head : head + mine.size] = mine
        rows = self._got[: self.count * nbytes].reshape(self.count, nbytes)
        try:
            self._request = self._comm.Iallgather(self._put[:nbytes], rows)
            for waited_s in self._looks("a member"):
                if self._request.Test():
                    break
                time.sleep(min(max(waited_s / 64, MPI_PAUSES_S[0]), MPI_PAUSES_S[1]))
        except self._error as error:
            self.lose(f"MPI says: {error}")
            self._refuse_if_lost()
        return [bytes(row[:head]) for row in rows], list(rows[:, head:])
