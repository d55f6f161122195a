"""What a store rank does for ranks that only lend: real tiers and checksums, transfers that copy arrays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.model.sizes import LOAD_SLOTS, SAVE_SLOTS
from mooncake_lite.ranks.store.lent_blocks import LentSaves
from mooncake_lite.ranks.store.loop import StoreRole
from store.tier import HDF5Tier
from tests.mooncake_lite.ranks.links import link_to
from tests.patience import patient
from tests.store.samples import FINGERPRINT, SMALL, block_of, digest_of

BLOCKS = 3 * SAVE_SLOTS + 1
LENDER, STORE = 1, 3


class Pair:
    """Rank 1 lends a segment; store rank 3, with a tier and no DRAM of its own, works on it.

    broken   offsets in the lent segment whose transfers fail
    """

    def __init__(self, folder: Path) -> None:
        self.lent = np.zeros(BLOCKS * SMALL.nbytes, np.uint8)
        self.broken: set[int] = set()
        self.told: list[Any] = []
        engine: Any = SimpleNamespace(local=np.zeros(0, np.uint8), submit=self.move, counters={})
        spoke: Any = SimpleNamespace(send=self.told.append, wake=lambda: None)
        self.tier = HDF5Tier(folder, 2**26, SMALL, FINGERPRINT)
        hello = m.RankHello(STORE, "store", 0)
        self.store = StoreRole(engine, link_to(spoke, hello, engine), self.tier, SMALL)

    def move(self, transfers: list[Any]) -> Any:
        failures = {}
        for index, move in enumerate(transfers):
            assert (move.rank, move.segment) == (LENDER, 0)
            if move.offset in self.broken:
                failures[index] = ValueError(f"the way to {move.offset} is cut")
                continue
            there = self.lent[move.offset : move.offset + move.nbytes]
            target, source = (move.local, there) if move.op == "read" else (there, move.local)
            target[:] = source
        return SimpleNamespace(poll=lambda: True, failures=failures, may_still_land=set(failures))

    def refs(self, keys: range) -> list[m.BlockRef]:
        """Block `key` lies at place `key`."""
        return [m.BlockRef(100 + key, LENDER, key * SMALL.nbytes, SMALL.nbytes) for key in keys]

    def lend(self, keys: range) -> m.SaveBlocks:
        """Write these blocks into the lent segment, as a prefill rank does; what the conductor then says."""
        for key, ref in zip(keys, self.refs(keys)):
            self.lent[ref.offset : ref.offset + ref.nbytes] = block_of(key)
        sums = [SMALL.checksums(block_of(key)) for key in keys]
        return m.SaveBlocks(STORE, self.refs(keys), list(keys), [digest_of(key) for key in keys], sums)

    def until(self, *kinds: type) -> list[Any]:
        """Let the store rank work until it has told this; everything that it told."""
        limit = time.monotonic() + patient(10.0)
        while not any(isinstance(message, kinds) for message in self.told):
            assert time.monotonic() < limit, self.told
            self.store._advance_lent()
            self.store._lent_saves.check()
            self.store._send_outbox()
        told, self.told[:] = list(self.told), []
        return told

    def save(self, message: m.SaveBlocks) -> dict[int, list[str]]:
        """Save and wait until each key has been reported as something; key -> its fates."""
        self.store._save(message)
        fates: dict[int, list[str]] = {key: [] for key in message.keys}
        while not all(fates.values()):
            for told in self.until(m.BlocksSaved):
                for key in told.keys:
                    fates[key].append(told.state)
        return fates


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "tier")
    yield pair
    pair.store.close(patient(5.0))


def test_more_lent_blocks_than_there_are_slots_reach_the_tier_unchanged(pair: Pair) -> None:
    fates = pair.save(pair.lend(range(BLOCKS)))
    assert {fate for some in fates.values() for fate in some} <= {"written", "durable"}
    assert pair.store._writer.seal_now(patient(5.0))
    out = np.zeros(SMALL.nbytes, np.uint8)
    for key in range(BLOCKS):
        assert pair.tier.load(key, out, digest_of(key)) == SMALL.checksums(block_of(key))


def test_a_lent_block_that_cannot_be_read_is_dropped_and_one_whose_bytes_have_changed_is_bad(
    pair: Pair,
) -> None:
    message = pair.lend(range(3))
    pair.broken.add(message.refs[0].offset)
    pair.lent[message.refs[1].offset + 7] ^= 1
    fates = pair.save(message)
    assert (fates[0], fates[1]) == (["dropped"], ["bad"])
    assert fates[2][0] == "written"


def test_when_stopping_with_time_every_lent_block_is_saved_and_without_it_all_are_counted(
    tmp_path: Path,
) -> None:
    for name, limit_s, dropped in (("enough", patient(5.0), 0), ("none", 0.0, BLOCKS)):
        pair = Pair(tmp_path / name)
        pair.store._save(pair.lend(range(BLOCKS)))
        assert pair.store.close(limit_s) == dropped
        pair.store._send_outbox()
        durable = [key for told in pair.told if told.state == "durable" for key in told.keys]
        assert sorted(durable) == list(range(BLOCKS - dropped))


def test_lent_blocks_are_saved_oldest_first_and_newest_first_when_stopping(pair: Pair) -> None:
    submitted: list[int] = []
    saves = LentSaves(pair.store._transfers, SMALL, 2, lambda key, *rest: not submitted.append(key))
    message = pair.lend(range(6))
    for save in zip(message.refs, message.keys, message.digests, message.checksums):
        saves.add(*save)
    for newest_first in (False, True):
        for _ in range(2):
            assert saves.advance(newest_first=newest_first) == []
        saves.reported(list(submitted))
        saves.check()
    assert submitted == [0, 1, 5, 4]
    assert saves.left == 2


def load(pair: Pair, keys: range) -> m.BlocksLoaded:
    """Have blocks that the tier holds read into an emptied lent segment."""
    pair.save(pair.lend(keys))
    assert pair.store._writer.seal_now(patient(5.0))
    pair.lent[:] = 0
    pair.store._load(m.LoadBlocks(STORE, 7, list(keys), [digest_of(key) for key in keys], pair.refs(keys)))
    pair.store._load(m.LoadBlocks(STORE, 8, [0], [digest_of(0)], pair.refs(range(1))))
    loaded = [told for told in pair.until(m.BlocksLoaded) if isinstance(told, m.BlocksLoaded)]
    if len(loaded) < 2:
        loaded += [told for told in pair.until(m.BlocksLoaded) if isinstance(told, m.BlocksLoaded)]
    assert [one.number for one in loaded] == [7, 8]
    return loaded[0]


def test_blocks_of_the_tier_are_brought_into_lent_dram_one_order_after_the_other(pair: Pair) -> None:
    count = 2 * LOAD_SLOTS + 3
    loaded = load(pair, range(count))
    assert loaded.ok == [True] * count
    assert loaded.checksums == [SMALL.checksums(block_of(key)) for key in range(count)]
    assert loaded.problem == ""
    for key, ref in enumerate(pair.refs(range(count))):
        assert pair.lent[ref.offset : ref.offset + ref.nbytes].tobytes() == block_of(key).tobytes()


def test_an_order_whose_bytes_cannot_be_moved_ends_with_the_reason_and_the_next_one_begins(
    pair: Pair,
) -> None:
    pair.broken.add(pair.refs(range(2))[1].offset)
    keys = range(2, LOAD_SLOTS + 4)
    message = pair.lend(keys)
    pair.save(message)
    assert pair.store._writer.seal_now(patient(5.0))
    places = pair.refs(range(len(keys)))
    pair.store._load(m.LoadBlocks(STORE, 7, message.keys, message.digests, places))
    (loaded,) = [told for told in pair.until(m.BlocksLoaded) if isinstance(told, m.BlocksLoaded)]
    assert loaded.ok == [True, False] + [True] * (LOAD_SLOTS - 2) + [False] * (len(keys) - LOAD_SLOTS)
    assert "is cut" in loaded.problem
    pair.store._load(m.LoadBlocks(STORE, 8, message.keys[:1], message.digests[:1], places[:1]))
    (loaded,) = [told for told in pair.until(m.BlocksLoaded) if isinstance(told, m.BlocksLoaded)]
    assert (loaded.number, loaded.ok, loaded.problem) == (8, [True], "")


def test_lent_blocks_are_compared_with_their_checksums_and_given_out(pair: Pair, tmp_path: Path) -> None:
    message = pair.lend(range(3))
    pair.lent[message.refs[1].offset] ^= 1
    pair.store._check(m.CheckBlocks(STORE, 1, 5, message.refs, message.checksums))
    assert pair.until(m.BlocksChecked) == [m.BlocksChecked(STORE, 0, 1, [True, False, True])]
    path = tmp_path / "one.block"
    pair.store._check(m.CheckBlocks(STORE, 2, 5, message.refs[2:], message.checksums[2:], str(path)))
    assert pair.until(m.BlocksChecked) == [m.BlocksChecked(STORE, 0, 2, [True])]
    assert path.read_bytes() == block_of(2).tobytes()


def test_a_lent_block_that_cannot_be_read_ends_the_command_with_the_reason(pair: Pair) -> None:
    message = pair.lend(range(3))
    pair.broken.add(message.refs[1].offset)
    pair.store._check(m.CheckBlocks(STORE, 1, 5, message.refs, message.checksums))
    (checked,) = pair.until(m.BlocksChecked)
    assert checked.good == [True]
    assert "is cut" in checked.problem
