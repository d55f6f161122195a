"""What a rank relies on when it carries out an order: its ranges are its own, and hold what they should.

The checker shows it every order and every answer. A range is in use from its order until the control plane
hears the answer.

    GOES_ON       reports after which a rank no longer reads the blocks that its order names
    NAMES_BLOCKS  events that name blocks, with their second digests
    SILENT        orders that use no range

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import TRANSFER_S
from mooncake_lite.control.request import BRANCH_MARK, client_id_of
from store.objects import BlockRef
from tests.worlds.memory import OVERWRITTEN, UseKey, Uses
from tests.worlds.requests import digests_of

GOES_ON = (ev.PrefillEnded, ev.DecodeLoaded, ev.DecodeEnded, ev.Preempted, ev.Swapped)
NAMES_BLOCKS = (ev.TierIndexed, ev.RequestArrived, ev.PutsWanted, ev.Preempted, ev.SwapWanted, ev.Swapped)
SILENT = (fx.CompactTier, fx.ForgetPages, fx.HoldBlocks)


@dataclass(slots=True)
class _Open:
    """What is known of a request, or of a branch that goes on alone, from the orders about it.

    kv         digests of its tokens, as far as they were needed
    attempt    the latest that a rank was given; on_rank: where; recalled: the latest one that was recalled
    live       branches that its latest rank has not ended; over: branches that need no more decoding
    swaps      branches whose KV goes into the pool, or has gone there
    store      places of full blocks that its latest attempt writes
    """

    kv: list[int] = field(default_factory=list)
    attempt: int = 0
    on_rank: int = -1
    recalled: int = 0
    live: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    swaps: set[int] = field(default_factory=set)
    store: list[BlockRef] = field(default_factory=list)

    def kv_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the digests of a sequence, which begins with what earlier calls named."""
        known = len(self.kv)
        self.kv += digests_of(token_ids[known:], *self.kv[-1:])
        return self.kv[: len(token_ids)]


