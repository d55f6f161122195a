"""The gateway process: `python -m mooncake_lite.gateway RUN_DIR`.

Started by rank 0, and ended by a Stop message, SIGTERM or rank 0's death. Exit code 0 after a stop, 1
when something broke, 2 with one line when it cannot start. Knows how to start and end, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from mooncake_lite.config.origins import hosts_of, parse_origins
from mooncake_lite.errors import ConfigError
from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.connection import connection_type
from mooncake_lite.gateway.cross_origin import CrossOrigin
from mooncake_lite.gateway.door import Door
from mooncake_lite.gateway.endpoints import Endpoints
from mooncake_lite.gateway.plumbing import QuietServer, bounded, well_framed
from mooncake_lite.gateway.prompts import Prompts
from mooncake_lite.gateway.settings import Settings, read_settings
from mooncake_lite.gateway.traced_view import TracedClusterView
from mooncake_lite.launch.child import end_child, run_child
from mooncake_lite.launch.exec_child import follow_parent
from mooncake_lite.launch.run_dir import read_states
from mooncake_lite.launch.verdict import why_told_to_end
from mooncake_lite.model.tokenizer import load_tokenizer
from transport.membership import Heart

PARENT_END_S = 0.2
"""Longest time from the end of rank 0's first thread to its own; mpirun kills it 0.5 s after its SIGTERM."""

GOODBYE_S = 1.0
"""Time for open connections to take their last bytes after a SIGTERM; a Stop may allow less."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError for a taken address, or one of another machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address of this machine: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    listener.setblocking(False)
    return listener


async def lost_parent(parent_pid: int) -> bool:
    """Tell whether rank 0 has ended, after a moment: the signal comes when its first thread ends."""
    deadline = time.monotonic() + PARENT_END_S
    while parent_pid == os.getppid() and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    return parent_pid not in (0, os.getppid())


def view_of(settings: Settings, on_stop: Callable[[str, float], None]) -> ClusterView:
    """Return a view of the cluster. It beats where a steward expects that."""
    cluster = (TracedClusterView if settings.config.trace else ClusterView)(settings, on_stop)
    if settings.beats:
        cluster.heart = Heart(settings.heart_endpoint, settings.name, on_fatal=end_child)
    return cluster


def end_on_signals(end: Callable[[], None]) -> None:
    """Call `end` in the running loop at each SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)


async def serve(settings: Settings, when_told: Callable[[Callable[[], None]], None]) -> None:
    """Serve until told to stop. Raises UserError when a socket cannot be opened.

    when_told   is given what begins the end, to be called in this loop: end_on_signals, in a process
    """
    origins = parse_origins(settings.config.allowed_origins)
    door = Door(listen(settings.config.host, settings.config.port), settings.limits.connections, origins)
    stopped = asyncio.Event()
    goodbye_s = GOODBYE_S

    def on_stop(reason: str, grace_s: float) -> None:
        nonlocal goodbye_s
        goodbye_s = min(GOODBYE_S, grace_s)
        stopped.set()

    cluster = view_of(settings, on_stop)

    async def end() -> None:
        orphaned = await lost_parent(settings.parent_pid)
        cluster.stop(why_told_to_end(read_states(settings.run_dir), orphaned))
        stopped.set()

    endings: list[asyncio.Task[None]] = []

    when_told(lambda: endings.append(asyncio.create_task(end())))
    prompts = Prompts(settings, load_tokenizer(settings.model_folder))
    app = Endpoints(settings, cluster, prompts).app()
    config = uvicorn.Config(
        app,
        http=connection_type(settings.limits.header_timeout_s, settings.limits.write_timeout_s, origins),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=100,  # endpoints.py reports what deserves it; a client's mistake is no news
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
    )
    server = QuietServer(config)
    limited = bounded(well_framed(app), door.limit, server.server_state.connections)
    own_names = (socket.gethostname(), socket.getfqdn(), settings.config.host)
    hosts = hosts_of(settings.config.allowed_hosts, door.getsockname()[0], own_names)
    config.app = CrossOrigin(limited, origins, hosts)
    serving = asyncio.create_task(server.serve(sockets=[door]))
    running = asyncio.create_task(cluster.run())
    told = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((serving, running, told), return_when=asyncio.FIRST_COMPLETED)
        cluster.stop("the gateway is ending")
        config.timeout_graceful_shutdown = goodbye_s  # type: ignore[assignment]
        server.should_exit = True
        await serving
        if running.done():
            running.result()
    finally:
        for task in (running, told):
            task.cancel()
        await asyncio.gather(serving, running, told, return_exceptions=True)
        prompts.close()
        cluster.disconnect()


def run(run_dir: Path) -> None:
    """Serve until the cluster stops. Raises UserError when that is impossible."""
    settings = read_settings(run_dir)
    if not follow_parent(settings.parent_pid or os.getppid()):
        return
    asyncio.run(serve(settings, end_on_signals))


if __name__ == "__main__":
    run_child("mooncake_lite.gateway", run)
