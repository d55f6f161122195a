"""The limits of sampling are equal on every way in, and values within them leave numbers to draw from."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

from mooncake_lite.cli import main
from mooncake_lite.engine.commands import generate
from mooncake_lite.engine.nucleus import kept
from mooncake_lite.engine.sampler import sample
from mooncake_lite.errors import ModelError, RequestError
from mooncake_lite.gateway.bodies import parse_completion
from mooncake_lite.messages import Sampling
from mooncake_lite.model.generation_config import ABOVE_0, RANGES, default_sampling, range_of
from scheduler.instance.step import Draw

pytestmark = pytest.mark.quick

BESIDE: dict[str, tuple[float, float]] = {
    "temperature": (-1e-9, 2.0000001),
    "top_p": (0.0, 1.0000001),
    "top_k": (-2, 2**31),
    "min_p": (-1e-9, 1.0000001),
    "repetition_penalty": (9.99e-7, 10.000001),
}
"""Values just outside of the limits."""


def sampling(defaults: Sampling | None = None, **fields: Any) -> Sampling:
    raw = msgspec.json.encode({"prompt": "a", "seed": 3, **fields})
    return parse_completion(raw, defaults or Sampling()).sampling


@pytest.mark.parametrize("name", RANGES)
def test_a_request_and_a_model_may_say_the_same(name: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for value in RANGES[name]:
        file.write_text(json.dumps({name: value}))
        by_model = sampling(Sampling(**default_sampling(tmp_path)))
        assert by_model == sampling(**{name: value})
        assert getattr(by_model, name) == (0 if (name, value) == ("top_k", -1) else value)
    for value in BESIDE[name]:
        file.write_text(json.dumps({name: value}))
        with pytest.raises(ModelError, match=f"generation_config.json: {name}=") as of_model:
            default_sampling(tmp_path)
        with pytest.raises(RequestError) as of_request:
            sampling(**{name: value})
        assert of_request.value.param == name
        assert str(of_model.value).endswith(f" must be a number {range_of(name)}")
        low, high = RANGES[name]
        found = re.fullmatch(
            rf"{name}=(\S+) must be (at least|at most|above) (\S+)", of_request.value.message
        )
        assert found
        assert float(found[1]) == value
        assert float(found[3]) == (high if value > high else 0 if low == ABOVE_0 else low)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_generate_has_the_limits_of_a_request(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(parameter for parameter in generate.params if parameter.name == name)
    assert isinstance(option.type, click.IntRange | click.FloatRange)
    low, high = RANGES[name]
    assert (option.type.min, option.type.max) == (0.0 if low == ABOVE_0 else low, high)
    assert option.type.min_open == (low == ABOVE_0)
    flag = f"--{name.replace('_', '-')}"
    for value in BESIDE[name]:
        assert main(["generate", "a", "--model", "/nonexistent", flag, str(value)]) == 2
        assert f"Invalid value for '{flag}'" in capsys.readouterr().err


SPREAD = np.float32([3.0, -2.0, 1e4, 1e4, 0.0, 1e-30, -1e4, 7.0])
"""Logits as far from each other as a model's can be; the best are tokens 2 and 3, equal ones."""

TINY = [5e-324, 1e-320, 1e-300, 1e-45, 1e-38, 1e-7]


def chosen(logits: np.ndarray = SPREAD, **fields: Any) -> int:
    """The token that a request draws. One so far behind that float32 says -inf has no weight, rightly."""
    draw = Draw(sampling(**fields), [0, 1, 2, 5, 6, 7, 7], 4, frozenset({3}))
    with np.errstate(over="ignore", divide="raise", invalid="raise"):
        (drawn,) = sample(logits[None].copy(), [draw])
    assert 0 <= drawn.token < len(logits)
    return drawn.token


@pytest.mark.parametrize("value", TINY)
def test_what_is_0_in_float32_does_what_0_does(value: float) -> None:
    flat = np.linspace(-1, 1, 50, dtype=np.float32)
    assert chosen(temperature=value) == chosen(temperature=1e-30)
    assert chosen(flat, temperature=value) == chosen(flat, temperature=0) == 49
    assert chosen(flat, top_p=value) == chosen(flat, top_k=1) == 49
    even = np.full(50, 0.02, dtype=np.float32)
    assert list(kept(even, sampling(min_p=value))) == list(range(50))
    for name in ("presence_penalty", "frequency_penalty"):
        assert chosen(flat, **{name: value}) == chosen(flat, **{name: -value}) == chosen(flat)
    assert chosen(flat, logit_bias={"7": value, "9": -value}) == chosen(flat)


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-30, 1e-3, 1, 2])
@pytest.mark.parametrize("penalty", RANGES["repetition_penalty"])
def test_all_limits_together_leave_a_token_to_draw(penalty: float, temperature: float) -> None:
    for added in (-2, 2):
        for name, ends in RANGES.items():
            for value in ends:
                fields = {"temperature": temperature, "repetition_penalty": penalty, name: value}
                fields |= {"presence_penalty": added, "frequency_penalty": added}
                chosen(**fields, logit_bias={"2": -100, "4": 100}, min_tokens=5)


def test_a_divided_logit_is_infinite_below_the_limit_and_finite_at_it() -> None:
    largest = np.float32(1e4)
    with np.errstate(over="ignore"):
        assert math.isinf(largest / np.float32(1e-38))
    assert math.isfinite(largest / np.float32(RANGES["repetition_penalty"][0]))
