"""Hints: what clients say of the use that a prefix will have, and what the control plane makes of it.

Used by `machine.py`. The directory holds and evicts, and knows whose hints are followed (see its `trust`).
This file has the limits of tenants, pins, and loads from SSD ahead of time. See docs/explain/hints.md.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.dispatch import Dispatcher
from mooncake_lite.control.grants import Grant
from store.books.hints import MOST_OWNERS, Owner
from store.errors import PoolFull, UnknownObject
from store.objects import PoolObject
from store.ranking import Ranking

MOST_TENANTS, MOST_SESSIONS = 256, 1024
"""Tenants whose sessions are noted, and sessions of each; the ones that were quiet longest are forgotten."""

MOST_NOTED = 1 << 20
"""Keys of all these sessions together: prompts may be long. Some 100 MB with their digests."""

HELD_SHARE, PINNED_SHARE = 0.75, 0.1
"""Of the pool's blocks, the most that one tenant holds by retain, pin and prefetch, and that all pin."""

MOST_S = 86_400.0
"""Longest time that a hint may name, and how long a pin without a time lasts: a day."""

MOST_DEFERRED = 256
"""Prefetches of a tenant that wait for their time."""

EARLY_S, LATE_S = 2.0, 30.0
"""A prefetch begins so long before its reading has to, and holds its blocks so long after they are needed."""

AGAIN_S = 0.25
"""Until a prefetch that found no space is tried again."""


class _Prefix(NamedTuple):
    """The blocks that a hint is about. owner: tenant and session."""

    owner: Owner
    keys: list[int]
    digests: list[int]
    class_id: int = 0
    until: float = 0.0


@dataclass(slots=True)
class _Load:
    """A read of blocks from one tier. owner: of their places; parts: segments that are still written."""

    prefix: _Prefix
    owner: str
    parts: int


class _Done(NamedTuple):
    """What became of a hint, as in HintAnswered."""

    outcome: fx.HintOutcome
    affected: int
    reason: str
    lasts_s: float = 0.0


