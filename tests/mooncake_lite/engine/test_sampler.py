"""The sampler against counting: its shares must be those of the distribution it is asked for."""

import numpy as np
import pytest

from mooncake_lite.engine import sample
from mooncake_lite.messages import Sampling

pytestmark = pytest.mark.quick


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def shares(logits: np.ndarray, sampling: Sampling, draws: int = 4000) -> np.ndarray:
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[sample(logits, sampling, position)] += 1
    return counts / draws


LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=np.float32)


def test_temperature_zero_takes_the_best_and_the_lowest_id_among_equals() -> None:
    assert sample(np.array([0.0, 3.0, 3.0], dtype=np.float32), Sampling(temperature=0.0), 5) == 1


def test_shares_follow_the_softmax() -> None:
    assert np.abs(shares(LOGITS, Sampling(seed=1)) - softmax(LOGITS)).max() < 0.03


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_the_smallest_temperatures_take_the_best(temperature: float) -> None:
    logits = np.array([-30.0, 3.0, 30.0, 29.9], dtype=np.float32)
    for top_p in (0.5, 1.0):
        assert sample(logits, Sampling(temperature=temperature, top_p=top_p, seed=3), 0) == 2


def test_temperature_flattens_and_sharpens() -> None:
    assert np.abs(shares(LOGITS, Sampling(2.0, seed=2)) - softmax(LOGITS / 2)).max() < 0.03


def test_top_k_keeps_exactly_the_k_best() -> None:
    found = shares(LOGITS, Sampling(top_k=2, seed=3))
    assert found[2:].sum() == 0
    assert found[0] == pytest.approx(softmax(LOGITS[:2])[0], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = softmax(LOGITS)
    keep = int(np.searchsorted(np.cumsum(probabilities), 0.8)) + 1
    found = shares(LOGITS, Sampling(top_p=0.8, seed=4))
    assert (found[:keep] > 0).all()
    assert found[keep:].sum() == 0


def test_a_tiny_top_p_is_greedy() -> None:
    assert {sample(LOGITS, Sampling(top_p=1e-9, seed=s), 1) for s in range(50)} == {0}


def test_top_p_over_a_flat_distribution_looks_beyond_the_candidates() -> None:
    """With equal logits half of the vocabulary is kept, far more than are sorted first."""
    logits = np.zeros(8192, dtype=np.float32)
    found = {sample(logits, Sampling(top_p=0.5, seed=s), 0) for s in range(300)}
    assert max(found) > 2048
    assert max(found) <= 4096


def test_top_k_and_top_p_together_renormalise_over_the_k_best() -> None:
    found = shares(LOGITS, Sampling(top_k=3, top_p=0.6, seed=6))
    assert found[0] == 1.0 or found[2:].sum() == 0
    assert found[3:].sum() == 0


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(1000).astype(np.float32)
    first = [sample(logits, Sampling(seed=9), p) for p in range(20)]
    assert first == [sample(logits, Sampling(seed=9), p) for p in range(20)]
    assert first != [sample(logits, Sampling(seed=10), p) for p in range(20)]
    assert len(set(first)) > 10


def test_a_negative_seed_is_a_seed_like_any_other() -> None:
    assert 0 <= sample(LOGITS, Sampling(seed=-5), 3) < len(LOGITS)
