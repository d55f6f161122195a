"""Prompt lookup: finds the answer's last tokens earlier in the text, and drafts what followed them there.

A drafter of `drafts.py`. Edits, answers from documents and JSON repeat what stands in the prompt, and agents
repeat what they have said. A lookup reads token ids alone, so another rank that resumes the request needs
nothing but its tokens.

Of several places the lookup takes the first one after the place that it found last, because an answer that
copies a list goes on in that list. If there is none, it takes the last place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence

KEY = 3
"""Last tokens of the answer that are searched for: with 2, essays have more wrong drafts; with 4, lists have
fewer right ones. Tokens of the prompt are no key: a chat template ends with the same tokens before each
answer of a conversation, and these would draft an earlier answer."""

BYTES = 4
"""Of a token in a searched text."""


class Text:
    """Tokens as bytes: a search of 2,048 tokens takes 13 us.

    _found   number of the byte after the place that was found last
    """

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._found = 0

    @property
    def num_tokens(self) -> int:
        """Return how many tokens it has."""
        return len(self.bytes) // BYTES

    def extend(self, ids: Seq[int]) -> None:
        """Add tokens at its end."""
        self.bytes += array("I", ids).tobytes()

    def behind(self, key: bytearray) -> int:
        """Return the number of the token after a place of `key`; 0 if no place has a token after it."""
        end, size = len(self.bytes) - BYTES, len(key)
        at = self.bytes.find(key, self._found, end)
        while at >= 0 and at % BYTES:  # between two tokens
            at = self.bytes.find(key, at + 1, end)
        while at < 0 or at % BYTES:
            at = self.bytes.rfind(key, 0, end)
            if at < 0:
                return 0
            end = at + size - 1
        self._found = at + size
        return self._found // BYTES


class Lookup:
    """The drafter of one sequence.

    _predicted, _prediction   the request's prediction, which may be empty, as a text and as tokens
    _said                     the sequence, as far as it has been read
    """

    def __init__(self, job: Job, branch: int = 0) -> None:
        self._said, self._predicted, self._prediction = Text(), Text(), list(job.predicted)
        self._predicted.extend(job.predicted)

    def after(self, sequence: Sequence, most: int) -> tuple[Seq[int], bool]:
        """Return at most so many tokens that followed the last ones, and whether the prediction has them.

        The prediction is searched first, then the text. Drafts from the prompt end with it. All end before an
        end token, which is drawn in any case.
        """
        ids, answered, prediction = sequence.token_ids, sequence.answered, self._prediction
        self._said.extend(ids[self._said.num_tokens :])
        if answered < KEY:
            begins = answered and ids[-answered:] == prediction[:answered]
            return (
                (_until_end(prediction[answered : answered + most], sequence), True)
                if begins
                else ((), False)
            )
        key, prompt = self._said.bytes[-KEY * BYTES :], len(ids) - answered
        if first := self._predicted.behind(key):
            return _until_end(prediction[first : first + most], sequence), True
        first = self._said.behind(key)
        end = min(first + most, prompt) if first < prompt else first + most
        return _until_end(ids[first:end] if first else [], sequence), False


def _until_end(ids: list[int], sequence: Sequence) -> list[int]:
    """Cut drafts before an end token."""
    return next((ids[:index] for index, one in enumerate(ids) if one in sequence.stop_ids), ids)
