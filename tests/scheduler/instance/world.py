"""A prefill rank, a decode rank and a pool, driven by a seeded generator: everything a planner can meet."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from scheduler.instance import DECODE, PREFILL, Granted, Limits
from scheduler.instance.outcomes import (
    Ended,
    Failed,
    Outcome,
    Preempted,
    Prefilled,
    PutFinished,
    Saved,
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
    attempt: int = 0
    answer: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cancelled: bool = False
    end: str = ""

    def expected(self) -> list[int]:
        """The answer that a model without planner, pages or pool gives."""
        tokens = list(self.prompt)
        while len(tokens) - len(self.prompt) < self.max_tokens:
            token = choose(kv_of(tokens)[-1])
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
        }
        longest = 40 // PAGE + 6
        self.prefill = Rank(
            PREFILL,
            num_pages=longest + rng.choice([0, 40]),
            limits=Limits(rng.choice([5, 64]), prefills=rng.choice([1, 3]), chunked=rng.random() < 0.7),
            **common,
        )
        self.decode = Rank(DECODE, num_pages=longest + rng.choice([0, 10, 60]), **common)
        stem = [rng.randrange(50) for _ in range(24)]
        self.requests = {
            f"r{n}": Request(
                f"r{n}",
                stem[: rng.randrange(25)] + [rng.randrange(50) for _ in range(rng.randrange(1, 16))],
                rng.randrange(1, 12),
            )
            for n in range(requests)
        }
        self.on_rank: dict[str, Rank] = {}
        self.offers: dict[int, tuple[int, ...]] = {}
        self._next_place = 0

    def run(self) -> None:
        """Play until every request has ended and both ranks are idle."""
        to_come = list(self.requests.values())
        for turn in range(20_000):
            if to_come and self.rng.random() < 0.3:
                self._prefill(to_come.pop(), 0)
            for rank in (self.prefill, self.decode):
                busy, flying = rank.state.busy, rank.runner.flying
                step, said = rank.step(unchanged=turn % 7 == 0)
                late = max(rank.state.staging.free_from) > rank.now
                moves = flying or late or step.reads or step.puts or not step.only_waits
                assert moves or not busy, "the rank waits for nothing"
                self._hear(rank, said)
            if self.rng.random() < self.cancels:
                self._cancel(self.rng.choice(list(self.requests.values())))
            if not to_come and not self.on_rank and not (self.prefill.state.busy or self.decode.state.busy):
                return
        raise AssertionError("requests are left over")

    def _place(self) -> int:
        self._next_place += 1
        return self._next_place

    def _prefill(self, request: Request, attempt: int) -> None:
        request.attempt = attempt
        tokens = request.prompt + request.answer
        full = len(tokens) // BLOCK
        load: list[int] = []
        for index in range(full):
            place = self.known.get(tuple(tokens[: (index + 1) * BLOCK]))
            if place is None:
                break
            load.append(place)
        store = [self._place() for _ in range(-(-len(tokens) // BLOCK) - len(load))]
        request.places = load + store
        self.on_rank[request.name] = self.prefill
        self._arrive(request, PREFILL, load=load, store=store)

    def _arrive(self, request: Request, duty: str, **more: Any) -> None:
        self.on_rank[request.name].arrive(
            job(
                request.name,
                [duty],
                request.prompt + request.answer,
                attempt=request.attempt,
                answered=len(request.answer),
                max_tokens=request.max_tokens,
                stop_ids=frozenset({STOP}),
                **more,
            )
        )

    def _cancel(self, request: Request) -> None:
        rank = self.on_rank.get(request.name)
        if rank is not None:
            assert rank.cancel(request.name, request.attempt + 1) == []
            request.cancelled = True
            self._hear(rank, rank.cancel(request.name, request.attempt))

    def _end(self, request: Request, how: str) -> None:
        assert not request.end, f"{request.name} ends twice"
        request.end = how
        del self.on_rank[request.name]

    def _hear(self, rank: Rank, said: list[Outcome]) -> None:
        for outcome in said:
            if isinstance(outcome, Saved):
                self._offered(rank, outcome)
            elif isinstance(outcome, PutFinished):
                self._put(outcome)
            elif hasattr(outcome, "job"):
                request = self.requests[outcome.job[0]]
                assert outcome.job[1] == request.attempt
                assert self.on_rank[request.name] is rank
                self._heard(request, outcome)

    def _heard(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Token) and outcome.finish != "stop":
            assert outcome.index == len(request.answer)
            request.answer.append(outcome.token)
        elif isinstance(outcome, Prefilled):
            self._prefilled(request, outcome)
        elif isinstance(outcome, Ended):
            assert (outcome.finish == "cancelled") <= request.cancelled
            self._end(request, outcome.finish)
        elif isinstance(outcome, Failed):
            self._end(request, "failed")
        elif isinstance(outcome, Preempted):
            assert list(outcome.token_ids) == request.prompt + request.answer
            self._prefill(request, request.attempt + 1)

    def _prefilled(self, request: Request, done: Prefilled) -> None:
        tokens = request.prompt + request.answer
        kv = kv_of(tokens)
        done_tokens = len(tokens) - (done.finish != "stop")
        for index, place in enumerate(request.places):
            expected = kv[index * BLOCK : min((index + 1) * BLOCK, done_tokens)]
            assert self.pool[place][: len(expected)] == expected
            if done_tokens >= (index + 1) * BLOCK:
                self.known.setdefault(tuple(tokens[: (index + 1) * BLOCK]), place)
        if done.finish or request.cancelled:
            self._end(request, done.finish or "cancelled")
            return
        self.on_rank[request.name] = self.decode
        self._arrive(request, DECODE, load=request.places, offers=True, salt="s")

    def _offered(self, rank: Rank, saved: Saved) -> None:
        kept = saved.blocks
        places = [self._place() if self.rng.random() < 0.7 else None for _ in kept]
        for place, block in zip(places, kept):
            request = self.requests[block.job[0]]
            prefix = (request.prompt + request.answer)[: (block.index + 1) * BLOCK]
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
        self.prefill.assert_idle()
        self.decode.assert_idle()
        for request in self.requests.values():
            assert request.end
            if request.end not in ("failed", "cancelled"):
                assert request.answer == request.expected(), request.name
            else:
                assert request.answer == request.expected()[: len(request.answer)]
