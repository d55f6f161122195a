"""Cut a list of byte ranges into a sequence of MPI messages, and send or receive them.

Used by `courier` on both sides. They compute the same slices from the same lengths, so that no message needs
a description. `one_sided` cuts with it too. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

SLICE_BYTES = 256 * 1024
"""Largest MPI message of a transfer.

Reads of 16 MiB over TCP between two namespaces that share 2 cores, settings interleaved, medians in GB/s:
nearly idle (one run) 1.4 at 256 KiB, 0.9 at 4 MiB, 1.1 as one blocking send; with other programs on the
cores (four runs) 0.2 to 0.4 at 256 KiB, 0.7 to 0.8 at 4 MiB, 0.3 to 0.5 as one send. There is no one best
size: this one is for nodes with idle cores. It has not been measured on a real network."""

PACK_BYTES = 256 * 1024
"""Ranges under a quarter of this are copied together into messages of this size. A message costs about 10 us
across nodes whatever its length; copying 12 KiB costs under one."""

WINDOW = 4
"""Messages of one transfer that a sender has under way. Two and eight were no better beyond the noise. A
receiver has all of its receives posted before the first message may come: where a message has come first and
its sender is dead by then, Open MPI 5 crashes in MPI_Irecv."""

Part = tuple[int, int, int]
"""(range, start, end): bytes start .. end of a range."""


def plan(
    lengths: Sequence[int], slice_bytes: int = SLICE_BYTES, pack_bytes: int = PACK_BYTES
) -> Iterator[list[Part]]:
    """Yield the parts of each message, in order. Together they cover every range once.

    A long range has messages of its own, of slice_bytes. Neighbouring ranges under a quarter of pack_bytes
    share one of up to pack_bytes.
    """
    packed: list[Part] = []
    room = pack_bytes
    for index, length in enumerate(lengths):
        short = 4 * length < pack_bytes
        if packed and (not short or length > room):
            yield packed
            packed, room = [], pack_bytes
        if short:
            if length:
                packed.append((index, 0, length))
                room -= length
            continue
        for start in range(0, length, slice_bytes):
            yield [(index, start, min(start + slice_bytes, length))]
    if packed:
        yield packed


class Stream:
    """One direction of one transfer: posts its messages in order, sends WINDOW at a time.

    views   one (nbytes,) uint8 per range; the caller leaves them alone until finished or abandoned
    """

    def __init__(self, comm: Any, rank: int, tag: int, views: Sequence[np.ndarray], sending: bool):
        self._comm, self._rank, self._tag = comm, rank, tag
        self._views = views
        self._sending = sending
        self._plan = plan([view.nbytes for view in views])
        self._flying: deque[tuple[Any, list[Part], np.ndarray]] = deque()
        self._more = True
        self.finished = False

    def advance(self) -> bool:
        """Collect ended messages and post further ones; tell whether anything moved.

        Raises mpi4py's Exception when MPI reports a failure of the other side.
        """
        moved = False
        while self._flying and self._flying[0][0].Test():
            _, parts, buffer = self._flying.popleft()
            moved = True
            if not self._sending and len(parts) > 1:
                self._unpack(parts, buffer)
        while self._more and (len(self._flying) < WINDOW or not self._sending):
            parts = next(self._plan, [])
            if not parts:
                self._more = False
                break
            self._post(parts)
            moved = True
        self.finished = not self._more and not self._flying
        return moved

    def _post(self, parts: list[Part]) -> None:
        if len(parts) == 1:
            index, start, end = parts[0]
            buffer = self._views[index][start:end]
        elif self._sending:
            buffer = np.concatenate([self._views[index][start:end] for index, start, end in parts])
        else:
            buffer = np.empty(sum(end - start for _, start, end in parts), np.uint8)
        post = self._comm.Isend if self._sending else self._comm.Irecv
        self._flying.append((post(buffer, self._rank, self._tag), parts, buffer))

    def _unpack(self, parts: list[Part], buffer: np.ndarray) -> None:
        position = 0
        for index, start, end in parts:
            self._views[index][start:end] = buffer[position : position + end - start]
            position += end - start

    def abandon(self) -> list[Any]:
        """Give up; return what MPI still holds, which the caller keeps alive.

        A send cannot be cancelled, nor a receive whose message is on its way.
        """
        kept = []
        for entry in self._flying:
            try:
                if not self._sending:
                    entry[0].Cancel()
                if not entry[0].Test():
                    kept.append(entry)
            except Exception as error:
                # mpi4py's Exception, by duck: a request to a dead rank has ended with its failure.
                if not hasattr(error, "Get_error_class"):
                    raise
        self._flying.clear()
        self._more = False
        return kept
