"""Weights as they are published: the GGUF's own blocks compute what their float32 form computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels_numba.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.config import ServeConfig
from mooncake_lite.errors import ConfigError, ModelError
from mooncake_lite.model import load_model, weights_fingerprint
from mooncake_lite.model.forward import Model
from mooncake_lite.model.gguf_tensors import gguf_tensors
from mooncake_lite.model.projection import Projection
from mooncake_lite.model.weights import Linear, published_file
from tests.mooncake_lite.model.conftest import tiny_model


@pytest.fixture(scope="module")
def pair(default_folder: Path) -> tuple[Model, Model]:
    """The default model with float32 weights, and with published ones."""
    return load_model(default_folder), load_model(default_folder, weights="published")


def test_the_file_is_read_as_the_gguf_package_reads_it(default_folder: Path) -> None:
    path = published_file(default_folder)
    ours = gguf_tensors(path)
    theirs = gguf.GGUFReader(path).tensors
    assert len(ours) == len(theirs) == 272
    for tensor in theirs:
        mine = ours[tensor.name]
        assert (mine.format, mine.shape) == (
            tensor.tensor_type.name,
            tuple(int(n) for n in tensor.shape[::-1]),
        )
        np.testing.assert_array_equal(mine.data.ravel(), tensor.data.view(np.uint8).ravel())


def test_published_weights_are_the_float32_ones_to_the_last_bit(pair: tuple[Model, Model]) -> None:
    exact, published = pair
    for layer in (0, 29):
        for name in ("query", "key", "value", "output", "gate", "up", "down"):
            blocks = getattr(published.weights.layers[layer], name).weight
            assert isinstance(blocks, GgufRows)
            expected = getattr(exact.weights.layers[layer], name).weight
            np.testing.assert_array_equal(dequantize_v0(blocks), expected.numpy())
    assert isinstance(published.weights.head, GgufRows)
    assert published.weights.head.format == "Q8_0"


def test_published_weights_give_the_same_logits_for_one_token_and_for_many(
    pair: tuple[Model, Model], paged_loop: Callable[..., Any]
) -> None:
    ids = list(range(1000, 1060))
    exact, published = (paged_loop(model).forward({0: ids}, {0: 0}) for model in pair)
    torch.testing.assert_close(published, exact, rtol=0, atol=2e-3)
    assert paged_loop(pair[1]).greedy([ids], 12) == paged_loop(pair[0]).greedy([ids], 12)


def test_a_batch_above_the_limit_is_unpacked_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_lite.model.projection._PIECE_VALUES", 64 * 10)
    values = np.random.default_rng(0).standard_normal((25, 64), dtype=np.float32)
    blocks = GgufRows("Q4_1", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1))
    bias, x = torch.randn(25), torch.randn(40, 64)

    (result,) = Projection([Linear(blocks, bias)], {})(x)

    weight = torch.from_numpy(dequantize_v0(blocks))
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, bias), rtol=0, atol=1e-4)


def test_a_limit_that_is_given_is_not_measured() -> None:
    linears = [Linear(torch.ones(8, 4), torch.ones(8)), Linear(torch.ones(6, 4), None)]
    limits = {(("float32", 8, 4), ("float32", 6, 4)): 3}
    projection = Projection(linears, limits)  # type: ignore[arg-type]
    assert projection.limit == 3
    for tokens in (1, 3, 4):  # ours, ours, torch's
        first, second = projection(torch.ones(tokens, 4))
        assert first.tolist() == [[5.0] * 8] * tokens
        assert second.tolist() == [[4.0] * 6] * tokens


def test_the_format_is_part_of_the_fingerprint(default_folder: Path) -> None:
    published = weights_fingerprint(default_folder, "float32", "published")
    assert published == weights_fingerprint(default_folder, "float32", "published")
    assert published != weights_fingerprint(default_folder, "float32")


def test_published_weights_are_refused_with_the_fix_where_they_cannot_be(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"has 0; use weights 'float32'"):
        load_model(tmp_path, weights="published")
    with pytest.raises(ModelError, match="need dtype float32 and device cpu, not bfloat16 and cpu"):
        load_model(tmp_path, "bfloat16", weights="published")
    with pytest.raises(ModelError, match="'int3' are not supported; supported are float32, published"):
        load_model(tmp_path, weights="int3")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match="GGUF version 0"):
        load_model(tmp_path, weights="published")
    with pytest.raises(ConfigError, match="weights=published needs dtype float32"):
        ServeConfig(weights="published", dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights='x': use float32 or published"):
        ServeConfig(weights="x")  # type: ignore[arg-type]
