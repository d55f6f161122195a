"""A computing rank as a machine without I/O: orders and results in, a step and reports out.

Driven by `loop.py` (messages, a clock, a runner) and by `mooncake_lite.simulator`. The planner
(`scheduler.instance`) decides what the rank does. This file turns orders into its jobs, and what becomes of
the jobs into messages. It reads no clock and knows no socket, torch or MPI. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.control.request import client_id_of
from mooncake_lite.ranks.computing.jobs import blocks_to_load, blocks_to_store, job_of, prefetch_of
from scheduler import instance
from scheduler.instance import outcomes
from store.keys import block_digest


class NewTerm(NamedTuple):
    """A new conductor has begun, the one of this number. It knows nothing of the rank's work."""

    number: int


Order = (
    m.Start | m.PrefetchTokens | m.CancelOn | m.ListOpen | m.GrantPuts | m.GrantSwap | m.ForgetPages | NewTerm
)
"""Messages from the conductor to a computing rank about its work; NewTerm comes from the rank's heart."""


MOST_STORING = 2
"""Prompts that a rank stores when it asks for the next one. With more, stores are slower than computing, and
the next prompt had better wait where policies see it."""


Digest = Callable[[Sequence[int]], int]


class Told(NamedTuple):
    """A message of the rank.

    gateway   that it goes to; "" for the conductor
    times_s   of tokens from a leap: when each of them was drawn
    """

    message: m.Message
    gateway: str = ""
    times_s: Sequence[float] = ()


