"""Logprobs of a chosen token and of the best ones beside it.

Called by `sampler.sample`. They are those of the model: the logarithm of softmax(logits), before temperature,
bias and penalties.
"""

from __future__ import annotations

import numpy as np

from mooncake_lite.messages import Logprobs


def logprobs_of(row: np.ndarray, token: int, top: int) -> Logprobs:
    """Take the logprobs of `token` and of the `top` best tokens from `row` (vocab,), the log-softmax.

    The best come first, equal ones by ascending id.
    """
    best: list[tuple[int, float]] = []
    if top:
        ids = np.flatnonzero(row >= np.partition(row, -top)[-top])
        ids = ids[np.argsort(-row[ids], kind="stable")][:top]
        best = [(int(best_id), float(row[best_id])) for best_id in ids]
    return Logprobs(float(row[token]), best)
