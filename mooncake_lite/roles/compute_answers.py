"""Answers: what a rank tells the conductor and the gateways about its jobs, from the planner's outcomes.

Used by the compute role alone. It decides nothing. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from functools import singledispatchmethod

from mooncake_lite.control.request import client_id_of
from mooncake_lite.messages import (
    Decode,
    DecodeDone,
    DecodeLoaded,
    Logprobs,
    PagesHeld,
    Preempted,
    Prefill,
    PrefillDone,
    PromptComputed,
    PutEnded,
    PutWanted,
    RequestFailed,
    Serve,
    Span,
    Swapped,
    SwapWanted,
    Tokens,
)
from mooncake_lite.roles.compute_jobs import Asks, blocks_to_load, blocks_to_store
from mooncake_lite.roles.compute_rank import ComputeRank
from scheduler.instance import DECODE, PREFILL, Job, JobId, outcomes
from store.keys import block_digest, block_digests


@dataclass(slots=True)
class _Asked:
    """A job of this rank: its message, the sequences that have not ended, tokens found in pages, spans.

    reused   prompt tokens that were not computed, by tier
    computed, loaded, load_s   prompt tokens computed, blocks loaded, and how long the loads took
    scores   logprobs of the prompt, until they are sent
    """

    message: Asks
    left: int
    shared: int = 0
    reused: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    loaded: int = 0
    load_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)

    @property
    def all_spans(self) -> list[Span]:
        """Return the spans of earlier ranks and of this one."""
        return [*self.message.spans, *self.spans]


@dataclass(slots=True)
class DecodeSteps:
    """Sums over decode steps: their number, the batch, the context and the seconds between their tokens."""

    steps: int = 0
    sequences: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    def add(self, iterated: outcomes.Iterated) -> None:
        """Add a step."""
        self.steps += 1
        self.sequences += iterated.tokens
        self.context_tokens += iterated.context_tokens
        self.seconds += iterated.seconds


class Answers:
    """Open jobs of this rank, and the messages about them."""

    def __init__(self, rank: ComputeRank) -> None:
        self._rank = rank
        self._asked: dict[tuple[str, int], _Asked] = {}
        self._steps = DecodeSteps()

    def expect(self, job: Job, message: Asks) -> None:
        """Remember the message that asked for a job, until its last branch ends."""
        sequences = len(job.branches) if DECODE in job.duties else 1
        self._asked[job.request_id, job.attempt] = _Asked(message, sequences)

    def _of(self, job: JobId) -> _Asked:
        return self._asked[job.request_id, job.attempt]

    def _close(self, job: JobId) -> _Asked:
        """End a sequence of a job. The job is forgotten with its last one."""
        asked = self._of(job)
        asked.left -= 1
        if asked.left <= 0:
            del self._asked[job.request_id, job.attempt]
        return asked

    def tell(self, said: Iterable[outcomes.Outcome]) -> None:
        """Send the messages for the outcomes of a step or an event, in order."""
        for outcome in said:
            self._tell(outcome)

    def tell_held(self, stored: list[int], removed: list[int]) -> None:
        """Tell the conductor which blocks have come into the rank's pages, and which have left them.

        Only ranks that prefill choose between pages and computing.
        """
        if (stored or removed) and PREFILL in self._rank.state.duties:
            self._rank.tell(PagesHeld(stored, removed, self._rank.epoch))

    @singledispatchmethod
    def _tell(self, outcome: outcomes.Outcome) -> None:
        raise AssertionError(f"no answer follows from {outcome}")

    # ------------------------------------------------------------------------------ a job goes on

    @_tell.register
    def _loaded(self, loaded: outcomes.Loaded) -> None:
        asked = self._of(loaded.job)
        asked.shared, asked.loaded, asked.load_s = loaded.shared, loaded.blocks, loaded.load_s
        refs = blocks_to_load(asked.message)
        refs = refs[len(refs) - loaded.blocks :]
        span = Span("load", self._rank.number, loaded.load_s, sum(ref.nbytes for ref in refs), len(refs))
        asked.spans.append(span)
        if isinstance(asked.message, Decode):
            name, attempt, _ = loaded.job
            said = DecodeLoaded(name, attempt, self._rank.epoch, loaded.load_s, loaded.blocks)
            self._rank.tell(said)

    @_tell.register
    def _computed(self, computed: outcomes.Computed) -> None:
        asked = self._of(computed.job)
        asked.scores, asked.computed = list(computed.scores), computed.tokens
        asked.spans.append(Span("compute", self._rank.number, computed.compute_s, 0, computed.tokens))
        if isinstance(asked.message, Serve):
            name, attempt, _ = computed.job
            self._rank.tell(
                PromptComputed(
                    name, computed.tokens, computed.compute_s, attempt, self._rank.epoch, asked.load_s,
                    asked.loaded,
                )
            )  # fmt: skip
        self._rank.count_prefill(computed.tokens, computed.compute_s)
        assert not isinstance(asked.message, Decode)
        asked.reused = _reused(asked.message.cached_tokens, asked.shared, computed.loaded)
        if not asked.message.answered:  # a resumed request was counted when it came
            self._rank.count_prompt(computed.tokens + computed.loaded, asked.reused)

    @_tell.register
    def _iterated(self, iterated: outcomes.Iterated) -> None:
        self._rank.count_decode(iterated.tokens, iterated.compute_s)
        if iterated.alone:
            self._steps.add(iterated)

    @_tell.register
    def _decoded(self, decoded: outcomes.Decoded) -> None:
        span = Span("decode", self._rank.number, decoded.decode_s, 0, decoded.answered)
        self._of(decoded.job).spans.append(span)

    @_tell.register
    def _token(self, token: outcomes.Token) -> None:
        """Send a token of the answer straight to the gateway. The first and the last one carry spans.

        The first one also carries the logprobs of the prompt, where they are wanted. An end token is told
        beside the answer then, with its logprobs.
        """
        asked = self._of(token.job)
        message = asked.message
        ids = [] if token.finish == "stop" or message.max_tokens == 0 else [token.token]
        is_first = not isinstance(message, Decode) and token.index == message.answered
        cached = asked.reused if is_first else {}
        spans = asked.all_spans if is_first or token.finish else []
        ends = token.finish == "stop" and message.sampling.prompt_logprobs >= 0
        logprobs = [token.logprobs] if (ids or ends) and token.logprobs is not None else []
        scores, asked.scores = asked.scores, []
        name = client_id_of(message.request_id)
        tokens = Tokens(
            name, token.index, ids, token.finish, cached, spans, logprobs, token.job.branch,
            prompt_logprobs=scores, end_token=token.token if ends else None,
        )  # fmt: skip
        self._rank.to_gateway(message.gateway, tokens)

    # ------------------------------------------------------------------------------ a job ends

    @_tell.register
    def _prefilled(self, done: outcomes.Prefilled) -> None:
        name, attempt, _ = done.job
        asked = self._close(done.job)
        assert isinstance(asked.message, Prefill)
        refs = blocks_to_store(asked.message)
        asked.spans.append(
            Span("store", self._rank.number, done.store_s, sum(ref.nbytes for ref in refs), len(refs))
        )
        checksums = list(done.checksums[: len(asked.message.store)])
        self._rank.tell(
            PrefillDone(
                name, list(done.first_tokens), list(done.finishes), checksums, asked.all_spans,
                done.compute_s, done.load_s, done.store_s, attempt, self._rank.epoch, asked.computed,
                asked.loaded,
            )
        )  # fmt: skip

    @_tell.register
    def _ended(self, ended: outcomes.Ended) -> None:
        name, attempt, branch = ended.job
        asked = self._close(ended.job)
        if isinstance(asked.message, Prefill):
            self._rank.tell(RequestFailed(name, ended.finish, False, attempt, self._rank.epoch))
        else:
            answer_tokens = ended.answered if ended.finish == "finished" else 0
            steps, self._steps = self._steps, DecodeSteps()
            self._rank.tell(
                DecodeDone(name, attempt, self._rank.epoch, branch, answer_tokens, *astuple(steps))
            )

    @_tell.register
    def _failed(self, failed: outcomes.Failed) -> None:
        name, attempt, _ = failed.job
        del self._asked[name, attempt]  # a job fails as a whole
        writing = failed.may_still_write
        self._rank.tell(RequestFailed(name, failed.reason, writing, attempt, self._rank.epoch))

    @_tell.register
    def _preempted(self, preempted: outcomes.Preempted) -> None:
        name, attempt, branch = preempted.job
        self._close(preempted.job)
        self._rank.count_preemption()
        ids, writing = list(preempted.token_ids), preempted.may_still_write
        self._rank.tell(Preempted(name, ids, preempted.answered, attempt, self._rank.epoch, branch, writing))

    @_tell.register
    def _swapped(self, swapped: outcomes.Swapped) -> None:
        name, attempt, branch = swapped.job
        self._close(swapped.job)
        self._rank.count_preemption(swapped=True)
        ids = list(swapped.token_ids)
        self._rank.tell(Swapped(name, ids, swapped.answered, attempt, self._rank.epoch, branch))

    # ------------------------------------------------------------------------------ blocks back to the pool

    @_tell.register
    def _swap_wanted(self, wanted: outcomes.SwapWanted) -> None:
        """Ask for places for the KV of a sequence that leaves."""
        name, attempt, branch = wanted.job
        digests = block_digests(wanted.token_ids, self._rank.state.block_tokens) if wanted.keys else []
        num_tokens, keys = len(wanted.token_ids), list(wanted.keys)
        self._rank.tell(SwapWanted(name, num_tokens, keys, digests, attempt, self._rank.epoch, branch))

    @_tell.register
    def _saved(self, saved: outcomes.Saved) -> None:
        """Ask for places for the blocks in slots."""
        keys = [block.key for block in saved.blocks]
        before = [(block.parent, block.index) for block in saved.blocks]
        tokens = [list(block.token_ids) for block in saved.blocks]
        digests = [block_digest(ids) for ids in tokens]
        requests = [block.job[0] for block in saved.blocks]
        self._rank.tell(
            PutWanted(saved.put, self._rank.number, keys, digests, tokens, before, self._rank.epoch, requests)
        )

    @_tell.register
    def _put_finished(self, put: outcomes.PutFinished) -> None:
        ids = [place.object_id for place in put.places]
        if put.problem:
            ended = PutEnded([], [], ids, put.may_still_write, self._rank.epoch)
        else:
            ended = PutEnded(ids, list(put.checksums), [], False, self._rank.epoch)
        self._rank.tell(ended)


def _reused(in_pool: dict[str, int], shared: int, reused: int) -> dict[str, int]:
    """Return the `reused` tokens of a prompt by tier, those that the rank had in its pages under "pages".

    in_pool   tokens that the pool offered, by tier; the rank loads none that it has, and may compute the rest
    shared    tokens that the rank had in its pages
    """
    cached = {"pages": shared} if shared else {}
    known, left = shared, reused - shared
    for tier, tokens in in_pool.items():
        cached[tier] = min(max(0, tokens - known), left)
        known, left = max(0, known - tokens), left - cached[tier]
    return cached
