"""Scenarios: conversations with the control plane as text, one line for each event and each effect.

    # A title, in one sentence.                              begins a scenario
    cluster prefill 1 decode 1 store 1 blocks 8 slots 4      its ranks; blocks of each store rank
    cluster prefill 1 decode 1 store 1 share 50              the first class keeps half of the blocks
    cluster admission predictive profile                     a form of admission; PROFILE is known
    cluster order srpt queue 8 slots 4 trust 50              a queue; how many may wait; trust in percent
    cluster policy topology nodes 0012 racks 010             a node for each rank, and a rack for each node
    cluster profile link 200 rack 10 terms                   milliseconds for a block between nodes, in a rack
    cluster prefetch decode 2                                decode ranks load while prompts are computed
    cluster threshold 150 cold 5                             balancing threshold in percent; copy_cold_s
    cluster mode split prefill 1 decode 2 lend 4 slots 4     roles of another mode; blocks of each lender
    > arrived a 40 tokens keys x1 x2                         an event (COMMANDS)
      StartPrefill rank 1 a/1 load - store 3:0 3:1 tail 3:2  an effect; 3:0 is the first block of rank 3
      pool: 2 visible, ...                                   the books, at the end and after `> books`

A block has 16 tokens. Keys are names. a/1 is the first attempt of request a. One millisecond passes before
each event. `> wait 120` lets so many seconds pass, with the Ticks that were asked for. With the word `terms`,
decisions show the terms of their prefill instances, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from mooncake_lite.config.modes import DUTIES, MODES, ROLES
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler import Terms
from scheduler.admission import DEFAULT
from scheduler.classes import DEFAULT_CLASSES
from scheduler.costs import CostConfig, DecodeCost, LoadCost, PrefillCost, TransferCost
from store.objects import BlockRef, BlockRemoved, BlockStored
from tests.mooncake_lite.control.commands import (
    COMMANDS,
    Context,
    after,
    digest_of,
    heard_before,
    words_after,
)

LAYOUT = (2, 1, 16, 4, 4, "none")
BLOCK_BYTES = 1024

PROFILE = CostConfig(
    prefill=PrefillCost(0.0, 0.1 / 16), decode=DecodeCost(0.01, 0.01, 0.0),
    transfer=TransferCost(1e12, 0.0), load=LoadCost(1e12, 1e12, 0.0), is_guess=False,
)  # fmt: skip
"""0.1 s to prefill a block, 10 ms for a decode step and 10 ms for each sequence in it."""


def profile(link_ms: int, rack_ms: int) -> CostConfig:
    """PROFILE, in which a block takes so long between nodes and within a rack; 0: no time."""
    if not link_ms:
        return PROFILE
    far, rack = (BLOCK_BYTES * 1000 / ms if ms else 0.0 for ms in (link_ms, rack_ms))
    return replace(PROFILE, transfer=TransferCost(far, 0.0, rack))


class Scenario:
    """A control plane, and what a scenario may refer to: the orders that it gave."""

    def __init__(self, words: list[str]) -> None:
        """words: of the line `cluster`, a word for each size and a number after it."""
        mode = after(words, "mode") or "pooled"
        sizes = {role: MODES[mode].ranks.get(role, 0) for role in ROLES}
        sizes |= {"blocks": 16, "lend": 0, "slots": 4, "queue": 64, "share": 0, "link": 0, "rack": 0}
        sizes |= {"trust": 50, "threshold": 150, "cold": 60}
        sizes |= {name: int(after(words, name) or 0) for name in sizes if name in words}
        roles = ["steward", *(role for role in ROLES for _ in range(sizes[role]))]
        nodes = [int(node) for node in (after(words, "nodes") or "0" * len(roles))]
        self._shows_terms = "terms" in words
        self._tier = words_after(words, "tier") if "tier" in words else None
        highest, *others = DEFAULT_CLASSES
        config = ControlConfig(
            layout=LAYOUT, roles=roles, nodes=nodes, max_queue=sizes["queue"], saves=self._tier is not None,
            mode=mode, admission=after(words, "admission") or DEFAULT,
            policy=after(words, "policy") or "kvcache-centric", balancing_threshold=sizes["threshold"] / 100,
            queue=after(words, "order") or "fcfs", trust=sizes["trust"] / 100, copy_cold_s=sizes["cold"],
            costs=profile(sizes["link"], sizes["rack"]) if "profile" in words else CostConfig(),
            racks=[int(rack) for rack in after(words, "racks") or ""],
            prefetches="prefetch" in words,
            classes=[replace(highest, cache_share=sizes["share"] / 100), *others],
        )  # fmt: skip
        self.control = Control(config)
        self._context = Context()
        self._alarm = float("inf")
        self.now = 0.0
        for rank, role in enumerate(roles):
            if rank:
                self._join(rank, role, nodes[rank], sizes)
        self.control.on(ev.GatewayReady("gateway"), self.now)

    def _join(self, rank: int, role: str, node: int, sizes: dict[str, int]) -> None:
        tier = role == "store" and self._tier is not None
        slots = {"prefill": 1, "store": 0}.get(role, sizes["slots"])
        lends = role in MODES[self.control.config.mode].lenders
        blocks = sizes["blocks"] if role == "store" else sizes["lend"] * lends
        joined = ev.RankJoined(
            rank, 0, rank, DUTIES[role], node, slots=slots, segment_bytes=blocks * BLOCK_BYTES, tier=tier
        )
        self.control.on(joined, self.now)
        if tier and self._tier is not None:
            keys = self._context.keys(self._tier)
            self.control.on(ev.TierIndexed(rank, 0, keys, list(map(digest_of, keys)), True), self.now)
            self._tier = []  # of the first one alone

    # ------------------------------------------------------------------------------ a line

    def tell(self, words: list[str]) -> Iterator[str]:
        """Carry out one command; yields the lines of what it leads to."""
        if words[0] == "books":
            yield self.books()
            return
        if words[0] == "wait":
            yield from self._wait(self.now + float(words[1]))
            return
        event = COMMANDS[words[0]](self._context, words)
        self.now += 0.001
        for heard in heard_before(event) if "unheard" not in words else ():
            self.control.on(heard, self.now)
        yield from self._apply(event)

    def _wait(self, until: float) -> Iterator[str]:
        while self._alarm <= until:
            self.now, self._alarm = max(self.now, self._alarm), float("inf")
            yield from self._apply(ev.Tick())
        self.now = until

    def _apply(self, event: ev.Event) -> Iterator[str]:
        effects = self.control.on(event, self.now)
        if not self.control.stopped:
            self.control.check()
        stored: list[BlockStored | BlockRemoved] = []
        for effect in effects:
            if stored and (not isinstance(effect, type(stored[0])) or place(effect) != place(stored[0])):
                yield self._show_stored(stored)
                stored = []
            if isinstance(effect, BlockStored | BlockRemoved):
                stored.append(effect)
            else:
                yield self._show(effect)
        if stored:
            yield self._show_stored(stored)

    # ------------------------------------------------------------------------------ effects

    def _show_stored(self, events: Sequence[BlockStored | BlockRemoved]) -> str:
        names = " ".join(self._context.names[event.key] for event in events)
        return f"{type(events[0]).__name__} {events[0].tier} {events[0].rank}: {names}"

    def _show(self, effect: fx.Effect) -> str:
        """One line for an effect."""
        words = [type(effect).__name__]
        if isinstance(effect, fx.Order):
            self._context.orders.append(effect)
            words.append(f"rank {effect.rank}")
        match effect:
            case fx.Reject(request_id, reason, retry_after_s, kind):
                words += [request_id, *([kind] if kind != "overload" else [])]
                words += [f"after {retry_after_s:g} s:", reason]
            case fx.Release(request_id):
                words += [request_id]
            case fx.Moved():
                words += [f"{effect.request_id}/{effect.attempt} decode {effect.decode}"]
                words += [f"{1000 * effect.tbt_s:.0f} ms"]
            case fx.Fail(request_id, reason, code):
                words += [f"{request_id} ({code}):" if code else f"{request_id}:", reason]
            case fx.Forget(request_id, outcome):
                words += [request_id, outcome]
            case fx.Decided():
                words += [
                    f"{effect.request_id}/{effect.attempt} prefill {effect.prefill} decode {effect.decode}"
                ]
                words += [f"cached {effect.cached_tokens}"]
                words += [shown_terms(effect.terms)] if self._shows_terms else []
            case fx.StartPrefill():
                words += [f"{effect.request_id}/{effect.attempt} load {places(effect.load)}"]
                words += [f"store {places(effect.store)} tail {places([effect.tail])}"]
                words += [f"cached {effect.cached['dram']}+{effect.cached['ssd']}"]
            case fx.StartServe():
                words += [f"{effect.request_id}/{effect.attempt} load {places(effect.load)}"]
                words += [f"cached {effect.cached['dram']}+{effect.cached['ssd']}"]
            case fx.Prefetch():
                words += [f"{effect.request_id}/{effect.attempt} blocks {places(effect.blocks)}"]
            case fx.StartDecode():
                words += [f"{effect.request_id}/{effect.attempt} blocks {places(effect.blocks)}"]
                words += [f"tail {places([effect.tail])}"]
                words += [f"branches {effect.branches}"] if effect.branches != [0] else []
            case fx.Branched():
                words += [f"{effect.request_id} branch {effect.branch} is {effect.name}"]
            case fx.Recall():
                self._context.recalls.append(effect)
                words += [f"{effect.request_id}/{effect.attempt}: {effect.reason}"]
                words += [f"branches {effect.branches}"] if effect.branches != [0] else []
            case fx.MarkLost() | fx.EndRank():
                words += [f"{effect.rank}: {effect.reason}"]
            case fx.CancelOn():
                words += [f"{effect.request_id}/{effect.attempt}"]
                words += [f"branch {effect.branch}"] if effect.branch >= 0 else []
            case fx.GrantSwap():
                words += [f"{effect.request_id}/{effect.attempt}"]
                words += [f"branch {effect.branch}"] if effect.branch else []
                words += [places(effect.places) if effect.places is not None else "nothing"]
            case fx.GrantPuts():
                words += [f"#{effect.number} {places(effect.places)}"]
            case fx.LoadBlocks():
                words += [f"#{self._count} {self._at(effect.keys, effect.refs)}"]
            case fx.SaveBlocks():
                words += [self._at(effect.keys, effect.refs)]
            case fx.CopyBlocks():
                words += [f"#{self._count} {places(effect.sources)} to {places(effect.targets)}"]
            case fx.CheckBlocks():
                words += [f"#{self._count} {places(effect.refs)}{' export' if effect.path else ''}"]
            case fx.RemoveBlocks():
                words += [self._named(effect.keys)]
            case fx.AnswerCommand():
                words += [f"{effect.command} {'ended' if effect.ended else f'done {effect.done}'}"]
                words += [f"blocks {effect.blocks} kept {effect.kept}"] if effect.blocks else []
                words += [f"bad {self._named([bad.key for bad in effect.bad])}"] if effect.bad else []
                words += [f"({effect.problem})"] if effect.problem else []
            case fx.HintAnswered():
                words += [f"{effect.outcome} {effect.affected} of {effect.blocks}"]
                words[-1] += f" for {effect.lasts_s:g} s:" if effect.lasts_s else ":"
                words += [effect.reason]
            case fx.Readiness():
                words += [effect.closed or "ready" if effect.ready else f"missing {effect.missing}"]
            case fx.WakeAt(time):
                self._alarm = time
                words += [f"in {time - self.now:.3f} s"]
            case fx.Stop():
                words += [f"{'lost' if effect.lost else f'within {effect.grace_s:g} s'}:", effect.reason]
        return " ".join(words)

    @property
    def _count(self) -> int:
        return len(self._context.transfers)

    def _named(self, keys: Sequence[int]) -> str:
        return " ".join(self._context.names[key] for key in keys)

    def _at(self, keys: Sequence[int], refs: Sequence[BlockRef]) -> str:
        return " ".join(
            f"{self._context.names[key]}@{places([ref])}" for key, ref in zip(keys, refs, strict=True)
        )

    def books(self) -> str:
        """The pool in blocks by state, and the open requests by stage."""
        control = self.control
        stats = control.directory.stats()
        counts = {
            name: stats[f"{name}_bytes"] // BLOCK_BYTES
            for name in ("visible", "writing", "private", "quarantined", "unlisted", "free")
        }
        visible = control.directory.visible_objects()
        counts["leased"] = sum(bool(obj.lessees) for obj in visible)
        counts["unsaved"] = sum(obj.unsaved for obj in visible)
        shown = [f"{count} {name}" for name, count in counts.items() if count or name == "visible"]
        stages = [f"{name} {control.requests.stage_of(name).value}" for name in self._requests()]
        return f"pool: {', '.join(shown)}; {stats['keys_ssd']} on ssd; open: {', '.join(stages) or 'none'}"

    def _requests(self) -> list[str]:
        return [
            name for name in self._context.requests if self.control.requests.stage_of(name).value != "over"
        ]


def shown_terms(terms: Terms) -> str:
    """The terms of a decision in milliseconds."""
    parts = ("queue", terms.queue_s), ("transfer", terms.transfer_s), ("prefill", terms.prefill_s)
    return " ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in parts)


def place(effect: Any) -> tuple[int, str]:
    """Rank and tier of a BlockStored or a BlockRemoved."""
    return effect.rank, effect.tier


def places(refs: Sequence[BlockRef | None]) -> str:
    """Where blocks lie, as rank:number; - for no block."""
    shown = [f"{ref.rank}:{ref.offset // BLOCK_BYTES}" if ref else "-" for ref in refs]
    return " ".join(shown) or "-"
