"""KV of a sequence, out of its pages as pool blocks and in again, with and without a codec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels_numba.codecs import CODECS
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.model.forward import load_model
from scheduler.instance import pages_for
from store.layout import BlockLayout
from tests.mooncake_lite.model.conftest import tiny_model

LENGTH = 150
"""Two blocks of 64 tokens, and a tail of 22, which takes two of the four pages of its block."""


def engine_of(folder: Path, dtype: str, codec: str, device: str) -> Engine:
    engine = Engine(load_model(folder, dtype, device), 32, 64, codec)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    engine.caches.copy_(torch.randn(engine.caches.shape, generator=generator))
    return engine


FIRST, SECOND = list(range(10)), list(range(30, 20, -1))
"""Pages of two sequences of LENGTH tokens."""


def values(engine: Engine, sequence: list[int]) -> np.ndarray:
    """(layers, 2, kv_heads, tokens of the pages, head_dim) float32."""
    pages = engine.caches[:, :, sequence].float().cpu().numpy()
    return np.moveaxis(pages, 2, 3).reshape(*pages.shape[:2], pages.shape[3], -1, pages.shape[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS)
def test_kv_comes_back_as_its_codec_makes_it_in_other_pages_and_with_a_tail(
    dtype: str, codec: str, tmp_path: Path, device: str
) -> None:
    tiny_model("llama", tmp_path)
    engine = engine_of(tmp_path, dtype, codec, device)
    assert len(FIRST) == pages_for(LENGTH, PAGE_TOKENS)
    before = values(engine, FIRST)
    blocks = np.zeros((3, *engine.block_shape), engine.block_dtype)
    engine.store_blocks(FIRST, blocks)
    engine.load_blocks(SECOND, blocks)

    oracle = CODECS[codec]
    if codec == "none":
        expected = before
    else:
        units = oracle.encode(before)
        expected = oracle.decode(units, before.shape[-2], before.shape[-1])
        if dtype == "bfloat16":
            expected = torch.from_numpy(expected).bfloat16().float().numpy()
    assert values(engine, SECOND).tobytes() == expected.tobytes()
    assert values(engine, FIRST).tobytes() == before.tobytes()


def test_a_block_is_as_long_as_its_layout_says(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    model = load_model(tmp_path, "bfloat16")
    for codec in CODECS:
        engine = Engine(model, 8, 64, codec)
        config = model.config
        layout = BlockLayout(config.layers, config.kv_heads, 64, config.head_dim, 2, codec)
        assert layout.shape == engine.block_shape
        assert np.empty(engine.block_shape, engine.block_dtype).nbytes == layout.nbytes
