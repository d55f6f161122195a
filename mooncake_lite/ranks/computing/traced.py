"""Tracing of a compute rank: its steps, the jobs it works on, and what its transfers are for.

Made by `assemble.py` under --trace. It watches from outside: messages at the spoke, steps at the runner,
bytes at the transfer engine. Neither the planner nor a runner knows of it. See docs/how-to/trace.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.ranks.computing.jobs import blocks_to_load
from mooncake_lite.ranks.computing.loop import StepRunner
from mooncake_lite.ranks.traced import MOST_NAMED, WAIT_FOR_MESSAGES, RankTrace
from mooncake_lite.tracing.tracer import Tracer
from scheduler.instance import JobId, Result, Step

WAIT_FOR_TRANSFERS = "wait for transfers"


class ComputeTrace(RankTrace):
    """The lanes of a compute rank."""

    def __init__(self, tracer: Tracer, roles: Sequence[str]) -> None:
        super().__init__(tracer, roles)
        self._branches: dict[tuple[str, int], int] = {}  # of each job, those that have not ended
        self._stored: set[tuple[str, int]] = set()  # jobs whose KV goes to the pool at their end

    # ------------------------------------------------------------------------------ messages

    def received(self, messages: Sequence[m.Message], wait_s: float, began_ns: int) -> None:
        """Note messages, and open the span of each new job."""
        super().received(messages, wait_s, began_ns)
        for message in messages:
            if isinstance(message, m.Start):
                self._open_job(message)

    def sent(self, message: m.Message) -> None:
        """Note a message, and move the span of its job on."""
        super().sent(message)
        event = message.event if isinstance(message, m.Report) else message
        if isinstance(event, m.DecodeLoaded | m.PromptComputed):
            key = event.request_id, event.attempt
            self.requests.stage(key, "store" if key in self._stored else "decode")
        elif isinstance(event, m.PrefillEnded | m.RequestFailed):
            self._end_job(event, all_branches=True)
        elif isinstance(event, m.DecodeEnded | m.Preempted | m.Swapped):
            self._end_job(event, all_branches=False)

    def _open_job(self, message: m.Start) -> None:
        order, body = message.order, message.body
        args = {
            "request": order.request_id,
            "attempt": order.attempt,
            "tokens": len(body.token_ids),
            "blocks to load": len(blocks_to_load(order)),
        }
        key = order.request_id, order.attempt
        self._branches[key] = len(body.answers) or 1 if isinstance(order, m.StartDecode) else body.n
        if isinstance(order, m.StartPrefill):
            self._stored.add(key)
        name = type(order).__name__.removeprefix("Start").lower()
        self.requests.open(key, f"{name} {order.request_id}", args=args)
        self.requests.follow(key, order.request_id)
        self.requests.stage(key, "load")

    def _end_job(
        self,
        message: m.PrefillEnded | m.DecodeEnded | m.RequestFailed | m.Preempted | m.Swapped,
        all_branches: bool,
    ) -> None:
        """Close the span of a job when its last branch has ended."""
        key = message.request_id, message.attempt
        self._branches[key] = 0 if all_branches else self._branches.get(key, 1) - 1
        if self._branches[key] <= 0:
            del self._branches[key]
            self._stored.discard(key)
            failed = isinstance(message, m.RequestFailed | m.Preempted | m.Swapped)
            self.requests.close(key, {"end": type(message).__name__} if failed else {})

    # ------------------------------------------------------------------------------ steps

    def begins(self, step: Step) -> None:
        """Note which jobs a step begins to compute."""
        for chunk in step.chunks:
            if chunk.prompt:
                self.requests.stage(_key(chunk.job), "compute")

    def ended(self, step: Step, result: Result, began_ns: int) -> None:
        """Add a step, or a wait when it had nothing to do."""
        if step.only_waits and not (step.reads or step.puts):
            self.steps.wait(WAIT_FOR_TRANSFERS if len(self.transfers) else WAIT_FOR_MESSAGES, began_ns)
            return
        self.steps.work(_name(step), began_ns, _details(step, result))


class TracedRunner:
    """A runner that notes what it is told to do."""

    def __init__(self, runner: StepRunner, trace: ComputeTrace) -> None:
        self._runner = runner
        self._trace = trace

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Have the step done by the runner behind this one."""
        began_ns = self._trace.tracer.now_ns()
        self._trace.begins(step)
        result = self._runner.run(step, moved)
        self._trace.ended(step, result, began_ns)
        return result


def _key(job: JobId) -> tuple[str, int]:
    """Return what messages call a job."""
    return job[0], job[1]


def _name(step: Step) -> str:
    """Name a step after its forward pass; without one, after the rest of it."""
    prompt = any(chunk.prompt for chunk in step.chunks)
    decode = any(not chunk.prompt for chunk in step.chunks)
    if prompt or decode:
        return " + ".join(name for name, there in (("prefill", prompt), ("decode", decode)) if there)
    if step.lands or step.writes or step.saves:
        return "copy KV"
    return "begin transfers" if step.reads or step.puts else "admit"


def _details(step: Step, result: Result) -> dict[str, Any]:
    """Describe a step; what it does not do is left out."""
    prompt = [chunk for chunk in step.chunks if chunk.prompt]
    decode = [chunk for chunk in step.chunks if not chunk.prompt]
    jobs = list(dict.fromkeys(chunk.job[0] for chunk in step.chunks))
    found = {
        "forward ms": round(result.compute_s * 1000, 3) if step.chunks else 0,
        "jobs": len(jobs),
        "chunks": len(step.chunks),
        "prompt tokens": sum(len(chunk.token_ids) for chunk in prompt),
        "decode tokens": sum(len(chunk.token_ids) for chunk in decode),
        "requests": jobs[:MOST_NAMED],
        "admitted": [admission.job[0] for admission in step.admit][:MOST_NAMED],
        "preempted": [job[0] for job in step.preempt],
        "loads begun": len(step.reads),
        "loads landed": len(step.lands),
        "stores begun": len(step.writes),
        "blocks saved": len(step.saves),
        "puts begun": len(step.puts),
    }
    return {name: value for name, value in found.items() if value}
