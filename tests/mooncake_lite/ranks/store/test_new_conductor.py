"""A store rank and its conductor, a new one too: what it finishes, drops, tells and counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.ranks.store.loop import COPY_WAIT_S, IDLE_WAIT_S, StoreRole
from store.objects import HeldBlock
from store.tier import HDF5Tier
from tests.mooncake_lite.ranks.links import Signs, link_to
from tests.patience import wait_until
from tests.store.samples import FINGERPRINT, SMALL, block_of, digest_of

pytestmark = pytest.mark.quick


class Rank:
    """Store rank 3, whose tier holds block 7. It reads only when `read` is set; `told`: to the conductor."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inbox, self.told, self.waits = list[Any](), list[Any](), list[float]()
        self.signs, self.read = Signs(), threading.Event()
        self.lost: list[int] = []
        names = ("counters", "moved_bytes", "served_bytes", "control_counters", "socket_counters")
        self.engine: Any = SimpleNamespace(
            local=np.zeros(4 * SMALL.nbytes, np.uint8), submit=self.submit, serving_bytes=0,
            mark_lost=lambda rank, reason: self.lost.append(rank), **{name: {} for name in names},
        )  # fmt: skip
        self.ends, self.failures = False, dict[int, str]()
        tier = HDF5Tier(folder, 1 << 26, SMALL, FINGERPRINT)
        tier.append(7, digest_of(7), SMALL.checksums(block_of(7)), block_of(7), now=0.0)
        tier.seal()
        load = tier.load
        monkeypatch.setattr(tier, "load", lambda *given: self.read.wait(20.0) and load(*given))
        link = self.link = link_to(self, m.RankHello(3, "store", 0, tier=True), self.engine, self.signs)
        link._reported_at = float("inf")  # statistics are not the matter here
        self.role = StoreRole(self.engine, link, tier, SMALL)
        self.role.announce()

    def submit(self, transfers: Sequence[Any]) -> Any:
        return SimpleNamespace(poll=lambda: self.ends, failures=self.failures, may_still_land=set())

    def receive(self, wait_s: float) -> list[Any]:
        self.waits.append(wait_s)
        came, self.inbox = self.inbox, []
        return came

    def send(self, message: Any) -> None:
        self.told.append(message)

    def renew(self) -> None:
        self.inbox = []

    def wake(self) -> None:
        """It does not wait."""

    def hear(self, *messages: m.Message) -> list[Any]:
        """What it tells in a turn with these messages."""
        self.inbox += messages
        self.told = []
        self.role.turn()
        return self.told


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(tmp_path / "tier", monkeypatch)
    yield rank
    rank.read.set()
    rank.role.close(5.0)


def held(key: int, owner: int) -> HeldBlock:
    ref = m.BlockRef(key, owner, key * SMALL.nbytes, SMALL.nbytes)
    return HeldBlock(ref, key, digest_of(key), b"", None, 0, 0)


def joined(rank: Rank, term: int, blocks: list[HeldBlock]) -> bool:
    """Whether the rank told a new conductor of itself, and of what its tier and segments hold."""
    return rank.told == [
        m.RankHello(3, "store", 0, tier=True, epoch=term),
        m.TierIndexed(3, term, [7], [digest_of(7)], True),
        m.Inventory(3, term, blocks, True),
    ]


def test_the_first_conductor_hears_of_the_tier_alone(rank: Rank) -> None:
    assert rank.told == [
        m.RankHello(3, "store", 0, tier=True),
        m.TierIndexed(3, 0, [7], [digest_of(7)], True),
    ]
    assert rank.hear() == []
    assert rank.waits == [IDLE_WAIT_S]


def test_an_idle_rank_joins_at_once_and_tells_what_lost_ranks_do_not_hold(rank: Rank) -> None:
    kept = held(2, 3)
    assert rank.hear(m.HoldBlocks(3, [held(1, 5), kept]), m.MarkLost(5, "died")) == []
    assert rank.lost == [5]
    rank.signs.term = 2
    rank.hear()
    assert joined(rank, 2, [kept])
    assert rank.hear() == []
    assert rank.waits == [IDLE_WAIT_S, COPY_WAIT_S, IDLE_WAIT_S]


def test_all_blocks_that_a_rank_holds_are_told_and_the_last_message_says_so(rank: Rank) -> None:
    blocks = [held(key, 3) for key in range(1500)]
    rank.hear(m.HoldBlocks(3, blocks))
    rank.signs.term = 2
    pieces = [message for message in rank.hear() if isinstance(message, m.Inventory)]
    assert [block for piece in pieces for block in piece.blocks] == blocks
    assert [piece.last for piece in pieces] == [*[False] * (len(pieces) - 1), True]


