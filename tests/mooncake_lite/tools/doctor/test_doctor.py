"""The doctor looks, tells what follows, and touches nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mooncake_lite.config.machine import Machine
from mooncake_lite.errors import CacheError, ConfigError
from mooncake_lite.launch.open_mpi import OpenMPI
from mooncake_lite.tools.doctor import command as doctor
from mooncake_lite.tools.doctor import links
from mooncake_lite.tools.doctor.command import Finding, Report
from mooncake_lite.tools.doctor.links_program import Found, Pair
from mooncake_lite.tools.doctor.probes import try_mpirun, try_program
from tests.mpi import skip_without_ucx
from tests.two_nodes import serve_args, two_nodes

GOOD: dict[str, dict[str, Any]] = {
    "torch": {"version": "2.13.0", "built_for": None, "device": None},
    "numba": {"version": "0.68.1", "layer": "omp"},
    "nvvm": {"sm_90": True},
    "h5py": {"version": "3.16.0", "hdf5": "2.0.0"},
    "mpi4py": {"version": "4.1.2", "library": "Open MPI v5.0.11"},
}


UCX = frozenset({"pml/ucx", "osc/ucx"})


def states(findings: Any) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def test_this_machine_can_serve_and_the_doctor_leaves_no_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "mooncake_lite", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert (done.returncode, found["essential_missing"]) == (0, []), found
    assert found["profiles"]["ft"] == ""
    assert {entry["name"] for entry in found["findings"]} >= {
        *("Python", "cores", "memory", "/dev/shm", "mpirun", "mpi4py", "ULFM", "UCX", "CUDA device", "NVVM"),
        *("h5py", "cache", "default model", "two nodes in tests"),
    }
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if not _in_use(name)]


def test_links_between_and_within_two_nodes_are_measured_pair_by_pair(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        command = [*nodes.on(0), sys.executable, "-m", "mooncake_lite", "doctor", "--links", "--json"]
        done = subprocess.run(
            [*command, *serve_args(nodes, 2, 1)], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["hosts"] == [nodes.hosts[0], nodes.hosts[0], nodes.hosts[1]]
    assert found["nodes"] == [0, 0, 1]
    pairs = {(pair["reader"], pair["source"]): pair for pair in found["pairs"]}
    assert len(pairs) == 6
    assert all(pair["gb_per_s"] > 0.01 and 0 < pair["latency_us"] < 1e5 for pair in pairs.values())
    near = pairs[0, 1]
    assert (near["path"], near["secondary"], near["links"]) == ("shared", "", [])
    away = pairs[2, 0]
    assert sorted((away["path"], away["secondary"])) == ["sockets", "two_sided"]
    assert sorted(link["path"] for link in away["links"]) == ["sockets", "two_sided"]


def test_links_in_the_fast_profile_name_one_sided_mpi_and_the_fastest_serves(tmp_path: Path) -> None:
    skip_without_ucx()
    with two_nodes(tmp_path) as nodes:
        command = [*nodes.on(0), sys.executable, "-m", "mooncake_lite", "doctor", "--links", "--json"]
        command += [*serve_args(nodes, 1, 1), "--mpi-profile", "fast"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    for pair in json.loads(done.stdout)["pairs"]:
        links = {link["path"]: link for link in pair["links"]}
        assert sorted(links) == ["one_sided", "sockets", "two_sided"]
        fastest = min(links.values(), key=lambda link: link["latency_s"] + 8 * 2**20 / link["bytes_per_s"])
        assert pair["path"] == fastest["path"]
        assert pair["gb_per_s"] > 0.01


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--links --ranks 1", "--ranks 1: a link needs two ends; use 2 to 64"),
        ("--links --hosts a:x", "is not HOST or HOST:SLOTS"),
        ("--links --hosts a:2 --ranks 3", "--hosts a:2 has 2 slots"),
        ('--links --mpi-arg "\'"', "No closing quotation"),
        ("--ranks 2", "belong to --links"),
        ("--mpi-profile fast", "belong to --links"),
    ],
)
def test_a_wish_for_links_that_cannot_be_is_refused_before_anything_starts(flags: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        doctor.doctor.main(shlex.split(flags), standalone_mode=False)


@pytest.mark.quick
def test_the_matrix_names_figures_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    good = Pair(0, 1, "sockets", "two_sided", 81.0, 2.345, [])
    bad = Pair(1, 0, "sockets", "two_sided", 0.0, 0.0, [], "rank 0 is lost")
    links.show(Found(["a", "b", "c"], [0, 1, 2], [good, bad]))
    shown = capsys.readouterr().out
    for part in ("2.35 GB/s", "81 us", "sockets (two_sided)", "sockets: failed", "not measured", "rank 2"):
        assert part in shown


def _in_use(name: str) -> bool:
    """A cluster that runs beside this test has mapped the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                return True
        except OSError:
            continue
    return False


