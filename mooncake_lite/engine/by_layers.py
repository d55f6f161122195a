"""KV that moves by layers beside a forward pass: a prefix comes in ahead of it, new blocks leave behind it.

Used by `runner.py`. The paper's layer-wise prefill (FAST'25, section 5.2). The planner names blocks, pages
and halves of staging memory. Here they are cut into groups of layers, which go through a half in turn:

    layers     0 1    2 3    4 5    6 7 ...
    coming in  half 0 half 1 half 0 half 1      each is put into pages before the pass needs it
    computed   0 1 2 3 4 5 ...
    leaving    part 0 part 1 part 0 part 1      of one half; a part is filled again when its bytes have left

Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

import numpy as np

from mooncake_lite.engine.contract import ComputeEngine
from mooncake_lite.engine.flights import BAD, CANCEL_LIMIT_S, TRANSFER_LIMIT_S
from mooncake_lite.engine.leaving import Leaving, Send, Take, Wait, next_act
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import BlockRef
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance import JobId, TransferEnded
from scheduler.instance.step import LayerLoad, WriteGroup
from store.layout import check_of, checksum
from transport.bulk.batch import Batch, Transfer
from transport.errors import TransferError

if TYPE_CHECKING:
    from transport.engine import TransferEngine

GROUPS = 15
"""Groups that the layers of a block are cut into, if staging memory allows: so much of a load, or of a store,
does not overlap with computing."""


class LayersLost(Exception):
    """A load has failed, and the pass with it. ended: what the planner is told of it."""

    def __init__(self, ended: TransferEnded) -> None:
        super().__init__(ended.problem)
        self.ended = ended


def layer_groups(layers: int, room: int) -> list[slice]:
    """Cut layers into groups of equal size, at most `room` in each."""
    size = max(1, min(-(-layers // GROUPS), room))
    return [slice(first, min(first + size, layers)) for first in range(0, layers, size)]


class Incoming:
    """A load by layers. Reading begins at once; `need` puts layers into pages when they are needed.

    waited_s   how long it has kept the pass waiting
    """

    def __init__(
        self, engine: ComputeEngine, staging: StagingBlocks, transfers: TransferEngine, load: LayerLoad
    ) -> None:
        self._engine, self._staging, self._transfers, self._load = engine, staging, transfers, load
        layout = staging.layout
        room = staging.half_blocks * layout.layers // len(load.places)
        self._left = deque(layer_groups(layout.layers, room))
        self._free = deque(load.halves)
        self._flying: deque[tuple[slice, int, Batch]] = deque()
        self._landed, self.waited_s = 0, 0.0
        self._sums: list[list[int]] = [[] for _ in load.places]
        self._fill()

    def _fill(self) -> None:
        """Begin to read as many groups as there are free halves."""
        while self._left and self._free:
            layers, half = self._left.popleft(), self._free.popleft()
            parts = self._staging.part(half, len(self._load.places), layers)
            moves = _moves("read", parts, self._load.places, layers, self._staging.layout.layer_nbytes)
            try:
                batch = self._transfers.submit(moves, ("load KV", self._load.job[0]))
            except TransferError as error:
                raise self._given_up(error) from None
            self._flying.append((layers, half, batch))

    def need(self, layer: int) -> None:
        """Return when a layer is in its pages. Raises LayersLost."""
        began = time.perf_counter()
        while self._landed <= layer:
            layers, half, batch = self._flying[0]
            try:
                batch.wait(TRANSFER_LIMIT_S)
            except TransferError as error:
                raise self._given_up(error) from None
            self._flying.popleft()
            self._land(layers, half)
            self._free.append(half)
            self._fill()
        self.waited_s += time.perf_counter() - began

    def finish(self) -> None:
        """Bring in the layers that no pass will ask for. Raises LayersLost."""
        self.need(self._staging.layout.layers - 1)

    def _land(self, layers: slice, half: int) -> None:
        parts = self._staging.part(half, len(self._load.places), layers)
        self._engine.load_blocks(self._load.pages, parts, layers)
        for ref, sums, part in zip(self._load.places, self._sums, parts):
            if ref.check:
                sums += map(checksum, part)
        self._landed = layers.stop
        if not self._left and not self._flying:
            checked = [pair for pair in zip(self._load.places, self._sums) if pair[0].check]
            bad = [ref for ref, sums in checked if check_of(sums) != ref.check]
            if bad:
                raise LayersLost(TransferEnded(half, BAD, bad=bad))

    def _given_up(self, error: TransferError) -> LayersLost:
        """End the other reads, whose halves are used again. Raises RuntimeError if one does not end."""
        late = [_end(batch) for _, _, batch in self._flying]
        self._flying.clear()
        return LayersLost(TransferEnded(0, str(error), any(late)))


_FOR_PASS = Wait("computed")


class Outgoing:
    """A store by layers. `run` is called by the copying thread, and told by `reached` how far the pass is.

    job   whose blocks leave
    """

    def __init__(
        self, engine: ComputeEngine, staging: StagingBlocks, transfers: TransferEngine, group: WriteGroup
    ) -> None:
        self._engine, self._staging, self._transfers, self._group = engine, staging, transfers, group
        self.job: JobId = group.job
        self._done = threading.Condition()
        layers = staging.layout.layers
        self._at = Leaving(layer_groups(layers, staging.half_blocks * layers // 2 // len(group.places)))

    def reached(self, layers: int) -> None:
        """Note that so many layers are computed. A pass that is done again begins with fewer."""
        with self._done:
            self._at.reached = max(layers, self._at.reached)
            self._done.notify()

    def abort(self) -> None:
        """Note that the pass has failed: the other layers hold nothing that may leave."""
        with self._done:
            self._at.aborted = True
            self._done.notify()

    def run(self) -> TransferEnded:
        """Copy and write the blocks, a group of layers after the other. Returns when all have left, or none
        will after an abort."""
        at, half, problem = self._at, self._group.half, ""
        flying: deque[Batch] = deque()
        sums: list[list[int]] = [[] for _ in self._group.places]
        moves: list[Transfer] = []
        try:
            while (act := self._wait_for_act()) is not None:
                if isinstance(act, Take):
                    moves, at.taken = self._take(act, sums), at.taken + 1
                elif isinstance(act, Send):
                    flying.append(self._transfers.submit(moves, ("store KV", self.job[0])))
                    at.begun, at.flying = at.begun + 1, at.flying + 1
                else:
                    flying[0].wait(TRANSFER_LIMIT_S)
                    flying.popleft()
                    at.flying -= 1
            if at.taken == len(at.groups):
                return TransferEnded(half, sums=sums)
            problem = "its pass has failed"
        except TransferError as error:
            problem = str(error)
        return TransferEnded(half, problem, any([*map(_end, flying)]))

    def _wait_for_act(self) -> Take | Send | Wait | None:
        """Return the next act of the copying thread. It waits here for the pass."""
        at = self._at
        with self._done:
            while (act := next_act(at)) == _FOR_PASS:
                self._done.wait()
            return act

    def _take(self, act: Take, sums: list[list[int]]) -> list[Transfer]:
        """Copy layers out of their pages, and add their checksums. Returns the transfers of the copies."""
        group, layers = self._group, act.layers
        parts = self._staging.part(group.half, len(group.places), layers, act.part)
        self._engine.store_blocks(group.pages, parts, layers)
        for some, part in zip(sums, parts):
            some += map(checksum, part)
        return _moves("write", parts, group.places, layers, self._staging.layout.layer_nbytes)


class MovingHook(LayerHook):
    """The hook of a pass: looks after transfers, and lets layers come in and leave.

    look   tells of transfers that have ended; incoming, outgoing: what moves by layers
    broke  it has raised: the engine is not to blame for that
    """

    def __init__(
        self, look: Callable[[], None], incoming: Incoming | None = None, outgoing: Seq[Outgoing] = ()
    ) -> None:
        self._look, self._incoming, self._outgoing = look, incoming, outgoing
        self.moves = incoming is not None or bool(outgoing)
        self.broke = False

    def before(self, layer: int) -> None:
        """Wait until the prefix of this layer is in its pages."""
        self.broke = True  # unless it returns
        self._look()
        if self._incoming is not None:
            self._incoming.need(layer)
        self.broke = False

    def after(self, layer: int) -> None:
        """Let this layer leave."""
        self.broke = True
        self._look()
        for one in self._outgoing:
            one.reached(layer + 1)
        self.broke = False

    def give_up(self) -> None:
        """End what moves by layers, because the pass has failed. Raises LayersLost."""
        for one in self._outgoing:
            one.abort()
        if self._incoming is not None:
            self._incoming.finish()


def _moves(
    op: Literal["read", "write"], parts: np.ndarray, places: Seq[BlockRef], layers: slice, layer_nbytes: int
) -> list[Transfer]:
    """Return a transfer for each block: these layers of it are one range."""
    first, nbytes = layers.start * layer_nbytes, (layers.stop - layers.start) * layer_nbytes
    return [
        Transfer(op, part.reshape(-1).view(np.uint8), ref.rank, 0, ref.offset + first, nbytes)
        for ref, part in zip(places, parts)
    ]


def _end(batch: Batch) -> bool:
    """End a batch that has failed, or that is not wanted any more. Returns whether late bytes may come.

    Raises RuntimeError when it does not end: its buffers may not be used again.
    """
    batch.cancel()
    with contextlib.suppress(TransferError):
        batch.wait(CANCEL_LIMIT_S)
    if not batch.poll():
        raise RuntimeError(f"a transfer has not ended {CANCEL_LIMIT_S:.0f} s after it was cancelled")
    return bool(batch.may_still_land)
