"""The contract of a placement policy: rank the prefill instances for one request.

Asked by `choose.py` when a request arrives and whenever capacity frees. A policy reads the view and changes
nothing. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from scheduler.placement.view import NOTHING, View

NEVER, ANY = np.zeros((), bool), np.full((), -1)


class Ranked(NamedTuple):
    """The answer of a policy about every prefill instance: arrays over their rows, or one value for all.

    score        is minimised; the first of equal instances is chosen
    reused       leading blocks that the instance would not compute
    transfer_s   predicted seconds for those of them that come from elsewhere
    prefill_s    predicted seconds to compute the other blocks
    fetch        whether blocks may come from elsewhere: other nodes and SSD
    decode       the row of the decode instance that follows; below 0: the fastest
    """

    score: np.ndarray
    reused: np.ndarray
    transfer_s: np.ndarray
    prefill_s: np.ndarray
    fetch: np.ndarray
    decode: np.ndarray = ANY


def near_only(view: View, score: np.ndarray) -> Ranked:
    """Rank by a score where each instance reuses what it happens to have near it, and fetches nothing."""
    return Ranked(score, view.near, NOTHING, view.prefill_s(view.near), NEVER)


class Policy(Protocol):
    """Ranks the prefill instances of a request. The ranks are a function of the view alone."""

    name: str

    def rank(self, view: View) -> Ranked:
        """Rank all prefill instances, those without a decode slot too."""
