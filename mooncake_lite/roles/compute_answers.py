"""Answers: what a rank tells the conductor and the gateways about its jobs, from the planner's outcomes.

Used by the compute role alone. It decides nothing. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod

from mooncake_lite.messages import (
    Decode,
    DecodeDone,
    DecodeLoaded,
    Preempted,
    Prefill,
    PrefillDone,
    PromptComputed,
    PutEnded,
    PutWanted,
    RequestFailed,
    Serve,
    Span,
    Tokens,
)
from mooncake_lite.roles.compute_jobs import Asks, blocks_to_load, blocks_to_store, makes_offers
from mooncake_lite.roles.compute_rank import ComputeRank
from scheduler.instance import JobId, outcomes
from scheduler.instance.step import SaveBlock
from store.keys import PrefixChain, block_digest


@dataclass(slots=True)
class _Asked:
    """A job of this rank: its message, its spans, and for offers the keys of its full blocks so far.

    chain   continues after the last of `keys`
    """

    message: Asks
    keys: list[int]
    chain: PrefixChain | None
    spans: list[Span] = field(default_factory=list)

    def key(self, block: SaveBlock) -> tuple[int, int | None]:
        """Return the keys of a full block and of the one before it. Blocks become full in their order."""
        if block.index == len(self.keys):
            assert self.chain is not None
            self.keys += self.chain.extend(block.token_ids)
        return self.keys[block.index], self.keys[block.index - 1] if block.index else None

    @property
    def all_spans(self) -> list[Span]:
        """Return the spans of earlier ranks and of this one."""
        return [*self.message.spans, *self.spans]


class Answers:
    """Open jobs of this rank, and the messages about them."""

    def __init__(self, rank: ComputeRank, block_tokens: int) -> None:
        self._rank = rank
        self._block_tokens = block_tokens
        self._asked: dict[JobId, _Asked] = {}

    def expect(self, job: JobId, message: Asks) -> None:
        """Remember the message that asked for a job, until the job ends."""
        if isinstance(message, Prefill) or not makes_offers(message):
            self._asked[job] = _Asked(message, [], None)
            return
        last_key = message.keys[-1] if message.keys else None
        chain = PrefixChain(self._block_tokens, message.salt, last_key=last_key)
        self._asked[job] = _Asked(message, list(message.keys), chain)

    def tell(self, said: Iterable[outcomes.Outcome]) -> None:
        """Send the messages for the outcomes of a step or an event, in order."""
        for outcome in said:
            self._tell(outcome)

    @singledispatchmethod
    def _tell(self, outcome: outcomes.Outcome) -> None:
        raise AssertionError(f"no answer follows from {outcome}")

    # ------------------------------------------------------------------------------ a job goes on

    @_tell.register
    def _loaded(self, loaded: outcomes.Loaded) -> None:
        asked = self._asked[loaded.job]
        refs = blocks_to_load(asked.message)
        span = Span("load", self._rank.number, loaded.load_s, sum(ref.nbytes for ref in refs), len(refs))
        asked.spans.append(span)
        if isinstance(asked.message, Decode):
            name, attempt = loaded.job
            self._rank.tell(DecodeLoaded(name, attempt, self._rank.epoch))

    @_tell.register
    def _computed(self, computed: outcomes.Computed) -> None:
        asked = self._asked[computed.job]
        span = Span("compute", self._rank.number, computed.compute_s, 0, computed.tokens)
        asked.spans.append(span)
        if isinstance(asked.message, Serve):
            name, attempt = computed.job
            said = PromptComputed(name, computed.tokens, computed.compute_s, attempt, self._rank.epoch)
            self._rank.tell(said)
        self._rank.count_prefill(computed.tokens, computed.loaded, computed.compute_s)

    @_tell.register
    def _iterated(self, iterated: outcomes.Iterated) -> None:
        self._rank.count_decode(iterated.tokens, iterated.compute_s)

    @_tell.register
    def _decoded(self, decoded: outcomes.Decoded) -> None:
        span = Span("decode", self._rank.number, decoded.decode_s, 0, decoded.answered)
        self._asked[decoded.job].spans.append(span)

    @_tell.register
    def _token(self, token: outcomes.Token) -> None:
        """Send a token of the answer straight to the gateway. The first and the last one carry spans."""
        asked = self._asked[token.job]
        message = asked.message
        ids = [] if token.finish == "stop" or message.max_tokens == 0 else [token.token]
        cached: dict[str, int] = {}
        spans: list[Span] = []
        if not isinstance(message, Decode) and token.index == message.answered:
            cached, spans = message.cached_tokens, asked.all_spans
        elif token.finish:
            spans = asked.all_spans
        logprobs = [token.logprobs] if ids and token.logprobs is not None else []
        tokens = Tokens(message.request_id, token.index, ids, token.finish, cached, spans, logprobs)
        self._rank.to_gateway(message.gateway, tokens)

    # ------------------------------------------------------------------------------ a job ends

    @_tell.register
    def _prefilled(self, done: outcomes.Prefilled) -> None:
        name, attempt = done.job
        asked = self._asked.pop(done.job)
        assert isinstance(asked.message, Prefill)
        refs = blocks_to_store(asked.message)
        asked.spans.append(
            Span("store", self._rank.number, done.store_s, sum(ref.nbytes for ref in refs), len(refs))
        )
        checksums = list(done.checksums[: len(asked.message.store)])
        self._rank.tell(
            PrefillDone(
                name, done.first_token, done.finish, checksums, asked.all_spans, done.compute_s, done.load_s,
                done.store_s, attempt, self._rank.epoch,
            )
        )  # fmt: skip

    @_tell.register
    def _ended(self, ended: outcomes.Ended) -> None:
        name, attempt = ended.job
        asked = self._asked.pop(ended.job)
        if isinstance(asked.message, Prefill):
            self._rank.tell(RequestFailed(name, ended.finish, False, attempt, self._rank.epoch))
        else:
            self._rank.tell(DecodeDone(name, attempt, self._rank.epoch))

    @_tell.register
    def _failed(self, failed: outcomes.Failed) -> None:
        name, attempt = failed.job
        del self._asked[failed.job]
        writing = failed.may_still_write
        self._rank.tell(RequestFailed(name, failed.reason, writing, attempt, self._rank.epoch))

    @_tell.register
    def _preempted(self, preempted: outcomes.Preempted) -> None:
        name, attempt = preempted.job
        del self._asked[preempted.job]
        self._rank.count_preemption()
        ids = list(preempted.token_ids)
        self._rank.tell(Preempted(name, ids, preempted.answered, attempt, self._rank.epoch))

    # ------------------------------------------------------------------------------ blocks back to the pool

    @_tell.register
    def _saved(self, saved: outcomes.Saved) -> None:
        """Continue the chain of keys with full blocks, and ask for places for those in slots."""
        keys: list[int] = []
        before: list[tuple[int | None, int]] = []
        kept: list[SaveBlock] = []
        for block in saved.blocks:
            key, parent = self._asked[block.job].key(block)
            if block.slot is not None:
                keys.append(key)
                before.append((parent, block.index))
                kept.append(block)
        if saved.put is None:
            return
        tokens = [list(block.token_ids) for block in kept]
        digests = [block_digest(ids) for ids in tokens]
        self._rank.tell(
            PutWanted(saved.put, self._rank.number, keys, digests, tokens, before, self._rank.epoch)
        )

    @_tell.register
    def _put_finished(self, put: outcomes.PutFinished) -> None:
        ids = [place.object_id for place in put.places]
        if put.problem:
            ended = PutEnded([], [], ids, put.may_still_write, self._rank.epoch)
        else:
            ended = PutEnded(ids, list(put.checksums), [], False, self._rank.epoch)
        self._rank.tell(ended)
