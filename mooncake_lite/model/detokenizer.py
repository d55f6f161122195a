"""The text of an answer as its tokens come, and which part of it each token adds.

Made by tokenizer.py, for the gateway and the command line. Knows how the decoders of tokenizer.json join
tokens; reads no file. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import codecs
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are not (yet) a character."""

HELD_TOKENS = 64
"""A run of byte tokens is shown in parts of this length, for the client of a stream to see it."""

Utf8 = codecs.getincrementaldecoder("utf-8")


class Decoding(Protocol):
    """What a Detokenizer needs of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""

    def name_of(self, token_id: int) -> str:
        """Return the token as the tokenizer writes it, or "" for an id that it does not have."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether it is a control token."""

    def spelled(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that is written in bytes."""


class Detokenizer(ABC):
    """Turns one answer into text as its tokens come, never showing part of a character.

    Each token has a text: what it adds to the answer. A character of several tokens belongs to the last of
    them, and the others have "". A token is held while its text is not known.

    Invariant: all texts, joined, are decode(all ids), unless a part of a run of bytes that breaks was shown.
    """

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._context: list[int] = []

    @property
    def is_at_start(self) -> bool:
        """Tell whether the next token may be written as the first one of a text, without its blank."""
        return not self._context

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" while a character is not whole."""
        return "".join(self.texts(ids))

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Take these tokens, and return the texts that are now known: of the oldest tokens first."""
        return [text for token_id in ids for text in self._next(token_id)]

    def flush(self) -> str:
        """Return the rest, with U+FFFD for what never became a character. The Detokenizer is then as new."""
        return "".join(self.rest())

    @abstractmethod
    def rest(self) -> list[str]:
        """Return the texts of the tokens that are held, as `flush` does."""

    @abstractmethod
    def _next(self, token_id: int) -> list[str]: ...

    def _is_shown(self, token_id: int) -> bool:
        is_skipped = self._skips and self._tokenizer.is_special(token_id)
        return self._tokenizer.name_of(token_id) != "" and not is_skipped


class OfBytes(Detokenizer):
    """Where all tokens are bytes, as in GPT-2, Llama 3 and Qwen.

    held   text of the newest token, if it ends within a character
    """

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool):
        super().__init__(tokenizer, skip_special_tokens)
        self._utf8 = Utf8("replace")
        self._held: list[str] = []

    def rest(self) -> list[str]:
        """See Detokenizer."""
        held, self._held = self._held, []
        return [text + self._utf8.decode(b"", final=True) for text in held]

    def _next(self, token_id: int) -> list[str]:
        data = self._tokenizer.spelled(token_id) if self._is_shown(token_id) else None
        texts = [*self._held, self._utf8.decode(data or b"")]
        known = len(texts) - bool(self._utf8.getstate()[0])
        self._held = texts[known:]
        return texts[:known]


class OfTokens(Detokenizer):
    """Where a token is text, or one byte of it, as in Llama 2 and Gemma; and for all other decoders.

    A run of bytes is read as a whole: if it is not valid UTF-8, each of its bytes is U+FFFD. So a run is held
    until it ends, until it is broken, or until it has HELD_TOKENS: whole characters are shown then.

    before      tokens in front of the answer, if its text goes on where theirs ends
    context     the last token with a text: how the next one is written may depend on it (a leading blank)
    run         tokens that are held
    parts       what each of them adds if the run is valid
    is_broken   the run is not valid, and goes on
    was_shown   the run goes on from a part that was shown
    """

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool, before: Sequence[int]):
        super().__init__(tokenizer, skip_special_tokens)
        visible = (i for i in reversed(before) if self._is_shown(i) and tokenizer.spelled(i) is None)
        self._context = list(itertools.islice(visible, 1))
        self._utf8 = Utf8("strict")
        self._run: list[int] = []
        self._parts: list[str] = []
        self._is_broken = self._was_shown = False

    def rest(self) -> list[str]:
        """See Detokenizer."""
        texts, self._context = self._end_run(), []
        return texts

    def _next(self, token_id: int) -> list[str]:
        data = self._tokenizer.spelled(token_id) if self._is_shown(token_id) else b""
        if data is None:
            return [*self._end_run(), self._added([token_id])]
        if self._is_broken or not (data or self._run):
            return [REPLACEMENT if data else ""]
        self._run.append(token_id)
        try:
            self._parts.append(self._utf8.decode(data))
        except UnicodeDecodeError:
            self._is_broken, self._context = True, [token_id]
            return self._broken()
        if len(self._run) < HELD_TOKENS or self._utf8.getstate()[0]:
            return []
        texts, self._was_shown = self._end_run(), True
        return texts

    def _broken(self) -> list[str]:
        """Return the texts of a run that is no valid UTF-8."""
        run, self._run, self._parts = self._run, [], []
        return [REPLACEMENT if self._is_shown(token_id) else "" for token_id in run]

    def _end_run(self) -> list[str]:
        """Return the texts of the run, which ends here."""
        run, texts = self._run, self._parts
        if self._utf8.getstate()[0]:  # it ends within a character
            texts = self._broken()
        was_shown, self._was_shown = self._was_shown, False
        self._run, self._parts, self._is_broken = [], [], False
        self._utf8.reset()
        if was_shown:  # the run has no beginning of its own
            return texts
        text = self._added([token_id for token_id in run if self._is_shown(token_id)]) if run else ""
        return texts if "".join(texts) == text else [*[""] * (len(run) - 1), text]

    def _added(self, ids: list[int]) -> str:
        """Return what these tokens add to the text."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        whole = self._tokenizer.decode([*self._context, *ids], skip_special_tokens=False)
        text = whole[len(before) :]
        if text or not self._context:
            self._context = ids[-1:]
        return text
