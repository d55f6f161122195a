"""Builds the conductor from its parts, starts the gateway, runs both, and ends the cluster.

Called by `assemble.py` on rank 0. The order of the steps is the order in which ranks meet over MPI.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.conductor.gateway_process import GatewayProcess
from mooncake_lite.conductor.gateways import Gateways
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.conductor.loop import ConductorRole, control_config
from mooncake_lite.conductor.losses import Losses
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.conductor.traced import TracedConductorRole
from mooncake_lite.config.kv_events import kv_events_config
from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control
from mooncake_lite.control.events import GatewayLost, RankLost
from mooncake_lite.errors import ConfigError, UserError
from mooncake_lite.launch.preflight import preflight
from mooncake_lite.launch.rank_process import forget_shared_memory
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.launch.running import ready_line
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.sizes import block_layout, context_length
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.ranks.plan import STOP_EXTRA_S, StartPlan, pids_here, pool_fingerprint
from mooncake_lite.ranks.process import RankProcess
from mooncake_lite.ranks.traced import keep_lines, rank_tracer
from transport.address import reachable_address, tcp_endpoint
from transport.channel import Hub
from transport.curve import CurveKeys
from transport.engine import TransferEngine
from transport.membership import Monitor
from transport.wire import Decoder
from transport.world import World


def conduct(process: RankProcess) -> int:
    """Start the cluster, serve, and end. Returns the exit code."""
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
    if reason := _wrong_racks(config, world):
        gateway.stop(0.5)
        if stream is not None:
            stream.close()
        return _refuse(process, world, reason)
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
    plan = StartPlan(hub.endpoints, monitor.endpoints, control, heart, tokens)
    world.bcast_bytes(msgspec.msgpack.encode(plan))
    for rank, pid in pids_here(world):
        monitor.watch_pid(f"rank-{rank}", pid)
    tracer = rank_tracer(process, world, None)
    transfers = TransferEngine(world, 0, on_fatal=losses.on_fatal)
    forget_shared_memory()
    losses.end = monitor.end
    gateways = Gateways(world.node_of, host)
    lost = partial(_next_loss, losses, transfers, gateway, gateways)
    costs = serving_costs(config, resolve_model(config.model), model_config)
    decides = control_config(config, block_layout(config, model_config), world.node_of, costs)
    recorder = Recorder(Path(config.record), decides) if config.record else None
    kind = partial(TracedConductorRole, tracer) if tracer is not None else ConductorRole
    role = kind(config, hub, Control(decides), gateways, lost, losses.end_rank, stream, recorder)
    role.on_ready = lambda: _say_ready(process)
    process.ready()
    stop = role.run()
    role.close()
    if stop.lost:
        process.file.write("failed", stop.reason)  # before the ends of others can end this process
    _say_stop(process, hub, stop, monitor, gateway.name)
    gateway.stop(0.5 if stop.lost else 2.0)
    if stop.lost:
        process.fail(stop.reason)
    monitor.stop()
    transfers.close()
    hub.close()
    return process.leave(stop.reason, partial(world.finish, lost=transfers.has_lost))


def _next_loss(
    losses: Losses, transfers: TransferEngine, gateway: GatewayProcess, gateways: Gateways
) -> RankLost | GatewayLost | None:
    """Return the next loss, and let the parts of this process know it that have no messages."""
    found = losses.take() or gateway.lost()
    if isinstance(found, RankLost):
        transfers.mark_lost(found.rank, found.reason)
    elif found is not None:
        gateways.lose(found.gateway)
    return found


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
    return _refuse(process, World.start(process.config.mpi_profile), reason)


def _refuse(process: RankProcess, world: World, reason: str) -> int:
    world.bcast_bytes(msgspec.msgpack.encode(StartPlan(refused=reason)))
    print(f"mooncake-lite: error: {reason}", file=sys.stderr, flush=True)
    return process.leave(reason, world.finish, 2)


def _wrong_racks(config: ServeConfig, world: World) -> str:
    """Return why the configured racks do not fit the nodes; "" if they do."""
    try:
        parse_racks(config.racks, len(set(world.node_of)))
    except ConfigError as error:
        return str(error)
    return ""


def _address(config: ServeConfig, world: World) -> str:
    """Return the address at which other hosts reach this one; "" on one host."""
    if world.one_node:
        return ""
    others = [name for name, node in zip(world.hostnames, world.node_of) if node != world.node_of[world.rank]]
    return reachable_address(others, config.control_host)


def _say_ready(process: RankProcess) -> None:
    """Print the URL and the run folder, where no launcher of ours does."""
    if ENVIRONMENT not in os.environ:
        print(ready_line(process.config, process.run_dir.path), flush=True)


def _say_stop(process: RankProcess, hub: Hub, stop: m.Stop, monitor: Monitor, gateway: str) -> int:
    """Have all ranks flush, then leave MPI together. Returns the number of blocks that were not saved."""
    ranks = {f"rank-{rank}" for rank in range(1, process.config.ranks)}
    ranks -= monitor.lost().keys()
    for peer in [*ranks, gateway]:
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
