"""A replay of the queues of a cluster: where each request waits, for a tenth of what a simulation costs.

Policies, costs and copies of hot blocks are the live ones, links and passes those of the simulator. Left out
are messages one by one, leases, staging memory, admission, preemption, and the blocks that answers fill. The
simulator has all of it, and is what this is compared with. Explained in
docs/explain/planning.md.

    arrive -> [queue] -> load prefix, pass, store -> [queue] -> load -> steps of a running batch

In mode split a node finds prefixes in its own pages alone, and KV leaves for decode beside the pass.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.planner.batch import Batch
from mooncake_lite.planner.jobs import prompt_load
from mooncake_lite.planner.pool import Pages, Pool
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import without_collector
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.traces import Trace
from scheduler.costs import Costs
from scheduler.flows import Flows
from scheduler.hot_spots import HotSpots
from scheduler.placement import COPYING, POLICIES
from scheduler.placement.kvcache_centric import THRESHOLD
from store.objects import BlockRef

HALVES = 2
"""Of the staging memory of a node: so many groups of blocks leave it at once."""

_SECONDS = itemgetter(2)


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
    """A node that prefills.

    waiting   requests, whether each fetches a prefix, and its predicted seconds
    began_s, ends_s   of the prompt under way, the end as predicted; seconds: of its pass
    storing   groups of blocks that leave; stored: what waits for the last of them
    """

    waiting: deque[tuple[int, bool, float]]
    busy: bool = False
    storing: int = 0
    began_s: float = 0.0
    ends_s: float = 0.0
    seconds: float = 0.0
    stored: Action | None = None


def replay(cluster: Cluster, trace: Trace) -> Replayed:
    """Replay a trace on a cluster of mode split, or pooled with one store on each node that prefills."""
    run = _Replay(cluster, trace)
    with without_collector():
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
        self._direct, self._home = cluster.mode == "split", list(range(len(self._nodes)))
        if self._direct:
            self._pool: Pool = Pages(len(self._nodes) + decodes, cluster.kv_bytes // cluster.layout.nbytes)
        elif cluster.together:
            self._home = [0] * len(self._nodes)
            self._pool = Pool(1, cluster.node_blocks * len(self._nodes))
        else:
            self._pool = Pool(len(self._nodes), cluster.node_blocks)
        self._batches = [
            Batch(
                self.clock, cluster.costs.decode, self._over.step_s, partial(self._load_for_decode, node),
                partial(self._loaded_for_decode, node), self._tokens, self._answers,
            )
            for node in range(len(self._nodes), len(self._nodes) + decodes)
        ]  # fmt: skip
        self._first_s, self._cached = np.zeros(count), np.zeros(count, int)
        self._of = [(0, 0)] * count
        self._left = [0] * count  # groups of each prompt's blocks that have not been stored
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

    def _next(self, number: int, ended: bool = False) -> None:
        """Begin the next prompt of a node, if it is free. ended: the one before has ended now."""
        node = self._nodes[number]
        node.busy = node.busy and not ended
        if node.busy or not node.waiting:
            return
        request, fetches, predicted_s = node.waiting.popleft()
        node.busy, node.ends_s = True, self.clock.now + predicted_s
        ids, tokens = self._ids[request], self._tokens[request]
        best, near = self._pool.leading(ids)
        used = best if fetches else near.get(self._home[number], 0)
        if self._direct:  # blocks are shared whole, and the last token is computed
            used = min(used, (tokens - 1) // self._size)
        self._cached[request] = cached = min(used * self._size, tokens - 1)
        seconds = self._hardware.pass_s(0, prompt_load(tokens, cached)) + self._over.step_s
        node.began_s, node.seconds = self.clock.now, seconds
        if self._direct:
            self._pool.used(ids[:used], number)
            self._hand_over(request, node, seconds)
        elif not used:
            self.clock.after(seconds, partial(self._computed, request, self._new(request) // self._groups))
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
            if hot := self._hot.on_read(number, ids, near, self.clock.now):  # read again and again
                copied = partial(self._pool.copy, home, hot)
                self._hardware.copy(1 + number, self._refs(hot, home), copied)
        refs = self._refs(ids, home)
        self._flows.begin(str(request), [ref.rank - 1 for ref in refs if ref.rank - 1 != home])
        self._pool.used(ids, home)
        ends_s = self.clock.now + seconds

        def loaded() -> None:
            last_s = self.clock.now + seconds / self._groups
            self.clock.at(max(ends_s, last_s), partial(self._computed, request, self._new(request)))

        self._hardware.read(1 + number, refs, loaded, (1 - 2 / self._groups) * seconds)

    def _hand_over(self, request: int, node: _Node, seconds: float) -> None:
        """Write reused KV to the node that decodes, and new KV by layers beside its pass, given space."""
        new, reused = self._new(request), int(self._cached[request]) * self._token_bytes
        left = new + reused
        if reused and node.storing < HALVES:
            self._store(request, reused)
            left = new
        if node.storing < HALVES:
            self._store(request, new - new // self._groups, seconds)
            left -= new - new // self._groups
        self.clock.after(seconds, partial(self._computed, request, left))

    def _new(self, request: int) -> int:
        """Return the bytes of KV that a prompt computes; handed over are whole blocks."""
        tokens = self._tokens[request]
        if self._direct:
            tokens = -(-tokens // self._size) * self._size
        return int(tokens - self._cached[request]) * self._token_bytes

    def _computed(self, request: int, left: int) -> None:
        """Have the first token, and store what is left: most has left beside a pass that loaded nothing."""
        number, _ = self._of[request]
        node = self._nodes[number]
        self._first_s[request] = self.clock.now
        tokens, cached = self._tokens[request], int(self._cached[request])
        self._costs.measured_slot(tokens, cached, node.seconds, self.clock.now - node.began_s)
        if self._direct:
            self._pool.put(number, self._ids[request])
        self._store(request, left)
        self.clock.after(2 * self._over.message_s, partial(self._next, number, ended=True))

    def _store(self, request: int, nbytes: int, least_s: float = 0.0) -> None:
        """Write KV into the pool of the own node, or to the node that decodes."""
        number, decode = self._of[request]
        self._left[request] += 1
        self._nodes[number].storing += 1
        target = len(self._nodes) + decode if self._direct else number
        done = partial(self._stored, request)
        self._hardware.write(1 + number, [BlockRef(0, 1 + target, 0, nbytes)], done, least_s)

    def _stored(self, request: int) -> None:
        """Have all blocks of a prompt where decode reads them; others may once the conductor knows."""
        number, decode = self._of[request]
        node = self._nodes[number]
        node.storing -= 1
        self._left[request] -= 1
        if self._left[request] or not self._first_s[request]:
            return
        self._flows.end(str(request))
        if self._direct:
            self._pool.used(self._ids[request], number)
        else:
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
        if self._direct:  # it has taken all in; blocks in its own pages need no copy
            refs, own = [], node
            rest = self._tokens[request] - self._pool.leading(ids)[1].get(node, 0) * self._size
            self._pool.put(node, ids)
            self._pool.used(ids, node)
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
        far, context = self._hardware.bytes_moved()["far"], max(one.most_context for one in self._batches)
        return Replayed(ttft_s, tpot_s, tbt_s, self._cached, far, context)


class _View:
    """What a policy sees of a replay: `scheduler.placement.view.View`, as far as the policies ask for it."""

    def __init__(self, run: _Replay, request: int) -> None:
        self._run, self._tokens, self._size = run, run._tokens[request], run._size
        ids, nodes, now = run._ids[request], run._nodes, run.clock.now
        best, near = run._pool.leading(ids)
        self.best = 0.0 if run._direct else float(best)
        self.near = np.array([float(near.get(home, 0)) for home in run._home])
        self.rows = np.arange(len(nodes))
        waiting_s = np.array([sum(map(_SECONDS, one.waiting)) for one in nodes])
        left_s = [max(0.0, one.ends_s - now) * one.busy for one in nodes]
        self.queue_s = run._costs.slot_s(run._ranks, waiting_s) + left_s
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
