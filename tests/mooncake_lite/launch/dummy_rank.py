"""A rank without a model: everything that a rank does as a process, and nothing else.

Started by mpirun in place of `mooncake-lite serve`:  dummy_rank.py PORT BEHAVIOUR [RANK]

    serve          come up, stop when told to
    survive        the same, and go on without a rank that is gone
    mpi            the same, inside MPI
    stubborn       RANK hears no Stop and no signal
    silent         no rank becomes ready; RANK is ignored
    refuse         RANK fails while it starts
    deny           RANK cannot do what the user asked for
    vanish         RANK is gone while it starts, without a word
    unborn         RANK is gone before it has a file
    stillborn      RANK is gone before it is a Python program (run_launcher.py)
    chatter        RANK prints on both streams, then serves
    unheard        every rank is ready, /health answers 503, and leaving takes SLOW_S
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
import time

from mooncake_lite.launch import processes
from mooncake_lite.launch.place import world_from_environment
from mooncake_lite.launch.rank_process import (
    RankFile,
    block_stop_signals,
    die_with_parent,
    exit_within,
    forget_shared_memory,
    hard_exit,
    leave_together,
    shield_output,
    watch_signals,
)
from mooncake_lite.launch.run_dir import ENVIRONMENT, RunDir

SLOW_S = 1.5
"""Longer than ranks are given that have not started yet, and far less than those get that have."""

NEVER_WHOLE = ("refuse", "deny", "vanish", "unborn", "stillborn")

ROLES = ("steward", "prefill", "decode", "store")


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> int:
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    chosen = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    place = world_from_environment()
    assert place is not None
    special = place.rank == chosen
    if special and behaviour == "unborn":
        hard_exit(3)
    block_stop_signals()
    die_with_parent()
    shield_output()
    run_dir = RunDir.join(os.environ[ENVIRONMENT])
    file = RankFile(run_dir, place.rank, ROLES[place.rank])

    def on_signal(name: str) -> None:
        if special and behaviour == "stubborn":
            return
        file.write("stopped", name)
        leave_together(run_dir)
        hard_exit(0)

    watch_signals(on_signal)
    file.write("starting", "waking up")
    if behaviour == "mpi":
        from mpi4py import MPI

        file.write("starting", "joined MPI")
        MPI.COMM_WORLD.Barrier()
        forget_shared_memory()
    if special and behaviour == "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
    if special and behaviour == "refuse":
        file.write("failed", "it does not like it here")
        return 1
    if special and behaviour == "deny":
        file.write("refused", "config.json is missing")
        return 2
    if special and behaviour == "chatter":
        print("words on stdout", flush=True)
        print("words on stderr", file=sys.stderr, flush=True)
    if behaviour != "silent":
        file.write("ready")
    if behaviour in ("unheard", *NEVER_WHOLE):  # real clusters do not serve before all are there
        Health.status = 503
    if place.rank == 0:
        conduct(port, run_dir, file, alone=behaviour == "survive")
    else:
        deaf = special and behaviour == "stubborn"
        while deaf or not (run_dir.path / "stop").exists():
            time.sleep(0.02)
    if behaviour == "unheard":
        time.sleep(SLOW_S)
    exit_within(1.0, 0)
    file.write("stopped", "asked to")
    if behaviour == "mpi":
        MPI.Finalize()
    run_dir.leave()
    return 0


def conduct(port: int, run_dir: RunDir, file: RankFile, alone: bool) -> None:
    """Answer /health, pass Stop on, and notice when another rank is gone, unless it goes on alone."""
    from mooncake_lite.messages import TO_CONDUCTOR, StopRequested
    from transport.channel import Hub
    from transport.wire import Decoder

    server = http.server.HTTPServer(("127.0.0.1", port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Hub([run_dir.control], Decoder(TO_CONDUCTOR)) as hub:
        while True:
            for peer, message in hub.receive(0.1):
                if isinstance(message, StopRequested) and peer == "launcher":
                    (run_dir.path / "stop").touch()
                    return
            for state in () if alone else run_dir.states().values():
                if not state.ended and not processes.alive(state.pid, state.start_time):
                    file.write("failed", f"{state.name} died: its process has ended")
                    hard_exit(1)


if __name__ == "__main__":
    sys.exit(main())
