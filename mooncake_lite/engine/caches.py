"""The KV caches of one rank: the bytes of its pages.

Used by `engine.Engine`. Which page belongs to whom is decided in `scheduler.instance`.
"""

from __future__ import annotations

import torch

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.model.config import ModelConfig


def new_caches(config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make the KV pages of all layers, one array: (layers, 2, pages, kv_heads, PAGE_TOKENS, head_dim).

    Left uninitialised: the system gives memory to a page when it is first written, and no kernel reads
    a slot before that.
    """
    shape = (config.layers, 2, num_pages, config.kv_heads, PAGE_TOKENS, config.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)
