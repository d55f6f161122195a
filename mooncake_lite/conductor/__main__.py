"""The conductor process: `python -m mooncake_lite.conductor RUN_DIR`.

Started by the steward, and started again when it ends. It ends after a Stop, or with the steward. Exit code 0
after a stop; with one line 1 when something broke, 2 when it cannot start. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mooncake_lite import messages as m
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.conductor.loop import ConductorRole
from mooncake_lite.conductor.machine import STEWARD
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.conductor.settings import Settings, control_config
from mooncake_lite.config.kv_events import kv_events_config
from mooncake_lite.config.reading import config_from, read_private
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.child import end_child, run_child
from mooncake_lite.launch.exec_child import follow_parent
from mooncake_lite.launch.rank_process import STOP_EXTRA_S
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.launch.running import ready_line
from mooncake_lite.model.config import load_config
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.sizes import block_layout
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.tracing.tracer import Tracer
from transport.channel import Hub
from transport.membership import Heart
from transport.wire import Decoder


def conduct(run_dir: Path) -> None:
    """Serve until the cluster stops. Raises UserError when that is impossible."""
    settings = read_private(run_dir / "conductor.json", Settings)
    if not follow_parent(settings.parent_pid):
        return
    config = config_from(settings.config, str(run_dir))
    hub = Hub(settings.endpoints, Decoder(m.TO_CONDUCTOR), settings.curve)
    heart = Heart(f"ipc://{run_dir}/heart", settings.name, on_fatal=end_child)
    role = _role(config, settings, hub)
    if not settings.term and ENVIRONMENT not in os.environ:
        role.on_ready = lambda: print(ready_line(config, run_dir), flush=True)
    stop = role.run()
    role.close()
    _say_stop(config, role, stop)
    role.on_end()
    heart.stop()
    hub.close()


def _role(config: ServeConfig, settings: Settings, hub: Hub) -> ConductorRole:
    """Build the role from its parts."""
    wanted, stream = kv_events_config(config.kv_events_config), None
    if wanted.wanted:
        stream = KVEventStream(wanted, config.block_size)
    folder = resolve_model(config.model)
    model_config = load_config(folder)
    costs = serving_costs(config, folder, model_config)
    layout = block_layout(config, model_config)
    decides = control_config(config, layout, settings.nodes, costs, settings.term, settings.lost)
    recorder = None
    if config.record:
        suffix = f".{settings.term}" if settings.term else ""
        recorder = Recorder(Path(config.record + suffix), decides)
    parts = config, hub, decides, settings.host, stream, recorder
    if not config.trace:
        return ConductorRole(*parts)
    from mooncake_lite.conductor.traced import TracedConductorRole, conductor_tracer

    tracer = conductor_tracer(config, settings.term)
    role = TracedConductorRole(tracer, *parts)
    role.on_end = tracer.close
    signal.signal(signal.SIGTERM, lambda *_: _end_traced(tracer))
    return role


def _end_traced(tracer: Tracer) -> None:
    tracer.close()
    os._exit(143)


def _say_stop(config: ServeConfig, role: ConductorRole, stop: m.Stop) -> None:
    """Have all ranks flush, then leave MPI together. A rank that has yet to come is told when it does."""
    hub, lost = role.hub, role.control.members.lost
    ranks = {f"rank-{rank}" for rank in range(1, config.ranks) if rank not in lost}
    for peer in [*ranks, *role.machine.gateways.names]:
        hub.send(peer, stop)
    waiting = set() if stop.lost else set(ranks)
    dropped = 0
    deadline = time.monotonic() + stop.grace_s + STOP_EXTRA_S
    while waiting and time.monotonic() < deadline:
        for peer, message in hub.receive(deadline - time.monotonic()):
            if isinstance(message, m.Stopped):
                waiting.discard(peer)
                dropped += message.dropped
            elif isinstance(message, m.RankHello):
                hub.send(peer, stop)
            elif isinstance(message, m.RankLost) and peer == STEWARD:
                waiting.discard(f"rank-{message.rank}")
            else:
                role.after_stop(peer, message)
    for peer in ranks if not stop.lost else ():
        hub.send(peer, m.Stop("leave", 0.0))
    if dropped:
        print(f"mooncake-lite: {dropped} blocks were not saved to the SSD tier in time", flush=True)


if __name__ == "__main__":
    run_child("mooncake_lite.conductor", conduct)
