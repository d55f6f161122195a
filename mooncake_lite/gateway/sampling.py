"""The sampling of a request: from the fields of its body to a `Sampling`, or a RequestError that names one.

Used by `bodies`. Checks ranges; ids against the vocabulary are checked in `prompt_work`.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from mooncake_lite.errors import RequestError
from mooncake_lite.messages import Sampling
from mooncake_lite.model.generation_config import RANGES, range_of

OPENAI = Sampling()
"""Sampling of a request that names none, if its model names none either."""

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit for chats, and vLLM's for both."""

MAX_BIASES = 1024
"""Most entries of logit_bias: far more than clients send, and little work for each token."""

MAX_STOP_IDS = 64
"""Most stop_token_ids: far more than a model has, and a short list in each order to a rank."""

_INT64 = 2**63


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields of a body that choose the tokens of its answer."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None


def sampling_of(body: SamplingBody, defaults: Sampling, logprobs: int) -> Sampling:
    """The sampling of a body over its model's defaults. logprobs: as in Sampling. Raises RequestError."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if not -_INT64 <= seed < _INT64:
        raise RequestError(f"seed={seed} does not fit into 64 bits with a sign", param="seed")
    named: dict[str, Any] = {
        name: _in_range(name, getattr(body, name), getattr(defaults, name)) for name in RANGES
    }
    min_tokens = body.min_tokens or 0
    if min_tokens < 0:
        raise RequestError(f"min_tokens={min_tokens} must be at least 0", param="min_tokens")
    return Sampling(
        **named | {"top_k": max(0, named["top_k"])},
        # The sign bit is dropped: a counter-based generator wants a plain number of 63 bits.
        seed=seed & (_INT64 - 1),
        presence_penalty=_added("presence_penalty", body.presence_penalty, 2.0),
        frequency_penalty=_added("frequency_penalty", body.frequency_penalty, 2.0),
        logit_bias=_biases(body.logit_bias or {}),
        min_tokens=min_tokens,
        logprobs=logprobs,
    )


def stop_ids_of(body: SamplingBody) -> tuple[int, ...]:
    """Token ids that end the answer besides the model's own. Raises RequestError."""
    ids = body.stop_token_ids or []
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_IDS} are allowed", param="stop_token_ids"
        )
    return tuple(ids)


def top_logprobs(name: str, count: int) -> int:
    """`count`, if so many logprobs may be asked for. Raises RequestError with the field's name."""
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name}={count} must be from 0 to {MAX_TOP_LOGPROBS}", param=name)
    return count


def _in_range(name: str, given: float | None, default: float) -> float:
    """A parameter that a model can name, too."""
    value = default if given is None else given
    low, high = RANGES[name]
    if not low <= value <= high:
        raise RequestError(f"{name}={value:.10g} must be {range_of(name)}", param=name)
    return value


def _added(name: str, given: float | None, most: float) -> float:
    """A number that is added to logits. A tiny one, which is 0 in float32, changes nothing."""
    value = given or 0.0
    if not -most <= value <= most:
        raise RequestError(f"{name}={value:g} must be from {-most:g} to {most:g}", param=name)
    return value


def _biases(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    found = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise RequestError(f"logit_bias: {name[:20]!r} is no token id", param="logit_bias")
        found[int(name)] = _added(f"logit_bias.{name}", value, 100.0)
    return found