@dataclass(slots=True)
class _Open:
    """A job of this rank: its order, the sequences that have not ended, tokens found in pages, spans.

    reused   prompt tokens that were not computed, by tier
    computed, loaded, load_s   prompt tokens computed, blocks loaded, and how long the loads took
    scores   logprobs of the prompt, until they are sent
    """

    start: m.Start
    left: int
    spans: list[m.Span]
    shared: int = 0
    reused: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    loaded: int = 0
    load_s: float = 0.0
    scores: list[m.Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class DecodeSteps:
    """Sums over decode steps: their number, rows of sequences and drafts, context, seconds between them."""

    steps: int = 0
    sequences: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    def add(self, iterated: outcomes.Iterated) -> None:
        """Add the steps of a leap, or one."""
        self.steps += len(iterated.seconds)
        self.sequences += iterated.rows * len(iterated.seconds)
        self.context_tokens += iterated.context_tokens
        for seconds in iterated.seconds:
            self.seconds += seconds


class ComputingRank:
    """One rank: `on` applies an order, `step` decides what to run, `ended` applies the result.

    hello     of the rank, without an epoch
    epoch     number of the conductor that it has joined
    term      number of the latest conductor; the rank joins it once its last transfer has ended
    state     the books of the planner
    max_len   tokens of prompt and answer together, at most
    digest    second digest of the tokens of a block
    counters  for metrics; reused: prompt tokens that were not computed, by tier
    """

    def __init__(
        self, hello: m.RankHello, state: instance.State, max_len: int, digest: Digest = block_digest
    ) -> None:
        self.hello, self.number, self.state = hello, hello.rank, state
        self.epoch = self.term = hello.epoch
        shown = ["num_preemptions_total"] if instance.DECODE in state.duties else []
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(shown, 0.0))
        self.reused: defaultdict[str, int] = defaultdict(int)
        self._max_len, self._digest = max_len, digest
        self._open: dict[tuple[str, int], _Open] = {}
        self._steps = DecodeSteps()
        self._answers: dict[type, Callable[[Any], Told | m.Message | None]] = {
            outcomes.BadBlocks: self._bad_blocks,
            outcomes.Loaded: self._loaded,
            outcomes.Computed: self._computed,
            outcomes.Scored: self._scored,
            outcomes.Token: self._token,
            outcomes.Run: self._run,
            outcomes.Iterated: self._iterated,
            outcomes.Decoded: self._decoded,
            outcomes.Prefetched: lambda prefetched: None,
            outcomes.Stored: self._stored,
            outcomes.Prefilled: self._prefilled,
            outcomes.Ended: self._ended,
            outcomes.Failed: self._failed,
            outcomes.Preempted: self._preempted,
            outcomes.SwapWanted: self._swap_wanted,
            outcomes.Swapped: self._swapped,
            outcomes.Saved: self._saved,
            outcomes.PutFinished: self._put_finished,
        }

    def on(self, order: Order, now: float) -> list[Told]:
        """Apply an order. Returns what has to be told, in order."""
        if isinstance(order, m.ListOpen):
            return [Told(m.OpenListed(self.number, self.epoch, order.number, list(self._open)))]
        if isinstance(order, NewTerm):
            return self._drop_all(order.number, now)
        return self._with_pages(self._tell(instance.on(self.state, self._event(order), now)), now)

    def step(self, now: float, most: int = 1) -> instance.Step:
        """Decide what the rank does next, and reserve what it needs. `ended` takes the result.

        most   forward passes that the step may stand for; more than 1 only in virtual time
        """
        step = instance.next_step(self.state, now, most)
        instance.begin(self.state, step)
        return step

    def ended(self, result: instance.Result, now: float) -> list[Told]:
        """Apply the result of the step. Returns what has to be told, in order."""
        return self._with_pages(self._tell(instance.on(self.state, result, now)), now)

    def moved(
        self, halves: Sequence[instance.TransferEnded], late: Sequence[instance.Late], now: float
    ) -> list[Told]:
        """Apply ends of transfers, and late tokens, while the step goes on. Returns what has to be told."""
        return self._with_pages(self._tell(instance.on(self.state, instance.Moved(halves, late), now)), now)

    def _drop_all(self, term: int, now: float) -> list[Told]:
        """Drop all work. A transfer under way ends first: a new conductor may give its places away."""
        self.term = term
        for request_id, attempt in dict.fromkeys(task.id[:2] for task in self.state.tasks.values()):
            self._tell(instance.on(self.state, instance.Cancelled(request_id, attempt), now))
        return self._with_pages([], now)

    def _join(self, now: float) -> list[Told]:
        """Say hello to a new conductor once nothing is left of what earlier ones wanted."""
        state = self.state
        for number, put in list(state.puts.items()):
            if put.places is None:
                instance.on(state, instance.Granted(number, [None] * len(put.slots)), now)
        if state.busy or state.under_way is not None:
            return []
        self.epoch = self.term
        pages = m.PagesChanged(self.number, self.epoch, state.prefix.held(), [])
        tells = instance.PREFILL in state.duties
        return [Told(replace(self.hello, epoch=self.epoch)), *([Told(pages)] if tells else [])]

    def _with_pages(self, told: list[Told], now: float) -> list[Told]:
        """Add the blocks that have come into pages, or left them. Ranks that only decode do not tell."""
        if self.epoch != self.term:
            return self._join(now)
        stored, removed = self.state.prefix.drain()
        if (stored or removed) and instance.PREFILL in self.state.duties:
            told.append(Told(m.PagesChanged(self.number, self.epoch, stored, removed)))
        return told

    def _event(self, order: Order) -> instance.Event:
        """Turn an order into an event of the planner."""
        match order:
            case m.Start():
                job = job_of(order, self._max_len)
                self._expect(job, order)
                return instance.Arrived(job)
            case m.PrefetchTokens():
                return instance.Arrived(prefetch_of(order))
            case m.CancelOn():
                branch = order.branch if order.branch >= 0 else None
                return instance.Cancelled(order.request_id, order.attempt, branch)
            case m.GrantPuts():
                return instance.Granted(order.number, order.places)
            case m.GrantSwap():
                return instance.SwapAnswered(
                    instance.JobId(order.request_id, order.attempt, order.branch), order.places
                )
        return instance.Forgotten()

    def _expect(self, job: instance.Job, start: m.Start) -> None:
        """Remember the order for a job, until its last branch ends."""
        sequences = len(job.branches) if instance.DECODE in job.duties else 1
        spans = list(start.body.spans)
        if not isinstance(start.order, m.StartDecode):
            spans.append(m.Span("queue", 0, start.order.queued_s))
            spans += (m.Span("promote", *load) for load in start.order.promoted)
        self._open[job.request_id, job.attempt] = _Open(start, sequences, spans)

    def _of(self, job: instance.JobId) -> _Open:
        return self._open[job.request_id, job.attempt]

    def _close(self, job: instance.JobId) -> _Open:
        """End a sequence of a job. The job is forgotten with its last one."""
        opened = self._of(job)
        opened.left -= 1
        if opened.left <= 0:
            del self._open[job.request_id, job.attempt]
        return opened

    def _about(self, job: instance.JobId) -> tuple[int, int, str, int]:
        """Return the first fields of an event about a job: rank, epoch, request and attempt."""
        return self.number, self.epoch, job.request_id, job.attempt

    def _tell(self, said: Iterable[outcomes.Outcome]) -> list[Told]:
        told: list[Told] = []
        for outcome in said:
            answer = self._answers[type(outcome)](outcome)
            if answer is not None:
                told.append(answer if isinstance(answer, Told) else Told(answer))
        return told

    # ------------------------------------------------------------------------------ a job goes on

    def _loaded(self, loaded: outcomes.Loaded) -> m.Message | None:
        opened = self._of(loaded.job)
        opened.shared, opened.load_s = loaded.shared, loaded.load_s
        opened.loaded = 0 if loaded.beside else loaded.blocks
        refs = blocks_to_load(opened.start.order)
        refs = refs[len(refs) - loaded.blocks :]
        opened.spans.append(
            m.Span("load", self.number, loaded.load_s, sum(ref.nbytes for ref in refs), len(refs))
        )
        if isinstance(opened.start.order, m.StartDecode):
            return m.DecodeLoaded(*self._about(loaded.job), loaded.load_s, loaded.blocks)
        return None

    def _computed(self, computed: outcomes.Computed) -> m.Message | None:
        opened = self._of(computed.job)
        order = opened.start.order
        assert not isinstance(order, m.StartDecode)
        opened.computed = computed.tokens
        opened.spans.append(m.Span("compute", self.number, computed.compute_s, 0, computed.tokens))
        self.counters["prefill_computed_tokens_total"] += computed.tokens
        self.counters["prefill_seconds_total"] += computed.compute_s
        self.counters["prefills_total"] += 1
        if not opened.start.body.answered:  # the prompt of a resumed request was counted when it came
            opened.reused = _reused(order.cached, opened.shared, computed.loaded)
            self.counters["prefix_cache_queries_total"] += computed.tokens + computed.loaded
            for tier, tokens in opened.reused.items():
                self.reused[tier] += tokens
        if len(self.state.storing) > MOST_STORING:
            return None
        return m.PromptComputed(
            *self._about(computed.job), computed.tokens, computed.compute_s, opened.load_s, opened.loaded
        )

    def _scored(self, scored: outcomes.Scored) -> None:
        self._of(scored.job).scores = list(scored.scores)

    def _stored(self, stored: outcomes.Stored) -> m.Message:
        return m.ChunkStored(*self._about(stored.job), stored.first, list(stored.checksums))

    def _iterated(self, iterated: outcomes.Iterated) -> None:
        self.counters["decode_tokens_total"] += iterated.tokens * len(iterated.seconds)
        self.counters["decode_seconds_total"] += sum(iterated.compute_s)
        self.counters["decode_iterations_total"] += len(iterated.seconds)
        self.counters["decode_rows_total"] += iterated.rows * len(iterated.seconds)
        self.counters["spec_decode_num_drafts_total"] += iterated.drafts
        self.counters["spec_decode_num_draft_tokens_total"] += iterated.drafted
        self.counters["spec_decode_num_accepted_tokens_total"] += iterated.accepted
        if iterated.alone:
            self._steps.add(iterated)

    def _decoded(self, decoded: outcomes.Decoded) -> None:
        span = m.Span("decode", self.number, decoded.decode_s, 0, decoded.answered)
        self._of(decoded.job).spans.append(span)

    def _token(self, token: outcomes.Token) -> Told:
        """Send a token of the answer straight to the gateway. The first and the last one carry spans.

        The first one also carries the logprobs of the prompt, where they are wanted. An end token is told
        beside the answer then, with its logprobs.
        """
        opened = self._of(token.job)
        body = opened.start.body
        ids = [] if token.finish == "stop" or body.max_tokens == 0 else [token.token]
        is_first = not isinstance(opened.start.order, m.StartDecode) and token.index == body.answered
        spans = list(opened.spans) if is_first or token.finish else []
        ends = token.finish == "stop" and body.sampling.prompt_logprobs >= 0
        logprobs = [token.logprobs] if (ids or ends) and token.logprobs is not None else []
        scores, opened.scores = opened.scores, []
        tokens = m.Tokens(
            client_id_of(token.job.request_id), token.index, ids, token.finish,
            opened.reused if is_first else {}, spans, logprobs, token.job.branch,
            prompt_logprobs=scores, end_token=token.token if ends else None, attempt=token.job.attempt,
            predicted=token.predicted,
        )  # fmt: skip
        return Told(tokens, body.gateway)

    def _run(self, run: outcomes.Run) -> Told:
        """Send the tokens of a leap in one message."""
        tokens = m.Tokens(
            client_id_of(run.job.request_id),
            run.index,
            list(run.tokens),
            branch=run.job.branch,
            attempt=run.job.attempt,
        )
        return Told(tokens, self._of(run.job).start.body.gateway, run.times_s)

    # ------------------------------------------------------------------------------ a job ends

    def _prefilled(self, done: outcomes.Prefilled) -> m.Message:
        opened = self._close(done.job)
        order, branches = opened.start.order, range(opened.start.body.branch, 1 << 30)
        assert isinstance(order, m.StartPrefill)
        refs = blocks_to_store(order)
        opened.spans.append(
            m.Span("store", self.number, done.store_s, sum(ref.nbytes for ref in refs), len(refs))
        )
        event = m.PrefillEnded(
            *self._about(done.job), list(done.checksums[: len(order.store)]),
            [branch for branch, finish in zip(branches, done.finishes) if finish is not None],
            done.load_s, done.compute_s, done.store_s, opened.computed, opened.loaded,
            [sums for sums in done.checksums[len(order.store) :] for sums in sums],
        )  # fmt: skip
        return m.Report(event, [[token] for token in done.first_tokens], opened.spans)

    def _ended(self, ended: outcomes.Ended) -> m.Message:
        opened = self._close(ended.job)
        if isinstance(opened.start.order, m.StartPrefill):
            return m.RequestFailed(*self._about(ended.job), ended.finish)
        answer_tokens = ended.answered if ended.finish == "finished" else 0
        steps, self._steps = self._steps, DecodeSteps()
        return m.DecodeEnded(*self._about(ended.job), ended.job.branch, answer_tokens, *astuple(steps))

    def _failed(self, failed: outcomes.Failed) -> m.Message:
        del self._open[failed.job.request_id, failed.job.attempt]  # a job fails as a whole
        return m.RequestFailed(
            *self._about(failed.job), failed.reason, failed.may_still_write, failed.for_good, failed.code
        )

    def _preempted(self, preempted: outcomes.Preempted) -> m.Message:
        return self._left(m.Preempted(*self._so_far(preempted), preempted.may_still_write), preempted)

    def _swapped(self, swapped: outcomes.Swapped) -> m.Message:
        self.counters["num_swaps_total"] += 1
        return self._left(m.Swapped(*self._so_far(swapped), list(swapped.checksums)), swapped)

    def _so_far(
        self, left: outcomes.Preempted | outcomes.Swapped | outcomes.SwapWanted
    ) -> tuple[int, int, str, int, int, list[int], list[int], int]:
        """Return the fields of an event about a sequence that leaves the rank."""
        size, ids = self.state.block_tokens, left.token_ids
        digests = [self._digest(ids[index * size : (index + 1) * size]) for index in range(len(left.keys))]
        return *self._about(left.job), len(left.token_ids), list(left.keys), digests, left.job.branch

    def _left(self, event: m.Preempted | m.Swapped, left: outcomes.Preempted | outcomes.Swapped) -> m.Report:
        self._close(left.job)
        self.counters["num_preemptions_total"] += 1
        return m.Report(event, [left.token_ids])  # type: ignore[list-item]

    # ------------------------------------------------------------------------------ blocks back to the pool

    def _swap_wanted(self, wanted: outcomes.SwapWanted) -> m.Message:
        """Ask for places for the KV of a sequence that leaves."""
        return m.SwapWanted(*self._so_far(wanted))

    def _saved(self, saved: outcomes.Saved) -> m.Message:
        """Ask for places for the blocks in slots."""
        tokens = [block.token_ids for block in saved.blocks]
        event = m.PutsWanted(
            self.number, self.epoch, saved.put, [block.key for block in saved.blocks],
            [self._digest(ids) for ids in tokens], [(block.parent, block.index) for block in saved.blocks],
            [block.job.request_id for block in saved.blocks],
        )  # fmt: skip
        return m.Report(event, tokens)  # type: ignore[arg-type]

    def _bad_blocks(self, bad: outcomes.BadBlocks) -> m.Message:
        return m.BlocksBad(self.number, self.epoch, [place.object_id for place in bad.places])

    def _put_finished(self, put: outcomes.PutFinished) -> m.Message:
        ids = [place.object_id for place in put.places]
        if put.problem:
            return m.PutsEnded(self.number, self.epoch, put.put, [], [], ids, put.may_still_write)
        return m.PutsEnded(self.number, self.epoch, put.put, ids, list(put.checksums))


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
