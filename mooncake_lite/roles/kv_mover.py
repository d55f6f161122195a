"""KV between the pool and an engine's pages, through the rank's own segment.

Used by the prefill and decode roles. The pool names where bytes lie (`BlockRef`), `transport.engine`
moves them over MPI, `kernels_numba` puts them into pages and takes them out. See docs/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np

from mooncake_lite.engine import Engine, Sequence
from mooncake_lite.messages import BlockRef, Span
from store.layout import BlockLayout
from transport.engine import Batch, Transfer, TransferEngine
from transport.errors import TransferError

TRANSFER_LIMIT_S = 60.0
"""No batch of transfers takes longer on a working machine; after it the rank reports the failure."""


class Staging:
    """A rank's segment behind what it lends, as blocks: two halves for bulk work, single ones for puts.

    half(0), half(1)   (half_blocks, *block_shape), for one bulk job at a time
    puts               indices of the single blocks
    """

    def __init__(self, segment: np.ndarray, layout: BlockLayout, engine: Engine) -> None:
        self.layout = layout
        count = len(segment) // layout.nbytes
        used = segment[: count * layout.nbytes]
        self.blocks = used.view(engine.block_dtype).reshape(count, *engine.block_shape)
        self.half_blocks = max(2, (count - 2) * 3 // 8)
        self.puts = list(range(2 * self.half_blocks, count))

    def half(self, number: int) -> np.ndarray:
        """(half_blocks, *block_shape): the first half for even numbers, the second for odd ones."""
        return self.blocks[(number % 2) * self.half_blocks : (number % 2 + 1) * self.half_blocks]


def moves(
    op: Literal["read", "write"], refs: Seq[BlockRef], blocks: Seq[np.ndarray] | np.ndarray
) -> list[Transfer]:
    """One transfer per block between `blocks` (local, in order) and the places `refs` name."""
    return [
        Transfer(op=op, local=block.reshape(-1).view(np.uint8), rank=ref.rank, segment=0, offset=ref.offset,
                 nbytes=ref.nbytes)
        for ref, block in zip(refs, blocks)
    ]  # fmt: skip


def arrive(batch: Batch) -> None:
    """Wait for a batch. Raises TransferError when one of its transfers failed and none is under way any more.

    One that does not end at all is a broken rank: its staging may not be used again (RuntimeError).
    """
    try:
        batch.wait(TRANSFER_LIMIT_S)
    except TransferError:
        if not batch.poll():
            raise RuntimeError(f"a transfer has not ended after {TRANSFER_LIMIT_S:.0f} s") from None
        raise


class LoadJob:
    """Pool -> pages for one sequence, in groups: while one is put into pages, the next one travels."""

    def __init__(
        self,
        engine: Engine,
        transfers: TransferEngine,
        staging: Staging,
        sequence: Sequence,
        refs: list[BlockRef],
        rank: int,
    ) -> None:
        self.sequence = sequence
        self._rank = rank
        self._engine, self._transfers, self._staging = engine, transfers, staging
        size = staging.half_blocks
        self._groups = [refs[start : start + size] for start in range(0, len(refs), size)]
        self._flying: Batch | None = None
        self._arrived = 0
        self._began = time.perf_counter()
        self._nbytes = sum(ref.nbytes for ref in refs)
        self._count = len(refs)
        self._submit()

    def advance(self) -> bool:
        """Do what can be done without waiting; True when all KV is in the pages. Raises TransferError."""
        if self._flying is not None and self._flying.poll():
            self._land()
        return self._flying is None

    def finish(self) -> Span:
        """Wait for the rest. Raises TransferError."""
        while self._flying is not None:
            self._land()
        return self.span()

    def span(self) -> Span:
        """How long the load took until now, and what it moved."""
        seconds = time.perf_counter() - self._began
        return Span("load", self._rank, seconds, self._nbytes, self._count)

    def _land(self) -> None:
        """The flying group has arrived: send for the next one, put this one into pages."""
        number, group = self._arrived, self._groups[self._arrived]
        assert self._flying is not None
        flying, self._flying = self._flying, None
        arrive(flying)
        self._arrived += 1
        self._submit()
        blocks = self._staging.half(number)[: len(group)]
        self._engine.load_blocks(self.sequence, number * self._staging.half_blocks, blocks)

    def _submit(self) -> None:
        if self._arrived < len(self._groups):
            group = self._groups[self._arrived]
            self._flying = self._transfers.submit(moves("read", group, self._staging.half(self._arrived)))


def store_blocks(
    engine: Engine,
    transfers: TransferEngine,
    staging: Staging,
    sequence: Sequence,
    first: int,
    refs: list[BlockRef],
) -> list[list[int]]:
    """Pages -> pool: write blocks first, first+1, ... of a sequence to `refs`; their checksums per layer.

    Two halves take turns: one is filled from pages while the other travels. Raises TransferError.
    """
    sums: list[list[int]] = []
    flying: Batch | None = None
    size = staging.half_blocks
    for number, start in enumerate(range(0, len(refs), size)):
        group = refs[start : start + size]
        blocks = staging.half(number)[: len(group)]
        engine.store_blocks(sequence, first + start, blocks)
        sums += [staging.layout.checksums(block) for block in blocks]
        if flying is not None:
            arrive(flying)
        flying = transfers.submit(moves("write", group, blocks))
    if flying is not None:
        arrive(flying)
    return sums
