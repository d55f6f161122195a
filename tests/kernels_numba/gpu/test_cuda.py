"""The CUDA kernels without a GPU: simulated, lowered to PTX, assembled. With one: gpu_report's checks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest

from kernels_numba.errors import BackendError
from kernels_numba.report.gpu_lowering import Kernel, architecture, assemble, linked, ptx_of, read_log

if TYPE_CHECKING:
    from kernels_numba.gpu.backend_cuda import Capability

Test = TypeVar("Test")

REPOSITORY = Path(__file__).parents[3]
ARCHITECTURES: tuple[Capability, ...] = ((8, 0), (9, 0), (9, 0, "a"), (10, 0), (10, 0, "a"))
HOPPER: Capability = (9, 0, "a")
"""What a launch on an H100 or H200 links for."""
EVERYWHERE = (
    "prefill mma bfloat16 128, group 8",
    "decode mma float16 128, group 8",
    "decode v3 bfloat16 256",
    "merge float16",
    "scatter_kv v2",
    "scatter_rotated v2 bfloat16",
    "encode v2 int4 bfloat16 128",
    "decode v2 fp8 float16 64",
    "move_blocks v2",
    "copy_pages v2",
)
"""Assembled for each architecture: every tuned kernel once."""
HERE = (
    "prefill mma float16 64, group 128",
    "decode v3 float32 256",
    "encode v2 int8 float16 64",
    "encode v2 fp8 float32 64",
    "decode v2 bfloat16 bfloat16 128",
    "decode v2 int8 float32 64",
    "decode v2 int4 bfloat16 128",
    "scatter_rotated v2 float32",
    "attention v1 bfloat16",
    "attention shared float32",
    "attention v2 float16",
    "recode v1 bfloat16",
    "scatter_rotated v1 float16",
    "scatter_kv v1 float16",
    "move_blocks v1 bfloat16",
    "copy_pages v1 float32",
)
"""Assembled for sm_90a alone: other types, more warps, plain rungs. gpu_report assembles them all."""


PARTS = 2
"""Of the checks in the simulator, so that two workers share them."""


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


def of_kernels(*names: str) -> Callable[[Test], Test]:
    """A test of the PTX of these kernels; the worker that has lowered one gets all of its tests."""

    def marked(test: Test) -> Test:
        return pytest.mark.ptx(needs_nvvm(pytest.mark.parametrize("name", names)(test)))

    return marked


every_kernel = of_kernels(*EVERYWHERE, *HERE)


@functools.cache
def kernels() -> dict[str, Kernel]:
    from kernels_numba.report import gpu_lowering

    return {kernel.name: kernel for kernel in gpu_lowering.kernels()}


@functools.cache
def lowered(name: str) -> dict[Capability, bytes]:
    ccs = ARCHITECTURES if name in EVERYWHERE else (HOPPER,)
    return dict(zip(ccs, kernels()[name].lowered(*ccs)))


@functools.cache
def ptx(name: str, cc: Capability = HOPPER) -> str:
    return ptx_of(lowered(name)[cc], cc)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_cuda_kernel_agrees_with_its_oracle_in_the_simulator(part: int) -> None:
    """Numba chooses between simulator and compiler when it is imported: hence a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels_numba.gpu.simulator_checks", "--part", f"{part}/{PARTS}"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"


@every_kernel
def test_every_cuda_kernel_lowers_to_ptx(name: str) -> None:
    for cc in lowered(name):
        assert f".target {architecture(cc)}\n" in ptx(name, cc) + "\n"
        assert ".visible .entry" in ptx(name, cc)


@every_kernel
def test_the_ptx_of_every_cuda_kernel_assembles_the_tuned_ones_without_spills_and_long_divisions(
    name: str,
) -> None:
    """A GPU has no instruction for a division of 64 bits: it calls a routine of some 70."""
    for cc, code in lowered(name).items():
        found = assemble(code, cc)
        assert 0 < found.registers <= 255
        assert found.shared_bytes <= 48 * 1024
        assert (found.shared_bytes > 0) == ("mma" in name or "attention v2" in name or "shared" in name)
        if kernels()[name].tuned:
            assert (found.spill_bytes, found.stack_bytes) == (0, 0), cc
            assert re.findall(r"\b(?:div|rem)\.[su]64\b", ptx(name)) == []


