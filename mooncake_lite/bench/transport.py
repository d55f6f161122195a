"""Reading another rank's segment on one node, beside MPI messages and a plain copy.

Two ranks under mpirun run this file as a program (`python -m mooncake_lite.bench.transport QUICK FILE`); rank
0 measures and writes its rows. Ranks are started like those of a cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mooncake_lite.bench.result import Other, Row, best_seconds, median_seconds
from mooncake_lite.config import ServeConfig
from mooncake_lite.errors import ClusterError

if TYPE_CHECKING:
    from transport.engine import TransferEngine
    from transport.world import World

SEGMENT_BYTES = 64 * 2**20
SIZES = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": 2**20, "16 MiB": 16 * 2**20}
LIMIT_S = 50.0


def run(quick: bool) -> list[Row]:
    """Start two ranks and collect what rank 0 measured. Raises ClusterError when they fail."""
    from mooncake_lite.launch.child import start_child
    from mooncake_lite.launch.machine import find_mpirun
    from mooncake_lite.launch.mpirun import AS_ROOT, COMMON, PROFILES

    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as folder:
        result = Path(folder) / "rows.json"
        line = [str(find_mpirun()), "-n", "2", *COMMON, *PROFILES[ServeConfig().profile]]
        line += [sys.executable, "-m", __name__, str(int(quick)), str(result)]
        environment = {**os.environ, **(AS_ROOT if os.getuid() == 0 else {}), "TMPDIR": folder}
        process = start_child(
            line, env=environment, new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=10)
            raise ClusterError(f"two ranks did not finish their transfers within {LIMIT_S:.0f} s") from None
        if process.returncode != 0 or not result.exists():
            words = output.decode(errors="replace").strip().splitlines()
            raise ClusterError(f"measuring transfers failed: {words[-1] if words else process.returncode}")
        return msgspec.json.decode(result.read_bytes(), type=list[Row])


def measure(quick: bool, result: Path) -> None:
    """What each of the two ranks runs."""
    from mooncake_lite.launch.rank_process import die_with_parent, forget_shared_memory
    from transport.engine import TransferEngine
    from transport.world import World

    die_with_parent()
    world = World.start()
    engine = TransferEngine(world, SEGMENT_BYTES)
    forget_shared_memory()
    engine.local[:] = world.rank
    world.barrier()
    rows = []
    for name, size in SIZES.items():
        runs = max(5, min(2000, 2**28 // size) // (20 if quick else 1))
        rows.append(_row(world, engine, name, size, runs))
    if world.rank == 0:
        result.write_bytes(msgspec.json.encode(rows))
    world.barrier()
    engine.close()
    world.finish()


def _row(world: World, engine: TransferEngine, name: str, size: int, runs: int) -> Row:
    """Each kind of transfer has its phase, so that nobody spins in a message while another is measured.

    The peer asks for the bytes with an empty message and gets them in one: what a read is without windows. A
    sender that is not asked runs ahead, and a receive would time the last copy alone.
    """
    from mpi4py import MPI

    from transport.engine import Transfer

    out, source, request = np.empty(size, np.uint8), np.ones(size, np.uint8), np.empty(0, np.uint8)
    comm = MPI.COMM_WORLD

    def read() -> None:
        engine.submit([Transfer("read", out, 1, 0, 0, size)]).wait(10)

    def ask() -> None:
        comm.Send(request, dest=1)
        comm.Recv(out, source=1)

    def answer() -> None:
        comm.Recv(request, source=0)
        comm.Send(source, dest=0)

    first = world.rank == 0
    world.barrier()
    ours = median_seconds(runs, read)[0] if first else 0.0
    copies = best_seconds(runs, lambda: np.copyto(out, source)) if first else 0.0
    world.barrier()
    messages = median_seconds(runs, ask if first else answer)[0]
    world.barrier()
    gb = size / 1e9
    peer = Other("MPI request and reply", gb / messages)
    limit = Other("copy within the rank", gb / copies) if first else None
    return Row(f"read {name} from another rank", "GB/s", gb / ours if first else 0.0, peer, limit, runs)


if __name__ == "__main__":
    measure(sys.argv[1] == "1", Path(sys.argv[2]))
