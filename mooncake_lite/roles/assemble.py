"""Builds a rank's role from its parts, runs it, and closes it.

Called by `rank.py` once signals and the run folder are in order; everything heavy (MPI, torch, Numba) is
imported here. The order of the steps is the order in which ranks meet over MPI.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from mooncake_lite import messages as m
from mooncake_lite.config import PAGE_TOKENS, ServeConfig
from mooncake_lite.control import Control
from mooncake_lite.control.events import GatewayLost, RankLost
from mooncake_lite.errors import UserError
from mooncake_lite.kv_events import kv_events_config
from mooncake_lite.launch.machine import usable_cores
from mooncake_lite.launch.preflight import preflight
from mooncake_lite.launch.rank_process import forget_shared_memory, hard_exit
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.launch.threads import set_thread_environment, threads_for
from mooncake_lite.launch.verdict import CONDUCTOR, FOLLOWED
from mooncake_lite.model import ModelConfig, load_config, resolve_model, weights_fingerprint
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.modes import DUTIES
from mooncake_lite.recording import Recorder
from mooncake_lite.roles.conductor import ConductorRole, control_config
from mooncake_lite.roles.gateway_process import NAME as GATEWAY
from mooncake_lite.roles.gateway_process import GatewayProcess
from mooncake_lite.roles.gateways import Gateways
from mooncake_lite.roles.kv_event_stream import KVEventStream
from mooncake_lite.roles.losses import Losses
from mooncake_lite.roles.process import RankProcess
from mooncake_lite.roles.traced import keep_lines, rank_tracer, spoke_of, transfer_engine
from mooncake_lite.roles.traced_conductor import TracedConductorRole
from mooncake_lite.sizes import block_layout, context_length, pool_bytes, segment_bytes
from scheduler.instance import Limits, Pages, Staging, State, new_prefix_cache
from store.keys import next_key
from transport.address import reachable_address, tcp_endpoint
from transport.channel import Hub, Spoke
from transport.curve import CurveKeys
from transport.engine import TransferEngine
from transport.membership import Heart, Monitor
from transport.wire import Decoder
from transport.world import World

STOP_EXTRA_S = 1.0
"""What the conductor waits beyond the grace for the last rank to report that it has flushed."""


class Plan(msgspec.Struct, frozen=True):
    """What rank 0 broadcasts over MPI before any ZeroMQ connection exists.

    control, heart   endpoints of the conductor: over ipc, and over tcp ("" when all are on one host)
    ..._keys         of control, of heart and of the gateway, as CurveKeys.to_bytes
    refused          why the cluster does not start; all ranks then leave with exit code 2
    """

    control: list[str] = []
    heart: list[str] = []
    control_keys: bytes = b""
    heart_keys: bytes = b""
    gateway_keys: bytes = b""
    refused: str = ""


def play(process: RankProcess) -> int:
    """Start, serve, and end. Returns the exit code. Raises when the rank cannot continue."""
    return _conduct(process) if process.place.rank == 0 else _work(process)


def pool_fingerprint(config: ServeConfig, folder: Path) -> bytes:
    """Return a fingerprint of everything that determines a block's bytes: the weights, the family of kernels,
    and a lossy codec.

    The base of every key's salt: a lossy codec taints what is computed on its blocks, so that they are never
    found by a request that asks for exact ones. Raises ModelError when the folder cannot be used.
    """
    if config.engine == "emulated":  # KV of its own kind: an SSD tier must not give it to a real engine
        kind = f"emulated 1 {config.dtype} {load_config(folder).kv_identity()}"
        return xxhash.xxh3_128_digest(kind.encode())
    weights = weights_fingerprint(folder, config.dtype, config.weights, config.device)
    if config.batch_invariant:
        weights = xxhash.xxh3_128_digest(weights + b"batch invariant")
    if config.kv_codec == "none":
        return weights
    return xxhash.xxh3_128_digest(weights + b"codec " + config.kv_codec.encode())


def limits_of(config: ServeConfig) -> Limits:
    """Return how much a rank that computes does at once."""
    return Limits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_num_partial_prefills,
        config.enable_chunked_prefill,
    )


def _address(config: ServeConfig, world: World) -> str:
    """Return the address at which other hosts reach this one; "" on one host."""
    if world.one_node:
        return ""
    others = [name for name, node in zip(world.hostnames, world.node_of) if node != world.node_of[world.rank]]
    return reachable_address(others, config.control_host)


# ----------------------------------------------------------------------------------- rank 0


def _conduct(process: RankProcess) -> int:
    config = process.config
    client = CurveKeys.generate()
    keys = {name: CurveKeys.generate(client) for name in ("control", "heart", "gateway")}
    stream: KVEventStream | None = None
    try:
        stream = _kv_event_stream(config)
        model_config, gateway = _before_mpi(process, keys["gateway"])
    except UserError as error:
        if stream is not None:
            stream.close()
        return _refuse_all(process, str(error))

    world = World.start(config.mpi_profile)
    host = _address(config, world)
    tcp = [tcp_endpoint(host, "*")] if host else []
    hub = Hub([process.run_dir.control, *tcp], Decoder(m.TO_CONDUCTOR), keys["control"])
    losses = Losses(hub.wake)
    monitor = Monitor(
        [process.run_dir.heart, *tcp], [f"rank-{rank}" for rank in range(1, config.ranks)],
        dead_s=config.dead_after_s, curve=keys["heart"], first_s=config.start_timeout_s,
        on_lost=losses.on_lost, on_fatal=losses.on_fatal,
    )  # fmt: skip
    control, heart, tokens = (keys[name].to_bytes() for name in ("control", "heart", "gateway"))
    plan = Plan(hub.endpoints, monitor.endpoints, control, heart, tokens)
    world.bcast_bytes(msgspec.msgpack.encode(plan))
    for rank, pid in _pids(world):
        monitor.watch_pid(f"rank-{rank}", pid)
    tracer = rank_tracer(process, world, None)
    transfers = TransferEngine(world, 0, on_fatal=losses.on_fatal)
    forget_shared_memory()

    def lost() -> RankLost | GatewayLost | None:
        ended = gateway.lost()
        return losses.first() or (GatewayLost(GATEWAY, ended) if ended else None)

    decides = control_config(config, block_layout(config, model_config), world.node_of)
    recorder = Recorder(Path(config.record), decides) if config.record else None
    gateways = Gateways(world.node_of, host)
    kind = partial(TracedConductorRole, tracer) if tracer is not None else ConductorRole
    role = kind(config, hub, Control(decides), gateways, lost, stream, recorder)
    process.ready()
    stop = role.run()
    role.close()
    if stop.lost:
        process.file.write("failed", stop.reason)  # before the ends of others can end this process
    _say_stop(process, hub, stop, monitor)
    gateway.stop(0.5 if stop.lost else 2.0)
    if stop.lost:
        process.fail(stop.reason)
    monitor.stop()
    transfers.close()
    hub.close()
    return process.leave(stop.reason, world.finish)


def _before_mpi(process: RankProcess, gateway_keys: CurveKeys) -> tuple[ModelConfig, GatewayProcess]:
    """Load the model's configuration and start the gateway. Raises UserError where serving is impossible.

    Our own launcher has looked at the machine already; under a user's own mpirun this is the place.
    """
    config = process.config
    if ENVIRONMENT not in os.environ:
        for warning in preflight(config):
            print(f"mooncake-lite: warning: {warning}", file=sys.stderr, flush=True)
    folder = resolve_model(config.model)
    model_config = load_config(folder)
    fingerprint = pool_fingerprint(config, folder)
    if config.engine == "emulated":
        weights = "emulated"
    else:
        weights = weight_source(folder, config.weights, config.dtype, config.device).describe(config.dtype)
    max_len = context_length(config, model_config)
    gateway = GatewayProcess(process.run_dir, config, folder, fingerprint, weights, max_len, gateway_keys)
    return model_config, gateway


def _kv_event_stream(config: ServeConfig) -> KVEventStream | None:
    """Bind the stream of KV events, if there is one. Raises ConfigError when that is impossible."""
    wanted = kv_events_config(config.kv_events_config)
    return KVEventStream(wanted, config.block_size) if wanted.wanted else None


def _refuse_all(process: RankProcess, reason: str) -> int:
    """Tell all ranks through MPI why nothing starts. A rank that left earlier would leave them waiting."""
    world = World.start(process.config.mpi_profile)
    world.bcast_bytes(msgspec.msgpack.encode(Plan(refused=reason)))
    print(f"mooncake-lite: error: {reason}", file=sys.stderr, flush=True)
    return process.leave(reason, world.finish, 2)


def _pids(world: World) -> list[tuple[int, int]]:
    """Return (rank, pid) of every other rank on this host."""
    found = world.allgather_bytes(str(os.getpid()).encode())
    mine = world.node_of[world.rank]
    return [
        (rank, int(pid))
        for rank, pid in enumerate(found)
        if rank != world.rank and world.node_of[rank] == mine
    ]


def _say_stop(process: RankProcess, hub: Hub, stop: m.Stop, monitor: Monitor) -> int:
    """Have all ranks flush, then leave MPI together. Returns the number of blocks that were not saved."""
    ranks = {f"rank-{rank}" for rank in range(1, process.config.ranks)}
    for peer in [*ranks, GATEWAY]:
        hub.send(peer, stop)
    waiting = set() if stop.lost else set(ranks)
    dropped = 0
    deadline = time.monotonic() + stop.grace_s + STOP_EXTRA_S
    while waiting and time.monotonic() < deadline:
        for peer, message in hub.receive(deadline - time.monotonic()):
            if isinstance(message, m.Stopped):
                waiting.discard(peer)
                dropped += message.dropped
            elif isinstance(message, m.TraceLines):
                keep_lines(process.config, message)
        waiting -= monitor.lost().keys()
    for peer in ranks if not stop.lost else ():
        monitor.forget(peer)
        hub.send(peer, m.Stop("leave", 0.0))
    if dropped:
        print(f"mooncake-lite: {dropped} blocks were not saved to the SSD tier in time", flush=True)
    return dropped


# ----------------------------------------------------------------------------------- other ranks


class _Neighbours:
    """Connections of a working rank to the conductor, and its reasons to stop.

    roles   of all ranks on this node, this one's among them
    """

    def __init__(self, process: RankProcess, world: World, plan: Plan) -> None:
        self.config = process.config
        self.number = world.rank
        self.node = world.node_of[world.rank]
        self.roles = [
            process.config.role_of(rank) for rank, node in enumerate(world.node_of) if node == self.node
        ]
        _pids(world)
        self._process = process
        self._path = 0 if world.node_of[world.rank] == world.node_of[0] else -1
        self._gateway_keys = CurveKeys.from_bytes(plan.gateway_keys)
        self._name = f"rank-{world.rank}"
        heart_keys = CurveKeys.from_bytes(plan.heart_keys)
        self._control = plan.control[self._path]
        self._control_keys = CurveKeys.from_bytes(plan.control_keys)
        self.heart = Heart(plan.heart[self._path], self._name, curve=heart_keys, on_fatal=self.end_rank)
        expected = Decoder(m.TO_STORE if process.role == "store" else m.TO_COMPUTE)
        self.conductor = spoke_of(process.config)(self._control, self._name, expected, self._control_keys)

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
                conductor.send(m.RankError(why))
        finally:
            self._process.fail(why)

    def conductor_is_gone(self) -> bool:
        return self.heart.seconds_since_monitor() > self.config.dead_after_s

    def conductors_silence(self) -> str:
        return f"{CONDUCTOR} gave no sign of life for {self.heart.seconds_since_monitor():.1f} s"

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


def _work(process: RankProcess) -> int:
    config = process.config
    world = World.start(config.mpi_profile)
    plan = msgspec.msgpack.decode(world.bcast_bytes(None), type=Plan)
    if plan.refused:
        return process.leave(plan.refused, world.finish, 2)
    folder = resolve_model(config.model)
    model_config = load_config(folder)
    neighbours = _Neighbours(process, world, plan)
    lent = segment_bytes(config, model_config, process.role)
    transfers = transfer_engine(process, world, lent, neighbours.conductor, neighbours.end_rank)
    forget_shared_memory()
    start = _Start(process, folder, model_config, neighbours, transfers)
    try:
        part = _Store(start) if process.role == "store" else _Compute(start)
        process.ready()
        stop = part.run()
    except Exception as error:
        neighbours.conductor.send(m.RankError(f"{type(error).__name__}: {error}"))
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
    neighbours.conductor.close()
    return process.leave(stop.reason, world.finish)


class _Store:
    """The parts of a store rank."""

    def __init__(self, start: _Start) -> None:
        from mooncake_lite.roles.store import StoreRole
        from mooncake_lite.roles.tier_folder import open_tier
        from mooncake_lite.roles.traced_store import trace_store

        config, near = start.process.config, start.neighbours
        index = config.ranks_of("store").index(near.number)
        fingerprint = pool_fingerprint(config, start.folder)
        layout = block_layout(config, start.model_config)
        tier = open_tier(config, index, layout, fingerprint)
        self._role = StoreRole(
            near.number, start.transfers, near.conductor, tier, near.conductor_is_gone, layout,
            config.roles,
        )  # fmt: skip
        start.process.at_end(self._role.seal_now)
        trace_store(near.conductor, start.transfers, tier, config.roles)
        segment = len(start.transfers.local)
        near.conductor.send(m.RankHello(near.number, "store", near.node, segment, tier is not None))
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

        from mooncake_lite.engine import Runner, StagingBlocks
        from mooncake_lite.engine.build import build_engine
        from mooncake_lite.roles.compute import ComputeRole
        from mooncake_lite.roles.compute_rank import ComputeRank
        from mooncake_lite.roles.traced_compute import traced_runner

        engine = build_engine(config, start.folder, start.model_config, threads, process)
        lent = pool_bytes(config, start.model_config, role)
        blocks = StagingBlocks(start.transfers.local[lent:], block_layout(config, start.model_config), engine)
        pages = Pages(engine.num_pages, PAGE_TOKENS)
        halves_and_slots = Staging(blocks.half_blocks, blocks.num_slots)
        duties, size, limits = frozenset(DUTIES[role]), config.block_size, limits_of(config)
        prefix = new_prefix_cache(config.prefix_sharing, pages, size, next_key)
        state = State(
            duties, pages, halves_and_slots, size, limits, next_key=next_key, prefix=prefix,
            preemption=config.preemption,
        )  # fmt: skip
        self._rank = ComputeRank(
            near.number, config.roles, state, start.transfers, near.conductor, near.open_gateway,
            near.conductor_is_gone,
        )  # fmt: skip
        inner = Runner(engine, blocks, start.transfers)
        runner = traced_runner(inner, near.conductor, start.transfers, config.roles)
        self._role = ComputeRole(self._rank, runner, context_length(config, start.model_config))
        near.conductor.send(m.RankHello(near.number, role, near.node, lent))

    def run(self) -> m.Stop | None:
        """Serve until told to stop. None: the conductor is gone."""
        self._role.run()
        return self._rank.stop

    def close(self, grace_s: float) -> int:
        """Close the connections. A compute rank has nothing to save."""
        self._rank.close()
        return 0

    @property
    def may_leave(self) -> bool:
        """Tell whether the others have left already."""
        return self._rank.may_leave

    still_reading = False
