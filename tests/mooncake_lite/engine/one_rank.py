"""One rank in this process, with a real model: State, Runner and Engine, and what became of its requests.

A preempted branch comes again as a request of its own, as the conductor would send it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.engine import Engine, Runner
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.messages import Sampling
from mooncake_lite.model import Model
from scheduler.instance import (
    DECODE,
    PREFILL,
    Arrived,
    Cancelled,
    Forgotten,
    Job,
    JobId,
    Limits,
    Pages,
    Staging,
    State,
    Step,
    begin,
    new_prefix_cache,
    next_step,
    on,
)
from scheduler.instance.outcomes import Computed, Ended, Failed, Loaded, Outcome, Preempted, Token
from store.keys import next_key
from tests.mooncake_lite.engine.exact import Case

BOTH = frozenset({PREFILL, DECODE})
SALT = b"salt"
CONTEXT = 512

Branch = tuple[str, int]
"""(name of the request, number of its answer)."""


class HeardModel:
    """A model that keeps the logits of its last forward pass."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> torch.Tensor:
        """Compute what the model computes."""
        self.logits = self._model.forward(*args)
        return self.logits


class OneRank:
    """A rank with both duties.

    answers   tokens of each branch
    ended     how each branch ended: "finished" or "cancelled"
    seen      how often each kind of event happened
    logits    of each draw, by (branch, its number within the answer), if they are kept
    """

    def __init__(
        self, model: Model, num_pages: int, limits: Limits, sharing: str = "off", *, keep_logits: bool = False
    ) -> None:
        pages = Pages(num_pages, PAGE_TOKENS)
        prefix = new_prefix_cache(sharing, pages, BLOCK_TOKENS, next_key)
        self.state = State(BOTH, pages, Staging(0, 0), BLOCK_TOKENS, limits, next_key=next_key, prefix=prefix)
        self.model = HeardModel(model)
        self.runner = Runner(Engine(self.model, num_pages, BLOCK_TOKENS))  # type: ignore[arg-type]
        self.jobs: dict[str, Job] = {}
        self.answers: dict[Branch, list[int]] = defaultdict(list)
        self.ended: dict[Branch, str] = {}
        self.seen: Counter[str] = Counter()
        self.keep_logits = keep_logits
        self.logits: dict[tuple[Branch, int], torch.Tensor] = {}
        self._resumed: dict[Branch, JobId] = {}

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        n: int = 1,
        branch: int = 0,
        answered: int = 0,
    ) -> None:
        """Let a request arrive; with `answered`, the prompt ends with so many tokens of its answer."""
        job = Job(
            name, 0, BOTH, tuple(prompt), answered, max_tokens, CONTEXT, frozenset(), sampling, n, branch,
            salt=SALT,
        )  # fmt: skip
        self.jobs[name] = job
        self._hear(on(self.state, Arrived(job), 0.0))

    def cancel(self, name: str, branch: int | None = None) -> None:
        """Give up a request or one branch of it."""
        self._hear(on(self.state, Cancelled(name, 0, branch), 0.0))
        for (request, number), job in list(self._resumed.items()):
            if request == name and branch in (None, number):
                self._hear(on(self.state, Cancelled(job.request_id, job.attempt), 0.0))

    def forget(self) -> None:
        """Forget the prefixes in pages."""
        on(self.state, Forgotten(), 0.0)

    def step(self) -> Step:
        """Take one step."""
        step = next_step(self.state, 0.0)
        begin(self.state, step)
        self.seen["evicted"] += bool(step.evict)
        self.seen["copied"] += sum(growth.copies is not None for growth in step.grow)
        self.seen["mixed"] += len({chunk.prompt for chunk in step.chunks}) == 2
        result = self.runner.run(step)
        if self.keep_logits:
            self._keep(step)
        self._hear(on(self.state, result, 0.0))
        return step

    def settle(self) -> None:
        """Work until nothing is left."""
        while self.state.busy:
            self.step()

    def assert_at_rest(self) -> None:
        """Assert that every page is free or idle, and that every branch ended once."""
        self.state.check()
        assert not self.state.tasks
        assert not self.state.pages.used
        assert self.state.pages.num_free + self.state.pages.num_idle == self.state.pages.num_pages
        asked = {(name, branch) for name, job in self.jobs.items() for branch in job.branches}
        assert self.ended.keys() == asked, "a branch has no end"

    def _keep(self, step: Step) -> None:
        """Keep the logits of each draw; a row of logits serves all draws of its chunk."""
        drawing = [chunk for chunk in step.chunks if chunk.draws]
        for chunk, row in zip(drawing, self.model.logits[: len(drawing)], strict=True):
            for draw in chunk.draws:
                name = _branch_of(chunk.job._replace(branch=draw.branch))
                self.logits[name, draw.answered] = row.clone()

    def _hear(self, said: list[Outcome]) -> None:
        for outcome in said:
            match outcome:
                case Token():
                    name, branch = _branch_of(outcome.job)
                    answer = self.answers[name, branch]
                    already = self.jobs[name].answered
                    assert already + len(answer) == outcome.index, "a token is missing, or came twice"
                    answer.append(outcome.token)
                case Ended():
                    branch = _branch_of(outcome.job)
                    assert branch not in self.ended, "a branch ended twice"
                    self.ended[branch] = outcome.finish
                    self._resumed.pop(branch, None)
                    self.seen[outcome.finish] += 1
                case Loaded():
                    self.seen["shared"] += outcome.shared > 0
                case Computed():
                    self.seen["reused tokens"] += outcome.loaded
                case Preempted():
                    self._resume(outcome)
                case Failed():
                    raise AssertionError(f"{outcome.job}: {outcome.reason}")

    def _resume(self, preempted: Preempted) -> None:
        self.seen["preempted"] += 1
        name, branch = _branch_of(preempted.job)
        first = self.jobs[name]
        attempt = preempted.job.attempt + 1
        job = Job(
            f"{name}#{branch}", attempt, BOTH, preempted.token_ids, preempted.answered, first.max_tokens,
            first.max_len, first.stop_ids, first.sampling, 1, branch, salt=first.salt,
        )  # fmt: skip
        self._resumed[name, branch] = JobId(job.request_id, attempt, branch)
        self._hear(on(self.state, Arrived(job), 0.0))


def _branch_of(job: JobId) -> Branch:
    return job.request_id.partition("#")[0], job.branch


def go_on(model: Model, cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """Compute whole answers whose first tokens are given; every request has the rank to itself."""
    rank = OneRank(model, CONTEXT // PAGE_TOKENS, Limits(CONTEXT, sequences=1))
    for number, case in enumerate(cases):
        given = case.answer[: case.agreed]
        text = (*case.prompt, *given)
        rank.ask(str(number), text, case.sampling, len(case.answer), 1, case.branch, case.agreed)
    rank.settle()
    return [
        (*case.answer[: case.agreed], *rank.answers[str(number), case.branch])
        for number, case in enumerate(cases)
    ]
