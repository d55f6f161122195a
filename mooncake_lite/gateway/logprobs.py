"""Logprobs of an answer's tokens, in the two shapes of OpenAI's API.

Used by `answer`, which collects them, and by `shapes`. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_lite.messages import Logprobs
from mooncake_lite.model import Tokenizer
from mooncake_lite.model.tokenizer import REPLACEMENT

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot hold; OpenAI's API does the same."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer.

    offset   characters of the answer before it, counted token by token
    best     the tokens that were most likely in its place
    """

    token: str
    logprob: float
    offset: int
    best: tuple[tuple[str, float], ...]


def token_logprobs(tokenizer: Tokenizer, token: int, found: Logprobs, offset: int) -> TokenLogprobs:
    """The logprobs of one token, with the texts of tokens in place of their ids."""
    best = tuple((_text(tokenizer, other), max(value, LEAST)) for other, value in found.best)
    return TokenLogprobs(_text(tokenizer, token), max(found.chosen, LEAST), offset, best)


def in_chat_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a chat's choice."""
    content = [
        _entry(token.token, token.logprob)
        | {"top_logprobs": [_entry(text, value) for text, value in token.best]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def in_text_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a text completion's choice. The chosen token is among the best ones, always."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.best) | {token.token: token.logprob} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _entry(text: str, value: float) -> dict[str, Any]:
    """A token with its bytes; null where the token is only a part of a character."""
    return {"token": text, "logprob": value, "bytes": None if REPLACEMENT in text else list(text.encode())}
