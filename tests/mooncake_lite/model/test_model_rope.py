"""The tables of the rotary embedding: the same bits in every process, whatever its threads do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mooncake_lite.model.rope import ONE_THREAD_VALUES, inverse_frequencies, rotary_tables

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("head_dim", "positions"), [(64, 8192), (16, 512), (128, 33), (16, 1)])
def test_no_thread_shares_the_work_on_a_table_with_another(
    head_dim: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inverse = inverse_frequencies(head_dim, 10000.0, None)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse).double()
    asked: list[int] = []
    for name in ("cos", "sin"):
        monkeypatch.setattr(torch.Tensor, name, counting(asked, getattr(torch.Tensor, name)))
    cosine, sine = rotary_tables(inverse, positions)
    monkeypatch.undo()
    assert max(asked) <= ONE_THREAD_VALUES
    assert sum(asked) == 2 * positions * head_dim // 2
    assert cosine.shape == sine.shape == (positions, 1, head_dim)
    for half, sign in ((slice(None, head_dim // 2), -1), (slice(head_dim // 2, None), 1)):
        torch.testing.assert_close(cosine[:, 0, half].double(), angles.cos(), rtol=0, atol=1e-6)
        torch.testing.assert_close(sign * sine[:, 0, half].double(), angles.sin(), rtol=0, atol=1e-6)


def counting(asked: list[int], function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def counted(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.numel())
        return function(tensor)

    return counted
