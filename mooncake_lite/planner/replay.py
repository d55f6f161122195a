"""A replay of the queues of a cluster: where each request waits, for a tenth of what a simulation costs.

Policies, costs and copies of hot blocks are the live ones, links and passes those of the simulator. Left out
are messages one by one, leases, staging memory, admission, preemption, and the blocks that answers fill. The
simulator has all of it, and is what this is compared with. Explained in
docs/explain/planning.md.

    arrive -> [queue] -> load prefix, pass, store -> [queue] -> load -> steps of a running batch
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.planner.batch import Batch
from mooncake_lite.planner.jobs import prompt_load
from mooncake_lite.planner.pool import Pool
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.traces import Trace
from scheduler.costs import Costs
from scheduler.flows import Flows
from scheduler.hot_spots import HotSpots
from scheduler.placement import COPYING, POLICIES
from scheduler.placement.kvcache_centric import THRESHOLD
from store.objects import BlockRef


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of each request, in the order of arrival; seconds as its client sees them.

    cached      tokens of each prompt that were not computed
    far_bytes   that went between nodes; context: the most tokens that a node decoded with at once
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    tbt_s: np.ndarray
    cached: np.ndarray
    far_bytes: int
    context: int


@dataclass(slots=True)
class _Node:
    """A node that prefills: requests that wait, with their predicted seconds; when it is free; its stores."""

    waiting: deque[tuple[int, bool, float]]
    busy: bool = False
    storing: int = 0
    ends_s: float = 0.0
    stored: Action | None = None


def replay(cluster: Cluster, trace: Trace) -> Replayed:
    """Replay a trace on a cluster of mode pooled with one store on each node that prefills."""
    run = _Replay(cluster, trace)
    while run.clock.step():
        pass
    return run.result()


class _Replay:
    def __init__(self, cluster: Cluster, trace: Trace) -> None:
        self.clock, self._requests = Clock(), trace.requests
        self._size, self._token_bytes = trace.block_tokens, cluster.layout.nbytes // trace.block_tokens
        self._hardware: Any = cluster.setting(TraceSource(trace), 0).hardware(self.clock)
        self._costs, self._over = Costs(cluster.costs), cluster.overheads
        self._policy: Any = POLICIES[cluster.policy]()
        self._groups = min(GROUPS, cluster.layout.layers)
        self._hot = HotSpots(THRESHOLD) if cluster.policy in COPYING else None
        self._tokens = [one.input_length for one in trace.requests]
        self._answers = [max(1, one.output_length) for one in trace.requests]
        self._ids = [one.hash_ids[: one.input_length // self._size] for one in trace.requests]
        count, decodes = len(self._tokens), cluster.nodes["decode"]
        self._nodes = [_Node(deque()) for _ in range(cluster.nodes["prefill"])]
        self._flows = Flows()
        self._ranks = np.arange(1, 1 + len(self._nodes))
        together = cluster.together
        self._home = [0 if together else number for number in range(len(self._nodes))]
        self._pool = Pool(len(set(self._home)), cluster.node_blocks * (len(self._nodes) if together else 1))
        self._batches = [
            Batch(
                self.clock, cluster.costs.decode, self._over.step_s,
                partial(self._load_for_decode, len(self._nodes) + number),
                partial(self._loaded_for_decode, len(self._nodes) + number), self._tokens, self._answers,
            )
            for number in range(decodes)
        ]  # fmt: skip
        self._first_s, self._cached = np.zeros(count), np.zeros(count, int)
        self._of = [(0, 0)] * count
        self._began_s, self._seconds = [0.0] * len(self._nodes), [0.0] * len(self._nodes)
        for number, request in enumerate(trace.requests):
            self.clock.at(request.timestamp / 1e3 + 2 * self._over.message_s, partial(self._arrive, number))

    # ------------------------------------------------------------------------------ prefill

    def _arrive(self, request: int) -> None:
        """Place a request, and begin with it if its node is free."""
        view = _View(self, request)
        ranked = self._policy.rank(view)
        node = int(np.argmin(ranked.score))
        used = int(ranked.reused[node] if ranked.reused.ndim else ranked.reused)
        decode = int(np.argmin([batch.step_s(self._tokens[request]) for batch in self._batches]))
        self._of[request] = node, decode
        fetches = bool(ranked.fetch[node] if ranked.fetch.ndim else ranked.fetch)
        if self._answers[request] > 1:
            self._batches[decode].place(request)
        self._nodes[node].waiting.append((request, fetches, float(view.prefill_s(float(used))[node])))
        self._next(node)

    def _next(self, number: int) -> None:
        """Begin the next prompt of a node, if it is free."""
        node = self._nodes[number]
        if node.busy or not node.waiting:
            return
        request, fetches, predicted_s = node.waiting.popleft()
        node.busy, node.ends_s = True, self.clock.now + predicted_s
        ids, tokens = self._ids[request], self._tokens[request]
        best, near = self._pool.leading(ids)
        used = best if fetches else near.get(self._home[number], 0)
        self._cached[request] = cached = min(used * self._size, tokens - 1)
        seconds = self._hardware.pass_s(0, prompt_load(tokens, cached)) + self._over.step_s
        self._began_s[number], self._seconds[number] = self.clock.now, seconds
        if not used:
            self.clock.after(seconds, partial(self._computed, request, False))
        elif node.storing:  # the prefix needs the memory out of which blocks leave
            node.stored = partial(self._load, request, used, seconds)
        else:
            self._load(request, used, seconds)

    def _load(self, request: int, used: int, seconds: float) -> None:
        """Load a prefix by layers beside its pass."""
        number, _ = self._of[request]
        home, ids = self._home[number], self._ids[request][:used]
        if self._hot is not None:
            near = [node == home for node in self._pool.places(ids, home)]
            if hot := self._hot.on_read(number, ids, near, self.clock.now):
                self._copy(number, hot)
        refs = self._refs(ids, home)
        self._flows.begin(str(request), [ref.rank - 1 for ref in refs if ref.rank - 1 != home])
        self._pool.used(ids, home)
        ends_s = self.clock.now + seconds

        def loaded() -> None:
            last_s = self.clock.now + seconds / self._groups
            self.clock.at(max(ends_s, last_s), partial(self._computed, request, True))

        self._hardware.read(1 + number, refs, loaded, (1 - 2 / self._groups) * seconds)

    def _copy(self, number: int, ids: list[int]) -> None:
        """Copy blocks that a node reads again and again into its DRAM."""
        copied = partial(self._pool.copy, self._home[number], ids)
        self._hardware.copy(1 + number, self._refs(ids, self._home[number]), copied)

    def _computed(self, request: int, loaded: bool) -> None:
        """Have the first token, and store what is new: most has left beside a pass that loaded nothing."""
        number, _ = self._of[request]
        self._first_s[request] = self.clock.now
        self._nodes[number].storing += 1
        tokens, cached = self._tokens[request], int(self._cached[request])
        took_s = self.clock.now - self._began_s[number]
        self._costs.measured_slot(tokens, cached, self._seconds[number], took_s)
        new = (tokens - cached) * self._token_bytes
        left = new if loaded else new // self._groups
        refs = [BlockRef(0, 1 + number, 0, left)]
        self._hardware.write(1 + number, refs, partial(self._stored, request))
        self.clock.after(2 * self._over.message_s, partial(self._free, number))

    def _free(self, number: int) -> None:
        self._nodes[number].busy = False
        self._next(number)

    def _stored(self, request: int) -> None:
        """Have all blocks of a prompt in the pool: decode reads them, and others may once that is known."""
        number, decode = self._of[request]
        node = self._nodes[number]
        node.storing -= 1
        self._flows.end(str(request))
        self.clock.after(2 * self._over.message_s, partial(self._known, request))
        if node.stored is not None and not node.storing:
            go_on, node.stored = node.stored, None
            go_on()
        if self._answers[request] > 1:
            self.clock.after(4 * self._over.message_s, partial(self._batches[decode].on_stored, request))

    def _known(self, request: int) -> None:
        """Let others use the blocks of a prompt: the conductor was told, and its next order has arrived.

        So the prompt that follows at once on the same node never finds them.
        """
        home, ids = self._home[self._of[request][0]], self._ids[request]
        self._pool.put(home, ids)
        self._pool.used(ids, home)

    # ------------------------------------------------------------------------------ decode

    def _load_for_decode(self, node: int, request: int, loaded: Action) -> None:
        """Read the KV of a prompt; what follows its last full block is where it was computed."""
        ids, (own, _) = self._ids[request], self._of[request]
        refs = self._refs(ids, self._home[own])
        rest = self._tokens[request] - len(ids) * self._size
        self._hardware.read(1 + node, [*refs, BlockRef(0, 1 + own, 0, rest * self._token_bytes)], loaded)

    def _loaded_for_decode(self, node: int, request: int, seconds: float) -> None:
        self._costs.measured_fetch(1 + node, 0, self._tokens[request] * self._token_bytes, seconds)

    def _refs(self, ids: Any, node: int) -> list[BlockRef]:
        nbytes = self._size * self._token_bytes
        return [BlockRef(0, 1 + at, 0, nbytes * n) for at, n in self._pool.sources(ids, node).items()]

    def result(self) -> Replayed:
        """Return what became of the requests."""
        arrived_s = np.array([one.timestamp / 1e3 for one in self._requests])
        tpot_s, tbt_s = np.zeros(len(arrived_s)), np.zeros(len(arrived_s))
        ends = [batch.ends_s() for batch in self._batches]
        for number, count in enumerate(self._answers):
            _, decode = self._of[number]
            begin = self._batches[decode].begun.get(number)
            if begin is not None:
                gaps = np.diff(ends[decode][begin : begin + count - 1], prepend=self._first_s[number])
                fast = len(gaps) - -(-len(gaps) // 10)
                tpot_s[number], tbt_s[number] = gaps.mean(), np.partition(gaps, fast)[fast:].mean()
        ttft_s = self._first_s - arrived_s + self._over.request_s
        far = self._hardware.bytes_moved()["far"]
        return Replayed(
            ttft_s, tpot_s, tbt_s, self._cached, far, max(one.most_context for one in self._batches)
        )


class _View:
    """What a policy sees of a replay: `scheduler.placement.view.View`, as far as the policies ask for it."""

    def __init__(self, run: _Replay, request: int) -> None:
        self._run, self._tokens, self._size = run, run._tokens[request], run._size
        ids, nodes, now = run._ids[request], run._nodes, run.clock.now
        best, near = run._pool.leading(ids)
        self.best, self.near = float(best), np.array([float(near.get(home, 0)) for home in run._home])
        self.rows = np.arange(len(nodes))
        waiting_s = run._costs.slot_s(
            run._ranks, np.array([sum(s for *_, s in one.waiting) for one in nodes])
        )
        self.queue_s = waiting_s + [max(0.0, one.ends_s - now) * one.busy for one in nodes]
        self.pool: Any = SimpleNamespace(ssd_blocks=0, by_node=near)
        self.state = SimpleNamespace(num_placed=request)
        self._request = request

    def prefill_s(self, reused: Any) -> Any:
        """Return the predicted seconds of the prompt without its first blocks."""
        cached = np.minimum(reused * self._size, self._tokens - 1)
        return self._run._costs.prefill_s(self._run._ranks, self._tokens, cached)

    @property
    def fetch_s(self) -> Any:
        """Return the predicted seconds to move the rest of the longest prefix to each node."""
        moved = np.maximum(self.best - self.near, 0) * self._size * self._run._token_bytes
        return self._run._costs.fetch_s(self._run._ranks, 0, moved, self._run._flows.least(self.pool))

    def draw(self, what: str) -> int:
        """Return the number that the simulator's view draws for this request."""
        return xxh3_64_intdigest(f"{what} r{self._request + 1}".encode())
