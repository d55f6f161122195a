"""Which tokens a draw may choose from: min-p, top-k and top-p.

Called by `sampler.sample` with one row of probabilities. Pure NumPy.
"""

from __future__ import annotations

import numpy as np

from mooncake_lite.messages import Sampling


def kept(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray | None:
    """Ids that may be drawn, best first, equal ones by ascending id; None when all of them may.

    probabilities (vocab,) float32. First the tokens with at least min_p of the best one's probability (Nguyen
    et al. 2024), of these the top_k best, of these the smallest set of best ones that has top_p of their
    probability (nucleus sampling, Holtzman et al. 2020).
    """
    cuts_k = 0 < sampling.top_k < len(probabilities)
    cuts_p = sampling.top_p < 1.0
    if not (cuts_k or cuts_p or sampling.min_p > 0):
        return None
    floor = sampling.min_p * float(probabilities.max())
    if cuts_p and not cuts_k:
        # All tokens below it together have less than 1 - top_p: leaving them out saves sorting them.
        mass = probabilities[probabilities >= floor].sum(dtype=np.float64)
        least = (1.0 - sampling.top_p) * mass / len(probabilities)
    else:
        mass, least = 0.0, 0.0
    ids = np.flatnonzero(probabilities >= max(floor, least))
    if cuts_k and sampling.top_k < len(ids):
        weights = probabilities[ids]
        ids = ids[weights >= np.partition(weights, -sampling.top_k)[-sampling.top_k]]
    ids = ids[np.argsort(-probabilities[ids], kind="stable")]
    if cuts_k:
        ids = ids[: sampling.top_k]
        mass = probabilities[ids].sum(dtype=np.float64)
    if cuts_p:
        reached = np.cumsum(probabilities[ids], dtype=np.float64)
        ids = ids[: int(np.searchsorted(reached, sampling.top_p * mass)) + 1]
    return ids