def test_a_rank_joins_after_its_disk_has_written_into_dram(rank: Rank) -> None:
    rank.hear(m.LoadBlocks(3, 1, [7], [digest_of(7)], [m.BlockRef(1, 3, 0, SMALL.nbytes)]))
    rank.signs.term = 2
    assert (rank.hear(), rank.hear()) == ([], [])
    rank.read.set()
    assert wait_until(lambda: rank.role._outbox)
    loaded, *_ = rank.hear()
    assert (type(loaded), loaded.epoch, loaded.ok) == (m.BlocksLoaded, 0, [True])
    rank.told.pop(0)
    assert joined(rank, 2, [])
    assert set(rank.waits[1:]) == {COPY_WAIT_S}


def test_a_rank_joins_after_its_transfers_and_drops_the_orders_that_wait(rank: Rank) -> None:
    ref, sums = m.BlockRef(1, 3, 0, SMALL.nbytes), SMALL.checksums(block_of(7))
    lent = [m.BlockRef(100 + key, 1, key * SMALL.nbytes, SMALL.nbytes) for key in range(99)]
    rank.hear(
        m.CopyBlocks(3, 1, [m.BlockRef(1, 4, 0, SMALL.nbytes)], [ref]),
        m.SaveBlocks(3, lent, [*range(99)], [*range(99)], [sums] * 99),
    )
    waiting = rank.role._lent_saves.left
    rank.signs.term = 2
    assert rank.hear() == []
    assert 0 < rank.role._lent_saves.left < waiting
    rank.ends = True
    copied, *_ = rank.hear()
    assert (type(copied), copied.epoch) == (m.BlocksCopied, 0)
    hellos = [one for one in rank.told if isinstance(one, m.RankHello)]
    assert [one.epoch for one in hellos] == [2]


def test_a_rank_joins_after_the_load_for_a_lender_that_is_under_way_and_drops_the_others(rank: Rank) -> None:
    lent = [m.BlockRef(100, 1, 0, SMALL.nbytes)]
    rank.hear(*(m.LoadBlocks(3, number, [7], [digest_of(7)], lent) for number in (1, 2)))
    rank.signs.term = 2
    assert rank.hear() == []
    assert rank.role._lent_loads.left == 1
    rank.read.set()
    assert wait_until(lambda: rank.role._lent_read)
    loaded, *_ = rank.hear()
    assert (loaded.number, loaded.epoch, loaded.problem) == (1, 0, "a new conductor does not know this order")
    rank.told.pop(0)
    assert joined(rank, 2, [])


def test_metrics_come_with_what_is_wrong_with_the_disk(rank: Rank) -> None:
    rank.role._health.not_written(2, "No space left on device")
    assert rank.hear() == []
    rank.link._reported_at = 0.0
    assert [type(message) for message in rank.hear()] == [m.RankStats, m.Degraded]
    assert rank.hear() == []


def test_the_tier_is_compacted_when_the_conductor_wants_it(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[bool] = []
    monkeypatch.setattr(rank.role._writer, "compact", lambda: wanted.append(True))
    assert (rank.hear(m.CompactTier(3)), wanted) == ([], [True])


def test_a_new_conductor_does_not_hear_of_blocks_that_were_removed(rank: Rank) -> None:
    rank.hear(m.HoldBlocks(3, [held(1, 3), held(2, 3)]), m.RemoveBlocks(3, [1]))
    rank.signs.term = 2
    assert [one.blocks for one in rank.hear() if isinstance(one, m.Inventory)] == [[held(2, 3)]]


def test_bytes_of_a_copy_that_failed_are_not_counted(rank: Rank) -> None:
    refs = [m.BlockRef(number, 3, number * SMALL.nbytes, SMALL.nbytes) for number in range(3)]
    rank.ends, rank.failures = True, {1: "connection reset"}
    (copied,) = rank.hear(m.CopyBlocks(3, 1, [replace(ref, rank=4) for ref in refs], refs))
    assert [bool(sums) for sums in copied.checksums] == [True, False, True]
    assert rank.role._values()["copied_bytes_total"] == 2 * SMALL.nbytes


def test_blocks_that_the_tier_could_not_read_are_counted(rank: Rank) -> None:
    keys, refs = [7, 8, 9], [m.BlockRef(n, 3, n * SMALL.nbytes, SMALL.nbytes) for n in range(3)]
    rank.read.set()
    rank.hear(m.LoadBlocks(3, 1, keys, [digest_of(key) for key in keys], refs))
    assert wait_until(lambda: rank.role._outbox or rank.told)
    assert [one.ok for one in rank.told or rank.hear()] == [[True, False, False]]
    assert rank.role._values()["tier_blocks_bad_total"] == 2
