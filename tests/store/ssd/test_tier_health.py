"""What is wrong with a tier, from its beginning to its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Never

import pytest

from store.ssd.tier import HDF5Tier
from store.ssd.tier_health import BAD_BLOCKS_S, TierHealth
from store.ssd.tier_reader import TierReader
from store.ssd.tier_writer import TierWriter
from tests.store.samples import SMALL, block_of, fill
from tests.store.ssd.test_tier_reader import Answers, reads
from tests.store.ssd.test_tier_writer import LIMIT_S, Reports, submit

pytestmark = pytest.mark.quick
FULL = "the SSD tier cannot write: No space left on device ({} dropped)"


@pytest.fixture
def tier(tier_at, tmp_path) -> HDF5Tier:
    return tier_at(tmp_path, seal_after_s=3600)


def full(*_: object) -> Never:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_trouble_until_a_block_that_was_written_later_is_durable(tier, monkeypatch) -> None:
    monkeypatch.setattr("store.ssd.segment_writer.RESERVE_NBYTES", 0)
    reports, health = Reports(), TierHealth()
    writer = TierWriter(tier, **reports.callbacks(), health=health)
    submit(writer, 8)
    reports.wait_for(lambda keys: keys["written"] == [8])
    assert health.troubles(0.0) == {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for key in range(3):  # the second and the third are not even tried
            submit(writer, key)
        reports.wait_for(lambda keys: len(keys["dropped"]) == 3)
        assert health.troubles(0.0) == {"writes": FULL.format("3 blocks")}
    assert writer.seal_now(LIMIT_S)  # the file that was open before the disk was full
    assert reports.keys["durable"] == [8]
    assert health.troubles(0.0) == {"writes": FULL.format("3 blocks")}
    tier._retry_at = 0.0
    submit(writer, 9)
    reports.wait_for(lambda keys: keys["written"] == [8, 9])
    assert health.troubles(0.0) == {"writes": FULL.format("3 blocks")}
    assert writer.seal_now(LIMIT_S)
    assert health.troubles(0.0) == {}
    writer.stop(LIMIT_S)


def test_a_file_that_cannot_be_sealed_is_trouble(tier, monkeypatch) -> None:
    reports, health = Reports(), TierHealth()
    writer = TierWriter(tier, **reports.callbacks(), health=health)
    submit(writer, 1)
    reports.wait_for(lambda keys: keys["written"] == [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert writer.seal_now(LIMIT_S)
    assert health.troubles(0.0) == {"writes": FULL.format("1 block")}
    writer.stop(LIMIT_S)


def test_bad_blocks_are_trouble_until_none_was_found_for_a_while(tier, tmp_path: Path) -> None:
    fill(tier, (1, 2))
    (file,) = tmp_path.glob("*.h5")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 :] = bytes(len(raw) - len(raw) // 2)
    file.write_bytes(raw)
    health, answers = TierHealth(), Answers()
    reader = TierReader(tier, answers, health=health)
    reader.submit(1, reads([1, 2, 77]))  # 77 is a miss, and no trouble
    answers.wait_for(1)
    reader.stop(LIMIT_S)
    found = answers.of[1][:2].count(None)
    assert found
    assert health._bad == found
    last = health._last_bad_at
    (text,) = health.troubles(last + BAD_BLOCKS_S - 1).values()
    assert text.startswith(f"the SSD tier found {found} bad block")
    assert health.troubles(last + BAD_BLOCKS_S) == {}
    health.bad_block(last + 1000)
    assert health.troubles(last + 1000) == {
        "blocks": "the SSD tier found 1 bad block; their KV is computed again"
    }


def test_bytes_in_dram_that_are_not_what_was_put_are_trouble(tier) -> None:
    reports, health = Reports(), TierHealth()
    writer = TierWriter(tier, **reports.callbacks(), health=health)
    submit(writer, 1, good=False)
    reports.wait_for(lambda keys: keys["bad"] == [1])
    assert list(health.troubles(health._last_bad_at)) == ["blocks"]
    writer.stop(LIMIT_S)


def bug(*_: object, **__: object) -> Never:
    raise MemoryError("a bug of ours")


class Deaths(Reports):
    """(thread, why), as on_fatal hears it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def on_fatal(self, name: str, why: str) -> None:
        with self._changed:
            self.told.append((name, why))
            self._changed.notify_all()

    def wait_for_one(self) -> tuple[str, str]:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.told), LIMIT_S)
        return self.told[0]


def test_a_reader_that_dies_answers_all_orders_with_misses_and_tells_of_it(tier, monkeypatch) -> None:
    fill(tier, range(4))
    answers, deaths = Answers(), Deaths()
    monkeypatch.setattr(tier, "load", bug)
    reader = TierReader(tier, answers, threads=1, on_fatal=deaths.on_fatal)
    reader.submit(1, reads([0, 1]))
    accepted = reader.submit(2, reads([2, 3]))  # unless the thread is dead already
    assert deaths.wait_for_one() == ("tier-reader-0", "MemoryError: a bug of ours")
    assert answers.of == {1: [None, None], 2: [None, None]} if accepted else {1: [None, None]}
    assert not reader.submit(3, reads([0]))
    assert isinstance(reader.failure, MemoryError)
    reader.stop(LIMIT_S)


def test_a_writer_that_dies_drops_what_it_had_keeps_what_it_was_to_remove_and_tells_of_it(
    tier, monkeypatch
) -> None:
    deaths = Deaths()
    monkeypatch.setattr(tier, "append", bug)
    monkeypatch.setattr(tier, "remove", bug)
    writer = TierWriter(tier, **deaths.callbacks(), on_fatal=deaths.on_fatal)
    writer.remove([7])
    submitted = [key for key in range(3) if submit(writer, key)]
    assert deaths.wait_for_one() == ("tier-writer", "MemoryError: a bug of ours")
    assert deaths.keys["dropped"] == submitted
    assert deaths.keys["kept"] == [7]
    assert not submit(writer, 4)
    assert not writer.remove([8])
    assert writer.seal_now(LIMIT_S)


def test_a_program_without_a_handler_goes_on_when_a_thread_of_its_tier_dies(tier, monkeypatch) -> None:
    fill(tier, [1])
    answers = Answers()
    with monkeypatch.context() as patch:
        patch.setattr(tier, "load", bug)
        reader = TierReader(tier, answers, threads=1)
        reader.submit(1, reads([1]))
        answers.wait_for(1)
        reader.stop(LIMIT_S)
    assert reader.read_now(reads([1])) == [SMALL.checksums(block_of(1))]
