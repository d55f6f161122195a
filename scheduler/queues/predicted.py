"""A learning-augmented queue: some decode slots go by predicted length, the others by arrival.

Of k decode slots floor(trust * k) go to the shortest predicted answer that waits, the others first come,
first served (`scheduler.trusted_slots`). Good predictions shorten the mean wait. With bad ones, and fixed
service times, no request begins later than it would under first come, first served on the other slots alone.
A request of more answers than there are other slots has no such bound, as it needs trusted slots too. It
delays itself, and those that come after it, by one service time at most: the longest.

Such a pair of promises is what algorithms with predictions aim at: M. Mitzenmacher and S. Vassilvitskii,
"Algorithms with predictions", Communications of the ACM, 2022.
"""

from __future__ import annotations

from scheduler.queues.fcfs import FCFS

TRUST = 0.5
"""Share of the decode slots that go by predicted length. The bound is that of the other half of the slots."""


class Predicted(FCFS):
    """First come, first served at prefill instances; the line for decode slots as above."""

    name = "predicted"

    def __init__(self, trust: float = TRUST) -> None:
        self.trust = trust
