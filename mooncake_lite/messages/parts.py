"""The base of messages, and the parts that several of them carry.

Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mooncake_lite.control.message import Message

__all__ = ["Body", "BranchAnswer", "Logprobs", "Message", "Metric", "Plain", "Sampling", "Span"]


class Plain(msgspec.Struct, frozen=True, array_like=True):
    """Base of the parts of messages."""


class Sampling(Plain, frozen=True):
    """The parameters by which the next token is chosen. Greedy when temperature is 0.

    seed makes the draw of the token at position i a function of (seed, i) alone, so that any rank can
    continue a request and get the same tokens. engine/nucleus.py explains top_p, top_k and min_p,
    engine/penalties.py the penalties, the biases and min_tokens.

    logprobs          number of best tokens that are reported with their logprobs; -1: none, and not that of
                      the chosen token
    prompt_logprobs   likewise for the tokens of the prompt; with it, nothing of the prompt is reused
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1


class Logprobs(Plain, frozen=True):
    """Logprob of a token, and (token id, logprob) of the best tokens in its place."""

    chosen: float
    best: list[tuple[int, float]]


class Span(Plain, frozen=True):
    """The duration of one stage of a request, measured by the rank that did it. Never a clock time."""

    stage: str
    rank: int
    seconds: float
    nbytes: int = 0
    count: int = 0


class BranchAnswer(Plain, frozen=True):
    """A branch of a request, and the tokens of its answer so far."""

    branch: int
    token_ids: list[int]


class Body(Plain, frozen=True):
    """The part of a request that the control plane does not see. The gateway fills in fields up to stop_ids.

    gateway     the gateway that gets the tokens of the answer
    token_ids   the prompt, and the answer so far
    salt        start of the prefix keys; empty: nothing may be reused
    stop_ids    tokens that end the answer (the model's end tokens, unless ignore_eos)
    max_tokens  longest answer; 0: the prompt is computed into the pool, and nothing is answered
    answered    number of token_ids that belong to the answer
    keys        prefix keys of the full blocks of token_ids; empty: nothing may be reused
    n           answers that are drawn from the prompt; branch: number of the first one
    answers     of several branches to be decoded; token_ids is then the prompt
    offers      whether full blocks that have no place in the pool are offered to it
    spans       durations of the stages so far
    speculates  whether drafts may be made for it
    predicted   answer that the client expects, as tokens
    """

    gateway: str
    token_ids: list[int]
    salt: bytes
    sampling: Sampling
    stop_ids: list[int]
    max_tokens: int = 0
    answered: int = 0
    keys: list[int] = []
    n: int = 1
    branch: int = 0
    answers: list[BranchAnswer] = []
    offers: bool = False
    spans: list[Span] = []
    speculates: bool = True
    predicted: list[int] = []


class Metric(Plain, frozen=True):
    """One sample of one metric, in the form that Prometheus wants.

    buckets   histograms only: (upper bound, cumulative count) pairs, the last bound is inf
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: dict[str, str]
    value: float = 0.0
    buckets: list[tuple[float, int]] = []
    sum: float = 0.0
