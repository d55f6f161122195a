"""Play a seeded history over State, a placement policy and admission; print every answer.

Run by test_placement.py in processes of its own: `python -m tests.scheduler.history`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import scheduler as s
from scheduler.admission import BoundedQueue
from tests.scheduler.cluster import BLOCK_TOKENS, POLICY, cluster, request

STEPS = 400


def history(seed: int) -> Iterator[object]:
    """Yield each answer of arrivals, starts, deferrals, ends, cancels and changed blocks."""
    rng = random.Random(seed)
    state = cluster(prefill=5, decode=3, slots=4, max_queue=12)
    names: list[str] = []
    for step in range(STEPS):
        for _ in range(2):
            change = rng.choice([state.index.stored, state.index.stored, state.index.removed])
            change(rng.randrange(12), rng.choice([21, 22]), rng.choice(["dram", "ssd"]))
        first = rng.randrange(8)
        keys = tuple(range(first, first + rng.randrange(6)))
        wanted = request(
            f"r{step}", len(keys) * BLOCK_TOKENS + rng.randrange(1, 64), keys, rng.uniform(0.1, 3.0)
        )
        refused = BoundedQueue().on_arrival(state, wanted, float(step))
        yield refused
        if refused is None:
            state.wait_in_line(wanted, float(step))
            names.append(wanted.request_id)
        while (head := state.held.head()) is not None:
            choice = s.choose(POLICY, state, head, float(step))
            yield choice
            if not isinstance(choice, s.Placement):
                break
            state.place(head, choice, float(step))
        while (name := state.startable()) is not None:
            yield name
            if rng.random() < 0.8:
                state.start(name, float(step))
            else:
                state.defer(name, float(step))
        for name in state.deferred:
            state.retry(name)
        running = [name for one in state.prefills.values() for name in one.running]
        for name in running[: rng.randrange(4)]:
            state.costs.measured_prefill(
                state.placement_of(name).prefill, rng.randrange(600), 0, rng.random()
            )
            state.end_prefill(name, float(step))
        for _ in range(rng.choice([0, 0, 1, 2])):
            state.forget(rng.choice([name for name in names if name in state] or ["none"]), float(step))
        state.check()


if __name__ == "__main__":
    for answer in history(seed=3):
        print(answer)
