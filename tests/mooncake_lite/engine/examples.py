"""Random examples: the same ones in each `make test`, other ones in each `make soak`."""

from __future__ import annotations

import random


def a_random(soak: int) -> random.Random:
    """Return a source of examples. pytest shows the seed of a failed test: put it here to repeat it."""
    seed = 3 if soak == 1 else random.SystemRandom().randrange(2**32)
    print(f"examples of seed {seed}")
    return random.Random(seed)
