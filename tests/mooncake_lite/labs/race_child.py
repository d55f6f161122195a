"""Runs kernels in Numba's simulator under the race checker, for test_race_checker.py: `race_child RUNS`.

A process of its own, because Numba chooses between simulator and compiler when it is imported. Prints JSON:
{"good": {name: [findings of each run]}, "bad": likewise, "attention": likewise, "maps": {name: AccessMap}}.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kernels_numba.attention import attention_cuda
from kernels_numba.gpu.backend_cuda import cuda
from mooncake_lite.labs.access_map import access_map
from mooncake_lite.labs.race_checker import Finding, Recording, watch
from tests.kernels_numba.gpu.simulator_checks import Case, device, poison
from tests.mooncake_lite.labs import bad_kernels, good_kernels

BARRIER = "cuda.syncthreads()"


def small(kernel: Callable[..., None]) -> Recording:
    """Run a kernel of good_kernels or bad_kernels with two blocks."""
    numbers, out = np.arange(good_kernels.N, dtype=np.float32), np.zeros(good_kernels.N, np.float32)
    with watch() as recording:
        cuda.jit(kernel)[2, good_kernels.N](numbers, out)
    return recording


def attention(kernel: Callable[..., None], case: Case, *watched: str, check: bool = True) -> Recording:
    """Run a rung of attention whose grid is (tokens, heads)."""
    out = poison(case, case.query)
    arrays = (*case.inputs(), *device(case.new, case.lens), out)
    with watch(watched) as recording:
        cuda.jit(kernel)[case.query.shape[:2], attention_cuda.THREADS](
            *arrays, np.float32(case.scale), np.int64(case.window)
        )
    if check:
        case.check(out)
    return recording


def tiled(case: Case) -> Recording:
    """Run v2."""
    out = poison(case, case.query)
    with watch() as recording:
        attention_cuda.launch_tiled(*case.inputs(), *device(case.new, case.lens), case.scale, out)
    case.check(out)
    return recording


def without_barrier(number: int) -> Callable[..., None]:
    """Return attention_v1_shared without one of its barriers."""
    name = f"attention_without_barrier_{number}.py"
    lines = inspect.getsource(attention_cuda.attention_v1_shared).splitlines(keepends=True)
    barriers = [at for at, line in enumerate(lines) if line.strip() == BARRIER]
    lines[barriers[number]] = "\n"
    source = "".join(lines)
    linecache.cache[name] = (len(source), None, lines, name)
    names = dict(vars(attention_cuda))
    exec(compile(source, name, "exec"), names)
    return names["attention_v1_shared"]


def repeated(run: Callable[[], Recording], runs: int) -> list[list[Finding]]:
    return [run().findings() for _ in range(runs)]


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # poison overflows
    sys.setswitchinterval(1e-4)  # other orders of threads in each run
    runs = int(sys.argv[1])
    shared = attention_cuda.attention_v1_shared
    one, ragged = Case("float32", 1, 8, (70,), (1,)), Case("bfloat16", 2, 16, (66, 5), (2, 1))
    result: dict[str, Any] = {
        what: {name: repeated(lambda: small(kernel), runs) for name, kernel in kernels.items()}  # noqa: B023
        for what, kernels in (("good", good_kernels.KERNELS), ("bad", bad_kernels.KERNELS))
    }
    result["good"]["v1 shared"] = repeated(lambda: attention(shared, ragged), 1)
    result["good"]["v2"] = repeated(lambda: tiled(ragged), 1)
    result["attention"] = {
        str(number): repeated(lambda: attention(without_barrier(number), one, check=False), runs)  # noqa: B023
        for number in range(2)
    }
    recording = attention(shared, one, "key_cache")
    broken = small(bad_kernels.missing_barrier)
    result["maps"] = {
        "scores": access_map(recording, "scores"),
        "key_cache": access_map(recording, "key_cache", unit="page"),
        "broken": access_map(broken, "shared", block=(1, 0, 0)),
    }
    result["tables"] = one.tables[0].tolist()
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
