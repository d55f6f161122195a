"""Faults: a job that the engine cannot compute fails as a whole, and the rank goes on with the others.

Called by `progress`. A job's branches have one prompt and one order to their rank, so they fail together.
Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from scheduler.instance.job import JobId
from scheduler.instance.outcomes import Failed, Outcome
from scheduler.instance.state import State
from scheduler.instance.step import LOGITS_NOT_FINITE, NO_TOKEN, Chunk, Fault
from scheduler.instance.task import Task


def fault_of(state: State, chunk: Chunk, drawn: Seq[tuple[int, Any]], scored: Seq[Any]) -> Fault | None:
    """Return what is wrong with the (token, logprobs) and the scores of a chunk; None if nothing is.

    In a pipeline both come late.
    """
    targets = chunk.score.targets if chunk.score is not None and not state.limits.late else ()
    if len(scored) < len(targets) or any(token == NO_TOKEN for token, _ in drawn):
        return not_finite(chunk.job)
    return None


def not_finite(job: JobId) -> Fault:
    """Return the fault of a job whose next token cannot be chosen."""
    return Fault(job, LOGITS_NOT_FINITE, "the logits of its next token are not finite numbers")


def fail_job(state: State, fault: Fault) -> list[Outcome]:
    """Fail a job with all of its branches. Nothing of the pass that found the fault is noted as computed.

    A task whose blocks are on their way to the pool goes on until the transfer has ended: until then its
    places may not be given away.
    """
    for task in _tasks(state, fault.job):
        state.leave(task)
        if state.staging.of(task):
            task.fault, task.problem = fault, fault.reason
            state.storing.append(task)
        else:
            state.remove(task)
    return end_job(state, fault, False)


def end_job(state: State, fault: Fault, may_still_write: bool) -> list[Outcome]:
    """Tell that a job has failed, once none of its tasks is left. may_still_write: of a task that has."""
    left = _tasks(state, fault.job)
    for task in left:
        task.may_still_write = task.may_still_write or may_still_write
    if left:
        return []
    return [Failed(fault.job, fault.reason, may_still_write, for_good=True, code=fault.code)]


def _tasks(state: State, job: JobId) -> list[Task]:
    return [task for task in state.tasks.values() if task.id[:2] == job[:2]]