@pytest.mark.quick
def test_elsewhere_than_on_linux_the_doctor_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    (system,) = [found for found in doctor._system() if found.name == "system"]
    assert system.state == "missing"
    assert system.value.startswith("Darwin ")
    assert "generate, scheduler and store work; serve needs Linux" in system.follows


@pytest.mark.quick
def test_another_architecture_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "riscv64")
    assert states(doctor._system())["system"] == "note"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cores", "state", "threads"), [(1, "note", (1, 1, 1)), (2, "ok", (2, 2, 1)), (8, "ok", (4, 4, 4))]
)
def test_cores_tell_the_threads_of_ranks_and_of_members(
    cores: int, state: str, threads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Machine(cores=cores, memory_bytes=8 * 2**30, shared_memory_bytes=2**30)
    monkeypatch.setattr(Machine, "here", lambda: there)
    (found,) = [one for one in doctor._capacity() if one.name == "cores"]
    assert (found.value, found.state) == (str(cores), state)
    assert tuple(map(int, re.findall(r"\d+", found.follows))) == threads
    assert found.follows.endswith("in each of two members of an instance, which need a core each")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("version", "ulfm", "ucx", "broken", "found"),
    [
        ("5.0.11", True, True, "", ("ok", "starts processes")),
        ("5.0.11", True, True, "it hangs", ("missing", "it hangs")),
        ("5.0.9", True, True, "", ("note", "mpi4py uses another MPI than this mpirun")),
        ("4.1.6", False, False, "", ("missing", "Open MPI 4.1.6 is too old")),
    ],
)
def test_an_mpirun_is_found_with_what_follows(
    version: str, ulfm: bool, ucx: bool, broken: str, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = OpenMPI(
        mpirun=Path("/bin/mpirun"), version=version, components=UCX if ucx else frozenset(), ulfm=ulfm
    )
    monkeypatch.setattr("mooncake_lite.launch.open_mpi.inspect_open_mpi", lambda mpirun: there)
    monkeypatch.setattr("mooncake_lite.tools.doctor.probes.try_mpirun", lambda mpirun: broken)
    (mpirun,) = [one for one in doctor._mpi(Report(), GOOD["mpi4py"]) if one.name == "mpirun"]
    assert (mpirun.state, mpirun.follows[: len(found[1])]) == found


@pytest.mark.quick
def test_rdma_devices_decide_what_follows_from_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "mlx5_0"])
    assert doctor._ucx(False, "no UCX") == Finding("UCX", "no", "note", "no UCX")
    assert doctor._ucx(True, "").value == "yes, with mlx5_0"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [])
    assert doctor._ucx(False, "no UCX").state == "ok"
    assert doctor._ucx(True, "").value == "yes, no RDMA device"


@pytest.mark.quick
def test_a_gpu_is_told_and_a_driver_that_torch_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = GOOD | {"torch": GOOD["torch"] | {"device": "NVIDIA H200"}}
    (gpu,) = [one for one in doctor._compute(answers) if one.name == "CUDA device"]
    assert (gpu.value, gpu.follows) == ("NVIDIA H200", "--device cuda")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    (gpu,) = [one for one in doctor._compute(GOOD) if one.name == "CUDA device"]
    assert (gpu.state, gpu.follows) == ("note", "install a CUDA build of torch")


@pytest.mark.quick
def test_a_cache_that_cannot_be_used_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr("mooncake_lite.config.machine.why_unwritable", lambda folder: "read-only")
    found = {one.name: one for one in doctor._storage(GOOD["h5py"])}
    assert "not writable: set MOONCAKE_LITE_CACHE" in found["cache"].follows
    assert found["default model"].follows == "mooncake-lite model pull gets it (98 MB)"
    refuse = Mock(side_effect=CacheError("no home folder"))
    monkeypatch.setattr("mooncake_lite.config.cache.cache_folder", refuse)
    assert states(doctor._storage(GOOD["h5py"])) == {"h5py": "ok", "cache": "note"}


