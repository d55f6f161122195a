"""The prefill role: load the cached prefix, compute the rest, give the KV to the pool.

One request at a time, in chunks, so that a cancelled one stops within a chunk. Told what to do by the
conductor (`messages.Prefill`); it makes no placement decision. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import time
from collections import deque

from mooncake_lite.engine import Sequence
from mooncake_lite.messages import (
    Cancel,
    Prefill,
    PrefillDone,
    RequestFailed,
    Span,
    Tokens,
)
from mooncake_lite.roles.compute_rank import ComputeRank
from mooncake_lite.roles.kv_mover import LoadJob, store_blocks
from transport.errors import TransferError

IDLE_WAIT_S = 0.2


class PrefillRole:
    """The loop of a prefill rank."""

    def __init__(self, rank: ComputeRank) -> None:
        self.rank = rank
        self._queue: deque[Prefill] = deque()
        self._cancelled: set[str] = set()
        self._current = ""

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.rank.stopping:
            self._read(0.0 if self._queue else IDLE_WAIT_S)
            if self._queue:
                self._serve(self._queue.popleft())

    def _read(self, wait_s: float) -> None:
        for message in self.rank.receive(wait_s):
            if isinstance(message, Prefill):
                self._queue.append(message)
            elif isinstance(message, Cancel) and message.request_id in self._known():
                self._cancelled.add(message.request_id)

    def _known(self) -> set[str]:
        """Requests that wait or are being computed; a Cancel for another one comes too late."""
        return {job.request_id for job in self._queue} | {self._current}

    def _serve(self, job: Prefill) -> None:
        """One prefill from load to store; the conductor hears of its end in every case."""
        sequence = self.rank.new_sequence(job, job.token_ids, job.answered)
        self._current = job.request_id
        try:
            done: PrefillDone | RequestFailed = self._prefill(job, sequence)
        except TransferError as error:
            done = RequestFailed(job.request_id, f"KV could not be moved: {error}", writing=True)
        finally:
            self.rank.engine.free(sequence)
            self._cancelled.discard(job.request_id)
            self._current = ""
        self.rank.tell(done)

    def _prefill(self, job: Prefill, sequence: Sequence) -> PrefillDone | RequestFailed:
        rank, engine = self.rank, self.rank.engine
        began = time.perf_counter()
        prompt_tokens = len(job.token_ids)
        engine.reserve(sequence, prompt_tokens)
        load = LoadJob(engine, rank.transfers, rank.staging, sequence, job.load, rank.number).finish()
        # On a full hit the last token is computed all the same: its logits choose the first answer token.
        sequence.num_computed = min(len(job.load) * engine.block_tokens, prompt_tokens - 1)
        computed = prompt_tokens - sequence.num_computed

        token = None
        compute_began = time.perf_counter()
        while token is None:
            self._read(0.0)
            if rank.stopping or job.request_id in self._cancelled:
                return RequestFailed(job.request_id, "cancelled")
            token = engine.prefill_chunk(sequence, rank.config.max_num_batched_tokens)
        compute = Span("compute", rank.number, time.perf_counter() - compute_began, 0, computed)

        finish = sequence.append(token)
        spans = [*job.spans, load, compute]
        self._answer(job, sequence, token, finish, spans)
        store, checksums = self._store(job, sequence)
        rank.count_prefill(computed, prompt_tokens - computed, compute.seconds)
        return PrefillDone(
            job.request_id, token, finish, checksums, [*spans, store], time.perf_counter() - began
        )

    def _answer(
        self, job: Prefill, sequence: Sequence, token: int, finish: str | None, spans: list[Span]
    ) -> None:
        """Send the first token at once; the KV follows."""
        ids = [] if finish == "stop" else [token]
        message = Tokens(job.request_id, job.answered, ids, finish, job.cached_tokens, spans)
        self.rank.to_gateway(job.gateway, message)

    def _store(self, job: Prefill, sequence: Sequence) -> tuple[Span, list[list[int]]]:
        """Full blocks and the tail to the pool; the checksums of the full blocks."""
        rank = self.rank
        began = time.perf_counter()
        refs = job.store if job.tail is None else [*job.store, job.tail]
        sums = store_blocks(rank.engine, rank.transfers, rank.staging, sequence, len(job.load), refs)
        nbytes = sum(ref.nbytes for ref in refs)
        span = Span("store", rank.number, time.perf_counter() - began, nbytes, len(refs))
        return span, sums[: len(job.store)]
