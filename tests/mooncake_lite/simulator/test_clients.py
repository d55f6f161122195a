"""Clients of a simulated cluster: which tokens they take, and when they have seen them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.workload import Request

pytestmark = pytest.mark.quick


def one_client(admission: str) -> tuple[Clients, Any]:
    """A client that waits for an answer of two tokens, and its world, which it has sent `told`."""
    request = Request("a", [0] * 9, [], [], 2, 2)
    told = list[Any]()
    world: Any = SimpleNamespace(
        requests={"a": request}, records=[], clock=Clock(), tell=told.append, told=told,
        from_clients=told.append,
        shape=SimpleNamespace(
            config=SimpleNamespace(admission=admission), layout=SimpleNamespace(block_tokens=4)
        ),
    )  # fmt: skip
    source: Any = SimpleNamespace(num_requests=0)
    return Clients(world, source), world


def tokens(index: int, attempt: int = 1) -> m.Tokens:
    return m.Tokens("a", index, [0], "length" if index else None, attempt=attempt)


def test_tokens_that_were_withheld_are_seen_with_the_release_and_later_ones_as_they_come() -> None:
    clients, world = one_client("after-prefill")
    clients.on_tokens(tokens(0), [1.0])
    world.clock.at(2.0, lambda: clients.on(fx.Release("a")))
    world.clock.step()
    clients.on_tokens(tokens(1), [3.0])
    clients.on(fx.Forget("a", "finished"))
    assert [list(one.token_times_s) for one in world.records] == [[2.0, 3.0]]
    assert world.told == [ev.AnswerReceived("a", 0)]


def test_after_a_recall_a_client_takes_tokens_of_later_attempts_alone() -> None:
    clients, world = one_client("none")
    clients.on_tokens(tokens(0), [1.0])
    clients.on_recall(fx.Recall("a", 1, [0], "rank 2 is lost"))
    assert world.told == [m.Report(ev.Recalled("a", 1, [ev.AnswerSoFar(0, 1, False, [], [])]), [[0]])]
    clients.on_tokens(tokens(1), [2.0])
    clients.on_tokens(tokens(1, attempt=2), [3.0])
    assert world.requests["a"].token_times_s == [1.0, 3.0]


@pytest.mark.parametrize(
    ("effect", "cause"),
    [
        (fx.Fail("a", "4 ranks were lost", "ranks_lost"), "ranks_lost"),
        (fx.Fail("a", "rank 7 was silent for 9.5 s"), "rank N was silent for N s"),
        (fx.Reject("a", "TTFT would be 1,024.5 ms", 1.0), "TTFT would be N ms"),
    ],
)
def test_a_request_that_was_not_served_has_a_cause_that_others_share(effect: Any, cause: str) -> None:
    clients, world = one_client("none")
    clients.on(effect)
    clients.on(fx.Forget("a", "failed"))
    assert [one.cause for one in world.records] == [cause]
