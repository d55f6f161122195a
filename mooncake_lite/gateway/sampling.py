"""The sampling of a request: from the fields of its body to a `Sampling`.

Used by `bodies`. The types have the limits of values; ids are compared with the vocabulary in `prompt_work`.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncake_lite.messages import Sampling
from mooncake_lite.model.generation_config import ABOVE_0, RANGES

OPENAI = Sampling()
"""Sampling of a request that names none, if its model names none either."""

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit for chats, and vLLM's for both."""

MAX_BIASES = 1024
"""Most entries of logit_bias: far more than clients send, and little work for each token."""

MAX_STOP_IDS = 64
"""Most stop_token_ids: far more than a model has, and a short list in each order to a rank."""

_INT64 = 2**63


def _limits(name: str) -> Meta:
    """Return the limits that a parameter has in requests and in generation_config.json."""
    low, high = RANGES[name]
    return Meta(gt=0, le=high) if low == ABOVE_0 else Meta(ge=low, le=high)


TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": "$last_token_id"})]
NumTokens = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": "$most_tokens"})]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
"""Added to logits. A tiny one, which is 0 in float32, changes nothing."""

Biases = dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100.0, le=100.0)]]
"""Token ids -> what is added to their logits."""


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields of a body that choose the tokens of its answer."""

    temperature: Annotated[float, _limits("temperature")] | None = None
    top_p: Annotated[float, _limits("top_p")] | None = None
    top_k: Annotated[int, _limits("top_k")] | None = None
    min_p: Annotated[float, _limits("min_p")] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    repetition_penalty: Annotated[float, _limits("repetition_penalty")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Biases, Meta(max_length=MAX_BIASES)] | None = None
    min_tokens: NumTokens | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None


def sampling_of(body: SamplingBody, defaults: Sampling, logprobs: int) -> Sampling:
    """The sampling of a body over its model's defaults. logprobs: as in Sampling."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    given: dict[str, Any] = {name: getattr(body, name) for name in RANGES}
    named = {name: getattr(defaults, name) if given[name] is None else given[name] for name in RANGES}
    return Sampling(
        **named | {"top_k": max(0, named["top_k"])},
        # The sign bit is dropped: a counter-based generator wants a plain number of 63 bits.
        seed=seed & (_INT64 - 1),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(name): value for name, value in (body.logit_bias or {}).items()},
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
    )
