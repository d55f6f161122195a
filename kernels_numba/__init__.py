"""Kernels over paged KV: attention, and moving KV between pages and contiguous blocks.

Called by the engine and the store; knows arrays only, never requests, ranks or keys. Importing it loads
neither torch nor numba and compiles nothing: a function's module is loaded when the function is first named.

    attention/   paged attention for decode and prefill; read attention_decode first, then attention_prefill
    movers/      KV into pages, blocks and back; read blocks
    matmul/      linear layers; layers/ joins all of these to whole layers
    intrinsics/  the words that kernels are made of; gpu/ is the door to CUDA
    report/      checks and measurements on a GPU: python -m kernels_numba.gpu_report
    runtime, ahead, arrays, checks, codecs, errors   what all of them share
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_numba.attention.attention_decode import paged_attention_decode as paged_attention_decode
    from kernels_numba.attention.attention_prefill import paged_attention_prefill as paged_attention_prefill
    from kernels_numba.codecs import codec as codec
    from kernels_numba.layers.paged_pass import PagedPass as PagedPass
    from kernels_numba.layers.row_kernels import rms_norm as rms_norm
    from kernels_numba.layers.row_kernels import silu_multiply as silu_multiply
    from kernels_numba.matmul.linear_layers import GgufRows as GgufRows
    from kernels_numba.matmul.linear_layers import Int8Rows as Int8Rows
    from kernels_numba.matmul.linear_layers import Linears as Linears
    from kernels_numba.matmul.linear_layers import linear as linear
    from kernels_numba.movers.blocks import copy_pages as copy_pages
    from kernels_numba.movers.blocks import gather_blocks as gather_blocks
    from kernels_numba.movers.blocks import scatter_blocks as scatter_blocks
    from kernels_numba.movers.blocks import scatter_kv as scatter_kv

_HOME = {
    "paged_attention_decode": "attention.attention_decode",
    "paged_attention_prefill": "attention.attention_prefill",
    "scatter_kv": "movers.blocks",
    "gather_blocks": "movers.blocks",
    "scatter_blocks": "movers.blocks",
    "copy_pages": "movers.blocks",
    "PagedPass": "layers.paged_pass",
    "rms_norm": "layers.row_kernels",
    "silu_multiply": "layers.row_kernels",
    "codec": "codecs",
    "linear": "matmul.linear_layers",
    "Linears": "matmul.linear_layers",
    "Int8Rows": "matmul.linear_layers",
    "GgufRows": "matmul.linear_layers",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """The public function `name`, from the module that it lives in; kept, so that this runs once a name."""
    if name not in _HOME:
        raise AttributeError(f"module 'kernels_numba' has no attribute {name!r}")
    function = getattr(importlib.import_module(f"kernels_numba.{_HOME[name]}"), name)
    globals()[name] = function
    return function
