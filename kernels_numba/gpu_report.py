"""Every GPU check and benchmark of the kernels in one call: `python -m kernels_numba.gpu_report --json FILE`.

Needs Python, numpy, torch, numba and numba-cuda, and is run from the repository's root; nothing has to be
installed of ours. Checks spend their time in Numba's compiler, so they run at once, in a process for each
core. Then the measurements run, one after the other. Every process has a time limit (gpu_runner), and the
JSON is written anew with every result, so that nothing that fails, hangs or ends the run loses what came
before it. The door to kernels_numba/report, where the checks and the measurements are.
The JSON is a benchmark result (date, machine, commit, rows) with "checks", "late" (what time ran out for) and
"kernels" (registers, shared memory, spills) beside the rows. Exit codes:

    0  all checks passed
    1  a check failed, or there was none
    2  no GPU
    3  nothing failed, but time ran out for something
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from kernels_numba.report.gpu_runner import (
    LEAST_S,
    Item,
    Record,
    failed,
    late,
    results_of,
    run_items,
    together,
)

PROGRAM = [sys.executable, "-m", "kernels_numba.gpu_report"]
CHECKS = {"prefill": 6, "codecs": 6, "decode": 4, "graph": 2, "blocks": 3}
"""name -> processes that share the items, where there are as many cores"""
KERNELS = {"kernels": 12}
"""The assembler's figures: 115 s of one core, without a GPU."""
CHECKS_S = 200.0
"""For all of these together. Some 250 s of one core without torch, whose start each process adds."""
MEASURES = {"measure_decode": 60.0, "measure_prefill": 60.0, "measure_blocks": 50.0, "measure_codecs": 60.0}
"""name -> seconds it may take"""
TOTAL_S = CHECKS_S + sum(MEASURES.values())
"""The whole run, but for what killed processes take to disappear."""


def checked(title: str, action: Callable[[], str]) -> list[Record]:
    """One check; what it returns is its detail."""
    started = time.perf_counter()
    detail = action()
    seconds = round(time.perf_counter() - started, 2)
    return [{"kind": "check", "name": title, "passed": True, "detail": detail, "seconds": seconds}]


def measured(measure: Callable[[], list[Record]]) -> list[Record]:
    """The rows of one measurement."""
    return [{"kind": "row", **row} for row in measure()]


def lowered(kernel: Any, cc: Any) -> list[Record]:
    """What the assembler says of one kernel; a tuned one that spills is a failed check."""
    from kernels_numba.report.gpu_lowering import architecture, assemble

    found = assemble(kernel.lowered(cc)[0], cc)
    arch = architecture(cc)
    records: list[Record] = [
        {"kind": "kernel", "name": kernel.name, "tuned": kernel.tuned, "arch": arch, **asdict(found)}
    ]
    if kernel.tuned and found.spill_bytes:
        records.append(failed(f"no spills: {kernel.name}", f"{found.spill_bytes} bytes on {arch}"))
    return records


def items_of(name: str) -> list[Item]:
    """What a part does, one after the other."""
    import torch

    if name == "kernels":
        from kernels_numba.gpu.backend_cuda import launched
        from kernels_numba.report.gpu_lowering import kernels

        cc = launched(torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))
        return [(kernel.name, partial(lowered, kernel, cc)) for kernel in kernels()]
    if name in CHECKS:
        from kernels_numba.report import gpu_checks, gpu_mover_checks

        home = gpu_mover_checks if name in ("blocks", "codecs") else gpu_checks
        checks = getattr(home, f"{name}_checks")()
        return [(title, partial(checked, title, action)) for title, action in checks]
    from kernels_numba.report import gpu_figures

    return [
        (f"{name}: {title}", partial(measured, measure)) for title, measure in getattr(gpu_figures, name)()
    ]