class Hints:
    """Answers hints.

    counts      (verb, outcome) -> hints
    _noted      keys of all sessions
    _sessions   tenant -> session -> keys and digests of its latest prompt, the longest quiet first
    _pins       key -> (digest, {owner: end}), of blocks that hints have pinned hard
    _due        number of a deferred prefetch, or (owner, key) of a pin -> when it is begun, or ends
    _deferred   number -> the deferred prefetch
    """

    def __init__(self, books: Books, dispatcher: Dispatcher) -> None:
        self._directory, self._grants, self._emit = books.directory, books.grants, books.emit
        self._config, self._costs, self._members = books.config, books.state.costs, books.members
        self._dispatcher = dispatcher
        dispatcher.lift_pins = self.lift_pins
        self.counts = Counter[tuple[str, str]]()
        self._noted = 0
        self._sessions: OrderedDict[str, OrderedDict[str, tuple[list[int], list[int]]]] = OrderedDict()
        self._pins: dict[int, tuple[int, dict[Owner, float]]] = {}
        self._due = Ranking[Any]()
        self._deferred: dict[int, _Prefix] = {}
        self._last = 0

    def note_session(self, arrived: ev.RequestArrived) -> None:
        """Note which prefix a session has, for hints that name the session alone."""
        if arrived.session and arrived.keys:
            self._note((arrived.tenant, arrived.session), arrived.keys, arrived.digests)

    def _note(self, owner: Owner, keys: list[int], digests: list[int]) -> None:
        tenant, session = owner
        own = self._sessions.setdefault(tenant, OrderedDict())
        self._sessions.move_to_end(tenant)
        before, _ = own.pop(session, ([], []))
        own[session] = keys, digests
        self._noted += len(keys) - len(before)
        if len(own) > MOST_SESSIONS:
            self._forget_session(tenant)
        while self._noted > MOST_NOTED or len(self._sessions) > MOST_TENANTS:
            self._forget_session(next(iter(self._sessions)))

    def _forget_session(self, tenant: str) -> None:
        """Forget the session of a tenant that was quiet longest, and the tenant with its last one."""
        _, (keys, _) = self._sessions[tenant].popitem(last=False)
        self._noted -= len(keys)
        if not self._sessions[tenant]:
            del self._sessions[tenant]

    # ------------------------------------------------------------------------------ hints

    def on_arrived(self, hint: ev.HintArrived, now: float) -> None:
        """Do what a hint asks for, as far as it may be done, and answer it.

        A hint that names a longer prefix of its session, such as the prompt and its answer, is noted.
        """
        keys, digests, owner = hint.keys, hint.digests, (hint.tenant, hint.session)
        noted = self._sessions.get(hint.tenant, OrderedDict()).get(hint.session)
        if not keys and noted is not None:
            keys, digests = noted
        elif noted is not None and len(keys) == len(digests) and keys[: len(noted[0])] == noted[0]:
            self._note(owner, keys, digests)
        prefix = _Prefix(owner, keys, digests, hint.class_id)
        self._directory.end_holds(now)
        done = self._refusal(hint, prefix) or getattr(self, f"_{hint.verb}")(hint, prefix, now)
        self.counts[hint.verb, done.outcome] += 1
        answer = hint.hint_id, hint.gateway, done.outcome, len(keys), done.affected, done.lasts_s, done.reason
        self._emit(fx.HintAnswered(*answer))

    def _refusal(self, hint: ev.HintArrived, prefix: _Prefix) -> _Done | None:
        """Refuse a hint that cannot be followed."""
        seconds = hint.seconds
        if len(prefix.keys) != len(prefix.digests) or hint.copies < 1:
            return _rejected("keys and digests differ in number, or copies is below 1")
        if not 0 <= hint.class_id < len(self._config.classes):
            return _rejected(f"service class {hint.class_id} is unknown")
        if seconds is not None and not (isfinite(seconds) and 0 <= seconds <= MOST_S):
            return _rejected(f"seconds={seconds:g}: must be 0 to {MOST_S:.0f}")
        if not self._config.has_pool:
            return _rejected("this cluster has no pool, and keeps no KV for later requests")
        if self._dispatcher.learning:
            return _rejected(self._dispatcher.learning)
        if not prefix.keys:
            words = (
                f"session {hint.session!r} has sent no prompt yet" if hint.session else "no keys, no session"
            )
            return _rejected(f"{words}, or none of a whole block")
        if not self._directory.takes_hints():
            return _rejected("only the eviction policy lru without shares of classes follows hints")
        ends = hint.verb == "demote" or (hint.verb == "pin" and seconds == 0)
        if not self._may(hint.tenant) and not ends:
            return _rejected("earlier hints of this tenant have cost as much as they may, or may still do so")
        return None

    def _may(self, tenant: str) -> int:
        trust = self._directory.trust
        return trust.may(tenant) if trust is not None else 0

    @property
    def _blocks(self) -> int:
        """Return the size of the pool in blocks."""
        return self._directory.trust.blocks if self._directory.trust is not None else 0

    def _hold(self, prefix: _Prefix, blocks: Sequence[PoolObject], end: float) -> int:
        return self._directory.hold(prefix.owner, blocks, end, int(HELD_SHARE * self._blocks))

    def _clipped(self, prefix: _Prefix, there: int, taken: int, lasts_s: float, limit: str) -> _Done:
        """Return the answer for the first blocks of a prefix. there: how many are in DRAM."""
        if taken == len(prefix.keys):
            return _Done("accepted", taken, "all of its blocks", lasts_s)
        why = f"{there} of {len(prefix.keys)} blocks are in memory" if taken == there else limit
        return _Done("clipped", taken, why, lasts_s) if taken else _rejected(why)

    def _retain(self, hint: ev.HintArrived, prefix: _Prefix, now: float) -> _Done:
        """Have the blocks evicted last for some time. An earlier end than before changes nothing."""
        if not hint.seconds:
            return _rejected("retain needs seconds above 0")
        blocks = self._directory.leading(prefix.keys, prefix.digests)
        taken = self._hold(prefix, blocks, now + hint.seconds)
        limit = f"a tenant may hold {int(HELD_SHARE * self._blocks)} blocks"
        return self._clipped(prefix, len(blocks), taken, hint.seconds, limit)

    def _demote(self, hint: ev.HintArrived, prefix: _Prefix, now: float) -> _Done:
        """Have the blocks evicted first that no other needs."""
        directory, tenant = self._directory, hint.tenant
        blocks = directory.leading(prefix.keys, prefix.digests)
        held = directory.held[tenant]
        ended = self._unpin(prefix.owner, prefix.keys)
        most = max(0, self._may(tenant) - directory.waiting(tenant))
        taken = directory.demote(prefix.owner, blocks, most)
        if not blocks:
            return _Done("accepted", 0, "none of its blocks is in memory")
        why = (
            "others share or hold the rest"
            if taken < most
            else "the hints of this tenant may displace no more"
        )
        reason = f"{taken} of {len(blocks)} blocks in memory are evicted next; {why}"
        if not (taken or ended or directory.held[tenant] < held):
            return _rejected(reason)
        return _Done("accepted" if taken == len(prefix.keys) else "clipped", taken, reason)

    def _share(self, hint: ev.HintArrived, prefix: _Prefix, now: float) -> _Done:
        """Copy the blocks to further stores, into space that is free or was not used for long."""
        blocks = self._directory.leading(prefix.keys, prefix.digests)
        if not blocks:
            return _rejected("none of its blocks is in memory")
        limit = f"{hint.copies} copies of a block are more than the hints of this tenant may displace now"
        first = blocks[: self._may(hint.tenant) // hint.copies]
        if not first:
            return _rejected(limit)
        if all(len(obj.copies or [obj]) > hint.copies for obj in first):
            return self._clipped(prefix, len(blocks), len(first), 0.0, limit)
        named = [(obj.key or 0, obj.digest) for obj in first]
        besides = {obj.rank for obj in blocks[:1]}
        copied = self._dispatcher.copies.share(hint.tenant, named, besides, hint.copies, now)
        if not copied:
            return _rejected("no other store has space that is free or was not used for long")
        reason = f"{sum(copied)} copies of blocks on {len(copied)} stores have begun"
        whole = len(copied) == hint.copies and min(copied) == len(prefix.keys)
        return _Done("accepted" if whole else "clipped", max(copied), reason)

    # ------------------------------------------------------------------------------ pins

    def _pin(self, hint: ev.HintArrived, prefix: _Prefix, now: float) -> _Done:
        """Pin blocks hard until a time, or end what the owner has pinned or retained."""
        owner = prefix.owner
        if hint.seconds == 0:
            self._directory.end_hold(owner, prefix.keys)
            return _Done("accepted", self._unpin(owner, prefix.keys), "its pins are off")
        lasts_s = MOST_S if hint.seconds is None else hint.seconds
        blocks, end = self._directory.leading(prefix.keys, prefix.digests), now + lasts_s
        find = self._directory.find
        self.forget_pins([key for key in self._pins if not ((obj := find(key)) and obj.hard_pinned())])
        own = sum(any(tenant == hint.tenant for tenant, _ in ends) for _, ends in self._pins.values())
        most = min(int(PINNED_SHARE * self._blocks) - len(self._pins), self._may(hint.tenant) - own)
        new = taken = 0
        for obj in blocks:
            new += obj.key not in self._pins and not obj.hard_pinned()
            if new > most:
                break
            taken += 1
        taken = min(taken, self._hold(prefix, blocks[:taken], end))
        for obj in blocks[:taken]:
            if obj.key is not None and (obj.key in self._pins or not obj.hard_pinned()):
                _, ends = self._pins.setdefault(obj.key, (obj.digest, {}))
                if owner in ends or len(ends) < MOST_OWNERS:
                    ends[owner] = max(end, ends.get(owner, 0.0))
                    self._due.rank((owner, obj.key), ends[owner])
                self._directory.pin(obj.key, obj.digest, hard=True)
        limit = f"at most {max(0, most)} more blocks may be pinned now"
        return self._clipped(prefix, len(blocks), taken, lasts_s, limit)

    def _unpin(self, owner: Owner, keys: Sequence[int]) -> int:
        """Take the pins of an owner off; return how many there were."""
        ended = 0
        for key in keys:
            _, ends = self._pins.get(key, (0, {}))
            if ends.pop(owner, None) is not None:
                ended += 1
                self._due.discard((owner, key))
                if not ends:
                    self._lift(key)
        return ended

    def _lift(self, key: int) -> None:
        with suppress(UnknownObject):
            self._directory.pin(key, self._pins[key][0], hard=False)
        self.forget_pins([key])

    def lift_pins(self) -> bool:
        """Take all pins off. A request has found no space, and must not wait until a hint ends."""
        lifted = list(self._pins)
        for key in lifted:
            self._lift(key)
        return bool(lifted)

    def forget_pins(self, keys: Sequence[int]) -> None:
        """Leave the pins of blocks as they are: an operator has changed them, or the blocks are gone."""
        for key in keys:
            for owner in self._pins.pop(key, (0, {}))[1]:
                self._due.discard((owner, key))

    # ------------------------------------------------------------------------------ loads ahead of time

    def _prefetch(self, hint: ev.HintArrived, prefix: _Prefix, now: float) -> _Done:
        """Read blocks from SSD before they are needed: now, or later if that is too early."""
        needed_s = hint.seconds or 0.0
        missing = self._on_ssd(prefix, now)
        count = sum(map(len, missing.values()))
        if not count:
            return _Done("accepted", 0, "nothing to read: none of the blocks is on SSD alone")
        load_s = self._costs.mean_load_s("ssd", count * self._config.block_layout.nbytes)
        wait_s = needed_s - 2 * load_s - EARLY_S
        prefix = prefix._replace(until=now + needed_s + LATE_S)
        first = self._first(missing, self._may(hint.tenant))
        if wait_s <= 0 and self._load(prefix, first, now):
            taken = sum(map(len, first.values()))
            if taken == count:
                return _Done("accepted", count, "its blocks on SSD are being read")
            return _Done(
                "clipped", taken, f"{taken} of {count} blocks on SSD are read: no more may be displaced"
            )
        if sum(one.owner[0] == hint.tenant for one in self._deferred.values()) >= MOST_DEFERRED:
            return _rejected(f"{MOST_DEFERRED} prefetches of this tenant wait already")
        wait_s = max(wait_s, AGAIN_S)
        self._last += 1
        self._deferred[self._last] = prefix
        self._due.rank(self._last, now + wait_s)
        return _Done("deferred", count, "it is too early, or there is no space now", wait_s)

    def _on_ssd(self, prefix: _Prefix, now: float) -> dict[int, list[int]]:
        """Return {tier rank: places in the prefix} of blocks on SSD alone that are not on their way."""
        found = self._directory.lookup(prefix.keys, prefix.digests, now, touch=False)
        missing: dict[int, list[int]] = {}
        for place, hit in enumerate(found):
            if hit.object_id is None and hit.key not in self._directory.expected:
                missing.setdefault(hit.rank, []).append(place)
        return missing

    @staticmethod
    def _first(missing: dict[int, list[int]], most: int) -> dict[int, list[int]]:
        """Return these places without those behind the first `most` of all."""
        left = set(sorted(place for places in missing.values() for place in places)[:most])
        found = {rank: [place for place in places if place in left] for rank, places in missing.items()}
        return {rank: places for rank, places in found.items() if places}

    def _load(self, prefix: _Prefix, missing: dict[int, list[int]], now: float) -> bool:
        """Have blocks read from SSD, and hold those before them. Returns whether there is space for any."""
        keyed, tenant = self._dispatcher.room.keyed, prefix.owner[0]
        if missing:
            self._hold(prefix, self._directory.leading(prefix.keys, prefix.digests), prefix.until)
        for rank, places in missing.items():
            keys = [prefix.keys[place] for place in places]
            digests = [prefix.digests[place] for place in places]
            parents = [prefix.keys[place - 1] if place else None for place in places]
            facts = zip(keys, digests, parents, places)
            wanted = [keyed(*fact, prefix.class_id) for fact in facts]
            self._last += 1
            owner = f"hint/{self._last}"
            try:
                made = self._directory.allocate_for(tenant, owner, wanted, now, rank)
            except PoolFull:
                return False
            by_segment = [
                [obj for obj in made if obj.rank == segment]
                for segment in dict.fromkeys(obj.rank for obj in made)
            ]
            load = _Load(prefix, owner, len(by_segment))
            for part in by_segment:
                self._order_load(load, rank, part, now)
        return bool(missing)

    def _order_load(self, load: _Load, rank: int, made: list[PoolObject], now: float) -> None:
        """Have a tier read blocks into their places, which are all in one segment."""
        grant = self._grants.open(rank, None, self._lost, now, blocks=len(made), kind="prefetches")
        grant.about = load, made
        keys = [obj.key or 0 for obj in made]
        order = fx.LoadBlocks(
            rank, grant.number, keys, [obj.digest for obj in made], [obj.ref for obj in made]
        )
        self._emit(order)

    def on_loaded(self, loaded: ev.BlocksLoaded, now: float) -> bool:
        """Publish the blocks of a prefetch, and hold them. Returns False for loads of requests."""
        grant = self._grants.get(loaded.rank, loaded.number)
        if grant is None or grant.lost != self._lost:
            return False
        self._grants.end(loaded.rank, loaded.number, loaded.ok.count(False), loaded.problem or "damaged")
        load, made = grant.about
        for obj, ok, sums in reversed(list(zip(made, loaded.ok, loaded.checksums))):
            if ok and self._directory.has(obj.object_id):
                self._directory.put_end(obj.object_id, sums, now)
        self._hold(
            load.prefix, self._directory.leading(load.prefix.keys, load.prefix.digests), load.prefix.until
        )
        bad = [obj for obj, ok in zip(made, loaded.ok) if not ok]
        if bad and not loaded.problem:  # the tier has evicted or damaged them
            self._directory.drop_tier_block(loaded.rank, [obj.key or 0 for obj in bad])
        self._end_part(load, bad, loaded.rank, bool(loaded.problem) and loaded.may_still_write, now)
        return True

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        load, made = grant.about
        self._end_part(load, made, grant.rank, may_still_write, now)

    def _end_part(
        self, load: _Load, bad: Sequence[PoolObject], rank: int, may_still_write: bool, now: float
    ) -> None:
        """Free what was not read into one segment; after the last part, forget the owner of all."""
        for one in [obj.object_id for obj in bad if self._directory.has(obj.object_id)]:
            self._directory.put_revoke(one, now=now, writer_may_live=may_still_write, writer=rank)
        load.parts -= 1
        if not load.parts:
            self._directory.revoke_owner(load.owner, now)

    # ------------------------------------------------------------------------------ time

    def next_deadline(self) -> float:
        """Return when `on_time` has something to do; inf: never."""
        return self._due.key(self._due.first()) if self._due else inf

    def on_time(self, now: float) -> None:
        """End pins, and begin deferred prefetches, whose time has come."""
        for tenant in self._directory.take_ended():
            own = [one for _, ends in self._pins.values() for one in ends if one[0] == tenant]
            for owner in dict.fromkeys(own):
                self._unpin(owner, list(self._pins))
        while self._due and self._due.key(due := self._due.first()) <= now:
            self._due.remove(due)
            if isinstance(due, tuple):
                self._unpin(due[0], [due[1]])
                continue
            prefix = self._deferred.pop(due)
            missing, most = self._on_ssd(prefix, now), self._may(prefix.owner[0])
            if missing and now < prefix.until and not self._load(prefix, self._first(missing, most), now):
                self._deferred[due] = prefix
                self._due.rank(due, now + AGAIN_S)


def _rejected(reason: str) -> _Done:
    return _Done("rejected", 0, reason)
