"""`mooncake-lite doctor`: what this machine has, and what follows from it.

Mounted by `mooncake_lite.cli`. It tries things out in child processes (`probes.py`), changes nothing
and never loads MPI or torch itself. Explained in docs/reference/cli.md.

Exit code 1 when something is missing without which nothing can be served, else 0.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from mooncake_lite.config.modes import COMPUTE_ROLES
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError, UserError

State = Literal["ok", "note", "missing"]
GIB = 2**30
MIB = 2**20

DEMO_MEMORY_BYTES = 4 * GIB
"""What the ranks of the demo need together."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    state   "ok"; "note": something does not work or works worse; "missing": nothing can be served
    """

    name: str
    value: str
    state: State = "ok"
    follows: str = ""


@dataclass(slots=True)
class Report:
    """All findings, and what was found out about launch profiles ("" = can be used, else why not)."""

    findings: list[Finding] = field(default_factory=list)
    profiles: dict[str, str] = field(default_factory=dict)

    @property
    def essential_missing(self) -> list[str]:
        """Names of what serving cannot do without."""
        return [finding.name for finding in self.findings if finding.state == "missing"]


def examine() -> Report:
    """Look at this machine; takes some seconds, most of them for importing torch in a child."""
    from mooncake_lite.tools.doctor.probes import try_all

    answers = try_all()
    report = Report()
    report.findings += _system()
    report.findings += _capacity()
    report.findings += _mpi(report, answers["mpi4py"])
    report.findings += _compute(answers)
    report.findings += _storage(answers["h5py"])
    report.findings += _tests()
    return report


# ------------------------------------------------------------------------------- the findings


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    right = sys.version_info >= (3, 11)
    yield Finding("Python", version, "ok" if right else "missing", "" if right else "3.11 or later is needed")
    system, machine = platform.system(), platform.machine()
    value = f"{system} {platform.release()} on {machine}"
    if system != "Linux":
        follows = "generate, scheduler and store work; serve needs Linux (/dev/shm, /proc)"
        yield Finding("system", value, "missing", follows)
    elif machine not in ("x86_64", "aarch64"):
        yield Finding("system", value, "note", "tested on x86-64 and arm64 only")
    else:
        yield Finding("system", value, "ok", "everything can run here")


def _capacity() -> Iterator[Finding]:
    from mooncake_lite.config.machine import Machine
    from mooncake_lite.launch.preflight import MPI_SHARED_BYTES
    from mooncake_lite.launch.threads import threads_for

    machine, config = Machine.here(), ServeConfig()
    threads = {role: threads_for(config, machine.cores, role) for role in ("prefill", "decode")}
    pair = ServeConfig(prefill=2, decode=2, tensor_parallel_size=2)
    of_members = threads_for(pair, machine.cores, "decode")
    follows = (
        f"by default {threads['prefill']} threads in the prefill rank, {threads['decode']} in the decode "
        f"rank; {of_members} in each of two members of an instance, which need a core each"
    )
    enough = machine.cores >= sum(role in COMPUTE_ROLES for role in config.roles)
    yield Finding("cores", str(machine.cores), "ok" if enough else "note", follows)
    enough = machine.memory_bytes >= DEMO_MEMORY_BYTES
    yield Finding(
        "memory",
        f"{machine.memory_bytes / GIB:.1f} GiB available",
        "ok" if enough else "note",
        "enough for the demo" if enough else "the demo needs 4 GiB; lower --kv-cache-bytes and --pool-bytes",
    )
    wanted = config.pool_bytes + 2 * config.staging_bytes + config.ranks * MPI_SHARED_BYTES
    yield _shared_memory(machine.shared_memory_bytes, wanted)


def _shared_memory(free: int, wanted: int) -> Finding:
    if free < 0:
        return Finding("/dev/shm", "none", "missing", "mount one: mount -t tmpfs tmpfs /dev/shm")
    value = f"{free / GIB:.2f} GiB free"
    if free < wanted:
        size = -(-wanted // MIB)
        follows = f"defaults need {size} MiB: lower --pool-bytes, or docker run --shm-size={size}m"
        return Finding("/dev/shm", value, "note", follows)
    return Finding(
        "/dev/shm", value, "ok", f"room for --pool-bytes of up to {(free - wanted) // MIB + 512} MiB"
    )


def _mpi(report: Report, mpi4py: dict[str, Any]) -> Iterator[Finding]:
    from mooncake_lite.config.machine import find_mpirun
    from mooncake_lite.launch.open_mpi import inspect_open_mpi
    from mooncake_lite.tools.doctor.probes import try_mpirun

    yield _library("mpi4py", mpi4py, lambda answer: f"{answer['version']} over {answer['library']}")
    try:
        found = inspect_open_mpi(find_mpirun())
    except UserError as error:
        report.profiles = {"ft": str(error), "fast": str(error)}
        yield Finding("mpirun", "none", "missing", str(error))
        return
    report.profiles = {name: found.refusal(name) for name in ("ft", "fast")}
    broken = try_mpirun(found.mpirun)
    same = found.version in mpi4py.get("library", found.version)
    if not broken and all(report.profiles.values()):
        broken = report.profiles["ft"]
    state: State = "missing" if broken else "ok" if same else "note"
    follows = broken or "starts processes"
    if not broken and not same:
        follows = "mpi4py uses another MPI than this mpirun; put the right one first on PATH"
    yield Finding("mpirun", f"Open MPI {found.version}, {found.mpirun}", state, follows)
    yield Finding(
        "ULFM",
        "yes" if found.ulfm else "no",
        "ok" if found.ulfm else "note",
        report.profiles["ft"] or "--mpi-profile ft: a killed rank does not end the others",
    )
    yield _ucx(found.ucx, report.profiles["fast"])


def _ucx(there: bool, refusal: str) -> Finding:
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if refusal:
        return Finding("UCX", "no", "ok" if not devices else "note", refusal)
    if devices:
        return Finding("UCX", f"yes, with {', '.join(devices)}", "ok", "--mpi-profile fast uses RDMA")
    return Finding(
        "UCX", "yes, no RDMA device", "ok", "--mpi-profile fast works and gains nothing here; stay with ft"
    )


def _compute(answers: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    torch, numba, nvvm = answers["torch"], answers["numba"], answers["nvvm"]
    built = f"CUDA {torch.get('built_for')}" if torch.get("built_for") else "CPU"
    yield _library("torch", torch, lambda answer: f"{answer['version']} ({built} build)")
    yield _library("Numba", numba, lambda answer: f"{answer['version']}, threads by {answer['layer']}")
    if numba.get("layer") == "workqueue":
        follows = "two threads in parallel kernels would abort: install libgomp1 (Debian) or pip install tbb"
        yield Finding("Numba threads", "workqueue", "note", follows)
    if torch.get("device"):
        yield Finding("CUDA device", str(torch["device"]), "ok", "--device cuda")
    elif Path("/dev/nvidiactl").exists():
        yield Finding("CUDA device", "a driver, but torch sees none", "note", "install a CUDA build of torch")
    else:
        yield Finding(
            "CUDA device", "none", "ok", "everything runs on the CPU; CUDA kernels in the simulator"
        )
    version = _version("numba-cuda")
    if "error" in nvvm:
        why = f"{nvvm['error']}; pip install 'mooncake-lite[gpu]' installs what works together"
        yield Finding(
            "NVVM", f"no (numba-cuda: {version})", "note", f"CUDA kernels cannot be compiled: {why}"
        )
    else:
        yield Finding(
            "NVVM", f"yes (numba-cuda {version})", "ok", "CUDA kernels are lowered to PTX in the tests"
        )


def _storage(h5py: dict[str, Any]) -> Iterator[Finding]:
    from mooncake_lite.config.cache import VARIABLE, cache_folder, free_bytes
    from mooncake_lite.config.machine import why_unwritable
    from mooncake_lite.model.resolve import model_folder

    yield _library("h5py", h5py, lambda answer: f"{answer['version']} over HDF5 {answer['hdf5']}")
    try:
        folder = cache_folder()
        model = model_folder()
    except UserError as error:
        yield Finding("cache", "none", "note", str(error))
        return
    value = f"{folder}, {free_bytes(folder) / GIB:.1f} GiB free"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not why_unwritable(nearest):
        yield Finding("cache", value, "ok", "")
    else:
        yield Finding("cache", value, "note", f"not writable: set {VARIABLE} to a folder that is")
    pulled = (model / "model.safetensors").exists()
    follows = "decodes on its published blocks, 96 MB; --weights float32 reads 538 MB a step"
    if not pulled:
        follows = "mooncake-lite model pull gets it (98 MB)"
    yield Finding("default model", "pulled" if pulled else "not pulled", "ok", follows)
    yield _linear_paths(folder / "linear-paths")


def _linear_paths(folder: Path) -> Finding:
    """What has been measured of the linear layers; a damaged table counts as none (model/path_table.py).

    Of several measurements of one table, the one with the highest load average is shown.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            kinds = f"{len(content['paths'])} at {content['machine']['threads']} threads"
            times = [(float(one["load"]), str(one["at"])) for one in content.get("measured", [])]
            when = "".join(f" ({at}, load {load:.1f})" for load, at in sorted(times)[-1:])
            found.append(kinds + when)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if not found:
        return Finding(
            "linear layers", "not measured", "ok", "the first start measures which kernels are faster"
        )
    follows = f"if the machine was busy, remove {folder}: the next start measures again"
    return Finding("linear layers", f"kinds measured: {', '.join(found)}", "ok", follows)