def shared(items: list[Item], share: str) -> list[Item]:
    """The items of one process of several; share: "its number/how many". Two neighbours stay together: they
    often call the same kernel."""
    number, count = map(int, share.split("/"))
    return [item for place, item in enumerate(items) if place // 2 % count == number]


def device_works() -> bool:
    """False after an error that stays, such as an illegal address: all that follows would fail as well."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    device = torch.cuda.get_device_properties(0)
    versions = {}
    for package in ("torch", "numba", "numba-cuda", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return {
        "gpu": device.name,
        "gpu_memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "compute_capability": list(torch.cuda.get_device_capability(0)),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def commit() -> str:
    """The commit of the source tree, "" outside of one; "+" when files differ from it."""
    folder = str(Path(__file__).parent)
    command = ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def print_tables(report: dict[str, Any]) -> None:
    """Failures in full, the rows as a table."""
    passed = sum(item["passed"] for item in report["checks"])
    print(
        f"{report['machine'].get('gpu', 'unknown device')}: {passed} of {len(report['checks'])} checks passed"
    )
    for item in report["checks"]:
        if not item["passed"]:
            print(f"  FAILED {item['name']}: {item['detail']}")
    for item in report["late"]:
        print(f"  NO TIME {item['name']}: {item['detail']}")
    print(f"\n{'figure':62} {'ours':>10} {'unit':8} {'x peer':>7} {'x limit':>7}")
    for row in report["rows"]:
        ratios = [f"{r:7.2f}" if r else "      -" for r in (row["ratio_to_peer"], row["ratio_to_limit"])]
        print(f"{row['name']:62} {row['ours']:10.2f} {row['unit']:8} {ratios[0]} {ratios[1]}")
    if report["kernels"]:
        print(f"\n{'kernel':36} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for kernel in report["kernels"]:
        figures = f"{kernel['registers']:9} {kernel['shared_bytes']:7} {kernel['spill_bytes']:7}"
        print(f"{kernel['name']:36} {figures}")


class Report:
    """What is known so far, in the file as soon as it is known."""

    def __init__(self, path: Path | None):
        self.path, self.began = path, time.perf_counter()
        self.content: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {},
            "commit": commit(),
            "rows": [],
            "checks": [],
            "late": [],
            "kernels": [],
            "seconds": 0.0,
        }

    def add(self, record: Record) -> None:
        """One result."""
        fields = {name: value for name, value in record.items() if name != "kind"}
        kind = record["kind"]
        self.content[kind if kind == "late" else f"{kind}s"].append(fields)
        self.save()

    def save(self) -> None:
        """Write the file; whoever reads it meanwhile finds the old one whole."""
        self.content["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.path is not None:
            beside = self.path.with_name(self.path.name + ".new")
            beside.write_text(json.dumps(self.content, indent=2) + "\n")
            beside.replace(self.path)

    @property
    def exit_code(self) -> int:
        """See the head of the file."""
        checks = self.content["checks"]
        if not all(item["passed"] for item in checks):
            return 1
        if self.content["late"]:
            return 3
        return 0 if checks else 1


def run_shared(report: Report, parts: dict[str, int], limit_s: float) -> None:
    """Run parts at once, a process for each core."""
    cores, deadline = len(os.sched_getaffinity(0)), time.monotonic() + limit_s

    def results(name: str, command: list[str]) -> Iterator[Record | None]:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            yield late(f"part {name}", "no time left")
        else:
            yield from results_of(name, command, left)

    jobs = []
    for name, count in parts.items():
        count = min(count, cores)
        for number in range(count):
            command = [*PROGRAM, "--part", name, "--share", f"{number}/{count}"]
            jobs.append(results(f"{name} {number + 1}/{count}", command))
    for record in together(jobs, cores):
        report.add(record)


def fill(report: Report, checks: dict[str, int], measures: dict[str, float]) -> None:
    """Run the checks at once, then the measurements one after the other."""
    try:
        report.content["machine"] = machine()
    except Exception as error:
        report.add(failed("machine", f"{type(error).__name__}: {error}"))
    started = time.perf_counter()
    run_shared(report, checks, CHECKS_S)
    print(f"checks: {time.perf_counter() - started:.0f} s", flush=True)
    for name, limit_s in measures.items():
        started = time.perf_counter()
        for record in together([results_of(name, [*PROGRAM, "--part", name], limit_s)], 1):
            report.add(record)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    report.save()


def main() -> int:
    """The command line; see the head of the file."""
    parser = argparse.ArgumentParser(prog="python -m kernels_numba.gpu_report", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing, assemble nothing")
    parser.add_argument("--part", choices=[*CHECKS, *KERNELS, *MEASURES], help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if options.part not in MEASURES:  # many processes: one thread each
            os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
        items = shared(items_of(options.part), options.share)
        return run_items(items, options.skip, device_works)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to check or to measure")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part's process is ended too
    report = Report(options.json)
    if options.checks_only:
        fill(report, CHECKS, {})
    else:
        fill(report, CHECKS | KERNELS, MEASURES)
    print_tables(report.content)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
