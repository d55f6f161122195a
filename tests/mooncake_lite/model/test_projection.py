"""A linear layer gives the same through our kernels and through torch; which of them is measured."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch.nn.functional import linear as torch_linear

from kernels_numba.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.model import projection as module
from mooncake_lite.model.projection import Projection, measure_limits
from mooncake_lite.model.weights import Linear


def plain(rows: int, bias: bool = False) -> Linear:
    weight = torch.randn(rows, 64)
    return Linear(weight, torch.randn(rows) if bias else None, weight)


def blocks(rows: int, bias: bool = False) -> Linear:
    values = np.random.default_rng(0).standard_normal((rows, 64), dtype=np.float32)
    packed = GgufRows("Q4_1", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1))
    return Linear(packed, torch.randn(rows) if bias else None, None)


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("make", [plain, blocks])
def test_on_both_sides_of_the_limit_a_layer_is_x_times_its_weight_and_its_bias(
    make: Callable[..., Linear], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_VALUES", 64 * 10)  # blocks are unpacked ten rows at a time
    linears = [make(25, bias=True), make(12)]
    projection = Projection(linears)
    projection.limit = limit
    for tokens in (1, 4, 5, 40):
        x = torch.randn(tokens, 64)
        for result, linear in zip(projection(x), linears):
            weight = linear.weight
            dense = torch.from_numpy(dequantize_v0(weight)) if isinstance(weight, GgufRows) else weight
            torch.testing.assert_close(result, torch_linear(x, dense, linear.bias), rtol=0, atol=1e-4)


def test_above_the_limit_torch_multiplies_the_tensor_if_there_is_one() -> None:
    projection = Projection([blocks(25)._replace(dense=torch.ones(25, 64))])
    projection.limit = 4
    assert projection(torch.ones(5, 64))[0].eq(64.0).all()
    assert not projection(torch.ones(4, 64))[0].eq(64.0).any()


def test_torch_multiplies_until_a_limit_is_measured() -> None:
    assert Projection([plain(25)]).limit == 0


class Timed(Projection):
    """A projection on a clock of its own: ours takes 1 + tokens / 4 seconds, torch `torch_s`."""

    now = 0.0
    torch_s = 3.0
    noise: Callable[[], float] = staticmethod(lambda: 0.0)

    def by_kernels(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        Timed.now += 1 + len(hidden) / 4 + Timed.noise()
        return []

    def by_torch(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        Timed.now += Timed.torch_s + Timed.noise()
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "now", 0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: Timed.now)
    monkeypatch.setattr(module, "_ENOUGH_S", 1e9)


@pytest.mark.parametrize(
    ("torch_s", "limit"), [(1.0, 0), (1.25, 1), (1.5, 2), (2.0, 4), (3.0, 8), (5.0, 16), (99.0, 32)]
)
def test_the_limit_is_the_largest_batch_for_which_our_kernels_are_not_slower(
    torch_s: float, limit: int, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timed, "torch_s", torch_s)
    layers = [Timed([plain(25)]) for _ in range(30)]
    other = Timed([plain(26)])
    measure_limits([*layers, other])
    assert {layer.limit for layer in [*layers, other]} == {limit}


def test_runs_that_something_else_disturbed_do_not_move_the_limit(
    clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    monkeypatch.setattr(Timed, "noise", staticmethod(lambda: 50.0 * (random.random() < 0.4)))
    layers = [Timed([plain(25)]) for _ in range(30)]
    measure_limits(layers)
    assert {layer.limit for layer in layers} == {8}


def test_of_layers_alike_six_are_measured_and_all_get_the_limit(clock: None) -> None:
    met = []

    class Counted(Timed):
        def by_kernels(self, hidden: torch.Tensor) -> list[torch.Tensor]:
            met.append(self)
            return super().by_kernels(hidden)

    layers = [Counted([plain(25)]) for _ in range(30)]
    measure_limits(layers)
    assert len(set(map(id, met))) == 6
