"""Prompt lookup: finds the answer's last tokens earlier in the text, and drafts what followed them there.

A drafter of `drafts.py`. Edits, answers from documents and JSON repeat what stands in the prompt, and agents
repeat what they have said. A lookup reads token ids alone, so another rank that resumes the request needs
nothing but its tokens.

Of several places the lookup takes the first one after the place that it found last, because an answer that
copies a list goes on in that list. If there is none, it takes the last place.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence

KEY = 3
"""Last tokens of the answer that are searched for: with 2, essays have more wrong drafts; with 4, lists have
fewer right ones. Tokens of the prompt are no key: a chat template ends with the same tokens before each
answer of a conversation, and these would draft an earlier answer."""


class Text:
    """Tokens as characters, because a string is searched fast: 32,000 tokens take 20 us.

    tokens   a character for each token. Python has characters for ids below 1,114,112
    _found   number of the token after the place that was found last
    """

    def __init__(self) -> None:
        self.tokens = ""
        self._found = 0

    def extend(self, ids: Seq[int]) -> None:
        """Add tokens at its end."""
        self.tokens += "".join(map(chr, ids))

    def behind(self, key: str) -> int:
        """Return the number of the token after a place of `key`; 0 if no place has a token after it."""
        end = len(self.tokens) - 1
        at = self.tokens.find(key, self._found, end)
        if at < 0:
            at = self.tokens.rfind(key, 0, end)
        if at < 0:
            return 0
        self._found = at + len(key)
        return self._found


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
        self._said.extend(ids[len(self._said.tokens) :])
        if answered < KEY:
            begins = answered and ids[-answered:] == prediction[:answered]
            return (
                (_until_end(prediction[answered : answered + most], sequence), True)
                if begins
                else ((), False)
            )
        key, prompt = self._said.tokens[-KEY:], len(ids) - answered
        if first := self._predicted.behind(key):
            return _until_end(prediction[first : first + most], sequence), True
        first = self._said.behind(key)
        end = min(first + most, prompt) if first < prompt else first + most
        return _until_end(ids[first:end] if first else [], sequence), False


def _until_end(ids: list[int], sequence: Sequence) -> list[int]:
    """Cut drafts before an end token."""
    return next((ids[:index] for index, one in enumerate(ids) if one in sequence.stop_ids), ids)