@pytest.mark.quick
def test_damaged_tables_of_linear_layers_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "old.json").write_text('{"paths": []}')
    assert doctor._linear_paths(tmp_path).value == "not measured"
    (tmp_path / "whole.json").write_text('{"paths": [1, 2], "machine": {"threads": 4}}')
    assert doctor._linear_paths(tmp_path).value == "kinds measured: 2 at 4 threads"


@pytest.mark.quick
def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert doctor._version("no-such-distribution") == "none"
    assert doctor._version("numpy")[0].isdigit()


@pytest.mark.quick
def test_without_the_gpu_extra_ptx_is_a_note_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "none")
    answers = GOOD | {"nvvm": {"error": "No module named 'numba.cuda'"}}
    (nvvm,) = [found for found in doctor._compute(answers) if found.name == "NVVM"]
    assert nvvm.state == "note"
    assert "mooncake-lite[gpu]" in nvvm.follows


@pytest.mark.quick
def test_a_library_that_does_not_load_is_essential_and_says_why() -> None:
    answers = GOOD | {"torch": {"error": "libcudart.so.13: cannot open shared object file"}}
    found = {entry.name: entry for entry in doctor._compute(answers)}
    assert (found["torch"].state, found["torch"].follows) == (
        "missing",
        "libcudart.so.13: cannot open shared object file",
    )
    assert states(doctor._compute(GOOD))["torch"] == "ok"


@pytest.mark.quick
def test_numba_without_openmp_is_a_note() -> None:
    answers = GOOD | {"numba": {"version": "0.68.1", "layer": "workqueue"}}
    assert states(doctor._compute(answers))["Numba threads"] == "note"
    assert "Numba threads" not in states(doctor._compute(GOOD))


@pytest.mark.quick
@pytest.mark.parametrize(("free_mib", "state"), [(-1, "missing"), (64, "note"), (4096, "ok")])
def test_dev_shm_is_judged_by_what_the_defaults_need(free_mib: int, state: str) -> None:
    free = free_mib * 2**20 if free_mib >= 0 else -1
    assert doctor._shared_memory(free, 720 * 2**20).state == state


@pytest.mark.quick
def test_no_mpirun_means_no_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    report = Report()
    report.findings += doctor._mpi(report, GOOD["mpi4py"])
    assert report.essential_missing == ["mpirun"]
    assert "mpirun is neither beside this Python nor on PATH" in report.profiles["ft"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("profiles", "missing", "says"),
    [
        ({"ft": "", "fast": ""}, [], "can run here, with --mpi-profile ft"),
        ({"ft": "no ULFM", "fast": ""}, [], "with --mpi-profile fast only: no ULFM"),
        ({"ft": "too old", "fast": "too old"}, ["mpirun"], "cannot serve yet: mpirun"),
    ],
)
def test_the_last_line_and_the_exit_code_say_whether_to_serve(
    profiles: dict[str, str], missing: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report([Finding(name, "", "missing") for name in missing], profiles)
    assert says in doctor._conclusion(report)
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert doctor.doctor.main([], standalone_mode=False) == len(missing)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "limit_s", "answer"),
    [
        ("answer = {'n': 1}", 30.0, {"n": 1}),
        ("raise ValueError('broken wheel')", 30.0, {"error": "ValueError: broken wheel"}),
        ("import os; os.kill(os.getpid(), 11)", 30.0, {"error": "exit code -11"}),
        ("import signal; signal.pause()", 0.2, {"error": "no answer after 0 s"}),
        ("import os; os._exit(0)", 30.0, {"error": "the try printed no answer"}),
    ],
)
def test_a_try_that_fails_crashes_or_hangs_is_a_finding(
    program: str, limit_s: float, answer: dict[str, Any]
) -> None:
    assert try_program(program, limit_s) == answer


@pytest.mark.quick
def test_an_mpirun_that_is_not_there_is_told(tmp_path: Path) -> None:
    why = try_mpirun(tmp_path / "mpirun")
    assert why == "starting two processes failed: No such file or directory"
