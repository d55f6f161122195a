"""A rank of a pipeline: its connections to the other stages, and the loop of a stage that is not the first.

Used by `assemble.py`. What is told and reported stands in `engine/pipeline.py`. The first stage is driven by
`loop.py`, as a rank without a pipeline. See docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.contract import ComputeEngine
from mooncake_lite.engine.pipeline import (
    FirstRunner,
    Neighbours,
    StageEngine,
    halves_of,
    own_part,
    part_of,
    reports_of,
    step_of,
)
from mooncake_lite.engine.runner import Runner
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.messages.stages import HalfEnded, LateTokens, StageMail, StageStep
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.shares import Share
from mooncake_lite.model.sizes import block_layout, hidden_nbytes, pool_bytes, stage_bytes
from mooncake_lite.ranks.computing.loop import StepRunner
from mooncake_lite.ranks.conductor_link import ConductorLink
from scheduler.instance import Late, TransferEnded
from transport.channel import Hub, Spoke
from transport.engine import TransferEngine
from transport.messaging.address import reachable_address, tcp_endpoint
from transport.messaging.curve import CurveKeys
from transport.wire import Decoder
from transport.world import World

IDLE_WAIT_S = 0.1
"""Longest wait for the other stages, in which the conductor's Stop waits too."""

NOTHING = StageStep([], [], [], [])


class StageLinks:
    """Messages between the ranks of a pipeline.

    ranks   of the pipeline, first stage first; number: of this rank's stage

    They exchange addresses over MPI, so all other ranks have to call `world.allgather_bytes` meanwhile.
    """

    def __init__(self, world: World, ranks: list[int], run_dir: RunDir, keys: CurveKeys) -> None:
        self.ranks = ranks
        self.number = self.ranks.index(world.rank)
        self._spokes: dict[int, Spoke] = {}
        self._sent, self._heard = Counter[int](), Counter[str]()
        decoder, keys = Decoder(StageMail), CurveKeys.generate(keys)
        self._hub = Hub([_endpoint(world, self.ranks, run_dir)], decoder, keys)
        mine = self._hub.endpoints[0], keys.server_public
        found = world.allgather_bytes(msgspec.msgpack.encode(mine))
        for number, rank in enumerate(self.ranks):
            if rank != world.rank:
                endpoint, public = msgspec.msgpack.decode(found[rank], type=tuple[str, str])
                name, theirs = f"stage-{self.number}", keys.for_server(public)
                self._spokes[number] = Spoke(endpoint, name, decoder, theirs, context=self._hub.context)

    def receive(self, wait_s: float) -> list[Any]:
        """Return messages of the other stages. Waits wait_s at most. Raises RuntimeError when one was lost.

        Passes and hidden states belong together by their order: without one, all others would be wrong.
        """
        mail = self._hub.receive(wait_s)
        for peer, one in mail:
            if one.number != self._heard[peer]:
                raise RuntimeError(f"message {self._heard[peer]} of {peer} of the pipeline is lost")
            self._heard[peer] += 1
        return [one.message for _, one in mail]

    def tell(self, stage: int, message: Any) -> None:
        """Send to another stage. Raises RuntimeError when it takes nothing any more."""
        mail = StageMail(self._sent[stage], message)
        self._sent[stage] += 1
        if not self._spokes[stage].send(mail):
            raise RuntimeError(f"rank {self.ranks[stage]} of the pipeline does not read its messages")

    def close(self) -> None:
        """Close the connections."""
        for spoke in self._spokes.values():
            spoke.close()
        self._hub.close()


def _endpoint(world: World, ranks: Sequence[int], run_dir: RunDir) -> str:
    """Return where the other ranks of a pipeline reach this one."""
    others = [world.hostnames[rank] for rank in ranks if world.node_of[rank] != world.node_of[world.rank]]
    return tcp_endpoint(reachable_address(others), "*") if others else run_dir.stage(world.rank)


class StageMemory:
    """A rank's segment behind what it lends.

    staging   for blocks of `layout`, as many as on the first stage, which has the most layers
    slots     for hidden states, (count, rows, nbytes), `offset` bytes from the start of the segment
    layers    of the model that this stage holds
    """

    def __init__(
        self, config: ServeConfig, model: ModelConfig, role: str, share: Share, segment: np.ndarray
    ) -> None:
        lent = pool_bytes(config, model, role)
        self.offset = len(segment) - stage_bytes(config, model, role)
        self.layers, self.layout = share.layers, block_layout(config, share.part_of(model))
        count = (self.offset - lent) // block_layout(config, share.largest(model).part_of(model)).nbytes
        self.staging = segment[lent : lent + count * self.layout.nbytes]
        rows = config.max_num_batched_tokens
        self.slots = segment[self.offset :].reshape(-1, rows, hidden_nbytes(config, model))


class Pipeline:
    """The parts of a rank's runner that know of the other stages.

    compute   a pass of this stage, for its Runner
    near      what it hears from the others
    part      (place of a block) -> place of this stage's layers of it
    """

    def __init__(
        self, links: StageLinks, memory: StageMemory, engine: ComputeEngine, transfers: TransferEngine
    ) -> None:
        self.near = Neighbours(
            links.ranks, links.number, transfers, memory.slots, memory.offset, links.receive, links.tell
        )
        self._engine = StageEngine(engine, self.near)
        self.compute = self._engine.compute
        self.part = part_of(memory.layers, memory.layout.layer_nbytes)

    def runner(self, own: Runner) -> StepRunner:
        """Return the runner of this stage."""
        return own if self.near.number else FirstRunner(own, self._engine, self.near, self.part)


class StageLoop:
    """The loop of a stage that is not the first: does what that one tells, in its order, and reports.

    runner      own, or one around it; own: the runner of this stage
    conductor   takes part in nothing but starts, ends and losses
    """

    def __init__(self, pipeline: Pipeline, runner: StepRunner, own: Runner, conductor: ConductorLink) -> None:
        self._near, self._part, self._runner, self._own = pipeline.near, pipeline.part, runner, own
        self._conductor = conductor

    def run(self) -> None:
        """Serve until told to stop, or until the conductor is gone."""
        while not self._conductor.stopping:
            self.turn()
        self._near.drop()

    def turn(self) -> None:
        """Read, compute, tell."""
        self._read_conductor()
        idle = not (self._own.is_moving or self._near.can_begin)
        self._near.look(IDLE_WAIT_S if idle else 0.0)
        order = self._near.next_step()
        if order is None and not self._own.is_moving:
            return
        step = own_part(step_of(order or NOTHING, time.monotonic()), self._part)
        self._tell(reports_of(self._near.number, self._runner.run(step, self._moved)))

    def _moved(self, halves: Sequence[TransferEnded], late: Sequence[Late] = ()) -> None:
        self._tell(halves_of(self._near.number, halves))

    def _tell(self, reports: Iterable[HalfEnded | LateTokens]) -> None:
        for report in reports:
            self._near.tell(0, report)

    def _read_conductor(self) -> None:
        """Hear of ends and losses; join a new conductor after what an earlier one wanted."""
        self._conductor.new_term()
        if self._conductor.may_join and not (self._own.is_moving or self._near.steps):
            self._conductor.join()
        self._conductor.report_when_due(dict)
        for _ in self._conductor.receive(0.0):
            pass  # the first stage hears of the work
