"""The sampler against counting: its shares must be those of the distribution it is asked for."""

from collections.abc import Sequence

import numpy as np
import pytest

from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.nucleus import kept
from mooncake_lite.engine.sampler import sample as sample_rows
from mooncake_lite.messages import Logprobs, Sampling
from scheduler.instance.step import NO_TOKEN, Draw

pytestmark = pytest.mark.quick


def draw(sampling: Sampling, token_ids: Sequence[int] = (), answered: int = 0) -> Draw:
    return Draw(sampling, token_ids, answered, frozenset({5}))


def sample(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """The token of one row, drawn for this position of its sequence."""
    return sample_rows(logits[None], [draw(sampling, range(position))])[0].token


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def shares(logits: np.ndarray, sampling: Sampling, draws: int = 4000) -> np.ndarray:
    rows = [draw(sampling, range(position)) for position in range(draws)]
    tokens = [drawn.token for drawn in sample_rows(np.tile(logits, (draws, 1)), rows)]
    return np.bincount(tokens, minlength=len(logits)) / draws


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


SETTINGS = {
    "greedy": Sampling(0.0, logprobs=3),
    "drawn": Sampling(0.8, seed=4, logprobs=0),
    "nucleus": Sampling(0.8, top_p=0.9, top_k=5, min_p=0.01, seed=4),
    "repetition": Sampling(0.7, repetition_penalty=1.7, seed=2),
    "presence": Sampling(0.7, presence_penalty=1.1, frequency_penalty=0.7, seed=3),
    "bias": Sampling(0.7, logit_bias={3: 2.0}, min_tokens=6, seed=1),
}


@pytest.mark.parametrize("how", list(SETTINGS))
def test_a_token_behind_drafts_is_drawn_as_if_they_were_said(how: str) -> None:
    chosen, sampling = np.random.default_rng(3), SETTINGS[how]
    for _ in range(60):
        ids, cut = chosen.integers(0, 6, 9).tolist(), int(chosen.integers(1, 5))
        logits = chosen.normal(size=(1, 6)).astype(np.float32)
        stops = frozenset({5})
        ahead = Draw(sampling, ids[:-cut], 5, stops, 1, tuple(ids[-cut:]))
        assert sample_rows(logits, [ahead]) == sample_rows(logits, [Draw(sampling, ids, 5, stops, 1)])
        assert (ahead.position, list(ahead.before)) == (9, ids)


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
    of_all, of_three = np.cumsum(softmax(LOGITS))[0], np.cumsum(softmax(LOGITS[:3]))[0]
    assert of_all < 0.6 < of_three, "the best token alone reaches top_p only among the three best"
    found = shares(LOGITS, Sampling(top_k=3, top_p=0.6, seed=6))
    assert found[0] == 1.0
    found = shares(LOGITS, Sampling(top_k=3, top_p=0.7, seed=6))
    assert found[0] == pytest.approx(softmax(LOGITS[:2])[0], abs=0.03)
    assert found[2:].sum() == 0


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(1000).astype(np.float32)
    first = [sample(logits, Sampling(seed=9), p) for p in range(20)]
    assert first == [sample(logits, Sampling(seed=9), p) for p in range(20)]
    assert first != [sample(logits, Sampling(seed=10), p) for p in range(20)]
    assert len(set(first)) > 10


def test_a_negative_seed_is_a_seed_like_any_other() -> None:
    assert 0 <= sample(LOGITS, Sampling(seed=-5), 3) < len(LOGITS)


def test_a_row_gets_the_same_token_whatever_rows_stand_beside_it() -> None:
    rng = np.random.default_rng(1)
    logits = (4 * rng.standard_normal((12, 3000))).astype(np.float32)
    draws = [
        draw(Sampling(t, p, k, seed, min_p=m, frequency_penalty=f, logprobs=2), range(50), 20)
        for seed, (t, p, k, m, f) in enumerate(
            [
                (0.0, 1.0, 0, 0.0, 0.0),
                (1.0, 1.0, 0, 0.0, 0.0),
                (0.7, 0.9, 0, 0.0, 0.5),
                (2.0, 0.8, 40, 0.1, 0.0),
            ]
            * 3
        )
    ]
    together = sample_rows(logits, draws)
    alone = [sample_rows(logits[row : row + 1], [draws[row]])[0] for row in range(12)]
    some = sample_rows(logits[[7, 2]], [draws[7], draws[2]])

    assert together == alone
    assert some == [together[7], together[2]]


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = LOGITS[None].copy()
    sample_rows(logits, [draw(Sampling(0.7, logit_bias={1: 9.0}, presence_penalty=1.0), [1, 2], 2)])
    assert (logits[0] == LOGITS).all()


def test_a_min_p_of_one_keeps_the_best_and_its_equals() -> None:
    found = kept(softmax(np.array([1.0, 3.0, 2.0, 3.0], dtype=np.float32)), Sampling(min_p=1.0))
    assert found.tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_nucleus_cuts_agree_with_their_definition(seed: int) -> None:
    """Against a plain form: sort everything, cut by min_p, top_k and top_p in this order."""
    rng = np.random.default_rng(seed)
    probabilities = softmax(rng.standard_normal(500) * rng.choice([0.1, 1.0, 5.0])).astype(np.float32)
    sampling = Sampling(
        top_p=float(rng.choice([0.1, 0.5, 0.9, 0.999, 1.0])),
        top_k=int(rng.choice([0, 1, 7, 100, 1000])),
        min_p=float(rng.choice([0.0, 0.01, 0.3])),
    )
    ids = np.argsort(-probabilities, kind="stable")
    ids = ids[probabilities[ids] >= sampling.min_p * float(probabilities.max())]
    ids = ids[: sampling.top_k or None]
    if sampling.top_p < 1.0:
        reached = np.cumsum(probabilities[ids], dtype=np.float64)
        ids = ids[: int(np.searchsorted(reached, sampling.top_p * reached[-1])) + 1]
    found = kept(probabilities, sampling)

    assert (np.arange(500) if found is None else np.sort(found)).tolist() == np.sort(ids).tolist()


# ------------------------------------------------------------------------------------ penalties


def greedy(sampling: Sampling, token_ids: Sequence[int], answered: int) -> int:
    return sample_rows(LOGITS[None], [draw(sampling, token_ids, answered)])[0].token


def test_a_bias_is_added_to_the_logits_of_its_tokens() -> None:
    assert greedy(Sampling(0.0, logit_bias={4: 4.0}), [], 0) == 4
    assert greedy(Sampling(0.0, logit_bias={0: -100.0, 1: -100.0}), [], 0) == 2


def test_min_tokens_alone_also_keeps_the_end_token_away() -> None:
    ends = np.array([0.0, 1.0, 2.0, 0.0, 0.0, 3.0], dtype=np.float32)
    draws = [draw(Sampling(0.0, min_tokens=2), range(10), answered) for answered in range(4)]
    assert [drawn.token for drawn in sample_rows(np.stack([ends] * 4), draws)] == [2, 2, 5, 5]


def test_the_repetition_penalty_counts_prompt_and_answer_and_treats_both_signs_alike() -> None:
    assert greedy(Sampling(0.0, repetition_penalty=2.5), [0], 0) == 1
    assert greedy(Sampling(0.0, repetition_penalty=2.5), [0, 1], 1) == 0  # 0.8 and 0.4 are left of 2 and 1
    below = LOGITS - 10
    found = sample_rows(below[None], [draw(Sampling(0.0, repetition_penalty=2.0), [0], 0)])[0].token
    assert found == 1


def test_presence_counts_once_and_frequency_each_time_in_the_answer_alone() -> None:
    assert greedy(Sampling(0.0, presence_penalty=1.1), [0, 0, 0], 0) == 0  # the prompt does not count
    assert greedy(Sampling(0.0, presence_penalty=1.1), [0, 0, 0], 1) == 1
    assert greedy(Sampling(0.0, presence_penalty=0.9), [0, 0, 0], 3) == 0
    assert greedy(Sampling(0.0, frequency_penalty=0.4), [0, 0, 0], 2) == 0
    assert greedy(Sampling(0.0, frequency_penalty=0.4), [0, 0, 0], 3) == 1


# ------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_before_temperature_and_penalties() -> None:
    sampling = Sampling(0.0, logit_bias={3: 50.0}, logprobs=2)
    (found,) = sample_rows(LOGITS[None], [draw(sampling)])
    expected = np.log(softmax(LOGITS))

    assert found.token == 3
    assert found.logprobs.chosen == pytest.approx(expected[3])
    assert [token for token, _ in found.logprobs.best] == [0, 1]
    assert [value for _, value in found.logprobs.best] == pytest.approx(expected[:2])


def test_logprobs_come_only_to_rows_that_ask_and_equal_ones_by_id() -> None:
    logits = np.zeros((3, 6), dtype=np.float32)
    wants = [Sampling(0.0), Sampling(0.0, logprobs=0), Sampling(0.0, logprobs=3)]
    chosen = pytest.approx(float(-np.log(6)))
    assert sample_rows(logits, [draw(how) for how in wants]) == [
        Drawn(0),
        Drawn(0, Logprobs(chosen, [])),
        Drawn(0, Logprobs(chosen, [(0, chosen), (1, chosen), (2, chosen)])),
    ]


# ------------------------------------------------------------------------------ logits that are no numbers

BROKEN = {
    "no number": ([1.0, np.nan, 0.0, 2.0, 0.0, 0.0], False),
    "infinite": ([1.0, np.inf, 0.0, 2.0, 0.0, 0.0], False),
    "nothing may be chosen": ([-np.inf] * 6, False),
    "some may not be chosen": ([1.0, -np.inf, 0.0, -np.inf, 0.0, 0.0], True),
    "the largest numbers": ([3.4e38, -3.4e38, 0.0, 3.4e38, 0.0, 0.0], True),
}
WISHES = [
    Sampling(0.0),
    Sampling(0.9, seed=3),
    Sampling(1e-300, top_p=1e-320),
    Sampling(1.0, top_k=1, min_p=1.0),
    Sampling(0.0, logit_bias={1: -100.0}),
    Sampling(0.5, repetition_penalty=1e-6, presence_penalty=2.0, frequency_penalty=-2.0),
    Sampling(0.0, logprobs=2),
]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("sampling", WISHES, ids=str)
def test_a_row_whose_best_logit_is_not_finite_has_no_token_and_changes_no_other(
    name: str, sampling: Sampling
) -> None:
    values, sound = BROKEN[name]
    row = np.array(values, np.float32)
    draws = [draw(sampling, (1, 2), 1)] * 3
    before = row.copy()
    found = sample_rows(np.stack([LOGITS, row, LOGITS]), draws)
    alone = sample_rows(LOGITS[None], draws[:1])[0]
    assert (found[0], found[2]) == (alone, alone)
    assert (found[1].token != NO_TOKEN) == sound
    assert found[1].logprobs is None or sound
    assert np.array_equal(row, before, equal_nan=True)


def test_a_token_that_min_tokens_hides_is_still_seen_to_be_no_number() -> None:
    row = np.array([1.0, 2.0, 0.0, 0.0, 0.0, np.nan], np.float32)  # 5 is the end token
    assert sample_rows(row[None], [draw(Sampling(0.0, min_tokens=2), (1,), 0)])[0].token == NO_TOKEN


def test_a_row_that_wishes_have_emptied_has_no_token() -> None:
    every = Draw(Sampling(0.0, min_tokens=2), (1,), 0, frozenset(range(6)))
    assert sample_rows(LOGITS[None], [every])[0].token == NO_TOKEN
