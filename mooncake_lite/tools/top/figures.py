"""Two samples in, the figures of the picture out: rates, medians, shares.

Used by `command.py`. Pure: no clock, no HTTP, no terminal. A figure is None when its metric is missing or
nothing happened that it could be taken from. Rates are never negative: a counter that went back has begun
again at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from mooncake_lite.tools.top.sample import Sample

ROLES = ("prefill", "decode", "compute", "store")
SSD = "HDF5"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, or an instance of several, whose first one has its number and its role.

    used, total      pages of its engine; bytes of its segment for a store rank
    waiting          requests that wait for it; blocks in the queues of its tier for a store rank
    running          requests that it works on
    tokens_per_s     prompt tokens computed, or tokens generated
    moved_bytes      that all its ranks have read from others and written to them
    ranks, down      its ranks, and those of them that do not work: lost, or not there yet
    """

    number: int
    role: str
    used: float | None
    total: float | None
    waiting: float | None
    running: float | None
    tokens_per_s: float | None
    moved_bytes: float
    ranks: tuple[int, ...]
    down: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return its numbers: 3, or 3-6, which always follow each other."""
        return str(self.number) if len(self.ranks) < 2 else f"{self.ranks[0]}-{self.ranks[-1]}"

    @property
    def trouble(self) -> str:
        """Return which of its ranks do not work, in a few words; "" when all do."""
        if not self.down:
            return ""
        return "down" if self.down == self.ranks else f"{'+'.join(map(str, self.down))} down"


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of the pool. blocks: that can be read from it."""

    name: str
    used_bytes: float
    capacity_bytes: float
    blocks: float


@dataclass(frozen=True, slots=True)
class Lookups:
    """Blocks that were looked up in the pool, and those that were found, by tier."""

    asked: float
    dram: float
    ssd: float


