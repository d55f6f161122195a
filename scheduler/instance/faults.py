"""Faults: a job that the engine cannot compute fails as a whole, and the rank goes on with the others.

Called by `progress`. A job's branches have one prompt and one order to their rank, so they fail together.
Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from itertools import islice

from scheduler.instance.job import JobId
from scheduler.instance.outcomes import Failed, Outcome
from scheduler.instance.state import State
from scheduler.instance.step import LOGITS_NOT_FINITE, NO_TOKEN, Fault, Result
from scheduler.instance.task import Task

Attempt = tuple[str, int]
"""The first fields of a JobId, which the branches of a job share."""


def faults_of(result: Result) -> dict[Attempt, Fault]:
    """Return what is wrong with the jobs of a pass; of a leap, of its last pass.

    A job is at fault if its runner says so, or if a token or a score of one of its chunks is missing. In a
    pipeline both come late. A token after a draft may be missing: it is drawn again without.
    """
    chunks = result.step.chunks
    found: dict[Attempt, Fault] = {fault.job[:2]: fault for fault in result.faults}
    tokens = result.tokens[len(result.passes) * len(chunks) :]  # each pass before has one for each chunk
    if NO_TOKEN in tokens or result.scores:
        drawn, scores = iter(tokens), iter(result.scores)
        for chunk in chunks:
            some = [*islice(drawn, len(chunk.draws))]
            is_short = chunk.score is not None and len(next(scores)) < len(chunk.score.targets)
            if is_short or NO_TOKEN in (some if chunk.prompt else some[:1]):
                found.setdefault(chunk.job[:2], not_finite(chunk.job))
    return found


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
    """Return the tasks of a job, without its prefetches, which end by themselves."""
    return [task for task in state.tasks.values() if task.id[:2] == job[:2] and not task.is_prefetch]
