"""Foreseen: drafts that are right with a given probability, because the tokens to come are known.

A drafter of `drafts.py` for simulated and emulated ranks, whose tokens repeat nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence

SHARES = 1 << 32
"""Parts of a whole in which a draw of chance is measured."""

NextToken = Callable[[Sequence, Seq[int]], int]
"""(sequence, drafts after it) -> the token that follows."""

Chance = Callable[[str, int], int]
"""(request, position) -> a number below SHARES, as by chance."""


class Foreseen:
    """The drafter of one sequence. A draft is right with a probability, if all before it are.

    acceptance   the probability
    """

    def __init__(self, job: Job, acceptance: float, next_token: NextToken, chance: Chance) -> None:
        self._request, self._acceptance = job.request_id, acceptance
        self._next_token, self._chance = next_token, chance

    def after(self, sequence: Sequence, most: int) -> tuple[Seq[int], bool]:
        """Return `most` drafts. All after a wrong one are wrong, too."""
        drafts: list[int] = []
        for position in range(len(sequence.token_ids), len(sequence.token_ids) + most):
            right = self._next_token(sequence, drafts)
            if self._chance(self._request, position) >= self._acceptance * SHARES:
                return [*drafts, *[right ^ 1] * (most - len(drafts))], False
            drafts.append(right)
        return drafts, False
