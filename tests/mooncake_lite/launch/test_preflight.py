"""Every wish that cannot be fulfilled is refused before a process starts, with the fix in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from mooncake_lite.config.machine import Machine
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import LaunchError, UserError
from mooncake_lite.launch import preflight as checks
from mooncake_lite.launch.open_mpi import OpenMPI, inspect_open_mpi
from mooncake_lite.launch.preflight import FoundModel, crowded, preflight
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.ranks.steward.assemble import _wrong_racks
from tests import emulation
from tests.mooncake_lite.launch.conftest import free_port

pytestmark = pytest.mark.quick

GIB = 2**30
ROOMY = Machine(cores=8, memory_bytes=64 * GIB, shared_memory_bytes=16 * GIB)

SMALL_MODEL = FoundModel(
    config=ModelConfig(
        family="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_position=1024,
        tie_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * 2,
        eos_ids=(),
    ),
    weights_bytes=GIB,
)
"""512 bytes of KV per token in float32: a page is 8 KiB, a block 32 KiB, the longest request 16 blocks."""


def passed(machine: Machine = ROOMY, **wishes: Any) -> list[str]:
    """The warnings of preflight about wishes that it lets pass."""
    return preflight(ServeConfig(port=free_port(), **wishes), model=SMALL_MODEL, machine=machine)


def refusal(machine: Machine = ROOMY, **wishes: Any) -> str:
    """What preflight says to these wishes."""
    with pytest.raises(UserError) as caught:
        passed(machine, **wishes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wish_that_this_machine_can_fulfil_passes_without_a_warning() -> None:
    assert passed() == []


def test_a_server_open_to_the_network_without_a_key_gets_a_warning() -> None:
    config = ServeConfig(port=free_port(), host="0.0.0.0")
    (warning,) = preflight(config, model=SMALL_MODEL, machine=ROOMY)
    assert "host=0.0.0.0" in warning
    assert "MOONCAKE_LITE_API_KEY" in warning
    assert passed(host="0.0.0.0", api_key="secret") == []
    assert passed(host="127.0.0.2") == []


@pytest.mark.parametrize(
    ("cores", "threads", "warned"),
    [
        (4, 0, []),
        (3, 0, ["threads=1 each, in instances of 2"] * 2),
        (2, 0, ["threads=1 each, in instances of 2"] * 2),
        (4, 2, []),
        (4, 3, ["threads=3 each, in instances of 2"] * 2),
        (6, 3, []),
    ],
)
def test_members_without_a_core_each_get_a_warning_with_the_threads_of_each(
    cores: int, threads: int, warned: list[str]
) -> None:
    machine = replace(ROOMY, cores=cores)
    wishes = {"prefill": 2, "decode": 2, "threads": threads}
    assert passed(machine, **wishes) == [], "ranks that are alone take turns"
    found = passed(machine, tensor_parallel_size=2, **wishes)
    assert [words in one for words, one in zip(warned, found, strict=True)] == [True] * len(warned)
    assert all(f"4 ranks compute on {cores} cores, 2 " in one for one in found)
    (alone,) = passed(replace(ROOMY, cores=1), decode=2, decode_context_parallel_size=2, threads=threads)
    assert "3 ranks compute on 1 cores, 2 decode ranks" in alone
    asleep = ServeConfig(prefill=2, decode=2, tensor_parallel_size=2, engine="emulated")
    assert crowded(asleep, 1) == []


def test_a_warning_is_of_the_ranks_of_this_host_alone() -> None:
    config = ServeConfig(prefill=2, decode=2, tensor_parallel_size=2, hosts="localhost:3,elsewhere:3")
    assert crowded(config, 2) == []
    (warning,) = crowded(config, 1)
    assert "2 ranks compute on 1 cores, 2 prefill ranks" in warning


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"port {port} on 127.0.0.1 is taken; choose another with --port"
        ):
            preflight(ServeConfig(port=port), model=SMALL_MODEL, machine=ROOMY)


def test_an_address_of_another_machine_is_refused() -> None:
    assert "cannot be listened on" in refusal(host="192.0.2.1")  # TEST-NET-1, nobody's address


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "unknown"), None])
def test_a_host_that_has_no_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    if error is not None:
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    assert "host='no..name' is no address of this machine" in refusal(host="no..name")


def test_a_port_below_those_of_users_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MagicMock()
    probe.__enter__.return_value.bind.side_effect = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(socket, "socket", lambda *_: probe)
    with pytest.raises(LaunchError, match="port 80 is reserved for root; choose another with --port"):
        checks.check_port(ServeConfig(port=80))


def test_a_machine_without_shared_memory_is_refused() -> None:
    assert "there is no /dev/shm here" in refusal(replace(ROOMY, shared_memory_bytes=-1))


def test_a_shared_memory_too_small_is_refused_with_the_size_it_should_have() -> None:
    small = replace(ROOMY, shared_memory_bytes=64 * 2**20)
    said = refusal(small)
    # 512 MiB of pool, 64 MiB of staging in prefill and decode each, 20 MiB of Open MPI's own in each rank
    assert "/dev/shm has 64 MiB free, 720 MiB are needed" in said
    assert "docker run --shm-size=720m" in said


def test_dram_that_compute_ranks_lend_counts_as_shared_memory_and_as_memory() -> None:
    said = refusal(replace(ROOMY, shared_memory_bytes=64 * 2**20), lend_bytes=GIB, prefill=2)
    # as above with a prefill rank more, and a GiB in each of three ranks
    assert "64 MiB free, 3,876 MiB are needed" in said
    assert "lower --pool-bytes or --lend-bytes" in said
    lent = {"lend_bytes": GIB, "ssd_dir": "/tmp"}
    said = refusal(replace(ROOMY, memory_bytes=2 * GIB), **lent)
    # as below, 2 GiB more, and 24 blocks of 32 KiB through which they are saved
    assert "5,761 MiB are needed" in said


def test_shared_memory_elsewhere_is_not_measured_in_dev_shm() -> None:
    elsewhere = ("--mca osc_sm_backing_directory /somewhere",)
    assert passed(replace(ROOMY, shared_memory_bytes=0), mpi_arg=elsewhere) == []


def test_a_memory_too_small_is_refused() -> None:
    said = refusal(replace(ROOMY, memory_bytes=2 * GIB))
    # weights 1 GiB, 4 ranks of 256 MiB, pool 512, pages 2 x 512, staging 2 x 64
    assert "2,048 MiB of memory are available, 3,712 MiB are needed" in said
    assert "--kv-cache-bytes or --pool-bytes" in said


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"max_model_len": 2048}, "max_model_len=2048"),
        ({"max_model_len": 1}, "max_model_len=1 has no room"),
        ({"pool_bytes": 16 * 32768}, "pool_bytes=524288 holds 16 blocks of 32768 B"),
        ({"pool_bytes": 65536, "lend_bytes": 7 * 32768}, "holds 2 blocks of 32768 B beside 14 that are lent"),
        ({"lend_bytes": 32767}, "lend_bytes=32767 holds no block of 32768 B"),
        ({"kv_cache_bytes": 8192}, "kv_cache_bytes=8192 holds 16 tokens"),
    ],
)
def test_a_request_of_the_longest_length_must_fit_everywhere(wishes: dict[str, int], words: str) -> None:
    assert words in refusal(**wishes)


@pytest.mark.parametrize(
    ("racks", "hosts", "nodes"),
    [
        ("0,1", "", 1),
        ("0", "a:2,b:2", 2),
        ("0,1,1,2", "a:2,b:1,c:1,d:1", 3),
        ("0,1", "localhost:2,127.0.0.1:2", 1),
    ],
)
def test_racks_must_be_as_many_as_the_nodes_that_the_ranks_fill_by_slots(
    racks: str, hosts: str, nodes: int
) -> None:
    said = refusal(racks=racks, hosts=hosts)
    assert f"the ranks are on {nodes}; give one rack for each node, as in {','.join(['0'] * nodes)}" in said
    enough = ",".join(["7"] * nodes)
    passed(racks=enough, hosts=hosts)


def test_racks_of_nodes_that_a_job_system_or_the_user_chooses_are_checked_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert passed(racks="0,1", mpi_arg=("--hostfile x",)) == []
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert passed(racks="0,1") == []
    two_nodes: Any = SimpleNamespace(node_of=[0, 0, 1, 1])
    three_nodes: Any = SimpleNamespace(node_of=[0, 0, 1, 2])
    for config in (ServeConfig(racks="0,1", mpi_arg=("--hostfile x",)), ServeConfig(racks="0,1")):
        assert "the ranks are on 3; give one rack for each node" in _wrong_racks(config, three_nodes)
        assert _wrong_racks(config, two_nodes) == ""


def test_hosts_must_be_readable_and_have_a_slot_for_every_rank() -> None:
    assert "write a:2,b:2" in refusal(hosts="a:two")
    assert "has 3 slots for 4 ranks" in refusal(hosts="a:2,b")


def test_on_several_hosts_only_the_ranks_of_this_one_count() -> None:
    here = socket.gethostname()
    config = ServeConfig(hosts=f"elsewhere:2,{here}:2")
    assert checks.roles_here(config) == ["decode", "store"]


def under_mpirun(patch: pytest.MonkeyPatch, rank: int, size: int, index: int, count: int) -> None:
    for name, value in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", index), ("LOCAL_SIZE", count)):
        patch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_under_ones_own_mpirun_a_host_is_charged_with_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    under_mpirun(monkeypatch, rank=0, size=4, index=0, count=2)
    small = replace(ROOMY, shared_memory_bytes=128 * 2**20)  # not for the store's 512 MiB
    assert passed(small) == []
    under_mpirun(monkeypatch, rank=0, size=4, index=0, count=4)
    assert "720 MiB are needed" in refusal(small)


def test_under_srun_no_mpirun_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "mpirun is neither beside this Python" in refusal()
    for name, value in (("PMIX_RANK", "0"), ("SLURM_STEP_NUM_TASKS", "4")):
        monkeypatch.setenv(name, value)
    assert passed() == []


def test_a_tier_folder_in_use_by_another_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store-0").mkdir()
    lock = os.open(tmp_path / "store-0" / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is in use by another cluster" in refusal(ssd_dir=str(tmp_path))
    finally:
        os.close(lock)
    assert passed(ssd_dir=str(tmp_path)) == []


def test_a_tier_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is no folder" in refusal(ssd_dir=str(file))
    assert "is no folder" in refusal(ssd_dir=str(file / "below"))


def test_a_tier_folder_that_cannot_be_written_is_refused() -> None:
    said = refusal(ssd_dir="/proc/tier")
    assert "/proc is not writable" in said
    assert "choose another with --ssd-dir" in said


def test_a_tier_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    said = refusal(ssd_dir=str(tmp_path), ssd_bytes=40_000)
    assert said.startswith("ssd_bytes=40000 holds no block of 32768 B; raise it to ")
    enough = int(said.rpartition(" ")[2])
    assert passed(ssd_dir=str(tmp_path), ssd_bytes=enough) == []
    assert passed(ssd_bytes=0) == []


def test_checking_a_tier_folder_creates_nothing(tmp_path: Path) -> None:
    checks.check_tier_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("components", "ulfm", "version", "profile", "words"),
    [
        ({"pml/ob1", "osc/sm"}, True, "5.0.11", "fast", "has no UCX"),
        ({"pml/ucx", "osc/ucx"}, False, "5.0.11", "ft", "built without ULFM"),
        ({"pml/ucx", "osc/ucx"}, True, "4.1.6", "ft", "4.1.6 is too old"),
    ],
)
def test_a_profile_that_this_open_mpi_cannot_do_is_refused(
    components: set[str],
    ulfm: bool,
    version: str,
    profile: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = OpenMPI(mpirun=Path("mpirun"), version=version, components=frozenset(components), ulfm=ulfm)
    monkeypatch.setattr(checks, "inspect_open_mpi", lambda mpirun: found)
    said = refusal(mpi_profile=profile)
    assert said.startswith(f"mpi_profile='{profile}': ")
    assert words in said


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "has no ompi_info beside it"),
        ("exit 3", "does not work: Command .* returned non-zero exit status 3"),
        ("echo ompi:version:full:none", "is not Open MPI's"),
    ],
)
def test_an_mpirun_that_is_not_open_mpis_is_refused(
    program: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    if program is not None:
        (tmp_path / "ompi_info").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "ompi_info").chmod(0o700)
    with pytest.raises(LaunchError, match=why):
        inspect_open_mpi(tmp_path / "mpirun")


def test_a_cuda_device_without_a_driver_is_refused() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("an NVIDIA driver is loaded here")
    assert refusal(device="cuda") == "device='cuda': no NVIDIA driver is loaded here; use --device cpu"


def test_a_platform_without_proc_and_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(LaunchError, match="serve needs Linux, this is darwin"):
        checks.check_platform()


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'no-such-model'"):
        preflight(ServeConfig(port=free_port(), model="no-such-model"), machine=ROOMY)


@pytest.mark.parametrize("option", ["record", "trace"])
def test_a_file_of_a_run_must_be_new_and_in_a_folder_that_can_be_written(option: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    (tmp_path / "link").symlink_to("nowhere")

    for name in ("old", "link"):
        said = refusal(**{option: str(tmp_path / name)})
        assert f"exists already; remove it, or choose another file with --{option}" in said
    for path in (tmp_path / "x" / "run", "/proc/run"):
        assert "choose a file in a folder that exists and is writable" in refusal(**{option: str(path)})
    config = ServeConfig(port=free_port(), **{option: str(tmp_path / "run")})
    preflight(config, model=SMALL_MODEL, machine=ROOMY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]


def emulated(folder: Path, profile: Path, **wishes: Any) -> ServeConfig:
    """A cluster of 40 ranks that sleep, with room for requests of 1,024 tokens."""
    return ServeConfig(
        model=str(folder), engine="emulated", profile=str(profile), port=free_port(), max_model_len=1024,
        prefill=18, decode=18, store=3, staging_bytes=32 * 2**20, **wishes,
    )  # fmt: skip


def test_an_emulated_engine_is_refused_with_a_profile_of_another_model_before_anything_starts(
    tmp_path: Path,
) -> None:
    measured = emulation.model_folder(tmp_path / "measured")
    served = emulation.model_folder(tmp_path / "served", emulation.SMOL)
    profile = emulation.profile_file(measured)
    with pytest.raises(UserError, match=r"was measured with measured, .* --out FILE"):
        preflight(emulated(served, profile), machine=ROOMY)
    preflight(emulated(measured, profile), machine=ROOMY)


def test_an_emulated_rank_needs_no_memory_for_weights_pages_and_torch(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model", emulation.SMOL)
    config = emulated(folder, emulation.profile_file(folder), kv_cache_bytes=GIB)
    laptop = replace(ROOMY, memory_bytes=8 * GIB)
    preflight(config, machine=laptop)
    with pytest.raises(LaunchError, match="of memory are available"):
        preflight(config, machine=replace(laptop, memory_bytes=4 * GIB))


def test_a_trace_does_not_mix_with_the_parts_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "run.parts").mkdir()
    said = refusal(trace=str(tmp_path / "run"))
    assert f"{tmp_path}/run.parts is there, of a run that was killed; join it with" in said
