"""The child's side of gate 3: lowers kernels of the tree in which it runs, and names the GPU that it has.

Used by lowering.py. It needs NVVM for the first, and a driver for the second.
Explained in docs/explain/labs.md, "Gates".
"""

from __future__ import annotations

import os
from collections.abc import Sequence

os.environ.pop("NUMBA_ENABLE_CUDASIM", None)  # the simulator lowers nothing

CAPABILITY = (8, 0)


def lower(names: Sequence[str]) -> dict[str, str]:
    """Lower these plain kernels of gpu_lowering to PTX.

    Returns {name: what is wrong with it, empty when nothing is}; {"": why} where there is no NVVM.
    """
    from kernels_numba.report import gpu_lowering

    try:
        from cuda.bindings import nvjitlink  # noqa: F401
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:  # each part has errors of its own when it is missing
        return {"": f"no NVVM ({type(error).__name__}); pip install 'mooncake-lite[gpu]' brings it"}
    found = {}
    for kernel in gpu_lowering.plain_kernels():
        if kernel.name in names:
            try:
                gpu_lowering.ptx_of(kernel.lowered(CAPABILITY)[0], CAPABILITY)
                found[kernel.name] = ""
            except Exception as error:  # Numba, NVVM and the linker have many
                found[kernel.name] = f"{type(error).__name__}: {error}"[:2000]
    return found


def device(_: object) -> dict[str, str]:
    """Return {"name": the GPU}, or {"error": why there is none}."""
    from kernels_numba.gpu.backend_cuda import cuda

    if not cuda.is_available():
        return {"error": " ".join((cuda.cuda_error() or "no NVVM").split())}
    name = cuda.get_current_device().name
    return {"name": name.decode() if isinstance(name, bytes) else name}


CALLS = {"lower": lower, "device": device}
