"""Worlds of several ranks, started with mpirun: on one node, and on two made of network namespaces."""

import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import ROOT, mpi_environment, run_mpi, skip_without_ucx
from tests.two_nodes import two_nodes

PROGRAMS = Path(__file__).parent / "programs"


ONLY_TCP = ("-x", "UCX_TLS=tcp,self")
"""Else UCX finds that both "nodes" are one machine, and copies from process to process."""


def run_on(
    nodes: int,
    ranks: int,
    program: str,
    *args: object,
    folder: Path,
    profile: str = "ft",
    mpirun_args: tuple[str, ...] = (),
    limit_s: float = 60.0,
) -> str:
    """Run a program on one or two nodes; its output, after it has ended in order and left nothing."""
    if nodes == 1:
        run = run_mpi(ranks, PROGRAMS / program, args, limit_s, profile=profile, mpirun_args=mpirun_args)
        return run.check().output
    with two_nodes(folder) as pair:
        spread = [*mpirun_args, *pair.mpirun_args(ranks // 2, ranks // 2)]
        run = run_mpi(
            ranks, PROGRAMS / program, args, limit_s, profile=profile, prefix=pair.on(0), mpirun_args=spread
        )
    return run.check().output


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_byte_arrives_between_all_ranks(nodes: int, tmp_path: Path, soak: int) -> None:
    seed = secrets.randbelow(10**9) if soak > 1 else 20260
    print("seed", seed)
    output = run_on(nodes, 4, "moves.py", seed, soak, folder=tmp_path, limit_s=60.0 + 10 * (soak - 1))
    assert output.count(f"of {nodes} nodes") == output.count(" ok") == 12
    for line in (line for line in output.splitlines() if line.endswith("ok")):
        path = line.split("path ")[1].split(":")[0]
        numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        assert numbers["shared"] > 10**6, "what is on the own rank is copied"
        away = numbers.get("two_sided", 0) + numbers.get("sockets", 0)
        assert (away > 10**6) == (nodes == 2 or path != "any")
        if path != "any":
            assert numbers[path] == away
        assert numbers["control"] < 10**5, "bytes travelled over ZeroMQ"


@pytest.mark.parametrize(("nodes", "only"), [(1, ()), (2, ()), (2, ONLY_TCP)])
def test_the_fast_profile_moves_bytes_too(nodes: int, only: tuple[str, ...], tmp_path: Path) -> None:
    skip_without_ucx()
    output = run_on(nodes, 2, "moves.py", 7, 1, "fast", folder=tmp_path, profile="fast", mpirun_args=only)
    assert output.count(" ok") == 8
    for line in (line for line in output.splitlines() if "path one_sided" in line):
        numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        assert numbers["one_sided"] > 10**6
        assert numbers["two_sided"] == numbers["sockets"] == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_window_is_served_on_request_and_nothing_hangs_without(nodes: int, tmp_path: Path) -> None:
    skip_without_ucx()
    args = {"folder": tmp_path, "profile": "fast", "mpirun_args": ONLY_TCP}
    assert run_on(nodes, 2, "windows.py", **args).count("ok") == 2


def test_no_window_spans_ranks_that_may_die_alone(tmp_path: Path) -> None:
    assert run_on(1, 2, "windows.py", "refused", folder=tmp_path).count("ok") == 2


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("nodes", "how", "path"),
    [
        (1, "told", ""),
        (1, "untold", ""),
        (1, "untold", "sockets"),
        (2, "told", ""),
        (2, "untold", "two_sided"),
    ],
)
def test_a_killed_rank_fails_its_own_transfers_alone(nodes: int, how: str, path: str, tmp_path: Path) -> None:
    output = run_on(nodes, 4, "dies.py", how, path, folder=tmp_path)
    assert output.count("survived") == 3


def test_paths_are_measured_and_a_second_try_takes_another(tmp_path: Path) -> None:
    assert run_on(2, 4, "ways.py", folder=tmp_path).count("ok") == 4


@pytest.mark.parametrize(("nodes", "ranks", "profile"), [(1, 3, "ft"), (2, 4, "ft"), (2, 2, "fast")])
def test_members_exchange_over_mpi(nodes: int, ranks: int, profile: str, tmp_path: Path) -> None:
    if profile == "fast":
        skip_without_ucx()
    args = {"folder": tmp_path, "profile": profile, "mpirun_args": ONLY_TCP if profile == "fast" else ()}
    output = run_on(nodes, ranks, "exchanges.py", profile, **args)
    assert output.count(f"of {nodes} nodes exchanged") == ranks
    assert output.count("survived") == (ranks - 1 if profile == "ft" else 0)


@pytest.mark.parametrize("path", ["two_sided", "sockets"])
def test_closing_and_cancelling_end_whatever_is_under_way(path: str, tmp_path: Path) -> None:
    assert run_on(1, 2, "closes.py", path, folder=tmp_path).count("ok") == 2


def test_a_target_refuses_bad_ranges_and_strangers(tmp_path: Path) -> None:
    assert run_on(2, 2, "refused.py", folder=tmp_path).count("ok") == 2


def test_a_segment_too_large_is_told_to_every_rank(tmp_path: Path) -> None:
    output = run_on(1, 3, "too_large.py", folder=tmp_path)
    assert output.count("bytes of shared memory and /dev/shm has") == 3


def test_a_world_of_one_process_needs_no_mpirun_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from transport.world import World\n"
        "world = World.start()\n"
        "assert (world.rank, world.size, world.one_node) == (0, 1, True)\n"
        "assert world.allgather_bytes(b'abc') == [b'abc']\n"
        "assert world.bcast_bytes(b'x' * 70000) == b'x' * 70000\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "assert world.finish(5) and world.finish(5)\n"
        "print('mapped', '/dev/shm/sm_segment' in maps)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=mpi_environment(str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "mapped False"), run.stderr


@pytest.mark.quick
def test_importing_the_package_loads_neither_mpi_nor_torch() -> None:
    modules = "transport, transport.wire, transport.channel, transport.membership, transport.engine"
    code = (
        f"import sys, {modules}, transport.world, transport.bulk.courier\n"
        "print(sorted({'mpi4py', 'torch', 'numba'} & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert run.stdout.strip() == "[]"
