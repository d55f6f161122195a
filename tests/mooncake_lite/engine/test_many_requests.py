"""Hundreds of requests on one rank with few pages: right answers, and nothing is left behind."""

from __future__ import annotations

import functools
import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model
from scheduler.instance import Limits
from tests.mooncake_lite.engine.exact import assert_answers
from tests.mooncake_lite.engine.examples import a_random
from tests.mooncake_lite.engine.one_rank import OneRank, go_on

REQUESTS = {"radix": 500, "hash": 150}
"""In `make test`; `make soak` asks 500 of both, other ones each time."""

AT_ONCE = 12
NUM_PAGES = 24
"""384 tokens: the longest request with four answers needs 20 pages."""

LIMITS = Limits(96, sequences=12, prefills=3)
GROWTH_BYTES = {"scheduler": 10_000, "mooncake_lite/engine": 100_000}
"""What the last third of the requests may leave behind in each part: 60 B a request in the books. Torch keeps
some 40,000 B of small objects that it uses again."""


pytestmark = pytest.mark.usefixtures("one_thread")


class Clients:
    """Ask at random times, and give up some requests and some branches."""

    def __init__(self, rank: OneRank, chosen: random.Random) -> None:
        self.rank, self.chosen = rank, chosen
        self.bodies = [[chosen.randrange(3, 199) for _ in range(130)] for _ in range(12)]
        self.asked = 0

    def until(self, asked: int) -> None:
        """Ask until so many requests were asked, and wait until all of them have ended."""
        rank, chosen = self.rank, self.chosen
        while self.asked < asked or rank.state.busy:
            while self.asked < asked and len(rank.state.tasks) < AT_ONCE:
                self._ask()
            rank.step()
            if chosen.random() < 0.06:
                self._give_up()
            if chosen.random() < 0.05:
                rank.state.check()

    def _ask(self) -> None:
        chosen = self.chosen
        body = chosen.choice(self.bodies)
        prompt = body[: chosen.choice([1, 15, 16, 17, 64, 65, 128, 130])]
        if chosen.random() < 0.3:  # its own end
            prompt = [*prompt, *(chosen.randrange(3, 199) for _ in range(chosen.randint(1, 20)))]
        greedy = chosen.random() < 0.4
        sampling = Sampling(0.0) if greedy else Sampling(0.9, top_k=chosen.choice([0, 20]), seed=self.asked)
        n = chosen.choice([1, 1, 1, 1, 2, 3, 4])
        self.rank.ask(str(self.asked), prompt, sampling, chosen.randint(1, 24), n)
        self.asked += 1

    def _give_up(self) -> None:
        tasks = list(self.rank.state.tasks.values())
        if tasks:
            task = self.chosen.choice(tasks)
            alone = self.chosen.random() < 0.5
            name = task.id.request_id.partition("#")[0]
            self.rank.cancel(name, self.chosen.choice(task.branches) if alone else None)


def left_behind(clients: Clients, requests: int) -> dict[str, int]:
    """Ask all requests. Returns the bytes that the last third of them has left behind, by part."""
    clients.until(requests * 2 // 3)
    clients.rank.forget()
    tracemalloc.start()
    try:
        clients.until(requests)
        clients.rank.forget()
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/tests/*")])
    finally:
        tracemalloc.stop()
    found = {part: snapshot.filter_traces([tracemalloc.Filter(True, f"*/{part}/*")]) for part in GROWTH_BYTES}
    return {part: sum(trace.size for trace in some.traces) for part, some in found.items()}


@pytest.mark.parametrize("sharing", list(REQUESTS))
def test_hundreds_of_requests_with_few_pages_are_answered_right_and_leave_nothing_behind(
    sharing: str, model: Model, oracle_and_folder: tuple[Any, Path], soak: int
) -> None:
    rank = OneRank(model, NUM_PAGES, LIMITS, sharing)
    clients = Clients(rank, a_random(soak))
    grown = left_behind(clients, REQUESTS[sharing] if soak == 1 else max(REQUESTS.values()))
    assert not {part: grew for part, grew in grown.items() if grew > GROWTH_BYTES[part]}
    rank.assert_at_rest()
    assert len(rank.state.pages.free) == NUM_PAGES, "a forgotten page is not free"
    for kind in ("preempted", "evicted", "shared", "copied", "mixed", "cancelled", "finished"):
        assert rank.seen[kind] > 10, f"{kind}: {rank.seen}"

    assert_answers(oracle_and_folder[0], rank.cases(), functools.partial(go_on, model))
