"""The length of an answer, predicted from the answers to similar prompts.

Pure. The Mooncake paper predicts decode load for early rejection and leaves the length of answers open (arXiv
2407.00079, 7.4). Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from scheduler.costs.refine import Average

WEIGHT = 1 / 32
"""Weight of one answer in a mean: lengths vary much more than times of steps, so the mean is over more."""


class Lengths:
    """Moving means of the lengths of answers.

    _means   (class, b) -> mean over prompts of 2^(b-1) to 2^b - 1 tokens
    """

    def __init__(self) -> None:
        self._means: dict[tuple[int, int], Average] = {}

    def answered(self, class_id: int, num_tokens: int, answer_tokens: int) -> None:
        """Add a finished answer to a prompt of num_tokens."""
        bucket = class_id, num_tokens.bit_length()
        self._means.setdefault(bucket, Average(WEIGHT)).add(answer_tokens)

    def predicted(self, class_id: int, num_tokens: int, max_tokens: int, so_far: int = 0) -> float:
        """Predict the rest of an answer: to max_tokens before any answer to a similar prompt, and at most.

        so_far   tokens that the answer has. One that has outgrown the prediction has one token left.
        """
        mean = self._means.get((class_id, num_tokens.bit_length()))
        whole = max_tokens if mean is None else min(mean.value, max_tokens)
        return max(whole - so_far, 1.0) if so_far else whole
