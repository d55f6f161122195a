"""How long a forward pass takes: the cost model of a profile, as pure functions.

Used by the emulated engine, by the fit (fit.py), and wherever a cost is estimated from a profile. Reads no
clock and loads nothing heavy. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec

from scheduler.instance.step import Chunk

CHUNK_TOKENS = 256
"""Tokens of a prompt that a rank computes in one pass: the default of --max-num-batched-tokens."""


class PassLoad(msgspec.Struct, frozen=True):
    """What decides how long a forward pass takes.

    new_tokens   prompt tokens that the pass computes
    pairs        (query, key) pairs of their attention: a token at position p has p + 1
    sequences    tokens of the running batch that the pass computes: one per sequence, and drafts
    context      tokens that these attend to, themselves included
    """

    new_tokens: int = 0
    pairs: int = 0
    sequences: int = 0
    context: int = 0


def load_of(chunks: Iterable[Chunk]) -> PassLoad:
    """Add up the chunks of one pass."""
    new_tokens = pairs = sequences = context = 0
    for chunk in chunks:
        count = len(chunk.token_ids)
        attended = count * chunk.start + count * (count + 1) // 2
        if chunk.prompt:
            new_tokens += count
            pairs += attended
        else:
            sequences += count
            context += attended
    return PassLoad(new_tokens, pairs, sequences, context)


class PassTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one kind of pass: base_s + per_token_s * tokens + per_key_s * keys. None is negative.

    short_tokens   passes of at most so many tokens use other kernels: short_base_s and short_per_token_s
                   replace the first two terms; 0: no pass does
    """

    base_s: float
    per_token_s: float
    per_key_s: float
    short_tokens: int = 0
    short_base_s: float = 0.0
    short_per_token_s: float = 0.0

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 0:
            raise ValueError("every term must be 0 or more")

    def linear(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of a pass of `tokens` tokens, and of each of them."""
        if tokens <= self.short_tokens:
            return self.short_base_s, self.short_per_token_s
        return self.base_s, self.per_token_s


class ComputeCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fitted cost of forward passes.

    prefill        tokens: PassLoad.new_tokens; keys: PassLoad.pairs
    decode         tokens: PassLoad.sequences; keys: PassLoad.context
    mixed_base_s   base of a pass of both kinds, of more than prefill.short_tokens tokens; None: not measured,
                   and taken to be the larger of their bases
    """

    prefill: PassTerms
    decode: PassTerms
    mixed_base_s: float | None = None

    def __post_init__(self) -> None:
        if self.mixed_base_s is not None and not 0 <= self.mixed_base_s < inf:
            raise ValueError(f"mixed_base_s={self.mixed_base_s:g} must be 0 or more")

    def seconds(self, load: PassLoad) -> float:
        """Return the seconds of a pass: one base, and the terms of every token in it.

        A pass of both kinds reads the weights once. It pays `mixed_base_s`, or else the larger of the two
        bases. The tokens of both kinds together decide which kernels it uses.
        """
        rows = load.new_tokens + load.sequences
        base_s = seconds = 0.0
        if load.new_tokens:
            base_s, per_token_s = self.prefill.linear(rows)
            seconds = per_token_s * load.new_tokens + self.prefill.per_key_s * load.pairs
        if load.sequences:
            base, per_token_s = self.decode.linear(rows)
            base_s = max(base_s, base)
            if self.mixed_base_s is not None and load.new_tokens and rows > self.prefill.short_tokens:
                base_s = self.mixed_base_s
            seconds += per_token_s * load.sequences + self.decode.per_key_s * load.context
        return base_s + seconds
