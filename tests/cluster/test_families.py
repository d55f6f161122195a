"""Qwen2 in bfloat16, served by whole clusters: one with int8 blocks, an exact one by the fast profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mooncake_lite.cli import cli
from mooncake_lite.config.machine import find_mpirun
from mooncake_lite.launch.open_mpi import inspect_open_mpi
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import DType
from tests.cluster import asking, listening, machine, reference, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.patience import patient, wait_until

DTYPE: DType = "float32" if "_bf16" in Path("/proc/cpuinfo").read_text() else "bfloat16"
"""A processor that multiplies bfloat16 itself rounds by the size of the batch."""


def test_a_pool_of_int8_blocks_has_keys_of_its_own_that_listeners_hear_and_an_exact_one_never_reads(
    tmp_path: Path,
) -> None:
    """Both clusters use one SSD folder, one after the other. (What int8 does to answers: kv-codecs.md.)

    The exact one runs by the fast profile where Open MPI has it, and answers as one process does.
    """
    folder = tiny.tiny_folder("qwen2", tmp_path / "model")
    prompts = tiny.prompts(6)
    full = asking.full_blocks(prompts)
    flags = [str(folder), *tiny.FLAGS, "--dtype", DTYPE, "--ssd-dir", str(tmp_path / "tier")]
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/kv"}
    events |= {"replay_endpoint": f"ipc://{tmp_path}/replay"}
    with Cluster(
        [*flags, "--kv-codec", "int8", "--kv-events-config", json.dumps(events)], tmp_path / "log"
    ) as cluster:
        cluster.wait_ready(START_LIMIT_S)
        cold = asking.ask_all(cluster.base_url, prompts)[0]
        warm = asking.ask_all(cluster.base_url, prompts)
        assert warm == (asking.ask_all(cluster.base_url, prompts)[0], full)
        assert len(warm[0]) == len(cold)
        listening.assert_all_blocks_are_heard(events["replay_endpoint"], prompts)
        where = machine.run_dir(machine.family(cluster.pid))
        look_at_the_running_pool(where)
        assert wait_until(lambda: machine.metric(cluster.base_url, "pool_saving") == 0, 20)
        first = json.loads(store_command("ls", where, "--json"))[0]["key"]
        assert store_command("pin", where, first) == b"pinned 1 blocks\n"
        assert json.loads(store_command("ls", where, "--json"))[0]["state"] == "pinned"
        assert store_command("unpin", where, first) == b"unpinned 1 blocks\n"
        key = first_of(prompts[-1], listening.replayed(events["replay_endpoint"]))
        assert store_command("rm", where, f"{key:016x}") == b"removed 1 blocks\n"
        assert listening.removed(events["replay_endpoint"]) == {(key, "CPU"), (key, "SSD")}
        assert f"{key:016x}" not in {row["key"] for row in json.loads(store_command("ls", where, "--json"))}
        assert asking.ask_all(cluster.base_url, prompts[-1:])[1] == [0]
        remove_all(where)
        cached = asking.ask_all(cluster.base_url, prompts)[1]
        assert all(0 in cached[first : first + 2] for first in range(0, len(prompts), 2)), "one of each pair"
        remove_all(where)
        asking.ask_all(cluster.base_url, prompts[-1:])
        assert wait_until(lambda: machine.metric(cluster.base_url, "pool_saving") == 0, 20)
    at_rest = json.loads(store_command("ls", tmp_path / "tier", "--json"))
    assert f"{key:016x}" in {row["key"] for row in at_rest if row["state"] == "served"}
    refused = inspect_open_mpi(find_mpirun()).refusal("fast")
    flags += [] if refused else ["--mpi-profile", "fast"]
    with Cluster(flags, tmp_path / "log 2") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        exact = reference.greedy_texts(folder, prompts, dtype=DTYPE)
        assert asking.ask_all(cluster.base_url, prompts[-1:]) == (exact[-1:], [0])
        assert asking.ask_all(cluster.base_url, prompts)[0] == exact
        assert asking.ask_all(cluster.base_url, prompts) == (exact, full)
        assert cluster.stop() < patient(5.0)
    if refused:
        pytest.skip(f"the default profile did the same: {refused}")


def first_of(prompt: list[int], events: list[list[Any]]) -> int:
    """The key of a prompt's first block, as listeners have heard it."""
    stored = (fields for tag, *fields in events if tag == "BlockStored")
    return next(keys[0] for keys, parent, ids, *_ in stored if parent is None and ids[:64] == prompt[:64])


def look_at_the_running_pool(where: Path) -> None:
    """`mooncake-lite store` on a running cluster: the books, every checksum, one block."""
    blocks = json.loads(store_command("ls", where, "--json"))
    figures = {row["figure"]: row["value"] for row in json.loads(store_command("stat", where, "--json"))}
    assert len(blocks) == figures["keys_dram"] > 0
    assert json.loads(store_command("verify", where, "--json")) == [{"blocks": len(blocks), "bad": 0}]
    assert len(store_command("get", where, blocks[0]["key"])) == blocks[0]["bytes"]
    assert b"rewrites its tier" in store_command("compact", where)


def remove_all(where: Path) -> None:
    """Also what the last answer's ranks still hold, or the tier still writes, once they are done."""
    assert wait_until(lambda: b"in use" not in store_command("rm", where, "--all"), 20)


def store_command(name: str, where: Path, *rest: str) -> bytes:
    """What `mooncake-lite store` writes, called in this process."""
    done = CliRunner().invoke(cli, ["store", name, str(where), *rest])
    assert done.exit_code == 0, done.output
    return done.stdout_bytes
