"""What the machine allows: reading the weights once for a decode step, matrix products for a prefill.

Measured by `engine` in the same run as the figures that they bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn.functional import linear as torch_linear

from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.forward import Model
from mooncake_lite.model.projection import Projection, shape_of
from mooncake_lite.tools.bench.kernels import read_all
from mooncake_lite.tools.bench.result import timed

REPEATS = 3
"""Of which the fastest counts: a limit is what the machine can do when no other process takes a core."""


def projections(model: Model) -> Iterator[Projection]:
    """Yield every linear layer of a forward pass, the output layer last."""
    for layer in model.projections:
        yield from layer.all
    assert model.head is not None
    yield model.head


def weight_words(model: Model) -> list[np.ndarray]:
    """List the linear layers' weights as they are read in a decode step, as (n,) int64."""
    words = []
    for projection in projections(model):
        for linear in projection.linears:
            weight = linear.weight
            values = weight.numpy() if isinstance(weight, torch.Tensor) else np.asarray(weight.blocks)
            flat = values.reshape(-1).view(np.uint8)
            words.append(flat[: flat.size // 8 * 8].view(np.int64))
    return words


def read_seconds(words: list[np.ndarray]) -> float:
    """Read all weights once, with all threads; return the seconds."""

    def read() -> None:
        for each in words:
            read_all(each)

    return fastest(read)


def linear_inputs(model: Model, rows: int) -> list[tuple[Projection, torch.Tensor]]:
    """Pair each linear layer with an input of some rows, for `in_turn_seconds`."""
    return [(each, torch.ones(rows, shape_of(each.linears[0].weight)[1])) for each in projections(model)]


def in_turn_seconds(layers: list[tuple[Projection, torch.Tensor]]) -> float:
    """Multiply each layer by its input, as a decode step does, with nothing between; return the seconds."""

    def multiply() -> None:
        for projection, x in layers:
            projection(x)

    with torch.inference_mode():
        return fastest(multiply)


def prefill_flops(config: ModelConfig, weights: int, tokens: int) -> float:
    """Return the arithmetic of a prompt: two operations for each weight and token, and causal attention.

    weights   numbers in the linear layers, without the output layer, which sees the last token alone

    A token attends to itself and to those before it: half the square of the length, two products, two
    operations each.
    """
    pairs = tokens * (tokens + 1) / 2
    return 2.0 * weights * tokens + 4.0 * pairs * config.layers * config.heads * config.head_dim


def layer_shapes(model: Model) -> list[tuple[int, int]]:
    """List (out, in) of every weight but the output layer's."""
    return [
        shape_of(linear.weight)
        for layer in model.projections
        for each in layer.all
        for linear in each.linears
    ]


def prefill_limit(model: Model, tokens: int) -> Callable[[], float]:
    """Return a measurement: tokens/s of a prompt whose arithmetic runs as fast as torch's matrix products.

    The speed is that of the model's own products, each shape with all tokens, weighted as the model has them.
    """
    shapes = layer_shapes(model)
    weights = {shape: torch.randn(shape) for shape in set(shapes)}
    inputs = {width: torch.randn(tokens, width) for _, width in set(shapes)}
    numbers = sum(rows * width for rows, width in shapes)
    flops = prefill_flops(model.config, numbers, tokens)

    @torch.inference_mode()
    def measure() -> float:
        taken = {
            shape: fastest(lambda shape=shape: torch_linear(inputs[shape[1]], weights[shape]))  # type: ignore[misc]
            for shape in weights
        }
        flops_per_s = 2.0 * numbers * tokens / sum(taken[shape] for shape in shapes)
        return tokens * flops_per_s / flops

    return measure


def fastest(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    seconds = timed(action)
    return min(seconds() for _ in range(REPEATS))
