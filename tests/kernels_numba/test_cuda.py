"""The CUDA kernels without a GPU: in the simulator, and lowered to PTX for sm_90; with one, against torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def has_nvvm() -> str:
    """Empty when kernels can be lowered to PTX here, else the reason why not."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed: pip install 'mooncake-lite[gpu]'"
    try:
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:
        return f"no NVVM here ({type(error).__name__}): pip install 'mooncake-lite[gpu]'"
    return ""


needs_nvvm = pytest.mark.skipif(bool(has_nvvm()), reason=has_nvvm() or "NVVM is here")


def test_every_cuda_kernel_agrees_with_its_oracle_in_the_simulator() -> None:
    """Numba chooses between simulator and compiler when it is imported: hence a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels_numba.simulator_checks"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"


def signatures() -> dict[str, Any]:
    """Kernel name -> (kernel, arguments) of every CUDA kernel, for both element types."""
    from numba import types

    from kernels_numba import attention_cuda, blocks_cuda

    i32, i64, f32 = types.int32, types.int64, types.float32
    found = {}
    for name, element in (("float32", f32), ("bfloat16", types.uint16)):
        cache, caches = element[:, :, :, ::1], element[:, :, :, :, :, ::1]
        attention = (
            element[:, :, ::1],
            cache,
            cache,
            i32[:, ::1],
            i32[::1],
            i32[::1],
            element[:, :, ::1],
            f32,
        )
        blocks = (caches, i32[:, ::1], element[:, :, :, :, :, :], i64, i64, types.boolean)
        new = element[:, :, :]
        for kernel, arguments in (
            (attention_cuda.attention_v1, attention),
            (attention_cuda.attention_v2, attention),
            (blocks_cuda.scatter_kv_v1, (new, new, cache, cache, i64[::1])),
            (blocks_cuda.move_blocks_v1, blocks),
            (blocks_cuda.copy_pages_v1, (caches, i32[::1], i32[::1])),
        ):
            found[f"{kernel.__name__} {name}"] = (kernel, arguments)
    return found


@pytest.mark.ptx
@needs_nvvm
def test_every_cuda_kernel_lowers_to_ptx_for_sm_90() -> None:
    from numba import types

    from kernels_numba.backend_cuda import cuda

    kernels = signatures()
    assert len(kernels) == 10
    for name, (kernel, arguments) in kernels.items():
        ptx, _ = cuda.compile_ptx(kernel, types.void(*arguments), cc=(9, 0))
        assert ".target sm_90" in ptx, name
        assert ".visible .entry" in ptx, name
        assert (".shared" in ptx) == name.startswith("attention_v2"), name


@pytest.mark.ptx
@needs_nvvm
def test_the_ptx_of_attention_computes_in_single_precision_only() -> None:
    """Python's floats are doubles: one stray constant would make a GPU crawl."""
    from numba import types

    from kernels_numba.backend_cuda import cuda

    for name, (kernel, arguments) in signatures().items():
        if name.startswith("attention_v2"):
            ptx, _ = cuda.compile_ptx(kernel, types.void(*arguments), cc=(9, 0))
            assert not [line for line in ptx.splitlines() if ".f64" in line and "ld.param" not in line], name


@pytest.mark.gpu
def test_cuda_tensors_give_what_cpu_tensors_give() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the simulator and the PTX are all that can be checked here")
    import kernels_numba
    from tests.kernels_numba.paging import make_paged

    paged = make_paged(context_lens=[70, 33], query_lens=[20, 33], heads=6, kv_heads=2, head_dim=64)
    arrays = (paged.query, paged.key_cache, paged.value_cache, paged.block_tables)
    arguments = [torch.from_numpy(a) for a in (*arrays, paged.query_lens, paged.context_lens)]
    on_cpu = kernels_numba.paged_attention_prefill(*arguments, scale=paged.scale)
    on_gpu = kernels_numba.paged_attention_prefill(*(a.cuda() for a in arguments), scale=paged.scale)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=1e-5)
