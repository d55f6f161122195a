"""The made-up lengths of a class: most sequences are short, and a few are long."""

from __future__ import annotations

import random

LONGEST = 4096


def lengths(draw: random.Random, count: int) -> list[int]:
    """Lengths in tokens, from 1 to LONGEST; half of them below 250 or so."""
    return [min(LONGEST, 1 + int(draw.lognormvariate(5.5, 1.2))) for _ in range(count)]


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: a length a line."""
    made = lengths(random.Random(f"{seed} contexts"), sizes["contexts"])
    return {"contexts.csv": b"tokens\n" + b"".join(b"%d\n" % length for length in made)}
