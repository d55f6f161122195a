"""What modelled ranks that compute have in common: requests on a rank, reused prefixes, first tokens.

Used by `prefill_rank.py`, `decode_rank.py` and `serving_rank.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from mooncake_lite.control import effects as fx
from mooncake_lite.simulator.batch import Sequence
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.held_pages import HeldPages
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Request

CHUNK_S = 0.05
"""How soon a rank notices that a request is cancelled."""

MOVE_FAILED = "KV could not be moved: connection reset"

Part = Literal["read", "compute", "write"]
PARTS: tuple[Part, ...] = ("read", "compute", "write")


@dataclass(slots=True, eq=False)
class Job:
    """A request on a rank, or one branch of it.

    asked     it computes nothing, and waits for a GrantSwap; granted: its KV is being written to the pool
    over      its answer has been sent, and nothing about it happens any more
    sequence  of its answer, since its decode began
    """

    order: fx.StartOrder
    request: Request
    branch: int = 0
    asked: bool = False
    granted: bool = False
    over: bool = False
    sequence: Sequence | None = None


@dataclass(slots=True)
class Prompt:
    """A prompt that a rank works on, part by part.

    held       leading blocks in the rank's own pages; read: blocks of the pool that it reads after them
    computed   tokens that are left, at least the last one
    began_s    when its present part began; load_s, compute_s: what the earlier parts took
    fails      with this part; None: not at all
    """

    held: int
    read: int
    computed: int
    began_s: float
    load_s: float = 0.0
    compute_s: float = 0.0
    fails: Part | None = None

    @classmethod
    def begin(cls, request: Request, pages: HeldPages, load: int, now: float) -> Prompt:
        """Begin with a prompt, of which the first `load` blocks may be read from the pool."""
        text, held = request.text, pages.leading(request.keys)
        reused = max(held, load) * text.block_tokens
        return cls(held, max(0, load - held), max(1, text.num_tokens - reused), now)

    def may_fail(self, faults: Faults, dice: Random) -> None:
        """Draw whether it fails, and with which part."""
        if dice.random() < faults.prefill_fails:
            self.fails = dice.choice(PARTS)


class Engine:
    """Computes one prompt after the other, first come, first served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0

    def compute(self, seconds: float, done: Action) -> None:
        """Compute a prompt of so many seconds when those before it are computed."""
        self._free_s = max(self._clock.now, self._free_s) + seconds
        self._clock.at(self._free_s, done)


def first_tokens(request: Request, world: Surroundings) -> list[int]:
    """Add the first token of each answer. Returns the branches that end with it."""
    request.fork(world.dice)
    for part in request.parts.values():
        part.text.append()
        part.answered += 1
    return [branch for branch, part in request.parts.items() if part.answered >= part.answer_tokens]
