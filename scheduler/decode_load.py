"""The load of decode at a time to come: how many sequences will be running then.

Kept by `scheduler.state`; asked by admission. The paper's prediction (arXiv 2407.00079, 7.4): add the
requests whose prefill ends by then, drop those that will have decoded for longer than t_d. Its t_d is a
constant; here it is the mean that was measured. Books only. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from scheduler.costs.refine import Average

WEIGHT = 1 / 32
"""Of one decode in the mean: their lengths vary much."""


class _Entry(NamedTuple):
    """The sequences of one request: the list that they are in, their time there, and their number."""

    times: list[float]
    at: float
    sequences: int


class DecodeLoad:
    """When sequences begin to decode.

    _expected   predicted time of each sequence that does not decode yet, ascending
    _begun      time at which each began that decodes now, ascending
    """

    def __init__(self) -> None:
        self._expected: list[float] = []
        self._begun: list[float] = []
        self._of: dict[str, _Entry] = {}
        self._seconds = Average(WEIGHT)

    @property
    def decode_s(self) -> float | None:
        """The paper's t_d: how long answers decode; None before the first one has ended."""
        return self._seconds.value if self._seconds.is_measured else None

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

    def answered(self, request_id: str, now: float) -> None:
        """Add the time that a whole answer of a request took. It still counts, until `keeps` or `forget`."""
        entry = self._of[request_id]
        self._seconds.add(max(0.0, now - entry.at))

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

    def sequences(self, at: float, now: float) -> int:
        """Predict how many sequences will decode at a time: those that begin by then, less those that end.

        A sequence ends t_d after it began. One that should have begun by now, and has not, begins now.
        """
        come = bisect_right(self._expected, at)
        if self.decode_s is None:
            return come + len(self._begun)
        since = at - self.decode_s
        ended = bisect_right(self._begun, since) + (
            bisect_right(self._expected, since) if since >= now else 0
        )
        return come + len(self._begun) - ended

    def check(self, sequences: int) -> None:
        """Assert that the times are those of the requests, which have so many sequences."""
        for times in (self._expected, self._begun):
            expected = [
                one.at for one in self._of.values() if one.times is times for _ in range(one.sequences)
            ]
            assert times == sorted(expected)
        assert len(self._expected) + len(self._begun) == sequences