class Custody(Uses):
    """The ranges in use, and what the tiers have told.

    _given    id of an order -> the order, and what uses it began
    on_ssd    rank -> keys that its tier has, as the control plane was told
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._handover, self._block_tokens = world.shape.config.handover, world.shape.layout.block_tokens
        self._open, self._numbers = dict[str, _Open](), set[int]()
        self._given = dict[int, tuple[fx.Order, list[UseKey]]]()
        self._asked, self._checks = dict[tuple[int, int], list[UseKey]](), dict[int, UseKey]()
        self._loads, self._digests = dict[int, tuple[float, list[int]]](), dict[int, int]()
        self.on_ssd: defaultdict[int, set[int]] = defaultdict(set)
        self._orders: dict[type, Callable[..., None]] = dict.fromkeys(SILENT, lambda order: None) | {
            fx.StartPrefill: self._prefill, fx.StartDecode: self._decode, fx.StartServe: self._serve,
            fx.Prefetch: self._prefetch, fx.CancelOn: self._cancel, fx.GrantPuts: self._grant,
            fx.GrantSwap: self._grant_swap, fx.LoadBlocks: self._load, fx.SaveBlocks: self._save,
            fx.CopyBlocks: self._copy, fx.CheckBlocks: self._check, fx.ListOpen: self._ask,
            fx.RemoveBlocks: self._not_on_ssd,
        }  # fmt: skip
        self._answers: dict[type, Callable[..., None]] = dict.fromkeys(GOES_ON, self._request_goes_on) | {
            ev.ChunkStored: self._chunk_stored, ev.TierIndexed: self._on_ssd, ev.RankJoined: self._joined,
            ev.RequestFailed: self._failed, ev.OpenListed: self._listed, ev.PutsEnded: self._puts_ended,
            ev.BlocksLoaded: self._loaded, ev.BlocksSaved: self._saved, ev.TierEvicted: self._not_on_ssd,
            ev.BlocksRemoved: self._not_on_ssd, ev.BlocksCopied: self._copied, ev.BlocksBad: self._bad,
            ev.BlocksChecked: lambda event: self._end(("check", event.number)), ev.RankLost: self._lost,
            ev.CommandAbandoned: lambda event: self._end_reads(self._checks.get(event.command, ())),
            ev.Undelivered: lambda event: self.never_came(event.order),
            ev.PromptComputed: lambda event: self._end_reads(_work(event)),
        }  # fmt: skip

    def order(self, order: fx.Order) -> None:
        """Check an order that leaves the control plane, and note what it uses."""
        self._begun: list[UseKey] = []
        self._given[id(order)] = order, self._begun
        self._orders[type(order)](order)

    def answer(self, event: ev.Event) -> None:
        """End the uses that an event ends; the control plane is about to hear it."""
        if isinstance(event, ev.RankEvent) and event.rank in self._gone:
            return  # the control plane ignores it
        if isinstance(event, NAMES_BLOCKS):
            self._digests.update(zip(event.keys, event.digests, strict=True))
        for one in event.answers if isinstance(event, ev.Recalled | ev.RequestArrived) else ():
            self._digests.update(zip(one.keys, one.digests, strict=True))
        handler = self._answers.get(type(event))
        if handler is not None:
            handler(event)

    def unheard(self, event: ev.RankEvent) -> None:
        """End the uses that an event ends which the control plane will never hear."""
        if isinstance(event, ev.BlocksLoaded):
            event = msgspec.structs.replace(event, problem="lost")  # nor is it known what the tier lacks
        if not isinstance(event, ev.TierEvicted | ev.BlocksRemoved | ev.OpenListed):
            self.answer(event)

    def never_came(self, order: fx.Order) -> None:
        """End the uses of an order that is lost, whether the control plane knows it or not."""
        for key in self._given.pop(id(order))[1]:
            self._end(key)

    def recalled(self, effect: fx.Recall) -> None:
        """Note that a request goes on from what its client has."""
        known = self._of(effect.request_id)
        known.live, known.over, known.swaps = set(), set(), set()
        known.recalled = effect.attempt
        for branch in effect.branches:
            self._of(f"{effect.request_id}{BRANCH_MARK}{branch}").swaps.clear()

    def ended(self, forget: fx.Forget) -> None:
        """Check the end of a request: its rank has told the end of every branch."""
        live = self._of(forget.request_id).live
        assert forget.outcome != "finished" or not live, f"{forget}: branches {live} go on"

    def take_over(self) -> None:
        """Forget what the conductor that died has ordered, but not what ranks use. Late bytes that it had
        kept places for may land on others now."""
        self._memory.written.clear()
        for known in (self._open, self._numbers, self._asked, self._loads, self._checks):
            known.clear()
        self.forget_late()

    def _joined(self, event: ev.RankJoined) -> None:
        """End all uses of a rank that joins a new conductor."""
        self.on_ssd[event.rank] = set()
        self._known.add(event.rank)
        self._leave(event.rank, OVERWRITTEN)

    def _of(self, request_id: str) -> _Open:
        return self._open.setdefault(request_id, _Open())

    # ------------------------------------------------------------------------------ orders

    def _body(self, order: fx.StartOrder | fx.GrantSwap) -> Any:
        assert order.request_id in self._world.conductor.bodies, f"{order.request_id} has ended"
        return self._world.conductor.bodies[order.request_id]

    def _prefill(self, order: fx.StartPrefill) -> None:
        num_tokens, size = self._first(order), self._block_tokens
        assert len(order.load) + len(order.store) == num_tokens // size, "not a place for each full block"
        assert bool(order.tail) == (num_tokens % size > 0), "a tail without tokens, or none for them"
        places = [*order.store, order.tail] if order.tail else order.store
        self._of(order.request_id).store = order.store
        self._begin(_work(order), order.load, places, order.rank)

    def _serve(self, order: fx.StartServe) -> None:
        num_tokens, body = self._first(order), self._body(order).body
        assert len(order.load) <= num_tokens // self._block_tokens
        self._of(order.request_id).live = set(range(body.branch, body.branch + body.n))
        self._begin(_work(order), order.load, [], order.rank)

    def _first(self, order: fx.StartPrefill | fx.StartServe) -> int:
        """Check the first order of an attempt: it is new, and reads what the request begins with.

        Returns the tokens to prefill.
        """
        body, known = self._body(order).body, self._of(order.request_id)
        assert order.attempt > known.attempt, f"attempt {order.attempt} after {known.attempt}"
        known.attempt, known.on_rank = order.attempt, order.rank
        known.swaps.clear()  # what was swapped out is lost
        self._expect(known, body.token_ids, order.load)
        assert body.salt or not order.load
        return len(body.token_ids)

    def _expect(self, known: _Open, token_ids: Sequence[int], refs: Sequence[BlockRef]) -> None:
        """Assert that these blocks hold the KV of the first tokens; the last one may be partial."""
        kv, size = known.kv_of(token_ids), self._block_tokens
        for index, ref in enumerate(refs):
            if not ref.check:
                self._memory.expect(ref, kv[index * size : (index + 1) * size])

    def _decode(self, order: fx.StartDecode) -> None:
        body, known = self._body(order).body, self._of(order.request_id)
        if body.branch in known.swaps and body.n == 1:
            known.swaps.discard(body.branch)
            assert order.attempt > known.attempt, f"attempt {order.attempt} after {known.attempt}"
        else:
            assert order.attempt == known.attempt, f"attempt {order.attempt} was never prefilled"
        known.attempt, known.on_rank = order.attempt, order.rank
        known.live, wanted = set(order.branches), set(range(body.branch, body.branch + body.n)) - known.over
        assert known.live <= wanted, f"{order.branches} of {wanted}"
        tokens = body.token_ids[:-1] if body.n == 1 else body.token_ids  # not the last token of the answer
        assert len(order.blocks) == len(tokens) // self._block_tokens
        reads = [*order.blocks, order.tail] if order.tail else order.blocks
        if self._handover == "direct":
            assert {ref.rank for ref in reads} <= {order.rank}, "KV of another rank"
        self._expect(known, tokens, reads)
        self._begin(_work(order), reads, [], order.rank)

    def _prefetch(self, order: fx.Prefetch) -> None:
        """Check a hint. What it names may be overwritten at any time, and its reader compares."""
        body, known = self._world.conductor.bodies[order.request_id].body, self._of(order.request_id)
        assert order.attempt == known.attempt
        assert order.num_tokens == len(order.blocks) * self._block_tokens <= len(body.token_ids)
        assert all(ref.check for ref in order.blocks)

    def _cancel(self, order: fx.CancelOn) -> None:
        known = self._of(order.request_id)
        assert (order.attempt, order.rank) == (known.attempt, known.on_rank), "a cancel for another rank"
        known.live.discard(order.branch)  # nobody waits for its end

    def _grant(self, order: fx.GrantPuts) -> None:
        for ref in order.places:
            if ref is not None:
                self._begin(("put", ref.object_id), [], [ref], order.rank)

    def _grant_swap(self, order: fx.GrantSwap) -> None:
        name, known = self._name_of(order), self._of(order.request_id)
        self._body(order)
        assert order.attempt == known.attempt
        if order.places is None:
            return
        swapping = self._of(name)
        swapping.swaps.add(order.branch)
        swapping.attempt = known.attempt if name == order.request_id else 0
        places = [place for place in order.places if place is not None]
        self._begin(("swap", order.rank, name, order.attempt), [], places, order.rank)

    def _ask(self, order: fx.ListOpen) -> None:
        """Remember what was in use when a rank was asked."""
        self._asked[order.rank, order.number] = [
            key for key in self._uses if key[0] in ("work", "swap") and key[1] == order.rank
        ]

    def _listed(self, listed: ev.OpenListed) -> None:
        """End the uses of work that a rank does not have any more."""
        there = set(listed.work)
        for key in self._asked.pop((listed.rank, listed.number), ()):
            _, _, name, attempt = key
            if (client_id_of(str(name)), attempt) not in there and (name, attempt) not in there:
                self._end(key)

    def _load(self, order: fx.LoadBlocks) -> None:
        self._is_new(order.number)
        assert order.digests == [self._digests[key] for key in order.keys]
        assert len({ref.rank for ref in order.refs}) == 1, "places in several segments"
        missing = set(order.keys) - self.on_ssd[order.rank]
        assert not missing, f"the tier of rank {order.rank} has told that {missing} are gone"
        self._loads[order.number] = self._clock.now, order.keys
        self._begin(("load", order.number), [], order.refs, order.rank)

    def _save(self, order: fx.SaveBlocks) -> None:
        blocks = zip(order.refs, order.keys, order.digests, order.checksums, strict=True)
        for ref, key, digest, sums in blocks:
            assert digest == self._digests[key]
            if not self.doubts:
                self._memory.expect_sums(ref, key, sums)
            self._begin(("save", order.rank, key), [ref], [], order.rank)

    def _copy(self, order: fx.CopyBlocks) -> None:
        self._is_new(order.number)
        assert all(target.rank == order.rank for target in order.targets)
        key = ("copy", order.number)
        self._begin(key, order.sources, order.targets, order.rank)
        self._clock.after(TRANSFER_S, lambda: self._end_reads(key))

    def _check(self, order: fx.CheckBlocks) -> None:
        self._is_new(order.number)
        for ref, sums in () if self.doubts else zip(order.refs, order.checksums, strict=True):
            self._memory.expect_sums(ref, self._memory.content(ref).key, sums)
        key = self._checks[order.command] = ("check", order.number)
        self._begin(key, order.refs, [], order.rank)
        self._clock.after(TRANSFER_S, lambda: self._end_reads(key))

    def _on_ssd(self, event: ev.TierIndexed | ev.BlocksSaved) -> None:
        self.on_ssd[event.rank].update(event.keys)

    def _not_on_ssd(self, gone: fx.RemoveBlocks | ev.TierEvicted | ev.BlocksRemoved) -> None:
        self.on_ssd[gone.rank].difference_update(gone.keys)

    def _is_new(self, number: int) -> None:
        assert number not in self._numbers, f"order {number} is given twice"
        self._numbers.add(number)

    # ------------------------------------------------------------------------------ answers

    def _chunk_stored(self, event: ev.ChunkStored) -> None:
        """End writes of a prefill that goes on, or whose failure was not heard."""
        known = self._of(event.request_id)
        if known.attempt == event.attempt:
            stored = known.store[event.first : event.first + len(event.checksums)]
            self._end_writes(_work(event), stored, event.rank)

    def _request_goes_on(self, event: Any) -> None:
        """End the uses of a request, once the last of its branches ends.

        A branch of a recalled attempt is not noted as over, because it begins anew.
        """
        known, is_recalled = self._of(event.request_id), event.attempt <= self._of(event.request_id).recalled
        if isinstance(event, ev.PrefillEnded):
            known.over.update(() if is_recalled else event.finished)
        elif not isinstance(event, ev.DecodeLoaded):
            self._end_swap(event)
            if not is_recalled:
                known.live.discard(event.branch)
                known.over.add(event.branch)
                if known.live:
                    return
            if not isinstance(event, ev.DecodeEnded) and event.request_id in self._world.conductor.bodies:
                known.over.discard(event.branch)  # the request goes on as a whole, or its branch alone does
        self._end(_work(event))

    def _end_swap(self, event: ev.DecodeEnded | ev.Preempted | ev.Swapped) -> None:
        name = self._name_of(event)
        late = isinstance(event, ev.Preempted) and event.may_still_write
        self._end(("swap", event.rank, name, event.attempt), late=late)
        if not isinstance(event, ev.Swapped):
            self._of(name).swaps.discard(event.branch)

    def _name_of(self, event: ev.DecodeEnded | ev.Preempted | ev.Swapped | fx.GrantSwap) -> str:
        """Return the id of the branch that an answer or an order is about."""
        body = self._world.conductor.bodies.get(event.request_id)
        return event.request_id if body is None or body.body.n == 1 else f"{event.request_id}#{event.branch}"

    def _failed(self, event: ev.RequestFailed) -> None:
        """End the uses of a job and of its branches that swap, but not of one that goes on alone."""
        self._end(_work(event), late=event.may_still_write)
        first, work = f"{event.request_id}{BRANCH_MARK}", (event.rank, event.attempt)
        for key in [key for key in self._uses if key[0] == "swap" and key[1::2] == work]:
            if str(key[2]).startswith(first) and not self._of(str(key[2])).attempt:
                self._end(key, late=event.may_still_write)

    def _puts_ended(self, event: ev.PutsEnded) -> None:
        for object_id in (*event.object_ids, *event.failed):
            self._end(("put", object_id), late=object_id in event.failed and event.may_still_write)

    def _loaded(self, event: ev.BlocksLoaded) -> None:
        uses = self._uses.pop(("load", event.number))
        ordered_s, keys = self._loads.pop(event.number)
        given_up = self._clock.now - ordered_s >= TRANSFER_S
        for use, key, ok in zip(uses, keys, event.ok, strict=True):
            self._end_use(use, event.rank, late=not ok and event.may_still_write)
            if not (ok or event.problem or given_up):
                self.on_ssd[event.rank].discard(key)

    def _copied(self, event: ev.BlocksCopied) -> None:
        uses = self._uses.pop(("copy", event.number))
        writes = [use for use in uses if use.kind == "write"]
        for use, sums in zip(writes, event.checksums, strict=True):
            self._end_use(use, event.rank, late=not sums and event.may_still_write)
        self._memory.end(use for use in uses if use.kind == "read")

    def _bad(self, event: ev.BlocksBad) -> None:
        self._end_saves(lambda ref: ref.object_id in event.object_ids)

    def _saved(self, event: ev.BlocksSaved) -> None:
        if event.state == "durable":
            self._on_ssd(event)
        for key in event.keys:
            self._end(("save", event.rank, key))


def _work(of: Any) -> UseKey:
    """Return the key of what a rank reads and writes for an attempt of a request."""
    return "work", of.rank, of.request_id, of.attempt
