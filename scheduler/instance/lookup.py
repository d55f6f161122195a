"""Prompt lookup: drafts are what followed in the text the last time that its last tokens stood there.

A drafter of `drafts.py`. Edits, answers from documents and JSON repeat what stands in the prompt, and agents
what they have said. It reads token ids alone, so that a request that another rank resumes needs no more than
its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence

KEYS = (3, 2)
"""Last tokens of the answer that are looked for, the longest first. Tokens of the prompt are no key: the end
of a chat template, which stands before each answer of a conversation, would draft an earlier answer."""

BYTES = 4
"""Of a token in the searched text."""


class Lookup:
    """The drafter of one sequence. It keeps the text as bytes: `rfind` takes 13 us at 2,048 tokens."""

    def __init__(self, job: Job, branch: int = 0) -> None:
        self._text = bytearray()
        self._predicted, self._predicted_text = list(job.predicted), _as_bytes(job.predicted)

    def after(self, sequence: Sequence, most: int) -> tuple[Seq[int], bool]:
        """Return what follows the last place of the longest key, the prediction before the text.

        Not past the end of the prompt, nor an end token, which is drawn in any case.
        """
        ids, answered = sequence.token_ids, sequence.answered
        self._text += _as_bytes(ids[len(self._text) // BYTES :])
        if 0 < answered < KEYS[-1] and ids[-answered:] == self._predicted[:answered]:
            return _until_end(self._predicted[answered : answered + most], sequence), True
        prompt = len(ids) - answered
        for size in KEYS:
            if answered < size:
                continue
            key = self._text[-size * BYTES :]
            if (at := _last(self._predicted_text, key, len(self._predicted_text))) >= 0:
                return _until_end(self._predicted[at + size : at + size + most], sequence), True
            if (at := _last(self._text, key, len(self._text) - BYTES) + size) >= size:
                end = min(at + most, prompt) if at < prompt else at + most
                return _until_end(ids[at:end], sequence), False
        return (), False


def _as_bytes(ids: Seq[int]) -> bytes:
    return array("I", ids).tobytes()


def _last(text: bytes | bytearray, key: bytearray, end: int) -> int:
    """Return the number of the token at which the last `key` before byte `end` begins, or -1."""
    while (at := text.rfind(key, 0, end)) % BYTES and at >= 0:  # between two tokens
        end = at + len(key) - 1
    return at // BYTES


def _until_end(ids: list[int], sequence: Sequence) -> list[int]:
    """Cut drafts before an end token."""
    return next((ids[:index] for index, one in enumerate(ids) if one in sequence.stop_ids), ids)
