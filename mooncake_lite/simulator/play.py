"""Plays requests on a simulated cluster until they have ended, and measures it.

Called by `experiment.py` and `cluster_command.py`. Nothing goes wrong but what `kills` names. Explained in
docs/explain/simulator.md.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from mooncake_lite.errors import ClusterError
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.outcome import Loads, Outcome
from mooncake_lite.simulator.workload import Source
from mooncake_lite.simulator.world import MOST_PASSES, World
from mooncake_lite.workloads.metrics import Record
from scheduler.instance import DECODE

READY_S = 0.01
"""Until it is looked again whether the cluster is ready."""

SAMPLE_S = 1.0
"""Time between two samples of the loads."""


class GivenUp(Exception):
    """A run was not played to its end. records: of the requests that have ended."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__("a run was given up")
        self.records = records


def play(
    cluster: Cluster,
    source: Source,
    seed: int,
    *,
    warm_up: float = 0.0,
    kills: Sequence[tuple[str, float]] = (),
    told: Callable[[int], None] | None = None,
    decided: Callable[[Sequence[Record], Iterable[float]], bool] | None = None,
) -> Outcome:
    """Play all requests of a source. Raises ClusterError when a mechanism was tried and never worked.

    warm_up   share of the requests, the first ones, that do not count
    kills     (role, seconds): a rank of this role dies then, the first one that lives
    told      is called with the number of requests that have ended, every SAMPLE_S of virtual time
    decided   likewise with what became of them, and the seconds that others have waited for a first token;
              GivenUp is raised once it holds
    """
    world = World(cluster.setting(source, seed), most_passes=1 if kills else MOST_PASSES)
    killed: list[tuple[str, float]] = []
    for kill in kills:
        world.clock.at(kill[1], partial(_kill, world, kill, killed))
    ranks = [rank for rank in world.ranks.values() if isinstance(rank, SimulatedRank)]
    decodes = [rank for rank in ranks if DECODE in rank.rank.state.duties]
    loads, state, keys = Loads(), world.control.state, list[int | None]()

    def sample() -> None:
        now = world.clock.now
        if world.ready:
            alive = [one for one in decodes if one.number not in world.dead]
            steps_s = [one.step_s for one in alive]
            loads.times_s.append(now)
            loads.prefill.append(float(np.mean(state.queue_s(now))) / cluster.ttft_s)
            loads.decode.append(float(np.mean(steps_s)) / cluster.tbt_s)
            loads.waiting.append(state.num_waiting)
            loads.decoding.append(sum(len(one.rank.state.running) for one in alive))
        if world.clients.all_sent and not keys:
            keys.extend(obj.key for obj in world.control.directory.visible_objects())
        if told is not None:
            told(len(world.records))
        if decided is not None:
            waiting = (now - one.sent_s for one in world.requests.values() if not one.token_times_s)
            if decided(world.records, waiting):
                raise GivenUp(world.records)
        if not world.clients.done:
            world.clock.after(SAMPLE_S, sample)

    world.clock.after(0.0, sample)
    with without_collector():
        world.run()
    tried = world.control.mechanisms
    why = {name: tried.reasons.get(name, "no reason known") for name in tried.broken}
    if why and not kills:
        words = ", ".join(f"all {name.replace('_', ' ')} failed ({reason})" for name, reason in why.items())
        raise ClusterError(f"the figures of this run mean nothing: {words}")
    machines = [rank.rank for rank in ranks]
    return Outcome.of(world.records, loads, warm_up, machines, world.hardware, keys, world.control, killed)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python from looking for cycles: a run makes millions of objects, and none of them are in one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _kill(world: World, kill: tuple[str, float], killed: list[tuple[str, float]]) -> None:
    """Kill the first rank with this role that lives, once the cluster is ready.

    Runs with kills have no leaps, so that no token is lost that was drawn before.
    """
    if not world.ready:
        world.clock.after(READY_S, partial(_kill, world, kill, killed))
        return
    alive = [rank for rank in world.shape.ranks(kill[0]) if rank not in world.dead]
    if len(alive) > 1:
        killed.append(kill)
        world.kill(alive[0])
