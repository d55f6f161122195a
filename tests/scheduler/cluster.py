"""States and requests that the tests of this folder start from."""

from __future__ import annotations

import scheduler as s
from scheduler.placement import POLICIES

BLOCK_TOKENS = 64
POLICY = POLICIES["local-cache"]()
"""Of tests that are not about a policy. At the guessed rate its scores are tokens times 5 ms."""


NO_TERMS = s.Terms(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0.0)


def runs(index: s.PrefixIndex) -> list[tuple[int, ...]]:
    """The keys of each run."""
    for run in {id(run): run for run in index._run_of.values() if run.gone}.values():
        index._tidy(run)
    return [tuple(run) for key, run in index._run_of.items() if run[0] == key]


def choose(state: s.State, wanted: s.Request, now: float) -> s.Placement | s.Wait | s.Rejection:
    """Choose a place."""
    return s.choose(POLICY, state, wanted, now)


def cluster(prefill: int = 1, decode: int = 1, slots: int = 4, max_queue: int = 8) -> s.State:
    """Prefill instances 1.. (one slot each), decode instances 11.., holders 21, 22; odd ones on node 0."""
    state = s.State(max_queue)
    for i in range(prefill):
        state.add_instance(1 + i, i % 2, ["prefill"], 1)
    for i in range(decode):
        state.add_instance(11 + i, i % 2, ["decode"], slots)
    state.index.add_holder(21, 0)
    state.index.add_holder(22, 1)
    return state


def request(
    name: str, tokens: int = 640, keys: tuple[int, ...] = (), wait_limit_s: float = 600.0, n: int = 1
) -> s.Request:
    return s.Request(name, tokens, keys, BLOCK_TOKENS, 16, n=n, wait_limit_s=wait_limit_s)


def placed(
    state: s.State, name: str, tokens: int = 640, keys: tuple[int, ...] = (), n: int = 1
) -> s.Placement:
    """Choose for a request and put it into the books."""
    wanted = request(name, tokens, keys, n=n)
    placement = choose(state, wanted, 0.0)
    assert isinstance(placement, s.Placement)
    state.place(wanted, placement, 0.0)
    return placement


def started(state: s.State) -> list[str]:
    """Start every request whose turn it is."""
    names = []
    while (name := state.startable()) is not None:
        state.start(name, 0.0)
        names.append(name)
    return names
