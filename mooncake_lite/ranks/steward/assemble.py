"""Builds the steward, rank 0, from its parts, starts conductor and gateway, and ends the cluster.

Called by `mooncake_lite/rank.py`. The order of the steps is the order in which ranks meet over MPI.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.config.kv_events import kv_events_config
from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError, UserError
from mooncake_lite.launch.preflight import preflight
from mooncake_lite.launch.rank_process import forget_shared_memory
from mooncake_lite.launch.run_dir import ENDS, ENVIRONMENT
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.sizes import context_length
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.ranks.plan import StartPlan, pids_here, pool_fingerprint
from mooncake_lite.ranks.process import RankProcess
from mooncake_lite.ranks.steward.children import Child
from mooncake_lite.ranks.steward.loop import Steward
from mooncake_lite.ranks.steward.losses import LossQueue
from mooncake_lite.ranks.traced import rank_tracer
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.errors import ChannelError
from transport.membership import Monitor
from transport.messaging.address import reachable_address, reserved_port, tcp_endpoint
from transport.messaging.curve import CurveKeys
from transport.messaging.publisher import Publisher
from transport.wire import Decoder
from transport.world import World


def work(process: RankProcess) -> int:
    """Start the cluster, keep conductor and gateway alive, and end. Returns the exit code."""
    config = process.config
    client = CurveKeys.generate()
    keys = {name: CurveKeys.generate(client) for name in ("control", "heart", "gateway")}
    try:
        gateway = _before_mpi(process, keys["gateway"])
    except UserError as error:
        return _refuse(process, World.start(config.mpi_profile), str(error))

    world = World.start(config.mpi_profile)
    if reason := _wrong_racks(config, world):
        gateway.stop(0.5)
        return _refuse(process, world, reason)
    host = _address(config, world)
    port = reserved_port(host) if host else None
    control = [process.run_dir.control, *([tcp_endpoint(host, port.getsockname()[1])] if port else [])]
    conductor = Child("conductor", process.run_dir, {
        "config": config.to_dict(), "nodes": world.node_of, "host": host, "endpoints": control,
        "curve": replace(keys["control"], client_secret=""),
    })  # fmt: skip
    conductor.start(term=0, lost=[])
    spoke = Spoke(process.run_dir.control, "steward", Decoder(m.TO_STEWARD))
    losses = LossQueue(spoke.wake)
    monitor = Monitor(
        [process.run_dir.heart, *([tcp_endpoint(host, "*")] if host else [])],
        [f"rank-{rank}" for rank in range(1, config.ranks)],
        dead_s=config.dead_after_s, curve=keys["heart"], first_s=config.start_timeout_s, starting=True,
        on_lost=losses.on_lost, on_fatal=losses.on_fatal,
    )  # fmt: skip
    secrets = (keys[name].to_bytes() for name in ("control", "heart", "gateway"))
    plan = StartPlan(control, monitor.endpoints, *secrets)  # type: ignore[arg-type]
    world.bcast_bytes(msgspec.msgpack.encode(plan))
    for rank, pid in pids_here(world):
        monitor.watch_pid(f"rank-{rank}", pid)
    if config.has_followers:
        world.allgather_bytes(b"")  # see computing.members.Links
    rank_tracer(process, world, None)
    transfers = TransferEngine(world, 0, on_fatal=losses.on_fatal)
    forget_shared_memory()
    process.ready()
    stop = Steward(spoke, monitor, world, transfers, losses, conductor, gateway).run()
    code = 2 if stop.reason and stop.reason in (gateway.refusal, conductor.refusal) else 1
    if stop.lost:
        process.file.write(ENDS[code], stop.reason)  # before the ends of others can end this process
        gateway.terminate()  # a conductor that died has told it nothing; it reads the reason there
    gateway.stop(0.5 if stop.lost else 2.0)
    if stop.lost:
        process.fail(stop.reason, code)
    monitor.stop()
    conductor.stop(0.5)
    transfers.close()
    spoke.close()
    return process.leave(stop.reason, partial(world.finish, lost=transfers.has_lost))


def _before_mpi(process: RankProcess, gateway_keys: CurveKeys) -> Child:
    """Look whether serving is possible, and start the gateway. Raises UserError where it is impossible.

    Our own launcher has looked at the machine already; under a user's own mpirun this is the place.
    """
    config = process.config
    if ENVIRONMENT not in os.environ:
        for warning in preflight(config):
            print(f"mooncake-lite: warning: {warning}", file=sys.stderr, flush=True)
    _try_kv_event_stream(config)
    folder = resolve_model(config.model)
    gateway = Child("gateway", process.run_dir, _gateway_settings(config, folder, gateway_keys))
    gateway.start()
    return gateway


def _gateway_settings(config: ServeConfig, folder: Path, keys: CurveKeys) -> dict[str, Any]:
    model_config: ModelConfig = load_config(folder)
    weights = "emulated"
    if config.engine != "emulated":
        weights = weight_source(folder, config.weights, config.dtype, config.device).describe(config.dtype)
    return {
        "config": config.to_dict(),
        "model_folder": str(folder),
        "served_id": config.served_model_name or folder.name,
        "max_model_len": context_length(config, model_config),
        "fingerprint": pool_fingerprint(config, folder).hex(),
        "weights": weights,
        "curve": replace(keys, client_secret=""),
        "beats": True,
    }


def _try_kv_event_stream(config: ServeConfig) -> None:
    """Look whether the stream of KV events can be bound. Raises ConfigError when that is impossible."""
    wanted = kv_events_config(config.kv_events_config)
    try:
        if wanted.wanted:
            Publisher(wanted.endpoint, wanted.replay_endpoint or "", wanted.topic).close()
    except ChannelError as error:
        raise ConfigError(str(error)) from None


def _refuse(process: RankProcess, world: World, reason: str) -> int:
    """Tell all ranks through MPI why nothing starts. A rank that left earlier would leave them waiting."""
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
