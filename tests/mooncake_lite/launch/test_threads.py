"""Threads per rank follow the cores and the ranks that compute."""

from __future__ import annotations

import os

import pytest

from mooncake_lite.config import machine
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.place import ranks_near
from mooncake_lite.launch.threads import SPINS, set_thread_environment, threads_for

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("role", ["steward", "store"])
def test_ranks_that_do_not_compute_have_one_thread(role: str) -> None:
    assert threads_for(ServeConfig(threads=8), 64, role) == 1


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "expected"),
    [
        (1, 1, 1, (1, 1)),
        (2, 1, 1, (2, 2)),  # they take turns: measured to cost decode nothing with passive waiting
        (2, 2, 2, (1, 1)),
        (4, 1, 1, (4, 4)),
        (8, 1, 1, (4, 4)),  # from here on each has cores of its own
        (64, 1, 3, (16, 16)),
        (6, 1, 3, (4, 2)),
    ],
)
def test_small_nodes_take_turns_and_large_ones_share(
    cores: int, prefill: int, decode: int, expected: tuple[int, int]
) -> None:
    config = ServeConfig(prefill=prefill, decode=decode)
    assert (threads_for(config, cores, "prefill"), threads_for(config, cores, "decode")) == expected


def test_only_ranks_of_the_same_node_share_its_cores() -> None:
    config = ServeConfig(prefill=2, decode=2)
    assert threads_for(config, 16, "prefill", ["steward", "prefill"]) == 16
    assert threads_for(config, 16, "prefill") == 4


@pytest.mark.parametrize(
    ("rank", "size", "index", "count", "near"),
    [
        (0, 4, 0, 2, range(0, 2)),
        (3, 4, 1, 2, range(2, 4)),
        (1, 4, 1, 4, range(0, 4)),
        (2, 4, 0, 9, range(2, 4)),
        (1, 4, 5, 2, None),
    ],
)
def test_neighbours_are_told_by_mpirun_before_mpi_starts(
    rank: int, size: int, index: int, count: int, near: range | None
) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, index, count)
    told = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values)}
    assert ranks_near(told) == near
    assert ranks_near({"PMIX_RANK": "1", "SLURM_NTASKS": "4"}) is None


def test_cores_are_counted_where_there_is_no_affinity_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(machine, "_read", lambda path: "")
    assert machine.usable_cores() == 6
    monkeypatch.setattr(machine, "_read", lambda path: "200000 100000")
    assert machine.usable_cores() == 2, "a container's quota"


def test_a_flag_decides_where_it_is_given() -> None:
    assert threads_for(ServeConfig(threads=3), 64, "decode") == 3


def test_libraries_are_told_by_the_environment_and_a_users_wait_policy_stands() -> None:
    environment = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "64"}
    set_thread_environment(2, environment)
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in environment
    empty: dict[str, str] = {}
    set_thread_environment(2, empty)
    assert empty["OMP_WAIT_POLICY"] == "passive"
    assert empty["GOMP_SPINCOUNT"] == str(SPINS)
    never = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    set_thread_environment(2, never)
    assert never["GOMP_SPINCOUNT"] == "0"