@dataclass(frozen=True, slots=True)
class Flow:
    """KV on its way from one role to another, or to and from HDF5 files."""

    source: str
    target: str
    bytes_per_s: float | None
    total_bytes: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The picture.

    seconds          that the rates, medians and shares are of; 0 when there is one sample only
    ready            None: unknown, as with all others
    ttft_s, tpot_s   medians
    cached_share     of the prompt tokens that were looked up, 0 to 1
    accepted_share   of the drafts that were checked, 0 to 1
    stages           open requests by stage, in the order of a request's life
    recent, ever     lookups in these seconds, and since the start
    """

    seconds: float
    model: str
    version: str
    ready: bool | None
    degraded: float
    uptime_s: float | None
    requests_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    prompt_tokens_per_s: float | None
    answer_tokens_per_s: float | None
    cached_share: float | None
    accepted_share: float | None
    ranks: list[Rank]
    stages: dict[str, float]
    tiers: list[Tier]
    recent: Lookups
    ever: Lookups
    flows: list[Flow]


class Change:
    """What has changed from one sample to a later one."""

    def __init__(self, before: Sample, now: Sample) -> None:
        self.before, self.now = before, now
        self.seconds = max(0.0, now.at_s - before.at_s)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the growth of a counter by labels. What was not there before has grown from 0."""
        before = self.before.by(name, *labels)
        return {key: _grown(before.get(key, 0.0), value) for key, value in self.now.by(name, *labels).items()}

    def rate(self, name: str) -> float | None:
        """Return the growth of a counter per second, over all labels. None: unknown."""
        grown = self.by(name).get(())
        return grown / self.seconds if grown is not None and self.seconds else None

    def total(self, name: str) -> float:
        """Return the growth of a counter over all labels, 0 when it is missing."""
        return self.by(name).get((), 0.0)

    def median(self, name: str) -> float | None:
        """Return the median of what a histogram has observed, by linear interpolation within its bucket.

        None: nothing was observed. A median above the largest finite bound is reported as that bound.
        """
        before, now = _buckets(self.before, name), _buckets(self.now, name)
        begun_again = any(count < before.get(bound, 0.0) for bound, count in now.items())
        counts = [
            (bound, count - (0.0 if begun_again else before.get(bound, 0.0)))
            for bound, count in sorted(now.items())
        ]
        return quantile(counts, 0.5)


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def _buckets(sample: Sample, name: str) -> dict[float, float]:
    """Upper bound -> cumulative count."""
    found = {_bound(le): count for (le,), count in sample.by(f"{name}_bucket", "le").items()}
    return {bound: count for bound, count in found.items() if not math.isnan(bound)}


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile of a histogram.

    counts   (upper bound, cumulative count), ascending; the last bound is infinite
    """
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def figures_of(before: Sample, now: Sample) -> Figures:
    """Return the picture of the time between two samples of one server."""
    change = Change(before, now)
    reused, prompts = (change.total(f"prefix_cache_{name}_total") for name in ("hits", "queries"))
    accepted, drafted = (
        change.total(f"spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")
    )
    info = next((labels for labels, _ in now.values.get("server_info", [])), {})
    ready = now.total("ready")
    return Figures(
        seconds=change.seconds,
        model=info.get("model", ""),
        version=info.get("version", ""),
        ready=None if ready is None else ready > 0,
        degraded=now.total("degraded") or 0.0,
        uptime_s=now.total("uptime_seconds"),
        requests_per_s=change.rate("request_success_total"),
        ttft_s=change.median("time_to_first_token_seconds"),
        tpot_s=change.median("inter_token_latency_seconds"),
        prompt_tokens_per_s=change.rate("prefill_computed_tokens_total"),
        answer_tokens_per_s=change.rate("decode_tokens_total"),
        cached_share=min(reused / prompts, 1.0) if prompts else None,
        accepted_share=min(accepted / drafted, 1.0) if drafted else None,
        ranks=_ranks(change),
        stages={stage: count for (stage,), count in now.by("requests_by_stage", "stage").items()},
        tiers=_tiers(now),
        recent=_lookups(change.total),
        ever=_lookups(lambda name: now.total(name) or 0.0),
        flows=_flows(change),
    )


def _lookups(count: Callable[[str], float]) -> Lookups:
    asked, dram, ssd = map(
        count, ("pool_blocks_looked_up_total", "pool_hits_dram_total", "pool_hits_ssd_total")
    )
    return Lookups(asked, min(dram, asked), min(ssd, asked))


def _ranks(change: Change) -> list[Rank]:
    """Return every rank that has pages, is a store, or does not work, by number; an instance as one."""
    now = change.now
    used, total = _by_rank(now, "kv_cache_pages_used"), _by_rank(now, "kv_cache_pages")
    waiting = _by_rank(now, "prefill_requests_waiting", "decode_requests_waiting")
    waiting |= _by_rank(now, "tier_reader_queued", "tier_writer_queued")
    tokens = _by_rank(change, "prefill_computed_tokens_total", "decode_tokens_total")
    free = _by_rank(now, "pool_segment_free_bytes")
    for key, nbytes in _by_rank(now, "pool_segment_bytes").items():
        if key[1] == "store":
            total[key], used[key] = nbytes, nbytes - free.get(key, 0.0)
    moved, instances = now.by("moved_bytes_total", "rank"), _instances(now)
    downs = {int(rank) for (rank,), up in now.by("rank_up", "rank").items() if rank.isdecimal() and not up}
    troubled = {key for key, ranks in instances.items() if downs.intersection(ranks)}
    found, running = [], _running(now)
    for key in used.keys() | total.keys() | troubled:
        if key[0].isdecimal():
            ranks = instances.get(key, (int(key[0]),))
            rate = tokens.get(key, 0.0) / change.seconds if change.seconds and key[1] != "store" else None
            seen = (used.get(key), total.get(key), waiting.get(key), running.get(key), rate)
            all_moved = sum(moved.get((str(rank),), 0.0) for rank in ranks)
            down = tuple(rank for rank in ranks if rank in downs)
            found.append(Rank(int(key[0]), key[1], *seen, all_moved, ranks, down))
    return sorted(found, key=lambda rank: (rank.number, rank.role))


def _instances(now: Sample) -> dict[tuple[str, ...], tuple[int, ...]]:
    """(first rank, its role) -> all ranks of its instance, ascending."""
    labelled = now.by("rank_up", "rank", "role", "first")
    roles = {rank: role for rank, role, _ in labelled}
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, _, first in labelled:
        if rank.isdecimal():
            found.setdefault((first, roles.get(first, "")), []).append(int(rank))
    return {key: tuple(sorted(ranks)) for key, ranks in found.items()}


def _running(now: Sample) -> dict[tuple[str, ...], float]:
    """Return the requests that each rank works on.

    The conductor counts a request in a prefill slot as running. On a rank that decodes as well, it may still
    wait for pages, and the rank reports it as waiting.
    """
    prefill, decode = _by_rank(now, "prefill_requests_running"), _by_rank(now, "decode_requests_running")
    waiting = _by_rank(now, "decode_requests_waiting")
    both = {
        key: max(0.0, prefill[key] + decode[key] - waiting.get(key, 0.0)) for key in prefill.keys() & decode
    }
    return prefill | decode | both


def _by_rank(sample: Sample | Change, *names: str) -> dict[tuple[str, ...], float]:
    """(rank, role) -> the sum of these metrics, or of their growth."""
    sums: dict[tuple[str, ...], float] = {}
    for key, value in chain.from_iterable(sample.by(name, "rank", "role").items() for name in names):
        sums[key] = sums.get(key, 0.0) + value
    return sums


def _tiers(now: Sample) -> list[Tier]:
    """Return DRAM of store ranks, DRAM that others lend, and HDF5 files; those that there are."""

    def dram(name: str, is_store: bool) -> float:
        return sum(value for (role,), value in now.by(name, "role").items() if (role == "store") == is_store)

    tiers = []
    for title, is_store in (("DRAM", True), ("lent DRAM", False)):
        capacity, free, blocks = (
            dram(f"pool_segment_{name}", is_store) for name in ("bytes", "free_bytes", "blocks")
        )
        tiers.append(Tier(title, capacity - free, capacity, blocks))
    used = (now.total("tier_bytes") or 0.0) + (now.total("tier_open_bytes") or 0.0)
    tiers.append(Tier(SSD, used, now.total("tier_capacity_bytes") or 0.0, now.total("pool_keys_ssd") or 0.0))
    return [tier for tier in tiers if tier.capacity_bytes]


def _flows(change: Change) -> list[Flow]:
    """Return what has moved at any time, by direction."""
    grown: dict[tuple[str, str], float] = {}
    ever: dict[tuple[str, str], float] = {}
    leads = {str(rank): role for (_, role), ranks in _instances(change.now).items() for rank in ranks}
    for sums, moved in (
        (grown, change.by("moved_bytes_total", "rank", "role", "peer", "op")),
        (ever, change.now.by("moved_bytes_total", "rank", "role", "peer", "op")),
    ):
        for (rank, role, peer, op), nbytes in moved.items():
            role = leads.get(rank, role) if role == "member" else role
            way = (peer, role) if op == "read" else (role, peer)
            sums[way] = sums.get(way, 0.0) + nbytes
    for way, done in ((("store", SSD), "written"), ((SSD, "store"), "loaded")):
        name = f"tier_bytes_{done}_total"
        grown[way], ever[way] = change.total(name), change.now.total(name) or 0.0
    order = {name: number for number, name in enumerate((*ROLES, SSD))}
    ways = sorted((way for way in ever if ever[way]), key=lambda way: [order.get(end, 9) for end in way])
    seconds = change.seconds
    return [Flow(*way, grown[way] / seconds if seconds else None, ever[way]) for way in ways]


def busiest(ranks: Iterable[Rank], count: int) -> list[Rank]:
    """Return at most `count` ranks by number: of each role in turn one in trouble, or with the most work."""
    by_role: dict[str, list[Rank]] = {}
    for rank in ranks:
        by_role.setdefault(rank.role, []).append(rank)
    for some in by_role.values():
        some.sort(key=_work, reverse=True)
    turns = (rank for turn in zip_longest(*by_role.values()) for rank in turn if rank is not None)
    chosen = [rank for rank, _ in zip(turns, range(count))]
    return sorted(chosen, key=lambda rank: rank.number)


def _work(rank: Rank) -> tuple[bool, float, float, float]:
    """Return what ranks are chosen by: those in trouble first."""
    open_requests = (rank.waiting or 0.0) + (rank.running or 0.0)
    return bool(rank.down), open_requests, rank.tokens_per_s or 0.0, rank.used or 0.0
