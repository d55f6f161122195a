"""A pipeline of ranks over layers: chunks of one prompt are in different stages at once.

Used by `ranks/computing`. Mooncake's chunked pipeline parallelism (FAST'25, section 5.1). The first stage has
the planner, and tells the others what to do (`members.py`):

    stage 0   chunk 1 | chunk 2 | chunk 3 | next prompt
    stage 1             chunk 1 | chunk 2 | chunk 3 -> first token

All stages use the same numbers of pages and halves, for their own layers. Explained in
docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_lite.engine.contract import ComputeEngine, Drawn
from mooncake_lite.engine.flights import TRANSFER_LIMIT_S
from mooncake_lite.engine.members import SILENCE_LIMIT_S, Peers
from mooncake_lite.messages import Logprobs
from mooncake_lite.messages.members import HiddenAt, HiddenTaken
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance.step import Chunk
from transport.bulk.batch import Transfer

if TYPE_CHECKING:
    from transport.engine import TransferEngine


class Neighbours(Peers):
    """What one stage hears from the others, and the hidden states between them.

    slots     (count, rows, nbytes) uint8: memory for hidden states, `offset` bytes from the start of this
              rank's segment
    """

    def __init__(
        self,
        ranks: Seq[int],
        number: int,
        receive: Callable[[float], Iterable[Any]],
        tell: Callable[[int, Any], object],
        transfers: TransferEngine,
        slots: np.ndarray,
        offset: int,
    ) -> None:
        super().__init__(ranks, number, receive, tell)
        self._transfers, self._slots, self._offset = transfers, slots, offset
        self._free, self._come = deque(range(len(slots))), deque[HiddenAt]()

    def hear(self, message: Any) -> None:
        """Take a message."""
        match message:
            case HiddenAt():
                self._come.append(message)
            case HiddenTaken(slot):
                self._free.append(slot)
            case _:
                super().hear(message)

    @property
    def can_begin(self) -> bool:
        """Tell whether there is a next step, and the hidden states that it needs have come."""
        return bool(self.steps) and (bool(self._come) or not self.steps[0].chunks)

    def take(self, rows: int) -> np.ndarray:
        """Read the hidden states of the stage before, (rows, nbytes) uint8. Raises TransferError."""
        at = self._come.popleft()
        found = np.empty((rows, self._slots.shape[2]), np.uint8)
        read = Transfer("read", found.reshape(-1), self.ranks[self.number - 1], 0, at.offset, found.nbytes)
        self._transfers.submit([read], ("hidden states", "")).wait(TRANSFER_LIMIT_S)
        self.tell(self.number - 1, HiddenTaken(at.slot))
        return found

    def leave(self) -> None:
        """End: free the slots that this stage will not read. The stage before may be waiting for one."""
        while self._come:
            self.tell(self.number - 1, HiddenTaken(self._come.popleft().slot))
        super().leave()

    def give(self, hidden: np.ndarray, waits: Callable[[], object] = lambda: None) -> None:
        """Leave hidden states to the next stage. Waits while that is two passes behind.

        waits   called while it does

        Raises RuntimeError when it does not take them.
        """
        until = time.monotonic() + SILENCE_LIMIT_S
        while not self._free:
            if time.monotonic() > until:
                raise RuntimeError(f"rank {self.ranks[self.number + 1]} takes no hidden states")
            self.look(0.1)
            waits()
        slot = self._free.popleft()
        self._slots[slot, : len(hidden)] = hidden
        self.tell(self.number + 1, HiddenAt(slot, self._offset + slot * self._slots[0].nbytes))


class StageEngine:
    """Computes passes of one stage, as the runner wants it."""

    def __init__(self, engine: ComputeEngine, neighbours: Neighbours) -> None:
        self._engine, self._neighbours = engine, neighbours
        self._look: Callable[[], object] = neighbours.look

    def on_look(self, look: Callable[[], object]) -> None:
        """Have a pass look after messages in this way."""
        self._look = look

    def compute(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None
    ) -> tuple[list[Drawn], list[list[Logprobs]]]:
        """Compute a pass. What the last stage draws is returned there, and nothing elsewhere."""
        near = self._neighbours
        hidden = near.take(sum(len(chunk.token_ids) for chunk in chunks)) if near.number else None
        looking = _Looking(self._look, hook or LayerHook())
        if near.number == len(near.ranks) - 1:
            return self._engine.compute(chunks, looking, hidden)
        near.give(self._engine.pass_on(chunks, looking, hidden), self._look)
        return [], []


class _Looking(LayerHook):
    """A hook that also looks after the messages of the other stages."""

    def __init__(self, look: Callable[[], object], inner: LayerHook) -> None:
        self._look, self._inner = look, inner

    def before(self, layer: int) -> None:
        self._look()
        self._inner.before(layer)

    def after(self, layer: int) -> None:
        self._inner.after(layer)