@of_kernels("merge float16")
def test_the_ptx_that_is_assembled_here_is_what_numba_loads(name: str) -> None:
    from numba.cuda.cudadrv.driver import _Linker

    from kernels_numba.gpu.backend_cuda import compiled

    kernel = kernels()[name]
    assert compiled(kernel.function).targetoptions["lto"], "Numba would assemble relocatable PTX"
    for cc, code in lowered(kernel.name).items():
        linker = _Linker(cc=cc, lto=True)
        linker.add_ltoir(code)
        assert bytes(linker.complete().code) == linked(code, cc)[0]


@of_kernels("prefill mma bfloat16 128, group 8")
def test_the_ptx_of_tensor_core_attention_uses_the_instructions_it_was_written_for(name: str) -> None:
    text = ptx(name)
    for instruction in (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        "cp.async.cg.shared.global",
        "cvt.rn.bf16x2.f32",
    ):
        assert instruction in text
    assert ".shared .align 16 .b8" in text
    assert text.count("mma.sync") == 64  # unrolled: a tile is 32 keys, two products of 32 instructions each


@of_kernels("move_blocks v2")
def test_the_ptx_of_copies_loads_16_bytes_at_a_time(name: str) -> None:
    assert "ld.global.v4.u32" in ptx(name)


@of_kernels(*(name for name in (*EVERYWHERE, *HERE) if not name.startswith("attention v1")))
def test_the_ptx_of_attention_computes_in_single_precision_only(name: str) -> None:
    """Python's floats are doubles: one stray constant would make a GPU crawl."""
    lines = ptx(name).splitlines()
    assert not [line for line in lines if ".f64" in line and "ld.param" not in line]


@of_kernels("scatter_kv v2")
def test_the_ptx_of_a_scatter_adds_offsets_in_64_bits(name: str) -> None:
    assert "mad.lo.s64" in ptx(name) or "mul.lo.s64" in ptx(name)


@pytest.mark.quick
def test_a_cache_with_more_slots_than_32_bits_hold_is_left_to_the_plain_kernels() -> None:
    from kernels_numba.movers.block_kernels_cuda import few_slots

    assert few_slots(SimpleNamespace(shape=(2**27 - 1, 8, 16, 128)))
    assert not few_slots(SimpleNamespace(shape=(2**27, 8, 16, 128)))


@pytest.mark.quick
@needs_nvvm
def test_more_rows_than_32_bits_hold_are_recoded_by_the_plain_kernel(monkeypatch) -> None:
    from kernels_numba.codecs import CODECS
    from kernels_numba.movers import codec_kernels_cuda as kernels

    chosen = []
    monkeypatch.setattr(kernels, "launch_recode_plain", lambda *_: chosen.append("plain"))
    monkeypatch.setattr(kernels, "make_recode_v2", lambda *_: chosen.append("lanes"))
    monkeypatch.setattr(kernels, "compiled", lambda _: defaultdict(lambda: lambda *_: None))
    for name, found in (("strides_of", [4096]), ("aligned", True), ("addresses", ((), None))):
        monkeypatch.setattr(kernels, name, lambda *_, found=found: found)
    caches = SimpleNamespace(shape=(1, 2, 1, 1, 16, 64), dtype=np.dtype("float32"), __cuda_ndarray__=True)
    blocks = SimpleNamespace(shape=(1, 1, 2, 1, 4096))
    for count in (2**26 - 1, 2**26):
        ids = SimpleNamespace(shape=(count, 1))
        kernels.launch_recode(caches, ids, blocks, (0, 1, 0, 1), CODECS["int8"], False)
    assert chosen == ["lanes", "plain"]


@pytest.mark.quick
def test_a_plan_with_too_much_shared_memory_is_refused_in_one_line() -> None:
    from kernels_numba.attention.attention_mma_cuda import make_attend

    words = r"^a block needs 65536 bytes of shared memory: Numba asks for at most 49152; use smaller tiles$"
    with pytest.raises(BackendError, match=words):
        make_attend("bfloat16", 256, True, 1)


