"""What changes logits before a token is chosen: bias, min_tokens, and penalties for what was said already.

Called by `sampler.sample`. The counts are made from the sequence's tokens each time, so that nothing has to
move with a request that another rank resumes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from scheduler.instance.step import Draw


def counted(draw: Draw) -> int:
    """Return how many last tokens of its sequence `adjust` counts."""
    how = draw.sampling
    if how.repetition_penalty != 1.0:
        return draw.position
    return draw.answered if how.frequency_penalty or how.presence_penalty else 0


def changes_logits(draw: Draw) -> bool:
    """Tell whether `adjust` has anything to do."""
    how = draw.sampling
    return bool(
        how.logit_bias
        or how.repetition_penalty != 1.0
        or how.presence_penalty
        or how.frequency_penalty
        or draw.answered < how.min_tokens
    )


def adjust(logits: np.ndarray, draw: Draw) -> None:
    """Change one row of `logits` (vocab,) in place.

    logit_bias           added to the logits of its tokens
    min_tokens           until the answer has as many, no end token can be chosen
    repetition_penalty   divides positive logits and multiplies negative ones of all tokens of the prompt and
                         the answer (Keskar et al. 2019)
    frequency_penalty    subtracted as often as a token occurs in the answer
    presence_penalty     subtracted once from each token of the answer

    The last two count the answer alone, as vLLM does.
    """
    how = draw.sampling
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    if draw.answered < how.min_tokens:
        logits[list(draw.stop_ids)] = -np.inf
    if how.repetition_penalty != 1.0:
        seen, _ = _counted(draw.before)
        of_seen, penalty = logits[seen], np.float32(how.repetition_penalty)
        logits[seen] = np.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
    if draw.answered and (how.frequency_penalty or how.presence_penalty):
        said, counts = _counted(draw.before[draw.position - draw.answered :])
        logits[said] -= (how.frequency_penalty * counts + how.presence_penalty).astype(np.float32)


def _counted(token_ids: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids, ascending, and how often each occurs."""
    counts = np.bincount(np.asarray(token_ids, dtype=np.int64))
    ids = np.flatnonzero(counts)
    return ids, counts[ids]
