"""The decode role: load a request's KV beside the running batch, then one token for everybody, over and over.

Continuous batching: requests join and leave between two iterations. Blocks that become full while
decoding go back to the pool, so that the next turn of a conversation finds them. See docs/lifecycle.md.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field

from mooncake_lite.engine import OutOfPages, Sequence
from mooncake_lite.messages import (
    BlockRef,
    Cancel,
    Decode,
    DecodeDone,
    DecodeLoaded,
    Preempted,
    PutEnded,
    PutGranted,
    PutWanted,
    RequestFailed,
    Span,
    Tokens,
)
from mooncake_lite.roles.compute_rank import ComputeRank
from mooncake_lite.roles.kv_mover import LoadJob, moves
from store.keys import PrefixChain, block_digest
from transport.engine import Batch
from transport.errors import TransferError

IDLE_WAIT_S = 0.2


@dataclass(slots=True)
class _Running:
    """A request on this rank, from its arrival to its last token."""

    job: Decode
    sequence: Sequence
    chain: PrefixChain | None
    began: float = field(default_factory=time.perf_counter)
    load: LoadJob | None = None
    loaded: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class _Put:
    """Full blocks that wait in staging for a place (`number` asked for them), or are on their way to it."""

    slots: list[int]
    sums: list[list[int]]
    batch: Batch | None = None
    refs: list[BlockRef] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


class DecodeRole:
    """The loop of a decode rank."""

    def __init__(self, rank: ComputeRank) -> None:
        self.rank = rank
        self.waiting: deque[_Running] = deque()
        self.loading: _Running | None = None
        self.running: list[_Running] = []
        self._puts: dict[int, _Put] = {}
        self._put_number = 0
        self._free_slots = list(rank.staging.puts)
        self._dropped_puts = 0

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.rank.stopping:
            busy = self.running or self.loading or self.waiting or self._puts
            self._read(0.0 if busy else IDLE_WAIT_S)
            self._load()
            self._finish_puts()
            if self.running:
                self._iterate()
            elif self.loading or self.waiting or self._puts:
                time.sleep(0.0002)  # only transfers are under way; give them the core
            self._count()

    # ------------------------------------------------------------------------------ arrival

    def _read(self, wait_s: float) -> None:
        for message in self.rank.receive(wait_s):
            if isinstance(message, Decode):
                self.waiting.append(self._arrive(message))
            elif isinstance(message, Cancel):
                self._cancel(message.request_id)
            elif isinstance(message, PutGranted):
                self._write_granted(message)

    def _arrive(self, job: Decode) -> _Running:
        sequence = self.rank.new_sequence(job, job.token_ids, job.answered)
        last_key = job.keys[-1] if job.keys else None
        size = self.rank.engine.block_tokens
        chain = PrefixChain(size, job.salt, last_key=last_key) if job.salt else None
        return _Running(job, sequence, chain)

    def _load(self) -> None:
        """Begin the next load when pages are free; let a request whose KV is here join the batch."""
        if self.loading is None and self.waiting:
            request = self.waiting[0]
            try:
                self.rank.engine.reserve(request.sequence, len(request.sequence.token_ids))
            except OutOfPages:
                return  # it waits until others have ended
            self.waiting.popleft()
            self.loading = request
            job = request.job
            refs = job.blocks if job.tail is None else [*job.blocks, job.tail]
            rank = self.rank
            request.load = LoadJob(
                rank.engine, rank.transfers, rank.staging, request.sequence, refs, rank.number
            )
        if self.loading is not None and self._loaded(self.loading):
            request, self.loading = self.loading, None
            assert request.load is not None
            request.sequence.num_computed = len(request.sequence.token_ids) - 1
            request.loaded = [request.load.span()]
            self.rank.tell(DecodeLoaded(request.job.request_id, request.loaded))
            request.began = time.perf_counter()
            self.running.append(request)

    def _loaded(self, request: _Running) -> bool:
        """Whether the KV of the loading request is in its pages; a load that fails ends its request."""
        assert request.load is not None
        try:
            return request.load.advance()
        except TransferError as error:
            self.loading = None
            self.rank.engine.free(request.sequence)
            reason = f"KV could not be moved: {error}"
            self.rank.tell(RequestFailed(request.job.request_id, reason))
            return False

    def _cancel(self, request_id: str) -> None:
        """Forget a request at once; one that is loading is waited for, its KV is flying into staging."""
        for request in [*self.waiting, *self.running, *([self.loading] if self.loading else [])]:
            if request.job.request_id == request_id:
                if request is self.loading and request.load is not None:
                    with contextlib.suppress(TransferError):
                        request.load.finish()
                    self.loading = None
                elif request in self.waiting:
                    self.waiting.remove(request)
                else:
                    self.running.remove(request)
                self._end(request, "cancelled")
                return

    # ------------------------------------------------------------------------------ iteration

    def _iterate(self) -> None:
        """One token for every running request."""
        self._make_room()
        batch = list(self.running)
        if not batch:
            return  # the only one made room for a request that is loading
        began = time.perf_counter()
        tokens = self.rank.engine.decode_step([request.sequence for request in batch])
        self.rank.count_decode(len(batch), time.perf_counter() - began)
        filled = []
        for request, token in zip(batch, tokens):
            sequence = request.sequence
            index = sequence.answered
            if request.chain and sequence.num_computed % self.rank.engine.block_tokens == 0:
                filled.append(request)
            finish = sequence.append(token)
            ids = [] if finish == "stop" else [token]
            spans = [*request.job.spans, *request.loaded, self._decode_span(request)] if finish else []
            message = Tokens(request.job.request_id, index, ids, finish, {}, spans)
            self.rank.to_gateway(request.job.gateway, message)
            if finish:
                self.running.remove(request)
        self._offer(filled)
        for request in batch:
            if request not in self.running:
                self._end(request, "finished")

    def _make_room(self) -> None:
        """A page for each sequence's next token; when none is left, the youngest request goes back."""
        for request in list(self.running):
            while request in self.running:
                try:
                    self.rank.engine.reserve(request.sequence, len(request.sequence.token_ids))
                    break
                except OutOfPages:
                    self._preempt(self.running[-1])

    def _preempt(self, request: _Running) -> None:
        self.running.remove(request)
        sequence = request.sequence
        self.rank.engine.free(sequence)
        self.rank.count_preemption()
        self.rank.tell(Preempted(request.job.request_id, list(sequence.token_ids), sequence.answered))

    def _decode_span(self, request: _Running) -> Span:
        seconds = time.perf_counter() - request.began
        return Span("decode", self.rank.number, seconds, 0, request.sequence.answered)

    def _end(self, request: _Running, finish: str) -> None:
        self.rank.engine.free(request.sequence)
        self.rank.tell(DecodeDone(request.job.request_id, finish, request.sequence.answered))

    def _count(self) -> None:
        requests = len(self.waiting) + (self.loading is not None)
        self.rank.report(running=len(self.running), waiting=requests, dropped_puts=self._dropped_puts)

    # ------------------------------------------------------------------------------ blocks back to the pool

    def _offer(self, filled: list[_Running]) -> None:
        """Copy blocks that have just become full into staging, and ask where they may go."""
        keys: list[int] = []
        tokens: list[list[int]] = []
        before: list[tuple[int | None, int]] = []
        put = _Put([], [])
        size = self.rank.engine.block_tokens
        for request in filled:
            assert request.chain is not None
            end = request.sequence.num_computed
            block_tokens = request.sequence.token_ids[end - size : end]
            parent = request.chain.last_key
            (key,) = request.chain.extend(block_tokens)
            if not self._free_slots:
                self._dropped_puts += 1
                continue
            slot = self._free_slots.pop()
            block = self.rank.staging.blocks[slot : slot + 1]
            self.rank.engine.store_blocks(request.sequence, end // size - 1, block)
            put.slots.append(slot)
            put.sums.append(self.rank.staging.layout.checksums(block))
            keys.append(key)
            tokens.append(block_tokens)
            before.append((parent, end // size - 1))
        if keys:
            self._put_number += 1
            self._puts[self._put_number] = put
            digests = [block_digest(block) for block in tokens]
            self.rank.tell(PutWanted(self._put_number, self.rank.number, keys, digests, tokens, before))

    def _write_granted(self, granted: PutGranted) -> None:
        put = self._puts.get(granted.number)
        if put is None:
            return
        chosen = [i for i, place in enumerate(granted.places) if place is not None]
        put.refs = [place for place in granted.places if place is not None]
        put.written = chosen
        blocks = [self.rank.staging.blocks[put.slots[i]] for i in chosen]
        put.batch = self.rank.transfers.submit(moves("write", put.refs, blocks))

    def _finish_puts(self) -> None:
        for number, put in list(self._puts.items()):
            if put.batch is None or not put.batch.poll():
                continue
            del self._puts[number]
            self._free_slots += put.slots
            ids = [ref.object_id for ref in put.refs]
            try:
                put.batch.wait(0.0)
                self.rank.tell(PutEnded(ids, [put.sums[i] for i in put.written]))
            except TransferError:
                self._dropped_puts += len(ids)
                self.rank.tell(PutEnded([], [], ids))