def test_figures_that_an_assembler_does_not_give_are_an_error_and_no_zero() -> None:
    with pytest.raises(RuntimeError, match=r"does not say .*registers"):
        read_log("info: 8 bytes gmem")


@pytest.mark.ptx
@needs_nvvm
def test_ptx_code_that_cannot_be_linked_is_an_error_with_the_linker_s_words() -> None:
    with pytest.raises(RuntimeError, match="ERROR"):
        assemble(b"no code", (9, 0))


@needs_nvvm
def test_kernels_go_to_torch_s_current_stream_of_the_tensor_s_device(monkeypatch) -> None:
    import torch

    from kernels_numba.gpu import backend_cuda

    made, current = [], SimpleNamespace(cuda_stream=0)

    def external_stream(handle: int) -> object:
        made.append(handle)
        return object()

    driver = SimpleNamespace(is_available=lambda: True, external_stream=external_stream)
    monkeypatch.setattr(backend_cuda, "cuda", driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    backend_cuda._check_available.cache_clear()
    backend_cuda._stream.cache_clear()
    here, there = (SimpleNamespace(device=SimpleNamespace(index=index)) for index in (0, 1))
    try:
        assert backend_cuda._stream_of(here) == 0, "Numba's default stream is torch's"
        current.cuda_stream = 77
        assert backend_cuda._stream_of(there) is backend_cuda._stream_of(here), "one object for one stream"
        assert made == [77]
    finally:
        backend_cuda._check_available.cache_clear()
        backend_cuda._stream.cache_clear()


@needs_nvvm
def test_a_launch_runs_on_the_tensor_s_device_and_the_caller_s_is_current_again_after(monkeypatch) -> None:
    import torch

    from kernels_numba.gpu.backend_cuda import on_its_device

    current, launches = [0], []

    @contextlib.contextmanager
    def device(wanted: SimpleNamespace) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)

    @on_its_device
    def launch(tensor: SimpleNamespace, fails: bool) -> None:
        launches.append((tensor.device.index, current[0]))
        if fails:
            raise ValueError

    here, there = (SimpleNamespace(device=SimpleNamespace(index=index)) for index in (0, 1))
    launch(here, False)
    launch(there, False)
    with pytest.raises(ValueError):
        launch(there, True)
    assert launches == [(0, 0), (1, 1), (1, 1)]
    assert current == [0]


@pytest.mark.quick
@needs_nvvm
def test_every_launch_function_leaves_the_caller_s_device_current() -> None:
    from kernels_numba.attention import attention_cuda, attention_decode_cuda
    from kernels_numba.movers import block_kernels_cuda, codec_kernels_cuda, rotary_cuda

    homes = (attention_cuda, attention_decode_cuda, block_kernels_cuda, codec_kernels_cuda, rotary_cuda)
    found = {name: f for home in homes for name, f in vars(home).items() if name.startswith("launch_")}
    assert len(found) == 16
    assert [name for name, launch in found.items() if not hasattr(launch, "__wrapped__")] == []


@needs_nvvm
def test_a_device_array_without_a_device_is_refused_with_the_driver_s_words(monkeypatch) -> None:
    from kernels_numba.gpu import backend_cuda

    driver = SimpleNamespace(is_available=lambda: False, cuda_error=lambda: "\nno driver\n")
    monkeypatch.setattr(backend_cuda, "cuda", driver)
    backend_cuda._check_available.cache_clear()
    with pytest.raises(BackendError, match=r"finds no CUDA device \(no driver\)"):
        backend_cuda.addresses(SimpleNamespace(device=None))


def test_without_a_gpu_the_report_says_so_in_one_line_and_ends_with_2(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    command = [sys.executable, "-m", "kernels_numba.gpu_report", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "no CUDA device here: nothing to check or to measure\n"
    assert not (tmp_path / "report.json").exists()


@pytest.mark.gpu
def test_every_gpu_check_of_the_report_passes(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the simulator and the PTX are all that can be checked here")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "kernels_numba.gpu_report", "--checks-only", "--json", str(report)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(check["passed"] for check in json.loads(report.read_text())["checks"])
