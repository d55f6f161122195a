"""The table of paths on disk: which kernels multiply how many rows, measured once per machine.

Used by linear_paths.py, and by `doctor`, which shows it. All ranks of a machine read the same table, so they
take the same paths and get the same bits. Ranks start together and would disturb each other's measurements.
Knows files and locks, no kernels. Explained in docs/explain/model.md.

    <cache folder>/linear-paths/<digest of the machine>.json
    {"machine": {"cpu": ..., "threads": 2, ...},
     "measured": [{"at": "2026-11-22 14:03", "load": 0.4}, ...],
     "region_us": 1.5,
     "paths": {"960x576 Q4_1": {"fixed": 2, "tiles": 32}, ...}}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

import kernels_numba
from mooncake_lite.config.cache import cache_errors, locked, subfolder
from mooncake_lite.config.files import replace_file
from mooncake_lite.config.machine import first_core
from mooncake_lite.errors import CacheError
from mooncake_lite.model.projection import MAX_ROWS_OF_X, Paths

WAIT_S = 60.0
"""Longest wait for another process that measures; then this one measures for itself and stores nothing.
Measuring the default model takes about 2 s on two idle cores."""
MOST_KINDS = 512
"""Kinds of layers in a table: about 100 models. A table that would get more begins anew."""
_KERNELS = ("linear_*.py", "vectors*.py", "numerics.py", "runtime.py", "words.py")
"""Names of the files in kernels_numba, in whatever folder, that the speed of a linear layer depends on."""


class Moment(msgspec.Struct, frozen=True):
    """When something was measured, and the machine's load average of one minute before."""

    at: str
    load: float


class Table(msgspec.Struct, frozen=True):
    """What was measured on one machine.

    measured    when, each time
    region_us   what a parallel region costs, in microseconds; None: not measured yet
    paths       kind of layer -> its paths
    """

    machine: dict[str, Any]
    measured: list[Moment] = []
    region_us: Annotated[float, msgspec.Meta(ge=0)] | None = None
    paths: dict[str, Paths] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for limits that cannot be: the file may be damaged."""
        for one in self.paths.values():
            if not 0 <= one.fixed <= one.tiles <= MAX_ROWS_OF_X:
                raise ValueError(f"{one} are no limits")


class PathTable:
    """The table of one machine.

    machine   what the paths depend on, as `this_machine` tells it; another machine has another file
    """

    def __init__(self, machine: dict[str, Any]) -> None:
        self.machine = machine
        self._digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The file. Raises CacheError when its folder cannot be made."""
        return subfolder("linear-paths") / f"{self._digest}.json"

    def read(self) -> Table:
        """What is on disk; empty where the file is absent, damaged or of another machine.

        Raises CacheError when the folder cannot be used.
        """
        try:
            table = msgspec.json.decode(self.path.read_bytes(), type=Table)
        except (OSError, ValueError, msgspec.MsgspecError):
            return Table(self.machine)
        return table if table.machine == self.machine else Table(self.machine)

    def region_us(self, measure: Callable[[], float]) -> float:
        """What a parallel region costs, in microseconds; if the table lacks it, it is measured and added."""

        def add(table: Table) -> Table:
            return replace(table, region_us=measure())

        found = self._completed(lambda table: table.region_us is not None, add).region_us
        assert found is not None
        return found

    def update(self, kinds: Collection[str], measure: Callable[[str], Paths]) -> dict[str, Paths]:
        """The paths of these kinds of layers; what the table lacks is measured and added to it."""

        def add(table: Table) -> Table:
            missing = [kind for kind in kinds if kind not in table.paths]
            old = table.paths if len(table.paths) + len(missing) <= MOST_KINDS else {}
            new = {kind: measure(kind) for kind in kinds if kind not in old}
            return replace(table, paths=old | new)

        return self._completed(lambda table: not kinds - table.paths.keys(), add).paths

    def _completed(self, is_complete: Callable[[Table], bool], add: Callable[[Table], Table]) -> Table:
        """The table with what `add` measures, if that was missing.

        One process of the machine measures, the others wait for its table, at most WAIT_S. Where the cache
        folder cannot be used, or the wait is over, this process measures for itself and stores nothing.
        """
        try:
            table = self.read()
            if is_complete(table):
                return table
            with locked(f"linear-paths-{self._digest}", WAIT_S):
                table = self.read()
                if not is_complete(table):
                    now = Moment(time.strftime("%Y-%m-%d %H:%M"), round(os.getloadavg()[0], 1))
                    table = replace(add(table), measured=[*table.measured, now])
                    self._write(table)
                return table
        except CacheError:
            return add(Table(self.machine))

    def _write(self, table: Table) -> None:
        """Replace the file at once, so that no reader sees a part of it. Raises CacheError."""
        with cache_errors():
            replace_file(self.path, msgspec.json.format(msgspec.json.encode(table), indent=1))


def this_machine(threads: int) -> dict[str, Any]:
    """What decides which kernels are faster here: the processor, the threads and the versions.

    threads   of this process, for torch and for our kernels alike
    """
    cpu, flags = _processor()
    return {
        "cpu": cpu,
        "instructions": hashlib.sha256(flags.encode()).hexdigest()[:16],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "waiting": os.environ.get("OMP_WAIT_POLICY", "").lower(),
        "spins": os.environ.get("GOMP_SPINCOUNT", ""),
        "torch": version("torch"),
        "numba": version("numba"),
        "kernels": _kernels_digest(),
    }


def _processor() -> tuple[str, str]:
    """(model, instruction sets) of the first core, as Linux names them; elsewhere what Python knows."""
    told = first_core()
    model = told.get("model name") or told.get("CPU part") or platform.processor() or platform.machine()
    return model, told.get("flags") or told.get("Features") or ""


def kernel_files() -> list[Path]:
    """Return the files that _KERNELS names."""
    folder = Path(kernels_numba.__file__).parent
    return sorted(path for pattern in _KERNELS for path in folder.rglob(pattern))


def _kernels_digest() -> str:
    """A digest of the kernels' sources: with other kernels other limits hold."""
    digest = hashlib.sha256()
    for path in kernel_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