def _tests() -> Iterator[Finding]:
    lacking = [] if os.getuid() == 0 else ["root"]
    lacking += [] if shutil.which("ip") else ["iproute2"]
    value = "can be made" if not lacking else f"need {' and '.join(lacking)}"
    yield Finding(
        "two nodes in tests", value, "ok", "" if not lacking else "tests over two nodes are skipped"
    )


def _library(name: str, answer: dict[str, Any], describe: Any) -> Finding:
    if "error" in answer:
        return Finding(name, "does not work", "missing", str(answer["error"]))
    return Finding(name, str(describe(answer)))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# --------------------------------------------------------------------------------- the command


def _print(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from mooncake_lite.config.progress import wide_console

    marks = {
        "ok": Text("ok", "green"),
        "note": Text("note", "yellow"),
        "missing": Text("missing", "bold red"),
    }
    table = Table("", "what", "found", "what follows", box=None, pad_edge=False)
    for found in report.findings:
        table.add_row(marks[found.state], found.name, Text(found.value), Text(found.follows))
    console = wide_console(120)
    console.print(table)
    console.print(Text(_conclusion(report)))


def _conclusion(report: Report) -> str:
    """The last line: whether to serve, and with which profile. Without either, mpirun counts as missing."""
    if missing := report.essential_missing:
        return f"This machine cannot serve yet: {', '.join(missing)}."
    if not report.profiles["ft"]:
        return "mooncake-lite serve can run here, with --mpi-profile ft (the default)."
    return f"mooncake-lite serve can run here with --mpi-profile fast only: {report.profiles['ft']}."


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--links", is_flag=True, help="Measure instead what every pair of ranks gets from each other.")
@click.option("--ranks", type=int, help="With --links: how many; 2 unless --hosts says otherwise.")
@click.option("--hosts", default="", help="With --links: HOST:SLOTS,... as for serve.")
@click.option("--mpi-arg", multiple=True, help="With --links: passed on to mpirun, as for serve.")
@click.option(
    "--mpi-profile", type=click.Choice(["ft", "fast"]), help="With --links: as for serve; ft if absent."
)
def doctor(
    as_json: bool,
    links: bool,
    ranks: int | None,
    hosts: str,
    mpi_arg: tuple[str, ...],
    mpi_profile: str | None,
) -> int:
    """Tell what this machine has (MPI, UCX, CUDA, memory, ...) and what follows from it."""
    if links:
        return _links(as_json, ranks, hosts, mpi_arg, mpi_profile or "ft")
    if ranks is not None or hosts or mpi_arg or mpi_profile:
        raise ConfigError("--ranks, --hosts, --mpi-arg and --mpi-profile belong to --links; add it")
    report = examine()
    if as_json:
        data = {
            "findings": [asdict(found) for found in report.findings],
            "profiles": report.profiles,
            "essential_missing": report.essential_missing,
        }
        click.echo(json.dumps(data, indent=2))
    else:
        _print(report)
    return 1 if report.essential_missing else 0


def _links(as_json: bool, ranks: int | None, hosts: str, mpi_arg: tuple[str, ...], profile: str) -> int:
    """1 when a pair could not be measured, else 0."""
    from mooncake_lite.tools.doctor import links

    found = links.measure(ranks, hosts, mpi_arg, profile)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        links.show(found)
    return int(any(pair.error for pair in found.pairs))
