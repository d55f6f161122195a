"""A learning-augmented queue: some decode slots go by predicted length, the others by arrival.

Of k decode slots q = floor(trust * k) go to the shortest predicted answer that waits, the other p = k - q
first come, first served (`scheduler.trusted_slots`). An answer keeps its slot to its end. x is how long a
request really has its slot, y how long is predicted, and n the number of requests. OPT is the least sum of
their times from arrival to end.

    robust      no request begins later than first come, first served on the p plain slots alone, for any
                arrivals and predictions; `scheduler.plain_alone` computes this bound while the queue runs
    consistent  if all n wait from the start:  sum of times <= c * OPT + (n - 1) / q * sum of |x - y|
                with c = k / q for 2q <= k + 1, and c = 1 + (k - 1) / 2q for more trusted slots

Proof. Robust, by induction over the begins on the plain slots alone. When request i begins there, those
ahead of it have begun here too, and no later, so they have ended here if they have there. Plain slots go
only to the first in line, so no request behind i has one. One is free, i is first, and begins. Consistent:
in the same way, in the order of y and with the trusted slots, i begins no later than with shortest predicted
first on q slots: at most after (sum of x before it) / q. Of two requests, the one that y puts first has at
most the smaller x plus both errors |x - y|. Over all pairs this is S + (n - 1) * sum of |x - y|, with S the
sum of the smaller ones. And OPT >= S / k + (k + 1) / 2k * sum of x (W. Eastman, S. Even and I. Isaacs,
"Bounds for the optimal scheduling of n jobs on m processors", Management Science, 1964).

The shares follow preferential round robin, which is within 1 / trust of OPT when predictions are right, and
within 2 / (1 - trust) always, on one machine that interrupts jobs at will (M. Purohit, Z. Svitkina and R.
Kumar, "Improving online algorithms via ML predictions", NeurIPS 2018). Without interruptions nothing is
within a constant of OPT always: n - 1 answers of 1 s may come with one of n * n s that looks like them.
Hence the promise compares with fewer slots and no predictions.

Exceptions. A request of more answers than plain slots needs trusted slots too. It delays itself, and those
that come after it, by the longest x at most. A preempted request goes before all others.
"""

from __future__ import annotations

from scheduler.queues.fcfs import FCFS

TRUST = 0.5
"""Share of the decode slots that go by predicted length: twice OPT at most when predictions are right."""


class Predicted(FCFS):
    """First come, first served at prefill instances; the line for decode slots as above."""

    name = "predicted"

    def __init__(self, trust: float = TRUST) -> None:
        self.trust = trust
