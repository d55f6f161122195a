"""Refuses, holds, places and starts requests. Asks `scheduler` for every choice.

Used by `machine.py`. The open requests are in `requests.py`. See docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from mooncake_lite.config.modes import DUTIES
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.copies import Copies
from mooncake_lite.control.life import Stage, Step
from mooncake_lite.control.malformed import wrong_request
from mooncake_lite.control.prefix_loads import PrefixLoads
from mooncake_lite.control.request import RequestRecord, Try, first_attempt
from mooncake_lite.control.requests import Requests
from mooncake_lite.control.room import Room
from scheduler import Admission, Placement, Rejection, Request, State, Wait
from scheduler.costs.load_or_compute import LoadOrCompute
from store.errors import PoolFull

STARTING_RETRY_S = 5.0
"""Retry-After of a request that arrives before every rank has joined. Any few seconds work."""

PINNED_RETRY_S = 5.0
"""Retry-After of a request that does not fit beside pinned blocks. Any few seconds work."""


Choose = Callable[[State, Request, float], Placement | Wait | Rejection]
"""Chooses the place of a request, as scheduler.choose does for a policy."""


class Dispatcher:
    """Takes requests from their arrival to the order that starts them.

    choose      chooses the place of a request: scheduler.choose with a policy
    admission   refuses requests
    _stuck      slots freed so far, and the head of the held line, when the policy last answered Wait
    closed      why no request can be served, because of lost ranks; "". Every refusal says so (HTTP 503)
    closes_at   until when requests wait for such ranks; inf while it is not closed
    learning    why no request may begin yet: a new conductor waits for the reports of its ranks; ""
    _full_at    what `Directory.space` counted when a request did not fit into the pool
    lift_pins   takes off the pins of hints when space is short; returns whether there were any

    A deferred request starts again when what it lacks was freed. While none was freed since a request did not
    fit into the pool, no other request is tried. Decode ranks that lend memory each have space of their own.
    """

    def __init__(self, books: Books, choose: Choose, admission: Admission, requests: Requests) -> None:
        self.choose = choose
        self.admission = admission
        self._stuck = -1, ""
        self._wait_s = books.config.wait_for_rank_s
        self._first_attempt = first_attempt(books.config.term)
        self._full_at = -1
        self._state, self._directory, self._members = books.state, books.directory, books.members
        self._requests, self._emit = requests, books.emit
        self._block_tokens = books.config.block_layout.block_tokens
        self._handover, self._classes = books.config.handover, books.config.classes
        self._prefetches = books.config.prefetches and self._handover == "pool"
        self.room = Room(books)
        self._load_or_compute = LoadOrCompute(books.state.costs)
        self.loads = PrefixLoads(books, self._loads_ended)
        self.copies = Copies(books, self._loads_ended)
        self.closed, self.closes_at, self.learning = self._lacking(), inf, ""
        self.lift_pins: Callable[[], bool] = bool

    def on_arrived(self, arrived: ev.RequestArrived, now: float) -> None:
        """Refuse a request at once, or accept it and place or hold it. Its repetition changes nothing."""
        if arrived.request_id in self._requests:
            self._requests.ignored += 1
            return
        if problem := wrong_request(arrived, len(self._classes), self._block_tokens):
            self._emit(fx.Reject(arrived.request_id, problem, 0.0))
            self._emit(fx.Forget(arrived.request_id, "rejected"))
            return
        record = RequestRecord.of(arrived, self._classes[arrived.class_id], now, self._first_attempt)
        if arrived.answers:
            self._requests.take_over(record, arrived, now)
            return
        if not self._members.was_ready:
            self._reject(record, "the cluster is still starting", STARTING_RETRY_S)
            return
        request = record.as_request(self._state, self._block_tokens)
        decision = self._decide(request, now)
        if isinstance(decision, Rejection):
            self._reject(record, decision.reason, decision.retry_after_s)
            return
        self._requests.add(record)
        if isinstance(decision, Placement):
            self._take(record, request, decision, now)
        else:
            self._state.wait_in_line(request, now)

    def _decide(self, request: Request, now: float) -> Placement | Wait | Rejection:
        """Refuse a new request, find its place, or let it wait. Those that wait already go first."""
        if now >= self.closes_at:
            return Rejection(request.request_id, self.closed, STARTING_RETRY_S)
        refused = self.admission.on_arrival(self._state, request, now)
        if refused is not None:
            return refused
        if self.closed or self.learning:
            return Wait(request.request_id, self.closed or self.learning)
        decision: Placement | Wait | Rejection = Wait(request.request_id, "others wait")
        if not self._state.held:
            decision = self._choose_for(request, now)
        if isinstance(decision, Rejection):
            return decision
        placement = decision if isinstance(decision, Placement) else None
        refused = self.admission.on_place(self._state, request, placement, now)
        return decision if refused is None else refused

    def _reject(self, record: RequestRecord, reason: str, retry_after_s: float) -> None:
        self._tell_refusal(record, reason, retry_after_s)
        self._emit(fx.Forget(record.request_id, "rejected"))

    def _tell_refusal(self, record: RequestRecord, reason: str, retry_after_s: float) -> None:
        """Tell a client why its request is refused. While no request can be served, that is the reason."""
        kind: fx.Refusal = "overload" if self._members.was_ready and not self.closed else "unavailable"
        self._emit(fx.Reject(record.request_id, self.closed or reason, retry_after_s, kind))

    def dispatch(self, now: float) -> None:
        """Place held requests, and start those whose turn it is. Only placement scans instances.

        A start that ends in a refusal frees a place, so that the next request may be placed.
        """
        if now >= self.closes_at:
            self._refuse_waiting(now)
        self._state.held.is_served = is_served = not (self.closed or self.learning)
        while is_served:
            request = self._state.held.head() if self._state.held else None
            if request is not None and (self._state.freed_slots, request.request_id) != self._stuck:
                self._place(self._requests[request.request_id], request, now)
            elif not self._is_full() and (request_id := self._state.startable()) is not None:
                self._start(self._requests[request_id], now)
            else:
                return

    def note_loss(self, now: float) -> None:
        """Look what the cluster can still do after the loss of a rank. What waits for space tries again."""
        self.retry(all_of_them=True)
        before, self.closed = self.closed, self._lacking()
        if not self.closed:
            self.closes_at = inf
        elif self.closes_at == inf:
            self.closes_at = now + self._wait_s
        if self.closed != before:
            self._emit(fx.Readiness(self._members.was_ready, self._members.missing(), self.closed))

    def _lacking(self) -> str:
        """Say which duties no rank is left for; "" without any. Ranks that are still to join are counted."""
        roles = [self._members.roles[rank] for rank in (*self._members.computes, *self._members.stores)]
        left = {duty for role in roles for duty in DUTIES[role]}
        missing = [duty for duty in ("prefill", "decode") if duty not in left]
        if self._handover == "pool" and "store" not in left and not self._directory.has_segments:
            missing.append("store")
        return f"no rank is left that can {' or '.join(missing)}" if missing else ""

    def open(self, now: float) -> None:
        """Begin requests that had to wait until a new conductor knew what ranks hold."""
        self.learning = ""
        self.note_loss(now)

    def _refuse_waiting(self, now: float) -> None:
        """Refuse what has waited long enough for a duty that no rank has."""
        for record in self._requests.waiting():
            if record.stage is Stage.OVER:
                continue  # it failed with an answer to the same prompt
            self.refuse(record, self.closed, STARTING_RETRY_S, now)

    def _is_full(self) -> bool:
        """Tell whether a request waits for space in the pool, and none has been freed since."""
        return bool(self._state.deferred) and self._directory.space()[0] == self._full_at

    def retry(self, *, all_of_them: bool) -> None:
        """Let deferred requests start again: those that may fit now, or all of them."""
        for request_id in self._state.deferred:
            if all_of_them or self.room.may_fit(self._requests[request_id]):
                self._full_at = -1
                self._state.retry(request_id)

    def _place(self, record: RequestRecord, request: Request, now: float) -> None:
        """Find a place for a held request, or refuse it. Without one, all that are held wait for capacity."""
        decision = self._choose_for(request, now)
        if isinstance(decision, Placement) and not (record.resumed or record.tries):
            decision = self.admission.on_place(self._state, request, decision, now) or decision
        if isinstance(decision, Rejection):
            self.refuse(record, decision.reason, decision.retry_after_s, now)
        elif isinstance(decision, Placement):
            self._take(record, request, decision, now)

    def _choose_for(self, request: Request, now: float) -> Placement | Wait | Rejection:
        """Ask the policy, and note a Wait: until a slot is freed, the answer is the same."""
        decision = self.choose(self._state, request, now)
        if isinstance(decision, Wait):
            self._stuck = self._state.freed_slots, request.request_id
        return decision

    def _take(self, record: RequestRecord, request: Request, placement: Placement, now: float) -> None:
        """Give a request its place. An instance has the number of its first rank, which gets the orders."""
        kept = record.present.kept
        if kept is None:
            self._requests.move(record, Step.PLACE)
            self._state.place(request, placement, now, front=record.resumed)
        else:
            self._requests.move(record, Step.RESUME)
            self._state.resume(request, placement, now)
        record.present = Try(placement.prefill, placement.decode, placement.fetch, placement.most_blocks)
        ranks, expected = (placement.prefill, placement.decode), placement.cached_tokens
        self._emit(fx.Decided(record.request_id, record.attempt + 1, *ranks, expected, placement.terms))
        if kept is not None:
            record.present.load, record.present.tail = kept.blocks, kept.tail
            record.attempt += 1
            self.start_decode(record, now)

    def start_decode(self, record: RequestRecord, now: float) -> None:
        """Order a decode rank to load the KV of a request, and to continue from it."""
        present = record.present
        self._requests.work(record, present.decode, self._decode_s(record), now)
        blocks, branches = self.room.to_read(present.load + present.store, now), sorted(record.branches)
        tail = self.room.to_read([present.tail], now)[0] if present.tail is not None else None
        order = fx.StartDecode(present.decode, record.request_id, record.attempt, blocks, tail, branches)
        self._emit(order)

    def _decode_s(self, record: RequestRecord) -> float:
        """Predict for how long a request decodes."""
        answer = self._state.request_of(record.request_id).predicted_tokens
        return answer * self._state.costs.mean_step_s(1.0, record.num_tokens)

    def refuse(self, record: RequestRecord, reason: str, retry_after_s: float, now: float) -> None:
        """Refuse an accepted request. A request whose client may have received tokens fails instead."""
        if record.resumed or (record.tries and not self.admission.withholds):
            self._requests.fail(record, reason, now)
            return
        self._requests.move(record, Step.REFUSE)
        self._tell_refusal(record, reason, retry_after_s)
        self._requests.end(record, "rejected", now)

    def _start(self, record: RequestRecord, now: float) -> None:
        """Start a request, defer it until there is space, or refuse it if it could never fit."""
        record.present = record.present.again(started_s=now)
        self._state.start(record.request_id, now)
        try:
            moves = self.room.reserve(record, now)
        except PoolFull as error:
            self._directory.revoke_owner(record.request_id, now)
            record.present = record.present.again(shortage=self.room.shortage(record, error))
            reason, lifted = self.room.never_fits(record, error, now), self.lift_pins()
            if reason and not lifted:
                self.refuse(record, reason, PINNED_RETRY_S, now)
                return
            self._state.defer(record.request_id, now)
            if lifted:
                self._state.retry(record.request_id)
                return
            if self._handover == "pool":
                self._full_at = self._directory.space()[0]
            return
        if moves or self.copies.pull(record, now):
            self._requests.move(record, Step.PROMOTE)
            self.loads.begin(record, moves, now)
        else:
            self._prefill(record, now)

    def _loads_ended(self, record: RequestRecord, now: float) -> None:
        """Continue with a request whose loads from SSD have all ended."""
        if record.stage is Stage.CANCELLED:
            self._requests.finish(record, now)
        elif record.request_id not in self._state:
            self._requests.lose(record, "the rank that would compute it is lost", now)
        elif record.present.bad_blocks or not self._requests.is_sound(record):  # look the prefix up again
            self._requests.move(record, Step.RESTART)
            self._directory.revoke_owner(record.request_id, now)
            self._state.defer(record.request_id, now)
            self._state.retry(record.request_id)
        else:
            self._prefill(record, now)

    def _prefill(self, record: RequestRecord, now: float) -> None:
        present = record.present
        self._requests.move(record, Step.PREFILL)
        record.attempt += 1
        present.ordered_s = now
        terms = self._state.placement_of(record.request_id).terms
        decode_s = self._decode_s(record) if self._handover == "none" else 0.0
        self._requests.work(record, present.prefill, terms.transfer_s + terms.prefill_s + decode_s, now)
        self._emit(self._first_order(record, now))
        self.prefetch(record, now)
        if present.worker == present.decode:
            for branch in sorted(record.dropped | record.ended):
                self._requests.cancel_on(record, branch)
        self._state.flows.begin(record.request_id, self._sources(record))
        if present.fetch:
            self.copies.on_prefill(record, now)

    def prefetch(self, record: RequestRecord, now: float) -> None:
        """Let the decode rank of a prompt load the blocks that the pool has of it, if a hint pays.

            record   of a request whose prompt is computed; `record.present` is its try

        The prompt fills the blocks of `present.load` and `present.store`, in this order. A hint is the effect
        Prefetch for `present.decode`. It names all blocks that can be read by now, from the first one on
        (`self.room.written`), so a hint for every new block would name most blocks again and again. It pays
        when there are new blocks since the last hint to this rank, and they are at least an eighth of the
        prompt's blocks that this rank had not been told of before, the new ones among them. The tail is not
        one of these blocks. `present.hinted` says how many blocks each decode rank was told of.

        No hint is sent where prefetches are off (`self._prefetches`), to a request that has no keys, because
        no other request may read its blocks, or to one without a place: `self._state` does not know it.
        """
        # labs:begin 6a
        has_place = record.request_id in self._state  # it may have lost its decode rank
        blocks = self.room.written(record, now) if self._prefetches and has_place and record.keys else []
        present = record.present
        hinted = present.hinted.get(present.decode, 0)
        missing = len(present.load) + len(present.store) - hinted
        if len(blocks) - hinted >= max(1, missing / 8):
            present.hinted[present.decode] = len(blocks)
            num_tokens = len(blocks) * self._block_tokens
            self._emit(fx.Prefetch(present.decode, record.request_id, record.attempt, blocks, num_tokens))
        # labs:end 6a

    def _sources(self, record: RequestRecord) -> list[int]:
        """List the other nodes that a prefill reads from."""
        node_of = self._members.node_of
        own = node_of(record.present.prefill)
        return sorted({node_of(ref.rank) for ref in record.present.load} - {own})

    def _reads(self, record: RequestRecord) -> bool:
        """Tell whether the prefix is read, and not computed although the pool has it."""
        present = record.present
        nbytes = self._members.nbytes_from(present.load, present.prefill)
        cached = sum(present.cached.values())
        return self._load_or_compute.loads(present.prefill, record.num_tokens, cached, *nbytes)

    def _first_order(self, record: RequestRecord, now: float) -> fx.StartPrefill | fx.StartServe:
        """Return the order for the rank that computes the prompt. Without a handover it decodes as well."""
        present = record.present
        load, queued_s = self.room.to_read(present.load, now), now - record.since_s
        reads = not load or bool(present.promoted) or self._reads(record)
        present.to_load = len(load) if reads else 0
        if self._handover == "none":
            return fx.StartServe(
                present.prefill, record.request_id, record.attempt, load, present.cached, queued_s,
                present.promoted, reads,
            )  # fmt: skip
        return fx.StartPrefill(
            present.prefill, record.request_id, record.attempt, load, present.store, present.tail,
            present.cached, queued_s, present.promoted, reads,
        )  # fmt: skip
