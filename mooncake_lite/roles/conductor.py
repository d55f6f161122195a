"""The conductor role (rank 0): everything that is decided about a request goes through here.

Owns the store's directory (where each KV object lies) and drives the scheduling policy (where each request
goes) with messages as events and one clock. It touches no KV and no tokens' meaning; `requests.py` beside it
holds what it knows of one request. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import scheduler
from mooncake_lite import messages as m
from mooncake_lite.config import ServeConfig
from mooncake_lite.roles.cluster_metrics import ClusterMetrics, segment_samples
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.pool import KVEvents, Pool
from mooncake_lite.roles.pool_queries import PoolQueries
from mooncake_lite.roles.replication import Replicator
from mooncake_lite.roles.requests import RequestRecord
from mooncake_lite.roles.room import Room
from store.directory import Directory
from store.errors import PoolFull
from store.keys import PrefixChain, block_digests
from transport.channel import Hub
from transport.errors import WireError

TICK_S = 0.1

PINNED_RETRY_S = 5.0
"""When a client may ask again that was refused because what is pinned leaves no room."""


class ConductorRole:
    """Messages in, messages out; `run` is the loop.

    hub        the bound channel that every other process speaks to
    directory  the pool's truth
    members    who has to be there, and who is
    events     for listeners outside, who want to know what the pool holds
    """

    def __init__(
        self,
        config: ServeConfig,
        hub: Hub,
        directory: Directory,
        members: Members,
        must_stop: Callable[[], str | None],
        events: KVEvents | None = None,
    ) -> None:
        self.config = config
        self.hub = hub
        self.directory = directory
        self.members = members
        self.policy = scheduler.Conductor(config.max_queue)
        self.room = Room(directory, members, config.block_size)
        self.pool = Pool(directory, self.policy, hub.send, events)
        self.replicator = Replicator(self.pool, members, hub.send)
        self.queries = PoolQueries(directory, members, hub.send)
        self.room.s_per_token = self.policy.prefill_s_per_token
        self.metrics = ClusterMetrics()
        self.records: dict[str, RequestRecord] = {}
        self._must_stop = must_stop
        self._loads: dict[int, tuple[RequestRecord, int]] = {}  # and whose tier is read
        self._next_load = 1
        self._blocked = False
        self.stop: m.Stop | None = None
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            m.GatewayHello: self._on_gateway_hello,
            m.RankHello: self._on_rank_hello,
            m.TierIndex: self._on_tier_index,
            m.Submit: self._on_submit,
            m.Cancel: self._on_cancel,
            m.BlocksLoaded: self._on_blocks_loaded,
            m.PrefillDone: self._on_prefill_done,
            m.RequestFailed: self._on_request_failed,
            m.DecodeLoaded: self._on_decode_loaded,
            m.DecodeDone: self._on_decode_done,
            m.Preempted: self._on_preempted,
            m.PutWanted: self._on_put_wanted,
            m.PutEnded: self._on_put_ended,
            m.BlocksSaved: self._on_blocks_saved,
            m.TierEvicted: self._on_tier_evicted,
            m.BlocksRemoved: self._on_blocks_removed,
            m.BlocksCopied: self._on_blocks_copied,
            m.PoolQuery: self._on_pool_query,
            m.BlocksChecked: lambda _, checked: self.queries.on_checked(checked, time.monotonic()),
            m.MetricsRequest: self._on_metrics_request,
            m.RankStats: self._on_rank_stats,
            m.RankError: self._on_rank_error,
            m.Stop: self._on_stop,
        }  # fmt: skip

    def run(self) -> m.Stop:
        """Serve until somebody asks to stop, or a rank is lost; returns the Stop that ended it."""
        while self.stop is None:
            self.step(self.hub.receive(TICK_S))
            reason = self._must_stop()
            if reason is not None and self.stop is None:
                self.stop = m.Stop(reason, 0.0, lost=True)
        return self.stop

    def step(self, received: list[tuple[str, m.Message]]) -> None:
        """Apply messages in their order, then start what may start now."""
        for peer, message in received:
            handler = self._handlers.get(type(message))
            if handler is not None:  # Stopped means something only after Stop
                handler(peer, message)
        if self.directory.expire(time.monotonic()):
            self._blocked = False
        self._dispatch()
        self.pool.serve()

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
            self.directory.add_segment(hello.rank, hello.segment_bytes, hello.node, tier=hello.tier)
        elif hello.segment_bytes:
            saver = self.members.keeper_of(hello.rank) if self.config.ssd_dir else None
            self.directory.add_segment(hello.rank, hello.segment_bytes, hello.node, saver=saver)
        self._introduce()

    def _introduce(self) -> None:
        """Tell new ranks of gateways and the other way round; tell gateways when all are there."""
        for rank, at in self.members.new_introductions():
            self.hub.send(f"rank-{rank}", at)
        status = self.members.status()
        for gateway in self.members.gateways:
            self.hub.send(gateway, status)

    def _on_tier_index(self, peer: str, index: m.TierIndex) -> None:
        self.pool.on_tier_index(index)
        if index.last:
            self.members.add_index(index.rank)
            self._introduce()

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
        elif record.stage in ("loading", "decode"):
            self.hub.send(f"rank-{record.decode}", cancel)

    def _drop(self, record: RequestRecord) -> None:
        """The request is over: its private objects and its leases go, whatever its stage."""
        now = time.monotonic()
        self.directory.revoke_owner(record.request_id, now)
        self.policy.on(scheduler.RequestDropped(record.request_id), now)
        self.records.pop(record.request_id, None)
        self._blocked = False
        self.pool.tell(time.monotonic())

    # ------------------------------------------------------------------------------ dispatch

    def _dispatch(self) -> None:
        """Start every request whose turn it is, unless the pool was full and nothing was freed since."""
        if self._blocked or not self.members.ready:
            return
        now = time.monotonic()
        for placement in self.policy.next_dispatches(now):
            record = self.records[placement.request_id]
            if not self._try_start(record, placement, now):
                self.policy.on(scheduler.RequestDeferred(record.request_id), now)
                self._blocked = True
        self.pool.tell(time.monotonic())

    def _try_start(self, record: RequestRecord, placement: scheduler.Placement, now: float) -> bool:
        """Start a request, or refuse it; False, and nothing is held, when it must wait for room."""
        record.begin(placement, now)
        try:
            on_ssd = self.room.reserve(record, now)
        except PoolFull as error:
            self.directory.revoke_owner(record.request_id, now)
            record.reset()
            if self.directory.will_free():
                return False
            self.metrics.count("requests_rejected_total")
            self.hub.send(record.submit.gateway, m.Rejected(record.request_id, str(error), PINNED_RETRY_S))
            self._drop(record)
            return True
        if on_ssd:
            self._promote(record, on_ssd)
        else:
            self._send_prefill(record)
        return True

    def _promote(self, record: RequestRecord, on_ssd: dict[tuple[int, int], list[int]]) -> None:
        """Ask store ranks to read blocks from SSD into the DRAM just allocated."""
        record.stage = "promoting"
        refused: list[m.BlocksLoaded] = []
        for (rank, _), indices in on_ssd.items():
            number, self._next_load = self._next_load, self._next_load + 1
            self._loads[number] = record, rank
            refs = [record.load[index] for index in indices]
            record.awaiting[number] = refs
            keys, digests = ([column[at] for at in indices] for column in (record.keys, record.digests))
            try:
                self.hub.send(f"rank-{rank}", m.LoadBlocks(number, keys, digests, refs))
            except WireError as error:
                refused.append(m.BlocksLoaded.failed(number, len(refs), str(error)))
        for answer in refused:
            self._on_blocks_loaded("", answer)

    def _on_blocks_loaded(self, peer: str, loaded: m.BlocksLoaded) -> None:
        record, rank = self._loads.pop(loaded.number, (None, 0))
        if record is None:
            return
        refs = record.awaiting.pop(loaded.number)
        now = time.monotonic()
        for ref, ok, sums in zip(refs, loaded.ok, loaded.checksums):
            if ok:
                self.directory.put_end(ref.object_id, sums, now)
            elif loaded.problem:
                self.directory.put_revoke(ref.object_id, writer_may_live=True)
                record.problem = loaded.problem
            else:
                self.directory.put_revoke(ref.object_id)
                self.directory.drop_tier_block(rank, [record.key_of(ref)])
                record.bad_blocks += 1
        nbytes = sum(ref.nbytes for ref, ok in zip(refs, loaded.ok) if ok)
        record.spans.append(m.Span("promote", rank, loaded.seconds, nbytes, len(refs)))
        if record.awaiting:
            return
        if record.cancelled:
            self._drop(record)
        elif record.problem:
            self._fail(record, f"KV could not be moved: {record.problem}")
        elif record.bad_blocks:
            self._restart(record, now)
        else:
            self._send_prefill(record)
        self.pool.tell(time.monotonic())

    def _restart(self, record: RequestRecord, now: float) -> None:
        """A block from SSD was bad: give everything back and look up again; it is a miss now."""
        self.directory.revoke_owner(record.request_id, now)
        record.reset()
        self.policy.on(scheduler.RequestDeferred(record.request_id), now)
        self._blocked = False

    def _send_prefill(self, record: RequestRecord) -> None:
        record.stage = "prefill"
        if not self._to_rank(record, record.prefill, record.prefill_message()):
            return
        self.replicator.on_prefill(record, time.monotonic())
        if record.answered:
            return  # resumed: it was counted when it came
        self.metrics.count("prefix_cache_queries_total", len(record.token_ids))
        for tier, tokens in record.cached.items():
            self.metrics.count("prefix_cache_hits_total", tokens, tier=tier)

    def _to_rank(self, record: RequestRecord, rank: int, message: m.Message) -> bool:
        """Hand a request to a rank; when that cannot be sent, the request has failed."""
        try:
            if self.hub.send(f"rank-{rank}", message):
                return True
            self._fail(record, f"rank {rank} cannot be reached")
        except WireError as error:
            self._fail(record, str(error))
        return False

    def _fail(self, record: RequestRecord, reason: str) -> None:
        """The request cannot be finished: its client hears why."""
        self.hub.send(record.submit.gateway, m.Failed(record.request_id, reason))
        self._drop(record)

    # ------------------------------------------------------------------------------ prefill -> decode

    def _on_prefill_done(self, peer: str, done: m.PrefillDone) -> None:
        record = self.records.get(done.request_id)
        if record is None:
            return
        now = time.monotonic()
        computed = len(record.token_ids) - sum(record.cached.values())
        self.policy.on(scheduler.PrefillEnded(done.request_id, computed, done.seconds), now)
        self.room.s_per_token = self.policy.prefill_s_per_token
        self._describe(record)
        self.pool.publish([ref.object_id for ref in record.store], done.checksums, now)
        record.first_token(done)
        if done.finish or record.cancelled:
            self._finish(record)
            return
        record.stage = "loading"
        salt = record.submit.salt if self.config.enable_prefix_caching else b""
        self._to_rank(record, record.decode, record.decode_message(salt))

    def _describe(self, record: RequestRecord) -> None:
        """The blocks that prefill has just written, for listeners outside."""
        size, first = self.config.block_size, len(record.load)
        keys = record.keys[first : first + len(record.store)]
        parent = record.keys[first - 1] if first else None
        self.pool.describe(keys, record.token_ids[first * size :], parent)

    def _on_request_failed(self, peer: str, failed: m.RequestFailed) -> None:
        record = self.records.get(failed.request_id)
        if record is None:
            return
        if not record.cancelled:
            self.hub.send(record.submit.gateway, m.Failed(failed.request_id, failed.reason))
        self.directory.revoke_owner(failed.request_id, time.monotonic(), writer_may_live=failed.writing)
        self._drop(record)

    def _on_decode_loaded(self, peer: str, loaded: m.DecodeLoaded) -> None:
        """The decode rank has all KV in its pages: the tail and the leases may go."""
        self.directory.revoke_owner(loaded.request_id, time.monotonic())
        record = self.records.get(loaded.request_id)
        if record is not None:
            record.stage = "decode"
        self._blocked = False
        self.pool.tell(time.monotonic())

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
        self.hub.send(peer, self.room.grant(wanted, time.monotonic()))
        self.pool.tell(time.monotonic())

    def _on_put_ended(self, peer: str, ended: m.PutEnded) -> None:
        """Blocks that a decode rank has written become visible, or their places are taken back."""
        now = time.monotonic()
        for grant in self.room.granted(ended.object_ids):
            self.pool.describe([grant.key], grant.tokens, grant.parent)
        self.pool.publish(ended.object_ids, ended.checksums, now)
        self.room.end(ended, now)
        self._blocked = False
        self.pool.tell(time.monotonic())

    # ------------------------------------------------------------------------------ the SSD tier

    def _on_blocks_saved(self, peer: str, saved: m.BlocksSaved) -> None:
        self.pool.on_blocks_saved(saved)
        self._blocked = False

    def _on_tier_evicted(self, peer: str, evicted: m.TierEvicted) -> None:
        self.pool.on_tier_evicted(evicted)
        self._blocked = False

    def _on_blocks_removed(self, peer: str, removed: m.BlocksRemoved) -> None:
        self.pool.on_blocks_removed(removed)
        self.queries.on_removed(removed)
        self._blocked = False

    def _on_pool_query(self, peer: str, query: m.PoolQuery) -> None:
        now = time.monotonic()
        self.queries.on_query(peer, query, now)
        self._blocked = False
        self.pool.tell(now)

    def _on_blocks_copied(self, peer: str, copied: m.BlocksCopied) -> None:
        self.replicator.on_copied(copied, time.monotonic())
        self._blocked = False

    # ------------------------------------------------------------------------------ metrics

    def _on_metrics_request(self, peer: str, request: m.MetricsRequest) -> None:
        gauges = {
            "num_requests_waiting": self.policy.num_waiting,
            "num_requests_running": self.policy.num_running,
        }
        samples = self.metrics.samples(gauges, self.pool.stats(), self.hub.counters.as_dict())
        samples += segment_samples(self.queries.segments())
        self.hub.send(peer, m.MetricsReply(request.number, samples))

    def _on_rank_stats(self, peer: str, stats: m.RankStats) -> None:
        self.metrics.from_rank(stats)
