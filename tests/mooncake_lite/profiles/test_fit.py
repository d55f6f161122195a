"""The cost of a forward pass: what a fit finds, and what a mixed pass pays."""

from __future__ import annotations

import random

import msgspec
import pytest

from mooncake_lite.profiles.compute import ComputeCost, PassLoad, PassTerms
from mooncake_lite.profiles.fit import (
    MeasuredPass,
    MeasuredPrompt,
    error_of,
    errors,
    fit,
    fit_prompts,
    with_mixed_base,
)
from scheduler.costs import PrefillCost

pytestmark = pytest.mark.quick

COST = ComputeCost(prefill=PassTerms(0.04, 1.5e-3, 2e-7), decode=PassTerms(0.03, 4e-3, 3e-6))
TWO_RANGES = ComputeCost(prefill=PassTerms(0.04, 1.5e-3, 2e-7, 32, 0.01, 5e-4), decode=COST.decode)


def passes(cost: ComputeCost, noise: float = 0.0) -> list[MeasuredPass]:
    """Passes that take what `cost` says, times 1 +- noise."""
    chosen = random.Random(3)
    prompts = [(new, start) for new in (8, 32, 64, 256) for start in (0, 1024, 3072)]
    loads = [PassLoad(new, new * start + new * (new + 1) // 2) for new, start in prompts]
    loads += [PassLoad(0, 0, batch, batch * context) for batch in (1, 4, 16) for context in (64, 1024, 3072)]
    loads += [PassLoad(128, 128 * 1024, 8, 8 * 1024)]
    return [MeasuredPass(load, cost.seconds(load) * chosen.uniform(1 - noise, 1 + noise)) for load in loads]


def terms(cost: ComputeCost) -> list[float]:
    return [
        value
        for part in (cost.prefill, cost.decode)
        for value in (part.base_s, part.per_token_s, part.per_key_s)
    ]


def test_a_fit_finds_the_terms_again() -> None:
    measured = passes(COST)
    found = fit(measured)
    assert terms(found) == pytest.approx(terms(COST), rel=1e-6)
    assert all(error.largest < 1e-6 for error in errors(found, measured).values())
    assert set(errors(found, measured)) == {"prefill", "decode", "mixed"}


def test_passes_of_few_tokens_get_terms_of_their_own_where_they_use_other_kernels() -> None:
    measured = passes(TWO_RANGES, noise=0.02)
    found = fit(measured).prefill
    assert found.short_tokens == 32
    assert terms_of_few(found) == pytest.approx([0.01, 5e-4], rel=0.1)
    assert fit(passes(COST, noise=0.02)).prefill.short_tokens == 0, "one range, and noise"


def terms_of_few(found: PassTerms) -> list[float]:
    return [found.short_base_s, found.short_per_token_s]


def test_whole_prompts_of_few_tokens_get_terms_of_their_own_too() -> None:
    cost = PrefillCost(0.05, 1e-3, 2e-7, 3e-5, 32, 0.01, 5e-4)
    lengths = [(cached + new, cached) for new in (8, 32, 33, 64, 256) for cached in (0, 512, 1024)]
    prompts = [MeasuredPrompt(n, cached, cost.seconds(n, cached)) for n, cached in lengths]
    found = fit_prompts(prompts)
    assert found.short_tokens == 32
    assert error_of(found, prompts).largest < 1e-6


def test_all_tokens_of_a_mixed_pass_decide_which_kernels_it_uses() -> None:
    few, many = PassLoad(24, 300, 8, 800), PassLoad(24, 300, 9, 900)
    attention_s = 300 * 2e-7 + 800 * 3e-6
    assert TWO_RANGES.seconds(few) == pytest.approx(0.03 + 24 * 5e-4 + 8 * 4e-3 + attention_s)
    assert TWO_RANGES.seconds(many) == pytest.approx(0.04 + 24 * 1.5e-3 + 9 * 4e-3 + attention_s + 3e-4)


def test_noise_makes_no_term_negative_and_the_error_tells_of_it() -> None:
    flat = ComputeCost(prefill=PassTerms(0.04, 0.0, 0.0), decode=PassTerms(0.0, 4e-3, 0.0))
    measured = passes(flat, noise=0.1)
    found = fit(measured)
    assert min(terms(found)) >= 0
    off = errors(found, measured)
    assert off.pop("mixed").largest < 1e-6, "a single one, which its base fits"
    assert all(0 < error.mean <= error.largest < 0.2 for error in off.values())


def test_a_mixed_pass_pays_one_base_and_every_token() -> None:
    prompt, decode = PassLoad(128, 8256), PassLoad(0, 0, 4, 2048)
    both = PassLoad(128, 8256, 4, 2048)
    assert COST.seconds(both) == pytest.approx(COST.seconds(prompt) + COST.seconds(decode) - 0.03)
    assert COST.seconds(PassLoad()) == 0.0


def test_a_measured_base_of_mixed_passes_takes_the_place_of_the_larger_one() -> None:
    measured = ComputeCost(COST.prefill, COST.decode, mixed_base_s=0.055)
    prompt, decode, both = PassLoad(128, 8256), PassLoad(0, 0, 4, 2048), PassLoad(128, 8256, 4, 2048)
    assert measured.seconds(both) == pytest.approx(COST.seconds(both) - 0.04 + 0.055)
    assert [measured.seconds(one) for one in (prompt, decode)] == [
        COST.seconds(one) for one in (prompt, decode)
    ]
    found = fit(passes(measured))
    assert found.mixed_base_s == pytest.approx(0.055)
    assert errors(found, passes(measured))["mixed"].largest < 1e-6


def test_mixed_passes_of_few_tokens_keep_their_base_and_take_no_part_in_the_fit() -> None:
    cost = ComputeCost(TWO_RANGES.prefill, TWO_RANGES.decode, mixed_base_s=0.055)
    few, many = PassLoad(24, 300, 8, 800), PassLoad(24, 300, 9, 900)
    assert cost.seconds(few) == TWO_RANGES.seconds(few)
    assert cost.seconds(many) == pytest.approx(TWO_RANGES.seconds(many) + 0.015)
    measured = [MeasuredPass(one, cost.seconds(one)) for one in (few, many)]
    assert with_mixed_base(TWO_RANGES, measured).mixed_base_s == pytest.approx(0.055)
    assert with_mixed_base(TWO_RANGES, measured[:1]) == TWO_RANGES


def test_a_cost_without_a_base_of_mixed_passes_is_written_as_before() -> None:
    raw = msgspec.json.encode(COST)
    assert b"mixed" not in raw
    assert msgspec.json.decode(raw, type=ComputeCost) == COST
    with pytest.raises(msgspec.ValidationError, match="mixed_base_s=-1 must be 0 or more"):
        msgspec.json.decode(raw[:-1] + b',"mixed_base_s":-1}', type=ComputeCost)


def test_too_few_passes_are_no_fit() -> None:
    with pytest.raises(ValueError, match="2 passes of a kind are too few to fit 3 terms"):
        fit(passes(COST)[:2])
