"""Requests that an engine cannot compute: where, on whatever rank computes them.

Drawn by `workload.py`, met by `runner.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE, Chunk

POISONED = 0.15
"""Share of the requests that cannot be computed, in runs that have some."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A token of a request that an engine cannot compute.

    code       ENGINE_ERROR: each pass over the token fails; LOGITS_NOT_FINITE: none can follow it
    position   of the token in prompt and answer
    branch     whose answer has it; the prompt is that of all branches
    answered   tokens of that answer before a rank meets it; below 0: it may meet it sooner
    """

    code: str
    position: int
    branch: int
    answered: int

    @classmethod
    def drawn(cls, random: Random, may_raise: bool, prompt: int, answer: int, n: int) -> Poison | None:
        """Draw what is wrong with a request of so many tokens and branches; None for most of them.

        may_raise   passes may fail: not in a pipeline, where an exception ends the rank
        """
        if random.random() >= POISONED:
            return None
        branch, raises = random.randrange(n), may_raise and random.random() < 0.5
        end = prompt + random.choice((0, random.randint(1, answer)))
        position = random.randrange(0 if raises else prompt - 1, end)
        return cls(ENGINE_ERROR if raises else LOGITS_NOT_FINITE, position, branch, position + 1 - prompt)

    def is_in(self, chunk: Chunk) -> bool:
        """Tell whether a chunk cannot be computed."""
        if self.code == LOGITS_NOT_FINITE:
            return chunk.end == self.position + 1 and any(draw.branch == self.branch for draw in chunk.draws)
        in_prompt = self.answered <= 0
        return chunk.start <= self.position < chunk.end and (in_prompt or chunk.job.branch == self.branch)
