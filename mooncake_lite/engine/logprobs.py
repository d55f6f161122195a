"""Logprobs of a token and of the best ones in its place: of tokens that were chosen, and of prompts.

Called by `sampler.sample` and `engine.Engine`. They are those of the model: the logarithm of softmax(logits),
before temperature, bias and penalties.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from mooncake_lite.messages import Logprobs

ROWS = 128
"""Rows of a prompt whose logits exist at a time, with a copy, their log-softmax: 50 MB with 49,152 tokens."""


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: Seq[int], top: int
) -> list[Logprobs]:
    """Take the logprobs of the tokens that follow in a prompt, and of the `top` best ones in their places.

    Returns none if some logits are not finite.

    logits_of   makes logits (rows, vocab) float32 of some rows of `states`
    states      (len(targets), hidden), on any device: one row per token, in front of its target
    targets     the token that follows each of them
    """
    found = []
    for first in range(0, len(targets), ROWS):
        rows = logits_of(states[first : first + ROWS]).log_softmax(dim=1).cpu().numpy()
        if np.isnan(rows[:, 0]).any():  # all of a row are, if one of its logits is no number or infinite
            return []
        found += [logprobs_of(row, token, top) for row, token in zip(rows, targets[first:])]
    return found


def logprobs_of(row: np.ndarray, token: int, top: int) -> Logprobs:
    """Take the logprobs of `token` and of the `top` best tokens from `row` (vocab,), the log-softmax.

    The best come first, equal ones by ascending id.
    """
    best: list[tuple[int, float]] = []
    if top == 1:
        best_id = int(row.argmax())
        best = [(best_id, float(row[best_id]))]
    elif top:
        ids = np.flatnonzero(row >= np.partition(row, -top)[-top])
        ids = ids[np.argsort(-row[ids], kind="stable")][:top]
        best = [(int(one), float(row[one])) for one in ids]
    return Logprobs(float(row[token]), best)
