"""Every GPU check and benchmark of the kernels in one call: `python -m kernels_numba.gpu_report --json FILE`.

Needs Python, numpy, torch, numba and numba-cuda, and is run from the repository's root; nothing has to be
installed of ours. Each part runs in a process of its own with a time limit and prints every result as soon as
it has it, so that a part that fails, hangs or takes the device down with it loses nothing of the others.
Without a GPU: one line and exit code 2; with failed checks: 1. The JSON is a benchmark result (date, machine,
commit, rows) with "checks" and "kernels" beside the rows (registers, shared memory, spills, where ptxas is).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

PARTS = {  # name -> seconds it may take; each starts torch and compiles what it calls
    "decode": 80,
    "prefill": 80,
    "blocks": 40,
    "graph": 40,
    "measure_decode": 90,
    "measure_prefill": 80,
    "measure_blocks": 60,
    "kernels": 100,
}
CHECKS = ("decode", "prefill", "blocks", "graph")
TOTAL_S = 460.0
"""The whole run; a part that no longer fits is reported as not run."""
MARK = "@result "


def emit(kind: str, **fields: Any) -> None:
    """One result of a part, for the parent: kind is "check", "row" or "kernel"."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def check(name: str, action: Callable[[], str]) -> None:
    """Run one check; what it returns is its detail, what it raises its failure."""
    started = time.perf_counter()
    try:
        passed, detail = True, action()
    except Exception as error:
        traceback.print_exc()
        passed, detail = False, f"{type(error).__name__}: {error}"[:500]
    seconds = round(time.perf_counter() - started, 2)
    emit("check", name=name, passed=passed, detail=detail, seconds=seconds)


def run_part(name: str) -> None:
    """One part, in this process."""
    from kernels_numba import gpu_checks, gpu_figures

    if name == "kernels":
        emit_kernels()
    elif name in CHECKS:
        for title, action in getattr(gpu_checks, f"{name}_checks")():
            check(title, action)
    else:
        for title, measure in getattr(gpu_figures, name)():
            try:
                for row in measure():
                    emit("row", **row)
            except Exception as error:
                traceback.print_exc()
                detail = f"{type(error).__name__}: {error}"[:500]
                emit("check", name=f"measured: {title}", passed=False, detail=detail, seconds=0.0)


def emit_kernels() -> None:
    """What ptxas says of each kernel for this device's architecture (sm_90 without one)."""
    import torch

    from kernels_numba.gpu_lowering import assemble, find_ptxas, kernels

    cc = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    ptxas = find_ptxas()
    if not ptxas:
        check("registers and spills (no ptxas here: not looked at)", lambda: "skipped")
        return
    for kernel in kernels():
        try:
            found = assemble(ptxas, kernel.ptx(cc)[0], cc)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"[:500]
            emit("check", name=f"lowering {kernel.name}", passed=False, detail=detail, seconds=0.0)
            continue
        arch = f"sm_{cc[0]}{cc[1]}"
        emit("kernel", name=kernel.name, tuned=kernel.tuned, arch=arch, **asdict(found))
        if kernel.tuned and found.spill_bytes:
            detail = f"{found.spill_bytes} bytes"
            emit("check", name=f"no spills: {kernel.name}", passed=False, detail=detail, seconds=0.0)


def results_of(name: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run a part as a process of its own; its results, and a failed check when it did not end well."""
    command = [sys.executable, "-m", "kernels_numba.gpu_report", "--part", name]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
        out, err, trouble = (
            done.stdout,
            done.stderr,
            f"exit code {done.returncode}" if done.returncode else "",
        )
    except subprocess.TimeoutExpired as late:
        out, err, trouble = late.stdout or b"", late.stderr or b"", f"not done after {limit_s:.0f} s"
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            yield json.loads(line[len(MARK) :])
    if trouble:
        words = err.decode(errors="replace").strip().splitlines()[-4:]
        detail = " | ".join([trouble, *words])[:800]
        seconds = round(time.perf_counter() - started, 2)
        yield {"kind": "check", "name": f"part {name}", "passed": False, "detail": detail, "seconds": seconds}


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
    print(f"{report['machine']['gpu']}: {passed} of {len(report['checks'])} checks passed")
    for item in report["checks"]:
        if not item["passed"]:
            print(f"  FAILED {item['name']}: {item['detail']}")
    print(f"\n{'figure':62} {'ours':>10} {'unit':8} {'x peer':>7} {'x limit':>7}")
    for row in report["rows"]:
        ratios = [f"{r:7.2f}" if r else "      -" for r in (row["ratio_to_peer"], row["ratio_to_limit"])]
        print(f"{row['name']:62} {row['ours']:10.2f} {row['unit']:8} {ratios[0]} {ratios[1]}")
    if report["kernels"]:
        print(f"\n{'kernel':32} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for kernel in report["kernels"]:
        figures = f"{kernel['registers']:9} {kernel['shared_bytes']:7} {kernel['spill_bytes']:7}"
        print(f"{kernel['name']:32} {figures}")


def make_report(parts: list[str]) -> dict[str, Any]:
    """Run the parts one after the other."""
    began = time.perf_counter()
    kinds: dict[str, list] = {"check": [], "row": [], "kernel": []}
    for name in parts:
        left = TOTAL_S - (time.perf_counter() - began)
        if left < 15:
            late = {"name": f"part {name}", "passed": False, "detail": "no time left", "seconds": 0.0}
            kinds["check"].append(late)
            continue
        for result in results_of(name, min(PARTS[name], left)):
            kinds[result.pop("kind")].append(result)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "rows": kinds["row"],
        "checks": kinds["check"],
        "kernels": kinds["kernel"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    """The command line; see the head of the file."""
    parser = argparse.ArgumentParser(prog="python -m kernels_numba.gpu_report", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to check or to measure")
        return 2
    report = make_report(list(CHECKS if options.checks_only else PARTS))
    print_tables(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(item["passed"] for item in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
