"""Mistakes that tests plant into the product: the world of one seed notices each of them at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

import pytest

from tests.worlds.faults import Faults
from tests.worlds.world import WorldFailure

MOST = 2000
"""Worlds that a soak draws at most, until one notices a mistake."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """`wrong` in place of owner.name.

    seed     of a world that notices it soon, as worlds are drawn today
    faults   of the worlds; None: those of FaultWorld
    says     a pattern of the failure, which names its seed and the last events
    """

    owner: Any
    name: str
    wrong: Callable[..., Any]
    seed: int
    faults: Faults | None = None
    says: str = r"seed \d+: .*\n(.*\n)*the last \d+ events of \d+:"


def assert_noticed(
    mistake: Mistake, play: Callable[[int], object], soak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a mistake, and play the world of its seed. In a soak, draw seeds until a world notices it.

    play   plays the world of a seed
    """
    monkeypatch.setattr(mistake.owner, mistake.name, mistake.wrong)
    start = SystemRandom().getrandbits(30)
    for seed in range(start, start + MOST) if soak > 1 else [mistake.seed]:
        said = ""
        try:
            play(seed)
        except WorldFailure as failure:
            said = str(failure)
        if said:
            print(f"seed {seed} notices it")
            assert re.search(mistake.says, said), said
            return
    if soak > 1:
        pytest.fail(f"none of {MOST} worlds notices this mistake")
    pytest.fail(
        f"the world of seed {mistake.seed} does not notice this mistake, as worlds are drawn now. "
        "To find another seed, run this test with `--soak 2 -s`: it draws worlds until one notices it",
        pytrace=False,
    )
