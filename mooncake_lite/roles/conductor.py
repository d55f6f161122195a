"""The conductor role (rank 0): everything that is decided about a request goes through here.

Owns the store's directory (where each KV object lies) and drives the scheduling policy (where each request
goes) with messages as events and one clock. It touches no KV and no tokens' meaning; `requests.py` beside it
holds what it knows of one request. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import scheduler
from mooncake_lite import messages as m
from mooncake_lite.config import ServeConfig
from mooncake_lite.roles.cluster_metrics import ClusterMetrics
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.requests import RequestRecord
from store.directory import Directory
from store.errors import PoolFull
from store.keys import PrefixChain, block_digests
from transport.channel import Hub

LEASE_S = 3600.0
"""A request's lease on its blocks ends when its KV has been read; this bound is for our own bugs."""

TICK_S = 0.1


class ConductorRole:
    """Messages in, messages out; `run` is the loop.

    hub        the bound channel that every other process speaks to
    directory  the pool's truth
    members    who has to be there, and who is
    """

    def __init__(
        self,
        config: ServeConfig,
        hub: Hub,
        directory: Directory,
        members: Members,
        must_stop: Callable[[], str | None],
    ) -> None:
        self.config = config
        self.hub = hub
        self.directory = directory
        self.members = members
        self.policy = scheduler.Conductor(config.max_queue)
        self.metrics = ClusterMetrics()
        self.records: dict[str, RequestRecord] = {}
        self._must_stop = must_stop
        self._loads: dict[int, RequestRecord] = {}
        self._next_load = 1
        self._grants: dict[int, str] = {}
        self._blocked = False
        self.stop: m.Stop | None = None
        self._handlers: dict[type, Callable[[str, m.Message], None]] = {
            m.GatewayHello: self._on_gateway_hello,
            m.RankHello: self._on_rank_hello,
            m.TierIndex: self._on_tier_index,
            m.Submit: self._on_submit,
            m.Cancel: self._on_cancel,
            m.BlocksLoaded: self._on_blocks_loaded,
            m.PrefillDone: self._on_prefill_done,
            m.PrefillFailed: self._on_prefill_failed,
            m.DecodeLoaded: self._on_decode_loaded,
            m.DecodeDone: self._on_decode_done,
            m.Preempted: self._on_preempted,
            m.PutWanted: self._on_put_wanted,
            m.PutEnded: self._on_put_ended,
            m.BlocksSaved: self._on_blocks_saved,
            m.TierEvicted: self._on_tier_evicted,
            m.MetricsRequest: self._on_metrics_request,
            m.RankStats: self._on_rank_stats,
            m.RankError: self._on_rank_error,
            m.Stop: self._on_stop,
        }  # fmt: skip

    def run(self) -> m.Stop:
        """Serve until somebody asks to stop, or a rank is lost; returns the Stop that ended it."""
        while self.stop is None:
            for peer, message in self.hub.receive(TICK_S):
                self._handlers[type(message)](peer, message)
            self._dispatch()
            reason = self._must_stop()
            if reason is not None and self.stop is None:
                self.stop = m.Stop(reason, 0.0, lost=True)
        return self.stop

    # ------------------------------------------------------------------------------ membership

    def _on_gateway_hello(self, peer: str, hello: m.GatewayHello) -> None:
        self.members.add_gateway(hello)
        if self.members.spans_hosts and len(hello.token_endpoints) < 2:
            self.hub.send(peer, m.OpenTokens(self.members.control_host))
        self._introduce()

    def _on_rank_hello(self, peer: str, hello: m.RankHello) -> None:
        self.members.add_rank(hello)
        slots = self.config.max_num_seqs if hello.role == "decode" else 0
        joined = scheduler.RankJoined(hello.rank, hello.role, hello.node, slots)
        self.policy.on(joined, time.monotonic())
        if hello.role == "store":
            self.directory.add_segment(hello.rank, hello.segment_bytes, hello.node)
        self._introduce()

    def _introduce(self) -> None:
        """Tell new ranks of gateways and the other way round; tell gateways when all are there."""
        for rank, at in self.members.new_introductions():
            self.hub.send(f"rank-{rank}", at)
        status = self.members.status()
        for gateway in self.members.gateways:
            self.hub.send(gateway, status)

    def _on_tier_index(self, peer: str, index: m.TierIndex) -> None:
        self.directory.add_tier_blocks(index.rank, index.keys, index.digests)
        self._feed_policy()

    def _on_rank_error(self, peer: str, error: m.RankError) -> None:
        role = self.config.role_of(error.rank)
        self.stop = m.Stop(f"rank {error.rank} ({role}) failed: {error.reason}", 0.0, lost=True)

    def _on_stop(self, peer: str, stop: m.Stop) -> None:
        self.stop = stop

    # ------------------------------------------------------------------------------ arrival

    def _on_submit(self, peer: str, submit: m.Submit) -> None:
        now = time.monotonic()
        if not self.members.ready:
            self.hub.send(peer, m.Rejected(submit.request_id, "the cluster is still starting", 5.0))
            return
        request = scheduler.Request(
            submit.request_id, len(submit.token_ids), tuple(submit.keys), self.config.block_size,
            submit.max_tokens,
        )  # fmt: skip
        began = time.perf_counter()
        decision = self.policy.decide(request, now)
        took = time.perf_counter() - began
        self.metrics.observe_decision(took)
        if isinstance(decision, scheduler.Rejection):
            self.metrics.count("requests_rejected_total")
            self.hub.send(peer, m.Rejected(submit.request_id, decision.reason, decision.retry_after_s))
            return
        record = RequestRecord(submit, now)
        record.spans.append(m.Span("decide", 0, took))
        self.records[submit.request_id] = record

    def _on_cancel(self, peer: str, cancel: m.Cancel) -> None:
        """A waiting request is dropped here; one that a rank works on, by that rank, which says so."""
        record = self.records.get(cancel.request_id)
        if record is None or record.cancelled:
            return
        record.cancelled = True
        if record.stage == "waiting":
            self._drop(record)
        elif record.stage == "prefill":
            self.hub.send(f"rank-{record.prefill}", cancel)
        elif record.stage == "decode":
            self.hub.send(f"rank-{record.decode}", cancel)

    def _drop(self, record: RequestRecord) -> None:
        """The request is over: its private objects and its leases go, whatever its stage."""
        now = time.monotonic()
        self.directory.revoke_owner(record.request_id, now)
        self.policy.on(scheduler.RequestDropped(record.request_id), now)
        self.records.pop(record.request_id, None)
        self._blocked = False
        self._feed_policy()

    # ------------------------------------------------------------------------------ dispatch

    def _dispatch(self) -> None:
        """Start every request whose turn it is, unless the pool was full and nothing was freed since."""
        if self._blocked or not self.members.ready:
            return
        now = time.monotonic()
        for placement in self.policy.next_dispatches(now):
            record = self.records[placement.request_id]
            try:
                self._start(record, placement, now)
            except PoolFull:
                self.directory.revoke_owner(record.request_id, now)
                self.policy.on(scheduler.RequestDeferred(record.request_id), now)
                self._blocked = True
        self._feed_policy()

    def _start(self, record: RequestRecord, placement: scheduler.Placement, now: float) -> None:
        """Lease what is reused, make room for what will be written. Raises PoolFull."""
        record.begin(placement, now)
        size, owner = self.config.block_size, record.request_id
        hits = self.directory.lookup(record.keys, record.digests, now)
        in_dram = [hit.object_id for hit in hits if hit.object_id is not None]
        self.directory.lease(owner, in_dram, now, now + LEASE_S)
        promoted: dict[int, list[tuple[int, m.BlockRef]]] = {}
        for index, hit in enumerate(hits):
            if hit.object_id is not None:
                record.load.append(m.BlockRef(hit.object_id, hit.rank, hit.offset, hit.nbytes))
                continue
            place = self.directory.allocate(
                owner, self.directory.layout.nbytes, now=now, rank=hit.rank, key=hit.key,
                digest=record.digests[index],
            )  # fmt: skip
            ref = m.BlockRef(place.object_id, place.rank, place.offset, place.nbytes)
            record.load.append(ref)
            promoted.setdefault(hit.rank, []).append((index, ref))
        record.count_cached(size, {index for group in promoted.values() for index, _ in group})
        self._make_room(record, now)
        if promoted:
            self._promote(record, promoted)
        else:
            self._send_prefill(record)

    def _make_room(self, record: RequestRecord, now: float) -> None:
        """Places for the KV that prefill will write: full blocks, then the tail. Raises PoolFull."""
        size, node = self.config.block_size, self.members.node_of(record.prefill)
        nbytes = self.directory.layout.nbytes
        for index in range(len(record.load), len(record.token_ids) // size):
            key = record.keys[index] if record.keys else None
            digest = record.digests[index] if record.keys else 0
            place = self.directory.allocate(
                record.request_id, nbytes, now=now, node=node, key=key, digest=digest
            )
            record.store.append(m.BlockRef(place.object_id, place.rank, place.offset, place.nbytes))
        if len(record.token_ids) % size:
            place = self.directory.allocate(record.request_id, nbytes, now=now, node=node)
            record.tail = m.BlockRef(place.object_id, place.rank, place.offset, place.nbytes)

    def _promote(self, record: RequestRecord, promoted: dict[int, list[tuple[int, m.BlockRef]]]) -> None:
        """Ask store ranks to read blocks from SSD into the DRAM just allocated."""
        record.stage = "promoting"
        for rank, group in promoted.items():
            number = self._next_load
            self._next_load += 1
            self._loads[number] = record
            record.awaiting[number] = [ref for _, ref in group]
            keys = [record.keys[index] for index, _ in group]
            digests = [record.digests[index] for index, _ in group]
            message = m.LoadBlocks(number, keys, digests, [ref for _, ref in group])
            self.hub.send(f"rank-{rank}", message)

    def _on_blocks_loaded(self, peer: str, loaded: m.BlocksLoaded) -> None:
        record = self._loads.pop(loaded.number)
        refs = record.awaiting.pop(loaded.number)
        now = time.monotonic()
        for ref, ok, sums in zip(refs, loaded.ok, loaded.checksums):
            if ok:
                self.directory.put_end(ref.object_id, sums, now)
            else:
                self.directory.put_revoke(ref.object_id, now)
                self.directory.drop_tier_block(ref.rank, record.key_of(ref))
                record.bad_blocks += 1
        nbytes = sum(ref.nbytes for ref, ok in zip(refs, loaded.ok) if ok)
        record.spans.append(m.Span("promote", ref.rank, loaded.seconds, nbytes, len(refs)))
        if record.awaiting:
            return
        if record.cancelled:
            self._drop(record)
        elif record.bad_blocks:
            self._restart(record, now)
        else:
            self._send_prefill(record)
        self._feed_policy()

    def _restart(self, record: RequestRecord, now: float) -> None:
        """A block from SSD was bad: give everything back and look up again; it is a miss now."""
        self.directory.revoke_owner(record.request_id, now)
        record.reset()
        self.policy.on(scheduler.RequestDeferred(record.request_id), now)

    def _send_prefill(self, record: RequestRecord) -> None:
        record.stage = "prefill"
        self.hub.send(f"rank-{record.prefill}", record.prefill_message())
        self.metrics.count("prefix_cache_queries_total", len(record.token_ids))
        for tier, tokens in record.cached.items():
            self.metrics.count("prefix_cache_hits_total", tokens, tier=tier)

    # ------------------------------------------------------------------------------ prefill -> decode

    def _on_prefill_done(self, peer: str, done: m.PrefillDone) -> None:
        record = self.records.get(done.request_id)
        if record is None:
            return
        now = time.monotonic()
        computed = len(record.token_ids) - sum(record.cached.values())
        self.policy.on(scheduler.PrefillEnded(done.request_id, computed, done.seconds), now)
        self._publish([ref.object_id for ref in record.store], done.checksums, now)
        record.first_token(done)
        if done.finish or record.cancelled:
            self._finish(record)
            return
        record.stage = "decode"
        salt = record.submit.salt if self.config.enable_prefix_caching else b""
        self.hub.send(f"rank-{record.decode}", record.decode_message(salt))

    def _publish(self, object_ids: list[int], checksums: list[list[int]], now: float) -> None:
        """Written objects become visible, and those that their store rank may keep are written behind."""
        saves: dict[int, m.SaveBlocks] = {}
        for object_id, sums in zip(object_ids, checksums):
            if not self.directory.put_end(object_id, sums, now):
                continue
            place = self.directory.object(object_id)
            if not self.directory.wants_save(object_id):
                continue
            save = saves.setdefault(place.rank, m.SaveBlocks([], [], [], []))
            save.refs.append(m.BlockRef(object_id, place.rank, place.offset, place.nbytes))
            save.keys.append(place.key or 0)
            save.digests.append(place.digest)
            save.checksums.append(sums)
        for rank, save in saves.items():
            self.hub.send(f"rank-{rank}", save)
        self._feed_policy()

    def _on_prefill_failed(self, peer: str, failed: m.PrefillFailed) -> None:
        record = self.records.get(failed.request_id)
        if record is None:
            return
        if not record.cancelled:
            self.hub.send(record.submit.gateway, m.Failed(failed.request_id, failed.reason))
        self._drop(record)

    def _on_decode_loaded(self, peer: str, loaded: m.DecodeLoaded) -> None:
        """The decode rank has all KV in its pages: the tail and the leases may go."""
        self.directory.revoke_owner(loaded.request_id, time.monotonic())
        self._blocked = False
        self._feed_policy()

    def _on_decode_done(self, peer: str, done: m.DecodeDone) -> None:
        record = self.records.get(done.request_id)
        if record is not None:
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        self.metrics.count("requests_finished_total")
        self._drop(record)

    def _on_preempted(self, peer: str, preempted: m.Preempted) -> None:
        """A decode rank had no page left: prefill prompt and answer again; most of it is in the pool."""
        record = self.records.get(preempted.request_id)
        if record is None:
            return
        if record.cancelled:
            self._drop(record)
            return
        now = time.monotonic()
        self.directory.revoke_owner(record.request_id, now)
        size = self.config.block_size
        record.extend(preempted.token_ids, preempted.answered)
        if record.submit.salt and self.config.enable_prefix_caching:
            last_key = record.keys[-1] if record.keys else None
            tokens = record.token_ids[len(record.keys) * size :]
            record.keys += PrefixChain(size, record.submit.salt, last_key=last_key).extend(tokens)
            record.digests += block_digests(tokens, size)
        resumed = scheduler.RequestResumed(
            record.request_id, len(record.token_ids), tuple(record.keys), size, record.submit.max_tokens
        )
        self.policy.on(resumed, now)
        self._blocked = False

    # ------------------------------------------------------------------------------ blocks from decode

    def _on_put_wanted(self, peer: str, wanted: m.PutWanted) -> None:
        """Places for blocks that became full while decoding; a full pool or a known key means no place."""
        now = time.monotonic()
        places: list[m.BlockRef | None] = []
        for index, (key, digest) in enumerate(zip(wanted.keys, wanted.digests)):
            owner = f"put/{wanted.rank}/{wanted.number}/{index}"
            if self.directory.has(key):
                places.append(None)
                continue
            try:
                place = self.directory.allocate(
                    owner, self.directory.layout.nbytes, now=now, node=self.members.node_of(wanted.rank),
                    key=key, digest=digest,
                )  # fmt: skip
            except PoolFull:
                places.append(None)
                continue
            self._grants[place.object_id] = owner
            places.append(m.BlockRef(place.object_id, place.rank, place.offset, place.nbytes))
        self.hub.send(peer, m.PutGranted(wanted.number, places))
        self._feed_policy()

    def _on_put_ended(self, peer: str, ended: m.PutEnded) -> None:
        now = time.monotonic()
        self._publish(ended.object_ids, ended.checksums, now)
        for object_id in ended.object_ids:
            self.directory.revoke_owner(self._grants.pop(object_id), now)
        self._blocked = False
        self._feed_policy()

    # ------------------------------------------------------------------------------ the SSD tier

    def _on_blocks_saved(self, peer: str, saved: m.BlocksSaved) -> None:
        now = time.monotonic()
        if saved.state == "written":
            self.directory.saved(saved.keys, now)
        elif saved.state == "durable":
            self.directory.durable(saved.rank, saved.keys, now)
        else:
            self.directory.dropped(saved.keys, now)
        self._blocked = False
        self._feed_policy()

    def _on_tier_evicted(self, peer: str, evicted: m.TierEvicted) -> None:
        self.directory.tier_evicted(evicted.rank, evicted.keys)
        self._feed_policy()

    def _feed_policy(self) -> None:
        """The scheduler's index lives on the directory's events alone."""
        now = time.monotonic()
        for event in self.directory.drain_events():
            kind = scheduler.BlockStored if event.kind == "stored" else scheduler.BlockRemoved
            self.policy.on(kind(event.key, event.rank, event.tier), now)

    # ------------------------------------------------------------------------------ metrics

    def _on_metrics_request(self, peer: str, request: m.MetricsRequest) -> None:
        gauges = {
            "num_requests_waiting": self.policy.num_waiting,
            "num_requests_running": self.policy.num_running,
        }
        samples = self.metrics.samples(gauges, self.directory.stats(), self.hub.counters.as_dict())
        self.hub.send(peer, m.MetricsReply(request.number, samples))

    def _on_rank_stats(self, peer: str, stats: m.RankStats) -> None:
        self.metrics.from_rank(stats)
