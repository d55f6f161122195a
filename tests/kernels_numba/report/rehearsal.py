"""gpu_report's checks and measurements on the CPU: the same code, with CPU forms in the place of CUDA ones.

What is tested so is the code that compares and measures, which otherwise first ran on a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels_numba
from kernels_numba.attention import attention_cuda, attention_decode_cuda
from kernels_numba.checks import NO_WINDOW
from kernels_numba.movers import block_kernels_cuda, codec_kernels_cuda
from kernels_numba.report import gpu_checks, gpu_figures, gpu_mover_checks


class Event:
    """A point in time; torch's lies on a stream."""

    def __init__(self, enable_timing: bool):
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the checks and measurements ask of CUDA, from the CPU."""

    def prefill(*arrays: Any, window: int = NO_WINDOW, warps: int = 0, **options: Any) -> None:
        if len(arrays) > 6:
            *arrays, options["scale"], options["out"], window = arrays
        kernels_numba.paged_attention_prefill(*arrays, window=window, **options)

    def split(*arguments: Any, tensor_cores: bool) -> None:
        *arrays, scale, out = arguments
        kernels_numba.paged_attention_decode(*arrays, scale=scale, out=out)

    def move(caches: Any, ids: Any, blocks: Any, part: tuple, to_pages: bool) -> None:
        recode(caches, ids, blocks, part, None, to_pages)

    def recode(caches: Any, ids: Any, blocks: Any, part: tuple, codec: Any, to_pages: bool) -> None:
        layer, layers, head, heads = part
        chosen = {"layers": slice(layer, layer + layers), "heads": slice(head, head + heads), "codec": codec}
        if to_pages:
            kernels_numba.scatter_blocks(blocks, caches, ids, **chosen)
        else:
            kernels_numba.gather_blocks(caches, ids, blocks, **chosen)

    for module in (gpu_checks, gpu_mover_checks, gpu_figures):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for module in (gpu_checks, gpu_figures):
        monkeypatch.setattr(module, "captured", same)
    for name in ("launch_prefill", "launch_plain", "launch_shared", "launch_tiled"):
        monkeypatch.setattr(attention_cuda, name, prefill)
    monkeypatch.setattr(attention_decode_cuda, "launch_split", split)
    for name in ("launch_move_blocks", "launch_move_blocks_plain"):
        monkeypatch.setattr(block_kernels_cuda, name, move)
    monkeypatch.setattr(codec_kernels_cuda, "launch_recode_plain", recode)
    for name, stand_in in (
        ("Stream", SimpleNamespace),
        ("stream", contextlib.nullcontext),
        ("synchronize", lambda: None),
        ("Event", Event),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)


def same(action: Callable[[], object]) -> Callable[[], object]:
    """A graph whose replay is the call."""
    return action
