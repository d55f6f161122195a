"""A planner with a model runner: one rank, driven turn by turn, whose books are checked every time."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from scheduler.instance import (
    Arrived,
    Cancelled,
    Event,
    Job,
    Limits,
    Pages,
    Preemption,
    Staging,
    State,
    Step,
    begin,
    new_prefix_cache,
    next_step,
    on,
)
from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.outcomes import Ended, Failed, Outcome, Preempted, Prefilled, Swapped, Token
from tests.scheduler.instance.model_runner import BLOCK, PAGE, DealtRunner, ModelRunner


def key_after(salt: Any, last_key: int | None, tokens: Sequence[int]) -> int:
    """A key of a block that depends on all tokens before it."""
    return hash((salt, last_key, *tokens))


class Rank:
    """One rank of a test. Time passes by 1 s per step.

    dealt   (tokens of a unit, turns): members have the KV of each sequence together
    said    all outcomes so far
    """

    def __init__(
        self,
        *duties: str,
        num_pages: int = 64,
        half_blocks: int = 2,
        num_slots: int = 2,
        limits: Limits = Limits(8),  # noqa: B008
        sharing: str = "off",
        preemption: Preemption = "recompute",
        pool: dict[Any, Any] | None = None,
        dealt: tuple[int, int] | None = None,
        **runner: Any,
    ) -> None:
        self.pool: dict[Any, Any] = {} if pool is None else pool
        staging = Staging(half_blocks, num_slots)
        pages = Pages(num_pages, PAGE) if dealt is None else DealtPages(num_pages, PAGE, *dealt)
        prefix = new_prefix_cache(sharing, pages, BLOCK)
        self.state = State(
            frozenset(duties), pages, staging, BLOCK, limits, next_key=key_after, prefix=prefix,
            preemption=preemption,
        )  # fmt: skip
        sizes = self.pool, num_pages, half_blocks, num_slots
        self.runner = ModelRunner(*sizes, **runner)
        if dealt is not None:
            self.runner = DealtRunner(*sizes, unit=dealt[0], turns=dealt[1], **runner)
        self.now = 0.0
        self.said: list[Outcome] = []

    def tell(self, event: Event) -> list[Outcome]:
        said = on(self.state, event, self.now)
        self.state.check()
        self.said += said
        return said

    def arrive(self, job: Job) -> list[Outcome]:
        return self.tell(Arrived(job))

    def cancel(self, name: str, attempt: int = 0, branch: int | None = None) -> list[Outcome]:
        return self.tell(Cancelled(name, attempt, branch))

    def step(self, unchanged: bool = True) -> tuple[Step, list[Outcome]]:
        """One turn of the loop; next_step must leave the state as it is."""
        before = pickle.dumps(self.state) if unchanged else b""
        step = next_step(self.state, self.now)
        assert not before or pickle.loads(before) == self.state, "next_step has changed the state"
        self._check_budget(step)
        begin(self.state, step)
        self.state.check()
        result = self.runner.run(step)
        self.now += 1.0
        said = on(self.state, result, self.now)
        self.state.check()
        self.said += said
        return step, said

    def _check_budget(self, step: Step) -> None:
        """Prompts share the tokens that the running batch leaves, and at least one."""
        limits = self.state.limits
        prompts = [len(chunk.token_ids) for chunk in step.chunks if chunk.prompt]
        left = max(1, limits.tokens - (len(step.chunks) - len(prompts)))
        assert len(prompts) <= limits.prefills, "too many prompts at once"
        assert sum(prompts) <= left or (not limits.chunked and len(prompts) == 1), (
            f"{prompts} of {left} tokens"
        )

    def until(self, kind: type, limit: int = 200) -> Any:
        """Go on until an outcome of this kind; return it."""
        for _ in range(limit):
            for outcome in self.step()[1]:
                if isinstance(outcome, kind):
                    return outcome
        raise AssertionError(f"no {kind.__name__} after {limit} steps")

    def settle(self, limit: int = 500) -> list[Outcome]:
        """Go on until the rank has nothing left to do; return what was said."""
        first = len(self.said)
        for _ in range(limit):
            if not self.state.busy:
                return self.said[first:]
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def said_tokens(self, name: str) -> list[int]:
        """The tokens of an answer so far."""
        return [said.token for said in self.said if isinstance(said, Token) and said.job[0] == name]

    def assert_idle(self) -> None:
        """Pages, halves and slots are all free, and every job has had exactly one end."""
        state = self.state
        assert not state.tasks
        assert not state.puts
        assert not state.busy
        assert len(state.pages.free) + len(state.pages.idle) == state.pages.num_pages
        assert state.staging.halves == [None, None]
        assert sorted(state.staging.free_slots) == list(range(state.staging.num_slots))
        for kinds in (Failed, (Prefilled, Ended, Preempted, Swapped)):  # a failure ends all branches
            ended = [outcome.job for outcome in self.said if isinstance(outcome, kinds)]
            assert len(ended) == len(set(ended))
        state.prefix.check()


def job(name: str, duties: Sequence[str], tokens: Sequence[int], **more: Any) -> Job:
    """A job of the first attempt, for an answer of up to 8 tokens."""
    values: dict[str, Any] = {"attempt": 0, "answered": 0, "max_tokens": 8, "max_len": 1000} | more
    return Job(name, duties=frozenset(duties), token_ids=list(tokens), **values)
