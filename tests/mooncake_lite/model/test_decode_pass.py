"""All layers of a decode step in one compiled call: the bits of the general loop, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels_numba.errors import ShapeError
from kernels_numba.layers.decode_layers import DecodeLayers, LayerArrays
from kernels_numba.matmul.linear_layers import GgufRows, Linears
from mooncake_lite.model.forward import Model, load_model
from mooncake_lite.model.projection import Paths
from mooncake_lite.model.weights import Linear

KINDS: dict[str, dict[str, Any]] = {
    "biases everywhere": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "windows in later layers": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "window, wide heads": {"family": "mistral", "sliding_window": 11, "head_dim": 32},
    "normed heads": {"family": "qwen3", "head_dim": 32, "attention_bias": True},
    "blocks": {"family": "qwen2", "intermediate_size": 512},
}
"""512 numbers: fixed point takes no narrower rows."""
PROMPTS = [[3, 1, 4, 1, 5], list(range(10, 47)), [7] * 17, [150, 12]]


def packed(linear: Linear) -> Linear:
    """The same layer as blocks of Q4_1."""
    blocks = gguf.quantize(linear.weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    return linear._replace(weight=GgufRows("Q4_1", blocks))


def our_model(folder: Path, kind: str, batch_invariant: bool) -> Model:
    """A model whose layers our kernels multiply, up to 2 rows in fixed point, whatever is fastest here."""
    model = load_model(folder, batch_invariant=batch_invariant)
    if kind == "blocks":
        names = ("query", "key", "value", "output", "gate", "up", "down")
        layers = tuple(
            replace(layer, **{name: packed(getattr(layer, name)) for name in names})
            for layer in model.weights.layers
        )
        weights = replace(model.weights, layers=layers)
        model = Model(model.config, weights, "float32", "cpu", batch_invariant)
    if not batch_invariant:
        for layer in model.projections:
            for projection in layer.all:
                projection.paths = Paths(fixed=2, tiles=32)
    return model


@pytest.fixture(scope="module", params=list(KINDS))
def kind(
    request: Any, tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder=folder, **KINDS[request.param])
    return request.param, folder


def refused(*_: Any) -> None:
    raise AssertionError("the loop over the layers was taken")


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_one_call_gives_the_bits_of_the_loop_over_the_layers(
    rows: int,
    batch_invariant: bool,
    kind: tuple[str, Path],
    paged_loop: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = our_model(kind[1], kind[0], batch_invariant)
    loops = [paged_loop(model, sequences=rows, max_tokens=64) for _ in range(2)]
    for loop in loops:
        loop.caches.fill_(torch.nan)
        for s, prompt in enumerate(PROMPTS[:rows]):
            loop.forward({s: prompt}, {s: 0})
    tokens = {s: [20 + s] for s in range(rows)}
    for step in range(2):
        starts = {s: len(PROMPTS[s]) + step for s in range(rows)}
        order = torch.arange(rows).flip(0) if step else None
        with monkeypatch.context() as patched:
            patched.setattr(Model, "_layers", refused)
            found = loops[0].forward(tokens, starts, rows=order)
        with monkeypatch.context() as patched:
            patched.setattr(model, "decode", None)
            expected = loops[1].forward(tokens, starts, rows=order)
        assert found.isfinite().all()
        assert torch.equal(found, expected)
        assert loops[0].caches.nan_to_num().equal(loops[1].caches.nan_to_num())


def test_other_passes_take_the_loop(
    tmp_path: Path, make_tiny: Callable[..., Any], paged_loop: Callable[..., Any]
) -> None:
    make_tiny("llama", tmp_path)
    model = our_model(tmp_path, "plain", batch_invariant=True)
    loop = paged_loop(model, sequences=2)
    loop.forward({0: [5, 6]}, {0: 0})
    taken: list[int] = []

    def decode(*_: Any) -> None:
        raise AssertionError("one call was taken")

    decode.takes = lambda count: taken.append(count) or True  # type: ignore[attr-defined]
    model.decode = decode  # type: ignore[assignment]
    loop.forward({0: [7], 1: [8, 9]}, {0: 2, 1: 0})  # a prompt beside a decode step
    loop.forward({0: [7], 1: [9]}, {0: 3, 1: 2}, rows=torch.tensor([1]))  # a token that nobody reads
    assert taken == []

    assert load_model(tmp_path, "bfloat16").decode is None
    measured = our_model(tmp_path, "plain", batch_invariant=False)
    assert measured.decode.takes(32)
    assert not measured.decode.takes(33)
    measured.projections[1].down.paths = Paths(fixed=0, tiles=4)
    assert not measured.decode.takes(5)  # torch multiplies one layer


def test_layers_of_other_sizes_than_the_first_are_refused() -> None:
    def layer(inner: int, hidden: int = 64) -> LayerArrays:
        shapes = ([(64, 64), (32, 64), (32, 64)], [(64, 64)], [(inner, hidden)] * 2, [(64, inner)])
        linears = [Linears([np.zeros(shape, np.float32) for shape in some]) for some in shapes]
        norm = np.ones(64, np.float32)
        return LayerArrays(norms=(norm, norm, None, None), linears=linears, biases=[None] * 7, window=None)

    sizes = {"head_dim": 32, "eps": 1e-6, "scale": 1.0}
    DecodeLayers([layer(96), layer(96)], **sizes)
    for wrong in ([layer(96), layer(128)], [layer(96, hidden=32)]):
        with pytest.raises(ShapeError, match=r"layers\[\d\].linears"):
            DecodeLayers(wrong, **sizes)
    with pytest.raises(ShapeError, match="whole heads of 48"):
        DecodeLayers([layer(96)], **(sizes | {"head_dim": 48}))
