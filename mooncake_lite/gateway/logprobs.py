"""Logprobs of the tokens of a prompt or an answer, in the two shapes of OpenAI's API.

Used by `answer`, which collects them, and by `shapes`. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_lite.messages import Logprobs
from mooncake_lite.model.tokenizer import REPLACEMENT, Tokenizer

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot hold; OpenAI's API does the same."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of a prompt or an answer.

    logprob  None: the first token of a prompt has none
    offset   characters of the choice's text before it, counted token by token
    best     the tokens that were most likely in its place
    """

    token: str
    logprob: float | None
    offset: int
    best: tuple[tuple[str, float], ...]

    @property
    def end(self) -> int:
        """The offset of the token after it."""
        return self.offset + len(self.token)


def token_logprobs(tokenizer: Tokenizer, token: int, found: Logprobs, offset: int) -> TokenLogprobs:
    """The logprobs of one token, with the texts of tokens in place of their ids."""
    best = tuple((_text(tokenizer, other), max(value, LEAST)) for other, value in found.best)
    return TokenLogprobs(_text(tokenizer, token), max(found.chosen, LEAST), offset, best)


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[Logprobs]
) -> tuple[TokenLogprobs, ...]:
    """The logprobs of a prompt's tokens, one for each. found: of all tokens but the first."""
    tokens = [TokenLogprobs(_text(tokenizer, token_ids[0]), None, 0, ())]
    for token, one in zip(token_ids[1:], found, strict=True):
        tokens.append(token_logprobs(tokenizer, token, one, tokens[-1].end))
    return tuple(tokens)


def in_chat_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a chat's choice."""
    content = [
        _entry(token.token, token.logprob)
        | {"top_logprobs": [_entry(text, value) for text, value in token.best]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def in_text_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a text completion's choice. Each token is among the best ones in its place."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: TokenLogprobs) -> dict[str, float] | None:
    """The best tokens and the token itself. Of different ones with the same text, the most likely is told."""
    if token.logprob is None:
        return None
    return {token.token: token.logprob} | dict(reversed(token.best))


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _entry(text: str, value: float | None) -> dict[str, Any]:
    """A token with its bytes; null where the token is only a part of a character."""
    return {"token": text, "logprob": value, "bytes": None if REPLACEMENT in text else list(text.encode())}
