"""Logprobs of the tokens of a prompt or an answer, in the two shapes of OpenAI's API.

Used by `answer`, which collects them, and by `shapes`. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mooncake_lite.messages import Logprobs
from mooncake_lite.model.detokenizer import REPLACEMENT
from mooncake_lite.model.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot hold; OpenAI's API does the same."""


class Scored(NamedTuple):
    """A token and its logprob.

    text      what it adds to the text, or would add; U+FFFD for bytes that are no character by themselves
    data      its bytes: those of its text in UTF-8, or a part of a character
    logprob   None: the first token of a prompt has none
    """

    token_id: int
    text: str
    data: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of a prompt or an answer.

    offset   characters of the choice's text before it
    best     the tokens that were most likely in its place
    """

    chosen: Scored
    offset: int
    best: tuple[Scored, ...]

    @property
    def end(self) -> int:
        """The offset of the token after it."""
        return self.offset + len(self.chosen.text)


def token_logprobs(
    tokenizer: Tokenizer, token: int, found: Logprobs | None, offset: int, text: str, is_first: bool
) -> TokenLogprobs:
    """The logprobs of one token. text: what it adds; is_first: no text is before it."""

    def scored(token_id: int, logprob: float | None, text: str | None = None) -> Scored:
        text = tokenizer.text_of(token_id, is_first=is_first) if text is None else text
        own = b"" if tokenizer.is_special(token_id) else tokenizer.spelled(token_id)
        # A control token, or the first blank of a text, has no bytes where it is left out.
        data = text.encode() if own is None or (own.isascii() and REPLACEMENT not in text) else own
        return Scored(token_id, text, data, logprob if logprob is None else max(logprob, LEAST))

    chosen = scored(token, None if found is None else found.chosen, text)
    best = [] if found is None else found.best
    named = (scored(other, value, chosen.text if other == token else None) for other, value in best)
    return TokenLogprobs(chosen, offset, tuple(named))


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], texts: Sequence[str], found: Sequence[Logprobs]
) -> tuple[TokenLogprobs, ...]:
    """The logprobs of a prompt's tokens, one for each. texts: of the tokens; found: of all but the first."""
    tokens: list[TokenLogprobs] = []
    for token, text, one in zip(token_ids, texts, [None, *found], strict=True):
        offset = tokens[-1].end if tokens else 0
        tokens.append(token_logprobs(tokenizer, token, one, offset, text, offset == 0))
    return tuple(tokens)


def in_chat_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a chat's choice."""
    content = [
        _entry(token.chosen) | {"top_logprobs": [_entry(other) for other in token.best]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def in_text_shape(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a text completion's choice. Each token is among the best ones in its place."""
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: TokenLogprobs) -> dict[str, float] | None:
    """The token itself and the best ones. One whose text is taken is called by its id, as vLLM writes it."""
    if token.chosen.logprob is None:
        return None
    found: dict[str, Any] = {token.chosen.text: token.chosen.logprob}
    for other in token.best:
        is_taken = other.text in found and other.token_id != token.chosen.token_id
        found[f"token_id:{other.token_id}" if is_taken else other.text] = other.logprob
    return found


def _entry(token: Scored) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
