"""What a rank relies on when it carries out an order: its ranges are its own, and hold what they should.

Used by `world.py`, which shows it every order and every answer. A range is in use from its order until the
control plane hears the answer. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple, get_args

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.orders import ORDER_LIMIT_S
from mooncake_lite.modes import Handover
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import LATE_WRITE_S
from mooncake_lite.simulator.memory import Label, Memory, Use
from mooncake_lite.simulator.workload import Request, digest_of
from store.objects import BlockRef

GoesOn = (
    ev.PrefillEnded | ev.DecodeLoaded | ev.PromptComputed | ev.DecodeEnded | ev.Preempted | ev.Swapped
)  # fmt: skip
"""Answers after which a rank does not read what its order names."""

UseKey = tuple[str, int, str, int]
"""(what it is for, rank, request id or "", attempt, number, object id or key)"""


def labels_of(request: Request, attempt: int, num_blocks: int) -> list[Label]:
    """Return what the first full blocks of a request hold: keys, or what only this attempt may read."""
    if request.reuse:
        return list(request.keys[:num_blocks])
    return [("own", request.request_id, attempt, index) for index in range(num_blocks)]


def tail_of(request_id: str, attempt: int) -> Label:
    """Return what the tail of a request holds."""
    return "tail", request_id, attempt, 0


class _Kept(NamedTuple):
    """Where the KV of a branch goes that is swapped out by an attempt: None where the pool has a block."""

    attempt: int
    places: list[BlockRef | None]

    def labels(self, request: Request) -> list[Label]:
        """Return what its blocks hold, with one for the tail at the end."""
        own = [("own", request.request_id, self.attempt, number) for number in range(len(self.places))]
        keys = [*request.keys, 0]
        return [keys[n] if place is None else own[n] for n, place in enumerate(self.places)]


class Custody:
    """The ranges in use, and what the tiers have told.

    on_ssd    rank -> keys that its tier has, as the control plane was told
    """

    def __init__(
        self, memory: Memory, clock: Clock, dice: Random, requests: dict[str, Request], handover: Handover
    ) -> None:
        self._handover = handover
        self._memory, self._clock, self._dice, self._requests = memory, clock, dice, requests
        self._uses: dict[UseKey, list[Use]] = {}
        self._numbers: set[int] = set()
        self._loads: dict[int, tuple[float, list[int]]] = {}
        self._checks: dict[int, UseKey] = {}
        self._kept: dict[str, _Kept] = {}
        self.on_ssd: dict[int, set[int]] = {}
        self._orders: dict[type, Callable[..., None]] = {
            fx.StartPrefill: self._prefill,
            fx.StartDecode: self._decode,
            fx.StartServe: self._serve,
            fx.CancelOn: self._cancel,
            fx.GrantPuts: self._grant,
            fx.GrantSwap: self._grant_swap,
            fx.LoadBlocks: self._load,
            fx.SaveBlocks: self._save,
            fx.CopyBlocks: self._copy,
            fx.CheckBlocks: self._check,
            fx.RemoveBlocks: self._remove,
            fx.CompactTier: lambda order: None,
            fx.ForgetPages: lambda order: None,
        }
        self._answers: dict[type, Callable[..., None]] = dict.fromkeys(
            get_args(GoesOn), self._request_goes_on
        )
        self._answers |= {
            ev.TierIndexed: lambda event: self.on_ssd.setdefault(event.rank, set()).update(event.keys),
            ev.RequestFailed: self._failed,
            ev.PutsEnded: self._puts_ended,
            ev.BlocksLoaded: self._loaded,
            ev.BlocksSaved: self._saved,
            ev.TierEvicted: lambda event: self.on_ssd[event.rank].difference_update(event.keys),
            ev.BlocksRemoved: lambda event: self.on_ssd.get(event.rank, set()).difference_update(event.keys),
            ev.BlocksCopied: self._copied,
            ev.BlocksChecked: lambda event: self._end(("check", event.rank, "", event.number)),
            ev.CommandAbandoned: self._abandoned,
            ev.Undelivered: self._undelivered,
        }

    def order(self, order: fx.Order) -> None:
        """Check an order that leaves the control plane, and note what it uses."""
        self._orders[type(order)](order)

    def answer(self, event: ev.Event) -> None:
        """End the uses that an event ends; the control plane is about to hear it."""
        handler = self._answers.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def in_use(self) -> dict[UseKey, list[Use]]:
        """Return what is in use; at the end of a run that is nothing."""
        return self._uses

    # ------------------------------------------------------------------------------ orders

    def _request(self, order: fx.StartOrder | fx.GrantSwap) -> Request:
        request = self._requests[order.request_id]
        assert not request.ends, f"{order.request_id} has ended ({request.ends[0]})"
        return request

    def _prefill(self, order: fx.StartPrefill) -> None:
        request = self._first(order)
        text, size = request.text, request.text.block_tokens
        assert len(order.load) + len(order.store) == text.num_tokens // size, (
            "not a place for each full block"
        )
        assert (order.tail is not None) == (text.num_tokens % size > 0), (
            "a tail without tokens, or none for them"
        )
        places = [*order.store, order.tail] if order.tail else order.store
        purpose = f"prefill of {order.request_id}/{order.attempt}"
        key = ("prefill", order.rank, order.request_id, order.attempt)
        self._begin(key, order.load, places, purpose)

    def _serve(self, order: fx.StartServe) -> None:
        request = self._first(order)
        assert len(order.load) <= request.text.num_tokens // request.text.block_tokens
        request.live = set(range(request.n)) if request.n > 1 else {request.branch}
        key = ("serve", order.rank, order.request_id, order.attempt)
        self._begin(key, order.load, [], f"serving of {order.request_id}/{order.attempt}")

    def _first(self, order: fx.StartPrefill | fx.StartServe) -> Request:
        """Check the first order of an attempt: it is new, and reads what the request begins with."""
        request = self._request(order)
        assert order.attempt > request.attempt, f"attempt {order.attempt} after {request.attempt}"
        request.attempt, request.on_rank = order.attempt, order.rank
        for ref, held in zip(order.load, request.keys):
            self._memory.expect(ref, held)
        assert request.reuse or not order.load
        return request

    def _decode(self, order: fx.StartDecode) -> None:
        request = self._request(order)
        kept = self._kept.pop(order.request_id, None)
        if kept is None:
            assert order.attempt == request.attempt, f"attempt {order.attempt} was never prefilled"
            labels = labels_of(request, order.attempt, len(order.blocks))
            tail = tail_of(order.request_id, order.attempt)
        else:
            assert order.attempt > request.attempt, f"attempt {order.attempt} after {request.attempt}"
            labels, tail = kept.labels(request), tail_of(order.request_id, kept.attempt)
        request.attempt, request.on_rank = order.attempt, order.rank
        request.live = set(order.branches)
        wanted = {branch for branch, part in request.parts.items() if part.answered < part.answer_tokens}
        assert wanted - request.dropped <= request.live <= wanted, f"{order.branches} of {wanted}"
        stored = request.text.num_tokens - (request.n == 1)  # not the last token of the answer
        assert len(order.blocks) == stored // request.text.block_tokens
        if self._handover == "direct":
            assert {ref.rank for ref in (*order.blocks, order.tail) if ref} <= {order.rank}, (
                "KV of another rank"
            )
        for ref, label in zip(order.blocks, labels):
            self._memory.expect(ref, label)
        if order.tail is not None:
            self._memory.expect(order.tail, tail)
        reads = [*order.blocks, order.tail] if order.tail else order.blocks
        key = ("decode", order.rank, order.request_id, order.attempt)
        self._begin(key, reads, [], f"decode of {order.request_id}/{order.attempt}")

    def _cancel(self, order: fx.CancelOn) -> None:
        request = self._requests[order.request_id]
        assert (order.attempt, order.rank) == (request.attempt, request.on_rank), "a cancel for another rank"
        in_vain = any(
            part.request_id in self._kept for part in request.parts.values()
        )  # an undelivered grant
        assert request.cancelled or in_vain if order.branch < 0 else order.branch in request.dropped
        assert not request.ends

    def _grant(self, order: fx.GrantPuts) -> None:
        for ref in order.places:
            if ref is not None:
                purpose = f"put {order.number} of rank {order.rank}"
                self._begin(("put", order.rank, "", ref.object_id), [], [ref], purpose)

    def _grant_swap(self, order: fx.GrantSwap) -> None:
        name, request = self._name_of(order), self._request(order)
        assert order.attempt == request.attempt
        self._kept[name] = _Kept(order.attempt, order.places or [])
        if order.places is None:
            return
        text = request.parts[order.branch].text
        num_tokens, size = text.num_tokens - 1, text.block_tokens
        assert len(order.places) == -(-num_tokens // size), "not a place, or None, for each block"
        assert num_tokens % size == 0 or order.places[-1] is not None, "the pool has no partial block"
        places = [place for place in order.places if place is not None]
        self._begin(("swap", order.rank, name, order.attempt), [], places, f"swap of {name}/{order.attempt}")

    def _load(self, order: fx.LoadBlocks) -> None:
        self._is_new(order.number)
        assert order.digests == [digest_of(key) for key in order.keys]
        assert len({ref.rank for ref in order.refs}) == 1, "places in several segments"
        missing = set(order.keys) - self.on_ssd.get(order.rank, set())
        assert not missing, f"the tier of rank {order.rank} has told that {missing} are gone"
        self._loads[order.number] = self._clock.now, order.keys
        self._begin(("load", order.rank, "", order.number), [], order.refs, f"load {order.number}")

    def _save(self, order: fx.SaveBlocks) -> None:
        for ref, key, digest, sums in zip(
            order.refs, order.keys, order.digests, order.checksums, strict=True
        ):
            assert digest == digest_of(key)
            self._memory.expect_sums(ref, key, sums)
            self._begin(("save", order.rank, "", key), [ref], [], f"save of {key:016x}")

    def _copy(self, order: fx.CopyBlocks) -> None:
        self._is_new(order.number)
        assert all(target.rank == order.rank for target in order.targets)
        for source in order.sources:
            assert isinstance(self._memory.content(source).label, int), f"{source} has no key"
        key = ("copy", order.rank, "", order.number)
        self._begin(key, order.sources, order.targets, f"copy {order.number}")
        self._clock.after(ORDER_LIMIT_S, lambda: self._end_reads(key))

    def _check(self, order: fx.CheckBlocks) -> None:
        self._is_new(order.number)
        for ref, sums in zip(order.refs, order.checksums, strict=True):
            self._memory.expect_sums(ref, self._memory.content(ref).label, sums)
        key = self._checks[order.command] = ("check", order.rank, "", order.number)
        self._begin(key, order.refs, [], f"check {order.number}")
        self._clock.after(ORDER_LIMIT_S, lambda: self._end_reads(key))

    def _remove(self, order: fx.RemoveBlocks) -> None:
        self.on_ssd.get(order.rank, set()).difference_update(order.keys)

    def _is_new(self, number: int) -> None:
        assert number not in self._numbers, f"order {number} is given twice"
        self._numbers.add(number)

    # ------------------------------------------------------------------------------ answers

    def _request_goes_on(self, event: GoesOn) -> None:
        """End the reads of a request. A branch that ends early leaves those of its siblings."""
        if isinstance(event, ev.DecodeEnded | ev.Preempted | ev.Swapped):
            self._end_swap(event)
            live = self._requests[event.request_id].live
            live.discard(event.branch)
            if live:
                return
        for what in ("prefill",) if isinstance(event, ev.PrefillEnded) else ("decode", "serve"):
            self._end((what, event.rank, event.request_id, event.attempt))

    def _end_swap(self, event: ev.DecodeEnded | ev.Preempted | ev.Swapped) -> None:
        name = self._name_of(event)
        late = isinstance(event, ev.Preempted) and event.may_still_write
        self._end(("swap", event.rank, name, event.attempt), late=late)
        if not isinstance(event, ev.Swapped):
            self._kept.pop(name, None)

    def _name_of(self, event: ev.DecodeEnded | ev.Preempted | ev.Swapped | fx.GrantSwap) -> str:
        """Return the id of the branch that an answer or an order is about."""
        request = self._requests[event.request_id]
        return request.request_id if request.n == 1 else f"{request.request_id}#{event.branch}"

    def _failed(self, event: ev.RequestFailed) -> None:
        for what in ("prefill", "decode", "serve"):
            self._end((what, event.rank, event.request_id, event.attempt), late=event.may_still_write)

    def _puts_ended(self, event: ev.PutsEnded) -> None:
        for object_id in event.object_ids:
            self._end(("put", event.rank, "", object_id))
        for object_id in event.failed:
            self._end(("put", event.rank, "", object_id), late=event.may_still_write)

    def _loaded(self, event: ev.BlocksLoaded) -> None:
        uses = self._uses.pop(("load", event.rank, "", event.number))
        ordered_s, keys = self._loads.pop(event.number)
        given_up = self._clock.now - ordered_s >= ORDER_LIMIT_S
        for use, key, ok in zip(uses, keys, event.ok, strict=True):
            self._end_use(use, late=not ok and event.may_still_write)
            if not (ok or event.problem or given_up):
                self.on_ssd[event.rank].discard(key)

    def _copied(self, event: ev.BlocksCopied) -> None:
        uses = self._uses.pop(("copy", event.rank, "", event.number))
        writes = [use for use in uses if use.kind == "write"]
        for use, sums in zip(writes, event.checksums, strict=True):
            self._end_use(use, late=not sums and event.may_still_write)
        self._memory.end(use for use in uses if use.kind == "read")

    def _saved(self, event: ev.BlocksSaved) -> None:
        for key in event.keys:
            if event.state == "durable":
                self.on_ssd.setdefault(event.rank, set()).add(key)
            self._end(("save", event.rank, "", key))

    def _abandoned(self, event: ev.CommandAbandoned) -> None:
        """End the reads of a command whose answer has no reader any more."""
        key = self._checks.get(event.command)
        if key is not None:
            self._end_reads(key)

    def _undelivered(self, event: ev.Undelivered) -> None:
        order = event.order
        match order:
            case fx.StartPrefill():
                self._end(("prefill", order.rank, order.request_id, order.attempt))
            case fx.StartDecode():
                self._end(("decode", order.rank, order.request_id, order.attempt))
            case fx.StartServe():
                self._end(("serve", order.rank, order.request_id, order.attempt))
            case fx.GrantSwap():
                self._end(("swap", order.rank, self._name_of(order), order.attempt))
            case fx.GrantPuts():
                for ref in order.places:
                    if ref is not None:
                        self._end(("put", order.rank, "", ref.object_id))
            case fx.LoadBlocks():
                self._end(("load", order.rank, "", order.number))
            case fx.CopyBlocks():
                self._end(("copy", order.rank, "", order.number))
            case fx.CheckBlocks():
                self._end(("check", order.rank, "", order.number))
            case fx.SaveBlocks():
                for key in order.keys:
                    self._end(("save", order.rank, "", key))

    # ------------------------------------------------------------------------------ uses

    def _begin(self, key: UseKey, reads: list[BlockRef], writes: list[BlockRef], purpose: str) -> None:
        assert key not in self._uses, f"{purpose} is ordered twice"
        uses = self._memory.begin_read(reads, purpose) + self._memory.begin_write(writes, purpose)
        if uses:
            self._uses[key] = uses

    def _end(self, key: UseKey, *, late: bool = False) -> None:
        for use in self._uses.pop(key, ()):
            self._end_use(use, late=late and use.kind == "write")

    def _end_reads(self, key: UseKey) -> None:
        """End the reads of an order whose lease has run out."""
        if key in self._uses:
            self._memory.end(use for use in self._uses[key] if use.kind == "read")
            self._uses[key] = [use for use in self._uses[key] if use.kind != "read"]

    def _end_use(self, use: Use, *, late: bool) -> None:
        if not late:
            self._memory.end([use])
            return
        waiting = self._memory.end_late(use)
        self._clock.after(self._dice.random() * LATE_WRITE_S, lambda: self._land(waiting))

    def _land(self, use: Use) -> None:
        """Let the last bytes of a failed transfer land."""
        self._memory.tear(use.ref)
        self._memory.end([use])
