"""Ranks and a pool, driven by a seeded generator: everything a planner can meet.

Either a prefill and a decode rank, or one rank that does both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from scheduler.instance import DECODE, PREFILL, Granted, JobId, Limits, SwapAnswered
from scheduler.instance.outcomes import (
    Ended,
    Failed,
    Outcome,
    Preempted,
    Prefilled,
    PutFinished,
    Saved,
    Swapped,
    SwapWanted,
    Token,
)
from tests.scheduler.instance.model_runner import BLOCK, PAGE, choose, kv_of, sometimes
from tests.scheduler.instance.rank import Rank, job

STOP = 3
"""The token that ends answers."""


@dataclass
class Request:
    name: str
    prompt: list[int]
    max_tokens: int
    branches: list[int] = field(default_factory=lambda: [0])
    attempt: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    ends: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers = self.answers or {branch: [] for branch in self.branches}

    @property
    def left(self) -> list[int]:
        """The branches that have not ended."""
        return [branch for branch in self.branches if branch not in self.ends]

    @property
    def tokens(self) -> list[int]:
        """What is prefilled: a request is resumed with a single branch."""
        return self.prompt + (self.answers[self.branches[0]] if len(self.branches) == 1 else [])

    def expected(self, branch: int) -> list[int]:
        """The answer that a model without planner, pages or pool gives."""
        tokens = list(self.prompt)
        while len(tokens) - len(self.prompt) < self.max_tokens:
            token = choose(kv_of(tokens)[-1], branch)
            if token == STOP:
                break
            tokens.append(token)
        return tokens[len(self.prompt) :]


class World:
    """Requests of mixed lengths that share prefixes, with cancels, failures, and too few pages."""

    def __init__(self, seed: int, requests: int = 12) -> None:
        rng = self.rng = random.Random(seed)
        self.pool: dict[int, Any] = {}
        self.known: dict[tuple[int, ...], int] = {}
        broken = rng.choice([0.0, 0.0, 0.1])
        self.cancels = rng.choice([0.0, 0.05, 0.2])
        common: dict[str, Any] = {
            "pool": self.pool,
            "ends": sometimes(rng, rng.choice([0.2, 0.6, 1.0])),
            "breaks": lambda: "the line is cut" if rng.random() < broken else "",
            "late": sometimes(rng, 0.3),
            "half_blocks": rng.choice([2, 3]),
            "num_slots": rng.choice([1, 2, 5]),
            "sharing": rng.choice(["off", "hash", "radix"]),
            "preemption": rng.choice(["recompute", "swap"]),
        }
        longest = 40 // PAGE + 6
        limits = Limits(rng.choice([5, 64]), prefills=rng.choice([1, 3]), chunked=rng.random() < 0.7)
        pages = longest + rng.choice([0, 10, 60])
        if rng.random() < 0.4:
            both = Rank(PREFILL, DECODE, num_pages=pages, limits=limits, **common)
            self.prefill = self.decode = both
        else:
            self.prefill = Rank(PREFILL, num_pages=longest + rng.choice([0, 40]), limits=limits, **common)
            self.decode = Rank(DECODE, num_pages=pages, **common)
        self.ranks = [self.prefill] if self.prefill is self.decode else [self.prefill, self.decode]
        stem = [rng.randrange(50) for _ in range(24)]
        self.requests = {
            f"r{n}": Request(
                f"r{n}",
                stem[: rng.randrange(25)] + [rng.randrange(50) for _ in range(rng.randrange(1, 16))],
                rng.randrange(1, 12),
                list(range(rng.choice([1, 1, 1, 2, 4]))),
            )
            for n in range(requests)
        }
        self.on_rank: dict[str, Rank] = {}
        self.offers: dict[int, tuple[int, ...]] = {}
        self.to_grant: list[tuple[Rank, SwapWanted]] = []
        self.swaps: dict[JobId, list[int]] = {}
        self.full = rng.choice([0.0, 0.3])
        self._next_place = 0

    def run(self) -> None:
        """Play until every request has ended and all ranks are idle."""
        to_come = list(self.requests.values())
        for turn in range(20_000):
            if to_come and self.rng.random() < 0.3:
                self._prefill(to_come.pop(), 0)
            for rank in self.ranks:
                busy, flying = rank.state.busy, rank.runner.flying
                step, said = rank.step(unchanged=turn % 7 == 0)
                late = max(rank.state.staging.free_from) > rank.now
                moves = flying or late or step.reads or step.puts or not step.only_waits
                assert moves or not busy or self.to_grant, "the rank waits for nothing"
                self._hear(rank, said)
            if self.to_grant and self.rng.random() < 0.5:
                self._grant_swap(*self.to_grant.pop(0))
            if self.rng.random() < self.cancels:
                self._cancel(self.rng.choice(list(self.requests.values())))
            if not to_come and not self.on_rank and not any(rank.state.busy for rank in self.ranks):
                return
        raise AssertionError("requests are left over")

    def _place(self) -> int:
        self._next_place += 1
        return self._next_place

    def _prefill(self, request: Request, attempt: int) -> None:
        request.attempt = attempt
        tokens = request.tokens
        load: list[int] = []
        for index in range(len(tokens) // BLOCK):
            place = self.known.get(tuple(tokens[: (index + 1) * BLOCK]))
            if place is None:
                break
            load.append(place)
        self.on_rank[request.name] = self.prefill
        branches = {"n": len(request.branches), "branch": request.branches[0]}
        if self.prefill is self.decode:
            self._arrive(request, PREFILL, DECODE, load=load, offers=True, **branches)
            return
        store = [self._place() for _ in range(-(-len(tokens) // BLOCK) - len(load))]
        request.places = load + store
        self._arrive(request, PREFILL, load=load, store=store, **branches)

    def _arrive(self, request: Request, *duties: str, **more: Any) -> None:
        self.on_rank[request.name].arrive(
            job(
                request.name,
                duties,
                request.tokens,
                attempt=request.attempt,
                answered=len(request.tokens) - len(request.prompt),
                max_tokens=request.max_tokens,
                stop_ids=frozenset({STOP}),
                salt=b"salt",
                **more,
            )
        )

    def _cancel(self, request: Request) -> None:
        """Cancel all branches of a request, or one, where it is."""
        rank = self.on_rank.get(request.name)
        if rank is None or not request.left:
            return
        assert rank.cancel(request.name, request.attempt + 1) == []
        branch = self.rng.choice([None, *request.left])
        if branch is not None and rank.state.duties == {PREFILL}:
            branch = None
        request.cancelled |= set(request.left if branch is None else [branch])
        self._hear(rank, rank.cancel(request.name, request.attempt, branch))

    def _end(self, request: Request, branch: int, how: str) -> None:
        assert branch in request.left, f"{request.name} branch {branch} ends twice"
        request.ends[branch] = how
        if not request.left:
            self.on_rank.pop(request.name, None)

    def _hear(self, rank: Rank, said: list[Outcome]) -> None:
        for outcome in said:
            if isinstance(outcome, Saved):
                self._offered(rank, outcome)
            elif isinstance(outcome, PutFinished):
                self._put(outcome)
            elif hasattr(outcome, "job"):
                request = self.requests[outcome.job.request_id]
                assert outcome.job.attempt == request.attempt
                assert self.on_rank[request.name] is rank
                self._heard(request, outcome)

    def _heard(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Token) and outcome.finish != "stop":
            answer = request.answers[outcome.job.branch]
            assert outcome.index == len(answer)
            answer.append(outcome.token)
        elif isinstance(outcome, Prefilled):
            self._prefilled(request, outcome)
        elif isinstance(outcome, Ended):
            if self.on_rank[request.name].state.duties == {PREFILL}:
                for branch in request.left:
                    self._end(request, branch, outcome.finish)
                return
            assert (outcome.finish == "cancelled") <= (outcome.job.branch in request.cancelled)
            self._end(request, outcome.job.branch, outcome.finish)
        elif isinstance(outcome, Failed):
            for branch in request.left:
                self._end(request, branch, "failed")
        elif isinstance(outcome, SwapWanted):
            self.to_grant.append((self.on_rank[request.name], outcome))
        elif isinstance(outcome, Preempted | Swapped):
            self._preempted(request, outcome)

    def _grant_swap(self, rank: Rank, wanted: SwapWanted) -> None:
        """Answer with a place for each block that the pool lacks, or say that the pool is full."""
        tokens = wanted.token_ids
        if self.rng.random() < self.full:
            self._hear(rank, rank.tell(SwapAnswered(wanted.job, None)))
            return
        prefixes = [tuple(tokens[: start + BLOCK]) for start in range(0, len(tokens), BLOCK)]
        has = [self.known.get(prefix) if len(prefix) % BLOCK == 0 else None for prefix in prefixes]
        places = [self._place() if place is None else None for place in has]
        self.swaps[wanted.job] = [new or old or 0 for new, old in zip(places, has)]
        self._hear(rank, rank.tell(SwapAnswered(wanted.job, places)))

    def _preempted(self, request: Request, outcome: Preempted | Swapped) -> None:
        """Resume a preempted branch, from its KV or from its tokens. One of several becomes a request."""
        branch = outcome.job.branch
        assert list(outcome.token_ids) == request.prompt + request.answers[branch]
        places = self.swaps.pop(outcome.job, [])
        if branch in request.cancelled:
            self._end(request, branch, "cancelled")
            return
        attempt = request.attempt + 1
        if len(request.branches) > 1:
            name, answers = f"{request.name}#{branch}", {branch: request.answers[branch]}
            self.requests[name] = Request(name, request.prompt, request.max_tokens, [branch], answers=answers)
            self._end(request, branch, "preempted")
            request, attempt = self.requests[name], 0
        if isinstance(outcome, Swapped):
            self._resume(request, attempt, places)
        else:
            self._prefill(request, attempt)

    def _resume(self, request: Request, attempt: int, places: list[int]) -> None:
        """Have a swapped request decoded from the KV in the pool, without computing any of it."""
        kv = kv_of(request.tokens)[:-1]
        assert len(places) == -(-len(kv) // BLOCK)
        for index, place in enumerate(places):
            expected = kv[index * BLOCK : (index + 1) * BLOCK]
            assert self.pool[place][: len(expected)] == expected
        request.attempt = attempt
        self.on_rank[request.name] = self.decode
        self._arrive(request, DECODE, load=places, offers=True, branch=request.branches[0])

    def _prefilled(self, request: Request, done: Prefilled) -> None:
        tokens = request.prompt + (request.answers[request.branches[0]] if len(request.branches) == 1 else [])
        kv = kv_of(tokens)
        stored = len(tokens) - (len(request.branches) == 1 and done.finishes[0] != "stop")
        for index, place in enumerate(request.places):
            expected = kv[index * BLOCK : min((index + 1) * BLOCK, stored)]
            assert self.pool[place][: len(expected)] == expected
            if stored >= (index + 1) * BLOCK:
                self.known.setdefault(tuple(tokens[: (index + 1) * BLOCK]), place)
        for branch, finish in zip(request.branches, done.finishes):
            if finish or branch in request.cancelled:
                self._end(request, branch, finish or "cancelled")
        if not request.left:
            return
        self.on_rank[request.name] = self.decode
        answers = [(branch, request.answers[branch]) for branch in request.left]
        if len(request.branches) == 1:
            answers = []
        branch = request.branches[0]
        self._arrive(request, DECODE, load=request.places, offers=True, answers=answers, branch=branch)

    def _offered(self, rank: Rank, saved: Saved) -> None:
        places = [self._place() if self.rng.random() < 0.7 else None for _ in saved.blocks]
        for place, block in zip(places, saved.blocks):
            request = self.requests[block.job.request_id]
            tokens = request.prompt + request.answers[block.job.branch]
            prefix = tokens[: (block.index + 1) * BLOCK]
            assert tuple(prefix[-BLOCK:]) == tuple(block.token_ids)
            if place is not None:
                self.offers[place] = tuple(prefix)
        self._hear(rank, rank.tell(Granted(saved.put, places)))

    def _put(self, put: PutFinished) -> None:
        for place in put.places:
            prefix = self.offers.pop(place)  # type: ignore[arg-type]
            if not put.problem:
                assert self.pool[place] == kv_of(prefix)[-BLOCK:]  # type: ignore[index]
                self.known.setdefault(prefix, place)  # type: ignore[arg-type]

    def check(self) -> None:
        """What must hold at the end."""
        for rank in self.ranks:
            rank.assert_idle()
        for request in self.requests.values():
            assert not request.left
            for branch, end in request.ends.items():
                answer, expected = request.answers[branch], request.expected(branch)
                if end in ("failed", "cancelled", "preempted"):
                    assert answer == expected[: len(answer)]
                else:
                    assert answer == expected, (request.name, branch)
