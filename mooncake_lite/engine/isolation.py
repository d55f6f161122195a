"""Isolation: a chunk that cannot be computed fails alone, and the rank goes on with the others.

Used by `runner.py`. A pass that raises is done again chunk by chunk, which writes the same KV into the same
pages. A chunk is at fault if it raises alone, and the engine can still compute a token of its own after that.
Explained in docs/explain/failures.md.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq

from mooncake_lite.engine.by_layers import LayersLost, MovingHook
from mooncake_lite.engine.contract import ComputeEngine, Drawn
from mooncake_lite.messages import Logprobs
from scheduler.instance import Fault
from scheduler.instance.step import ENGINE_ERROR, NO_TOKEN, Chunk

MOST_UNEXPLAINED = 3
"""Passes in a row that raise although each of their chunks can be computed alone: the engine is broken."""

REASON_CHARS = 300
"""Clients read the reason of a fault: the first line of the exception, cut off here."""

Passed = tuple[list[Drawn], list[list[Logprobs]], list[Fault]]
"""What ComputeEngine.compute returns, and the faults of chunks that could not be computed."""

HookOf = Callable[[Seq[Chunk]], MovingHook | None]
"""Makes the hook of a pass over these chunks."""


class Isolation:
    """Has an engine compute passes. A chunk that is computed alone loses its drafts.

    _unexplained   passes in a row that have raised although no chunk was at fault and none had drafts
    """

    def __init__(self, engine: ComputeEngine) -> None:
        self._engine = engine
        self._unexplained = 0

    def compute(self, chunks: Seq[Chunk], hook_of: HookOf) -> Passed:
        """Compute all chunks in one pass, or one by one if that raises.

        Raises LayersLost, what a hook raises, errors of a device, and what the engine raises when it cannot
        compute anything.
        """
        hook = hook_of(chunks)
        try:
            drawn, scores = self._engine.compute(chunks, hook)
        except Exception as error:
            _raise_unless_of_a_chunk(error, hook)
            return self._one_by_one(chunks, hook_of, error)
        self._unexplained = 0
        return drawn, scores, []

    def _one_by_one(self, chunks: Seq[Chunk], hook_of: HookOf, error: Exception) -> Passed:
        drawn, scores, faults = list[Drawn](), list[list[Logprobs]](), list[Fault]()
        for chunk in chunks:
            hook = hook_of([chunk])
            try:
                some, scored = self._engine.compute(chunk.rows[:1], hook)
                some = some + [Drawn(NO_TOKEN)] * (len(chunk.draws) - len(some))
            except Exception as again:
                _raise_unless_of_a_chunk(again, hook)
                self._engine.probe()
                if hook is not None:
                    hook.give_up()
                faults.append(Fault(chunk.job, ENGINE_ERROR, _told(chunk, again)))
                some = [Drawn(NO_TOKEN)] * len(chunk.draws)
                scored = [] if chunk.score is None else [[]]
            drawn += some
            scores += scored
        explained = faults or any(len(chunk.rows) > 1 for chunk in chunks)
        self._unexplained = 0 if explained else self._unexplained + 1
        if self._unexplained >= MOST_UNEXPLAINED:
            raise error
        return drawn, scores, faults


def _raise_unless_of_a_chunk(error: Exception, hook: MovingHook | None) -> None:
    """Raise an error that is not about what is computed: of moves, of the planner, or of a device.

    After an error of CUDA its context computes nothing more. Such an error is told by its words, because
    torch and Numba each have classes of their own.
    """
    of_cuda = "cuda" in f"{type(error).__module__} {type(error).__name__} {error}".lower()
    if of_cuda or isinstance(error, LayersLost) or (hook is not None and hook.broke):
        raise error


def _told(chunk: Chunk, error: Exception) -> str:
    """Print where a chunk has failed, in one line. Returns the reason for its client."""
    line = f"{type(error).__name__}: {error}".splitlines()[0][:REASON_CHARS]
    at = traceback.extract_tb(error.__traceback__)[-1]
    print(f"engine: {chunk.job.request_id}: {line} at {at.filename}:{at.lineno}", file=sys.stderr, flush=True)
    return f"the engine cannot compute this request: {line}"
