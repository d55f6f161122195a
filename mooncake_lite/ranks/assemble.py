"""Builds a working rank's role from its parts, runs it, and closes it. Rank 0: `steward/`.

Called by `mooncake_lite/rank.py` once signals and the run folder are in order; everything heavy (MPI, torch,
Numba) is imported here. The order of the steps is the order in which ranks meet over MPI.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.modes import DUTIES, pipeline_of
from mooncake_lite.launch.rank_process import STOP_EXTRA_S, forget_shared_memory, hard_exit
from mooncake_lite.launch.threads import set_thread_environment, threads_for
from mooncake_lite.launch.verdict import FOLLOWED, STEWARD
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.sizes import block_layout, pool_bytes, segment_bytes
from mooncake_lite.model.stages import WHOLE
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.ranks.computing.pipeline import Pipeline, StageLinks, StageLoop, StageMemory
from mooncake_lite.ranks.plan import StartPlan, pids_here, pool_fingerprint
from mooncake_lite.ranks.process import RankProcess
from mooncake_lite.ranks.traced import rank_tracer
from mooncake_lite.tracing.tracer import Tracer
from scheduler.instance import Staging
from transport.channel import Spoke
from transport.curve import CurveKeys
from transport.engine import TransferEngine
from transport.membership import Heart
from transport.wire import Decoder
from transport.world import World


class _Neighbours:
    """Connections of a working rank to the conductor, and its reasons to stop.

    roles   of all ranks on this node, this one's among them
    """

    def __init__(self, process: RankProcess, world: World, plan: StartPlan) -> None:
        self.config = process.config
        self.number = world.rank
        self.node = world.node_of[world.rank]
        self.roles = [
            process.config.role_of(rank) for rank, node in enumerate(world.node_of) if node == self.node
        ]
        pids_here(world)
        self._process, self._term = process, 0
        self._path = 0 if world.node_of[world.rank] == world.node_of[0] else -1
        self._gateway_keys = CurveKeys.from_bytes(plan.gateway_keys)
        self._name = f"rank-{world.rank}"
        heart_keys = CurveKeys.from_bytes(plan.heart_keys)
        self._control = plan.control[self._path]
        self._control_keys = CurveKeys.from_bytes(plan.control_keys)
        expected = Decoder(m.TO_STORE if process.role == "store" else m.TO_COMPUTE)
        self.conductor = Spoke(self._control, self._name, expected, self._control_keys)
        self.heart = Heart(
            plan.heart[self._path], self._name, curve=heart_keys, on_fatal=self.end_rank,
            on_term=self.conductor.wake,
        )  # fmt: skip

    def open_gateway(self, endpoint: str) -> Spoke:
        """Connect to a gateway, for tokens. No message comes back."""
        return Spoke(endpoint, self._name, Decoder(m.Stop), self._gateway_keys)

    def end_rank(self, thread: str, reason: str) -> None:
        """End this rank because one of its threads has died, and tell the conductor why.

        Called on that thread; the connection of the role's own thread may not be used here.
        """
        why = f"thread {thread} died: {reason}"
        try:
            name = f"{self._name} last word"
            with Spoke(self._control, name, Decoder(m.Stop), self._control_keys) as conductor:
                conductor.send(m.RankLost(self.number, 0, f"failed: {why}"))
        finally:
            self._process.fail(why)

    def new_term(self) -> int:
        """Return the number of a conductor that is new, once, after connecting to it; 0 without one."""
        if self.heart.term == self._term:
            return 0
        self._term = self.heart.term
        self.conductor.renew()
        return self._term

    def conductor_is_gone(self) -> bool:
        return self.heart.seconds_since_monitor() > self.config.dead_after_s

    def conductors_silence(self) -> str:
        return f"{STEWARD} gave no sign of life for {self.heart.seconds_since_monitor():.1f} s"

    def wait_to_leave(self, stop: m.Stop, dropped: int, may_leave: bool) -> None:
        """Report that this rank has flushed. Returns when all others have, or after the grace."""
        self.conductor.send(m.Stopped(dropped))
        if may_leave:
            return
        deadline = time.monotonic() + stop.grace_s + 2 * STOP_EXTRA_S
        while time.monotonic() < deadline and not self.conductor_is_gone():
            if any(isinstance(msg, m.Stop) for msg in self.conductor.receive(0.2)):
                return


@dataclass(frozen=True)
class _Start:
    """The parts of a working rank that exist before its role."""

    process: RankProcess
    folder: Path
    model_config: ModelConfig
    neighbours: _Neighbours
    transfers: TransferEngine
    tracer: Tracer | None
    links: StageLinks | None


def work(process: RankProcess) -> int:
    """Start, serve, and end. Returns the exit code. Raises when the rank cannot continue."""
    config = process.config
    world = World.start(config.mpi_profile)
    plan = msgspec.msgpack.decode(world.bcast_bytes(None), type=StartPlan)
    if plan.refused:
        return process.leave(plan.refused, world.finish, 2)
    folder = resolve_model(config.model)
    model_config = load_config(folder)
    neighbours = _Neighbours(process, world, plan)
    links = None
    if len(ranks := pipeline_of(config.roles, world.rank)) > 1:
        links = StageLinks(world, ranks, process.run_dir, CurveKeys.from_bytes(plan.control_keys))
    elif config.pipeline_parallel_size > 1:
        world.allgather_bytes(b"")  # see StageLinks
    lent = segment_bytes(config, model_config, process.role)
    tracer = rank_tracer(process, world, neighbours.conductor)
    transfers = TransferEngine(world, lent, on_fatal=neighbours.end_rank)
    forget_shared_memory()
    start = _Start(process, folder, model_config, neighbours, transfers, tracer, links)
    try:
        part = _Store(start) if process.role == "store" else _Compute(start)
        process.ready()
        stop = part.run()
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        neighbours.conductor.send(m.RankLost(neighbours.number, 0, reason))
        neighbours.conductor.close()  # waits until it has gone
        raise
    if stop is None or stop.lost:
        process.fail(f"{FOLLOWED}{stop.reason if stop else neighbours.conductors_silence()}")
    assert stop is not None
    neighbours.wait_to_leave(stop, part.close(stop.grace_s), part.may_leave)
    neighbours.heart.stop()
    if part.still_reading:
        process.file.write("stopped", stop.reason)
        hard_exit(0)
    transfers.close()
    part.release()
    neighbours.conductor.close()
    return process.leave(stop.reason, partial(world.finish, lost=transfers.has_lost))


class _Store:
    """The parts of a store rank."""

    def __init__(self, start: _Start) -> None:
        from mooncake_lite.ranks.store.loop import StoreRole
        from mooncake_lite.ranks.store.tier_folder import open_tier
        from mooncake_lite.ranks.store.traced import StoreTrace, trace_tier

        config, near = start.process.config, start.neighbours
        index = config.ranks_of("store").index(near.number)
        fingerprint = pool_fingerprint(config, start.folder)
        layout = block_layout(config, start.model_config)
        tier = open_tier(config, index, layout, fingerprint)
        self._role = StoreRole(
            start.transfers, near.conductor, tier, near.conductor_is_gone, layout, config.roles,
            m.RankHello(near.number, "store", near.node, len(start.transfers.local), tier is not None),
            near.new_term,
        )  # fmt: skip
        start.process.at_end(self._role.seal_now)
        if start.tracer is not None:
            StoreTrace(start.tracer, config.roles).watch(near.conductor, start.transfers)
            if tier is not None:
                trace_tier(start.tracer, tier)
        self._role.announce()

    def run(self) -> m.Stop | None:
        """Serve until told to stop. None: the conductor is gone."""
        self._role.run()
        return self._role.stop

    def close(self, grace_s: float) -> int:
        """Flush. Returns the number of blocks that could not be saved in time."""
        return self._role.close(grace_s)

    @property
    def may_leave(self) -> bool:
        """Tell whether the others have left already."""
        return self._role.may_leave

    def release(self) -> None:
        """Hold nothing that keeps the segment."""

    @property
    def still_reading(self) -> bool:
        """Tell whether the segment is in use and may not be unmapped."""
        return self._role.still_reading


class _Compute:
    """The parts of a rank that computes."""

    def __init__(self, start: _Start) -> None:
        process, near = start.process, start.neighbours
        config, role = process.config, process.role
        threads = threads_for(config, usable_cores(), role, near.roles)
        set_thread_environment(threads)  # Numba reads it when it is imported, by build_engine

        from mooncake_lite.engine.build import build_engine
        from mooncake_lite.engine.runner import Runner
        from mooncake_lite.engine.staging import StagingBlocks
        from mooncake_lite.ranks.computing.build import computing_rank
        from mooncake_lite.ranks.computing.connections import Connections
        from mooncake_lite.ranks.computing.loop import Loop, StepRunner
        from mooncake_lite.ranks.computing.traced import ComputeTrace, TracedRunner

        stage = start.links.stage if start.links is not None else WHOLE
        engine = build_engine(config, start.folder, start.model_config, threads, process, stage)
        lent = pool_bytes(config, start.model_config, role)
        memory = StageMemory(config, start.model_config, role, stage, start.transfers.local)
        blocks = StagingBlocks(memory.staging, memory.layout, engine)
        hello = m.RankHello(near.number, role, near.node, lent)
        links = start.links
        pipeline = Pipeline(links, memory, engine, start.transfers) if links is not None else None
        own = Runner(engine, blocks, start.transfers, pipeline.compute if pipeline else None)
        self._own, self._links = own, start.links
        runner: StepRunner = own if pipeline is None else pipeline.runner(own)
        if start.tracer is not None:
            trace = ComputeTrace(start.tracer, config.roles)
            trace.watch(near.conductor, start.transfers)
            runner = TracedRunner(runner, trace)
        ends = near.conductor_is_gone, near.new_term
        self._loop: Loop | StageLoop
        self._connections: Connections | StageLoop
        if pipeline is not None and not stage.is_first:
            self._loop = self._connections = StageLoop(
                pipeline, runner, own, start.transfers, near.conductor, hello, config.roles, *ends
            )
        else:
            staging = Staging(blocks.half_blocks, blocks.num_slots)
            load = serving_costs(config, start.folder, start.model_config).load
            rank = computing_rank(
                hello, config, start.model_config, DUTIES[role], engine.num_pages, staging, load
            )
            self._connections = Connections(
                rank, config.roles, start.transfers, near.conductor, near.open_gateway, *ends
            )
            self._loop = Loop(rank, self._connections, runner)
        near.conductor.send(hello)

    def run(self) -> m.Stop | None:
        """Serve until told to stop. None: the conductor is gone."""
        self._loop.run()
        return self._connections.stop

    def close(self, grace_s: float) -> int:
        """Close the connections. A compute rank has nothing to save."""
        self._connections.close()
        return 0

    def release(self) -> None:
        """Hold nothing that keeps the segment."""
        self._own.close()
        if self._links is not None:
            self._links.close()

    @property
    def may_leave(self) -> bool:
        """Tell whether the others have left already."""
        return self._connections.may_leave

    still_reading = False
