"""Builds a working rank's role from its parts, runs it, and closes it. Rank 0: `steward/`.

Called by `mooncake_lite/rank.py` once signals and the run folder are in order; everything heavy (MPI, torch,
Numba) is imported here. The order of the steps is the order in which ranks meet over MPI.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.config.instances import FOLLOWERS, MEMBER, instance_of, leading_roles
from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.modes import DUTIES
from mooncake_lite.launch.rank_process import forget_shared_memory, hard_exit
from mooncake_lite.launch.threads import set_thread_environment, threads_for
from mooncake_lite.launch.verdict import FOLLOWED
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.sizes import block_layout, pool_bytes, segment_bytes, shares_of_role, unit_tokens
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.ranks.computing.members import (
    FollowerLoop,
    Instance,
    Links,
    RankMemory,
    Watch,
    exchange_of,
)
from mooncake_lite.ranks.conductor_link import ConductorLink
from mooncake_lite.ranks.plan import StartPlan, pids_here, pool_fingerprint
from mooncake_lite.ranks.process import RankProcess
from mooncake_lite.ranks.traced import rank_tracer
from mooncake_lite.tracing.tracer import Tracer
from scheduler.instance import Staging
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.membership import Heart
from transport.messaging.curve import CurveKeys
from transport.wire import Decoder
from transport.world import World


class _Neighbours:
    """The sockets of a working rank to the conductor and to its heart's monitor.

    role    of the first rank of this one's instance: nearly always its own
    roles   likewise of all ranks on this node, this one's among them
    """

    def __init__(self, process: RankProcess, world: World, plan: StartPlan) -> None:
        self.number, self.node = world.rank, world.node_of[world.rank]
        leading = leading_roles(process.config.roles)
        self.role, self.roles = leading[world.rank], [leading[rank] for rank in world.node_ranks]
        pids_here(world)
        self._process = process
        path = 0 if self.node == world.node_of[0] else -1
        self._gateway_keys = CurveKeys.from_bytes(plan.gateway_keys)
        self._name = f"rank-{world.rank}"
        heart_keys = CurveKeys.from_bytes(plan.heart_keys)
        self._control = plan.control[path]
        self._control_keys = CurveKeys.from_bytes(plan.control_keys)
        expected = Decoder(m.TO_STORE if process.role == "store" else m.TO_COMPUTE)
        self.conductor = Spoke(self._control, self._name, expected, self._control_keys)
        self.heart = Heart(
            plan.heart[path], self._name, curve=heart_keys, on_fatal=self.end_rank,
            on_term=self.conductor.wake,
        )  # fmt: skip

    def open_gateway(self, endpoint: str) -> Spoke:
        """Connect to a gateway, for tokens. No message comes back."""
        return Spoke(endpoint, self._name, Decoder(m.Stop), self._gateway_keys)

    def link(self, model: ModelConfig, transfers: TransferEngine) -> ConductorLink:
        """Return the link of this rank, which has not said hello."""
        config, role = self._process.config, self._process.role
        has_tier = role == "store" and bool(config.ssd_dir)
        hello = m.RankHello(self.number, role, self.node, pool_bytes(config, model, role), has_tier)
        return ConductorLink(self.conductor, self.heart, config.dead_after_s, hello, config.roles, transfers)

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


@dataclass(frozen=True)
class _Start:
    """The parts of a working rank that exist before its role.

    at_end   called at the end of the rank, when nothing uses its segment any more
    """

    process: RankProcess
    world: World
    folder: Path
    model_config: ModelConfig
    neighbours: _Neighbours
    transfers: TransferEngine
    conductor: ConductorLink
    tracer: Tracer | None
    links: Links | None
    at_end: ExitStack


class _Part(NamedTuple):
    """What a rank does for its role.

    run             serves until told to stop, or until the conductor is gone
    close           flushes, for so many seconds at most; returns the number of blocks that were dropped
    still_reading   tells, after that, whether a slow disk still uses the segment, which may then not be
                    unmapped
    """

    run: Callable[[], None]
    close: Callable[[float], int] = lambda limit_s: 0
    still_reading: Callable[[], bool] = lambda: False


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
    at_end, links = ExitStack(), None
    if len(ranks := instance_of(config.roles, world.rank)) > 1:
        keys = CurveKeys.from_bytes(plan.control_keys)
        links = Links(world, ranks, config.role_of(ranks[1]) == MEMBER, process.run_dir, keys)
        at_end.callback(links.close)
    elif config.has_followers:
        world.allgather_bytes(b"")  # see Links
    lent = segment_bytes(config, model_config, process.role)
    tracer = rank_tracer(process, world, neighbours.conductor)
    transfers = TransferEngine(world, lent, on_fatal=neighbours.end_rank)
    forget_shared_memory()
    conductor = neighbours.link(model_config, transfers)
    start = _Start(
        process, world, folder, model_config, neighbours, transfers, conductor, tracer, links, at_end
    )
    try:
        part = _store(start) if process.role == "store" else _compute(start)
        process.ready()
        part.run()
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        neighbours.conductor.send(m.RankLost(neighbours.number, 0, reason))
        neighbours.conductor.close()  # waits until it has gone
        raise
    stop = conductor.stop
    if stop is None or stop.lost:
        process.fail(f"{FOLLOWED}{conductor.reason}")
    assert stop is not None
    conductor.leave(stop, part.close(stop.grace_s))
    neighbours.heart.stop()
    if part.still_reading():
        process.file.write("stopped", stop.reason)
        hard_exit(0)
    transfers.close()
    at_end.close()
    neighbours.conductor.close()
    return process.leave(stop.reason, partial(world.finish, lost=transfers.has_lost))


def _store(start: _Start) -> _Part:
    """Build the part of a store rank, which has said hello."""
    from mooncake_lite.ranks.store.loop import StoreRole
    from mooncake_lite.ranks.store.tier_folder import open_tier
    from mooncake_lite.ranks.store.traced import StoreTrace, trace_tier

    config, near = start.process.config, start.neighbours
    index = config.ranks_of("store").index(near.number)
    layout = block_layout(config, start.model_config)
    tier = open_tier(config, index, layout, pool_fingerprint(config, start.folder))
    role = StoreRole(start.transfers, start.conductor, tier, layout)
    start.process.at_end(role.seal_now)
    if start.tracer is not None:
        StoreTrace(start.tracer, config.roles).watch(near.conductor, start.transfers)
        if tier is not None:
            trace_tier(start.tracer, tier)
    role.announce()
    return _Part(role.run, role.close, role.still_reading)


def _compute(start: _Start) -> _Part:
    """Build the part of a rank that computes, which has said hello."""
    process, near = start.process, start.neighbours
    config, role = process.config, process.role
    threads = threads_for(config, usable_cores(), near.role, near.roles)
    set_thread_environment(threads)  # Numba reads it when it is imported, by build_engine

    from mooncake_lite.engine.build import build_engine
    from mooncake_lite.engine.runner import Runner
    from mooncake_lite.engine.staging import StagingBlocks
    from mooncake_lite.ranks.computing.build import computing_rank
    from mooncake_lite.ranks.computing.gateway_link import GatewayLink
    from mooncake_lite.ranks.computing.loop import Loop, StepRunner
    from mooncake_lite.ranks.computing.traced import ComputeTrace, TracedRunner

    model, links, transfers = start.model_config, start.links, start.transfers
    share = shares_of_role(config, model, near.role)[links.number if links is not None else 0]
    instance, exchange, watch = None, None, None
    if links is not None and links.in_lockstep:
        watch = Watch(start.conductor, reads=role in FOLLOWERS)
        exchange = exchange_of(links, config, start.world, transfers, watch)
    engine = build_engine(config, start.folder, model, threads, process, share, exchange)
    memory = RankMemory(config, model, role, share, transfers.local)
    blocks = StagingBlocks(memory.staging, memory.layout, engine)
    if links is not None:
        instance = Instance(
            links, memory, engine, blocks, transfers, share, block_layout(config, model), unit_tokens(config)
        )
    own = Runner(engine, blocks, transfers) if instance is None else instance.own
    start.at_end.callback(own.close)
    runner: StepRunner = own if instance is None else instance.runner
    if start.tracer is not None:
        trace = ComputeTrace(start.tracer, config.roles)
        trace.watch(near.conductor, transfers)
        runner = TracedRunner(runner, trace)
    if instance is not None and role in FOLLOWERS:
        part = _Part(FollowerLoop(instance.peers, runner, own, start.conductor, watch).run)
    else:
        hello, staging = start.conductor.hello, Staging(blocks.half_blocks, blocks.num_slots)
        load = serving_costs(config, start.folder, model).load
        rank = computing_rank(hello, config, model, DUTIES[role], engine.num_pages, staging, load)
        loop = Loop(rank, start.conductor, GatewayLink(near.open_gateway), runner)
        leave = instance.peers.leave if instance is not None else None
        part = _Part(loop.run, partial(loop.close, leave=leave))
    start.conductor.join()
    return part
