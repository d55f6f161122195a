"""The load of decode at a future time: the number of sequences that will be running then.

Kept by `scheduler.state`; asked by admission. The paper's prediction (arXiv 2407.00079, 7.4): add the
requests whose prefill ends by then, drop those that will have decoded for longer than t_d. Its t_d is a
constant; here it is the mean length of answers times a time between tokens. Sequences that decode for longer
than t_d already have long answers; they end after the mean excess of such answers. Books only. Explained in
docs/explain/conductor.md.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from scheduler.costs.refine import Average

WEIGHT = 1 / 32
"""Weight of one answer in the means. It is small because lengths of answers vary much."""


class _Entry(NamedTuple):
    """The sequences of one request: the list that they are in, their time there, and their number."""

    times: list[float]
    at: float
    sequences: int


class DecodeLoad:
    """The times at which sequences begin to decode, and the mean lengths of answers.

    _expected   predicted beginning of each sequence that does not decode yet, ascending
    _begun      beginning of each sequence that decodes now, ascending
    _tokens     mean length of answers
    _excess     mean number of tokens by which answers longer than _tokens exceed it
    """

    def __init__(self) -> None:
        self._expected: list[float] = []
        self._begun: list[float] = []
        self._of: dict[str, _Entry] = {}
        self._tokens, self._excess = Average(WEIGHT), Average(WEIGHT)

    @property
    def answer_tokens(self) -> float | None:
        """Return the mean length of answers; None before the first one has ended."""
        return self._tokens.value if self._tokens.is_measured else None

    @property
    def running(self) -> int:
        """Return the sequences that decode now."""
        return len(self._begun)

    def expects(self, request_id: str, sequences: int, at: float) -> None:
        """Note when the sequences of a request are predicted to begin."""
        self._put(request_id, _Entry(self._expected, at, sequences))

    def begins(self, request_id: str, sequences: int, now: float) -> None:
        """Note that the sequences of a request begin now."""
        self._put(request_id, _Entry(self._begun, now, sequences))

    def keeps(self, request_id: str, sequences: int) -> None:
        """Note that only so many sequences of a request are left."""
        entry = self._of[request_id]
        self._put(request_id, entry._replace(sequences=sequences))

    def answered(self, tokens: int) -> None:
        """Add the length of a whole answer."""
        if self._tokens.is_measured and tokens > self._tokens.value:
            self._excess.add(tokens - self._tokens.value)
        self._tokens.add(tokens)

    def forget(self, request_id: str) -> None:
        """Forget a request. An unknown one changes nothing."""
        entry = self._of.pop(request_id, None)
        if entry is not None:
            end = bisect_right(entry.times, entry.at)
            del entry.times[end - entry.sequences : end]

    def _put(self, request_id: str, entry: _Entry) -> None:
        self.forget(request_id)
        place = bisect_right(entry.times, entry.at)
        entry.times[place:place] = [entry.at] * entry.sequences
        self._of[request_id] = entry

    def sequences(self, at: float, now: float, tbt_s: float) -> int:
        """Predict how many sequences will decode at a time, which is not before now.

        A sequence decodes at a time if it begins by then (at that time, too) and does not end by then. It
        ends t_d after it began: `answer_tokens` steps of tbt_s. One that ends exactly at `at` does not decode
        then. There are two exceptions. One that decodes now and should have ended by now ends after the mean
        excess of long answers: `_excess.value` steps from now, or 0 if no excess is measured. One that should
        have begun by now begins now. The mean length is `answer_tokens`, which is None before the first
        answer: nothing is then known of t_d, and no sequence ends.
        """
        # labs:begin 7d
        come = bisect_right(self._expected, at) + len(self._begun)
        if self.answer_tokens is None:
            return come
        t_d = self.answer_tokens * tbt_s
        if at - t_d >= now:
            come -= bisect_right(self._expected, at - t_d)
        ended = bisect_right(self._begun, at - t_d)
        excess = self._excess.value if self._excess.is_measured else 0.0
        if at - now < excess * tbt_s:
            ended -= bisect_right(self._begun, now - t_d)
        return come - ended
        # labs:end 7d

    def check(self, sequences: int) -> None:
        """Assert that the times are those of the requests, which have so many sequences."""
        for times in (self._expected, self._begun):
            expected = [
                one.at for one in self._of.values() if one.times is times for _ in range(one.sequences)
            ]
            assert times == sorted(expected)
        assert len(self._expected) + len(self._begun) == sequences
