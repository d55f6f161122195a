"""A linear layer gives the same through our kernels and through torch; which of them is measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn.functional import linear as torch_linear

from kernels_numba.matmul.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.model import linear_paths
from mooncake_lite.model import projection as module
from mooncake_lite.model.linear_paths import measured_paths
from mooncake_lite.model.projection import INVARIANT, Family, Paths, Projection, invariant_pieces
from mooncake_lite.model.weights import Linear


def plain(rows: int, bias: bool = False) -> Linear:
    weight = torch.randn(rows, 64)
    return Linear(weight, torch.randn(rows) if bias else None, weight)


def blocks(rows: int, bias: bool = False) -> Linear:
    values = np.random.default_rng(0).standard_normal((rows, 64), dtype=np.float32)
    packed = GgufRows("Q4_1", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1))
    return Linear(packed, torch.randn(rows) if bias else None, None)


@pytest.mark.parametrize("paths", [Paths(), Paths(1, 4), INVARIANT])
@pytest.mark.parametrize("make", [plain, blocks])
def test_on_every_path_a_layer_is_x_times_its_weight_and_its_bias(
    make: Callable[..., Linear], paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_VALUES", 64 * 10)  # blocks are unpacked ten rows at a time
    linears = [make(25, bias=True), make(12)]
    projection = Projection(linears)
    projection.paths, projection.invariant = paths, paths == INVARIANT
    for tokens in (1, 4, 5, 40):
        x = torch.randn(tokens, 64)
        for result, linear in zip(projection(x), linears):
            weight = linear.weight
            dense = torch.from_numpy(dequantize_v0(weight)) if isinstance(weight, GgufRows) else weight
            torch.testing.assert_close(result, torch_linear(x, dense, linear.bias), rtol=0, atol=1e-4)


def test_above_the_limit_torch_multiplies_the_tensor_if_there_is_one() -> None:
    projection = Projection([blocks(25)._replace(dense=torch.ones(25, 64))])
    projection.paths = Paths(0, 4)
    assert projection(torch.ones(5, 64))[0].eq(64.0).all()
    assert not projection(torch.ones(4, 64))[0].eq(64.0).any()


def test_torch_multiplies_until_paths_are_measured() -> None:
    assert Projection([plain(25)]).paths.family(1) == "torch"


def test_the_path_follows_the_number_of_rows() -> None:
    paths = Paths(fixed=2, tiles=4)
    assert [paths.family(rows) for rows in range(6)] == ["torch", *2 * ["fixed"], *2 * ["tiles"], "torch"]


def test_a_piece_is_a_sequence_or_some_of_those_with_one_token() -> None:
    assert invariant_pieces([1] * 70 + [5, 0, 300], 70) == [32, 32, 6, 5, 300]
    assert invariant_pieces([1], 1) == [1]


@pytest.mark.parametrize("rows", [1, 2, 5, 31])
def test_a_row_has_the_same_bits_in_every_batch(rows: int) -> None:
    projection = Projection([blocks(25, bias=True), plain(12)])
    projection.paths, projection.invariant = INVARIANT, True
    x = torch.randn(64, 64)
    alone = [torch.cat(each) for each in zip(*(projection(row[None]) for row in x))]
    for result, expected in zip(projection(x[:rows]), alone):
        assert torch.equal(result, expected[:rows])
    for result, expected in zip(projection(x, [32, 32]), alone):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rows", [33, 64, 100])
def test_the_bits_of_many_rows_do_not_depend_on_the_threads(rows: int) -> None:
    weight = torch.randn(96, 1536)
    projection = Projection([Linear(weight, None, weight)])
    projection.paths, projection.invariant = INVARIANT, True
    x, before = torch.randn(rows, 1536), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = projection(x)[0]
        torch.set_num_threads(2)
        assert torch.equal(projection(x)[0], one)
    finally:
        torch.set_num_threads(before)


class Timed(Projection):
    """A projection on a clock of its own: fixed point takes 1 second per row, tiles 2 seconds and 1/4 per
    row, torch `torch_s`."""

    now = 0.0
    torch_s = 3.0
    noise: Callable[[], float] = staticmethod(lambda: 0.0)

    @property
    def kernels(self) -> Any:
        return SimpleNamespace(has_fixed=True)

    def by(self, family: Family, hidden: torch.Tensor) -> list[torch.Tensor]:
        rows = len(hidden)
        Timed.now += {"fixed": rows, "tiles": 2 + rows / 4, "torch": Timed.torch_s}[family] + Timed.noise()
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "now", 0.0)
    monkeypatch.setattr(linear_paths.time, "perf_counter", lambda: Timed.now)
    monkeypatch.setattr(linear_paths, "_ENOUGH_S", 1e9)


@pytest.mark.parametrize(
    ("torch_s", "paths"),
    [(0.5, (0, 0)), (1, (1, 1)), (2, (2, 2)), (3, (2, 4)), (4, (2, 8)), (6, (2, 16)), (99, (2, 32))],
)
def test_each_limit_is_the_largest_batch_for_which_its_kernels_are_not_slower(
    torch_s: float, paths: tuple[int, int], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timed, "torch_s", torch_s)
    assert measured_paths([Timed([plain(25)]) for _ in range(30)]) == Paths(*paths)


def test_runs_that_something_else_disturbed_do_not_move_a_limit(
    clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    monkeypatch.setattr(Timed, "noise", staticmethod(lambda: 50.0 * (random.random() < 0.4)))
    assert measured_paths([Timed([plain(25)]) for _ in range(30)]) == Paths(2, 4)


def test_of_layers_alike_six_are_measured(clock: None) -> None:
    met = []

    class Counted(Timed):
        def by(self, family: Family, hidden: torch.Tensor) -> list[torch.Tensor]:
            met.append(self)
            return super().by(family, hidden)

    measured_paths([Counted([plain(25)]) for _ in range(30)])
    assert len(set(map(id, met))) == 6
