"""The write-behind thread: every block's fate is reported exactly once, in time or not."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Never

import pytest

from store.errors import TierWriteError
from store.ssd.segment_writer import file_nbytes
from store.ssd.tier import HDF5Tier
from store.ssd.tier_writer import TierWriter
from tests.store.samples import SMALL, block_of, digest_of, loaded, new_tier

LIMIT_S = 30.0
KINDS = ("written", "durable", "dropped", "bad", "evicted", "removed", "kept")


class Reports:
    """What the writer reported: kind -> keys, in order; wait_for until a condition on them holds."""

    def __init__(self):
        self.keys: dict[str, list[int]] = defaultdict(list)
        self.groups: dict[str, list[int]] = defaultdict(list)
        self._changed = threading.Condition()

    def callbacks(self) -> dict:
        def report_to(kind: str) -> Callable[[list[int]], None]:
            def report(keys: list[int]) -> None:
                with self._changed:
                    self.keys[kind] += keys
                    self.groups[kind].append(len(keys))
                    self._changed.notify_all()

            return report

        return {f"on_{kind}": report_to(kind) for kind in KINDS}

    def wait_for(self, condition) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.keys), LIMIT_S), dict(self.keys)


class Gate:
    """Lets a tier's appends through only when opened: makes the writer's moments the test's own."""

    def __init__(self, tier: HDF5Tier, monkeypatch):
        self.entered, self._open = threading.Event(), threading.Event()
        append = tier.append

        def gated(*args, **options) -> bool:
            self.entered.set()
            assert self._open.wait(LIMIT_S)
            return append(*args, **options)

        monkeypatch.setattr(tier, "append", gated)

    def open(self) -> None:
        self._open.set()


def held(tier: HDF5Tier, writer: TierWriter, monkeypatch) -> Gate:
    """Block 0 is in the writer's hands, and 1 to 5 are in its queue."""
    gate = Gate(tier, monkeypatch)
    submit(writer, 0)
    assert gate.entered.wait(LIMIT_S)
    for key in range(1, 6):
        submit(writer, key)
    return gate


@pytest.fixture
def tier(tier_at, tmp_path) -> HDF5Tier:
    return tier_at(tmp_path, seal_after_s=3600)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def writer(tier, reports) -> Iterator[TierWriter]:
    writer = TierWriter(tier, **reports.callbacks())
    yield writer
    writer.stop(LIMIT_S)
    assert writer.ended
    assert writer.failure is None


def submit(writer: TierWriter, key: int, *, good: bool = True) -> bool:
    block = block_of(key)
    sums = SMALL.checksums(block) if good else [0, 0]
    return writer.submit(key, digest_of(key), sums, block)


def test_blocks_are_reported_written_then_durable_by_time_while_the_queue_is_idle(
    tier_at, tmp_path, reports
) -> None:
    tier = tier_at(tmp_path, seal_after_s=0.02)
    writer = TierWriter(tier, **reports.callbacks())
    assert submit(writer, 1)
    reports.wait_for(lambda keys: keys["durable"] == [1])
    assert reports.keys["written"] == [1]
    assert loaded(tier, 1)
    assert writer.stop(LIMIT_S) == 0


def test_stopping_writes_everything_when_there_is_time(tier, writer, reports) -> None:
    for key in range(40):
        assert submit(writer, key)
    assert writer.stop(LIMIT_S) == 0
    assert sorted(reports.keys["written"]) == sorted(reports.keys["durable"]) == list(range(40))
    assert reports.keys["dropped"] == []
    assert all(loaded(tier, key) for key in range(40))
    assert not submit(writer, 99)


def test_written_blocks_are_reported_in_groups(tier, writer, reports, monkeypatch) -> None:
    gate = Gate(tier, monkeypatch)
    for key in range(30):
        submit(writer, key)
    gate.open()
    reports.wait_for(lambda keys: len(keys["written"]) == 30)
    assert max(reports.groups["written"]) > 1
    assert max(reports.groups["written"]) <= 16


def test_stopping_writes_the_newest_first(tier, writer, reports, monkeypatch) -> None:
    gate = held(tier, writer, monkeypatch)
    stopper = threading.Thread(target=writer.stop, args=(LIMIT_S,))
    stopper.start()
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._stop_at is not None, LIMIT_S)
    gate.open()
    stopper.join(LIMIT_S)
    assert tier.blocks()[0] == [0, 5, 4, 3, 2, 1]


def test_stopping_without_time_drops_the_queue_counts_it_and_keeps_what_was_written(
    tier, writer, reports, monkeypatch
) -> None:
    gate = held(tier, writer, monkeypatch)
    assert writer.stop(0.0) == 6  # nothing is durable yet
    gate.open()
    reports.wait_for(lambda keys: len(keys["dropped"]) == 5 and keys["durable"] == [0])
    assert sorted(reports.keys["dropped"]) == [1, 2, 3, 4, 5]
    assert writer.stop(LIMIT_S) == 5
    assert writer.stats()["dropped_stopping"] == 5
    assert loaded(tier, 0)


def test_seal_now_makes_the_open_file_durable_before_the_rest_of_the_queue(
    tier, writer, reports, monkeypatch
) -> None:
    gate = held(tier, writer, monkeypatch)
    assert not writer.seal_now(0.0)  # it is on its way, and 0 s is no time
    gate.open()
    reports.wait_for(lambda keys: bool(keys["durable"]))
    assert reports.keys["durable"][:1] == [0]
    reports.wait_for(lambda keys: len(keys["written"]) == 6)
    assert writer.seal_now(LIMIT_S)
    assert sorted(reports.keys["durable"]) == list(range(6))
    assert writer.seal_now(LIMIT_S)  # nothing to seal is fine


def test_the_queue_is_bounded_and_refuses_what_is_in_it_already(tier, reports, monkeypatch) -> None:
    gate = Gate(tier, monkeypatch)
    writer = TierWriter(tier, max_blocks=2, **reports.callbacks())
    submit(writer, 0)
    assert gate.entered.wait(LIMIT_S)
    assert [submit(writer, key) for key in (1, 1, 2, 3)] == [True, False, True, False]
    assert writer.stats()["refused"] == 2
    gate.open()
    assert writer.stop(LIMIT_S) == 0
    assert sorted(reports.keys["written"]) == [0, 1, 2]


def test_bad_bytes_are_reported_as_such_and_the_rest_goes_on(tier, writer, reports) -> None:
    submit(writer, 1, good=False)
    writer.submit(2, 2, [0, 0], bytes(3))
    submit(writer, 3)
    reports.wait_for(lambda keys: keys["written"] == [3] and keys["bad"] == [1, 2])
    assert writer.stats()["bad"] == 2
    assert reports.keys["dropped"] == []


def test_blocks_lost_with_their_file_are_reported_dropped_after_they_were_written(
    tier, writer, reports, monkeypatch
) -> None:
    for key in range(3):
        submit(writer, key)
    reports.wait_for(lambda keys: len(keys["written"]) == 3)

    def broken() -> list[int]:
        keys = tuple(tier._writer.keys)
        tier._writer.abandon()
        tier._writer = None
        raise TierWriteError("Input/output error", keys)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "seal", broken)
        assert writer.seal_now(LIMIT_S)
    assert reports.keys["dropped"] == [0, 1, 2]
    assert reports.keys["durable"] == []
    assert writer.stop(LIMIT_S) == 0


def test_a_block_that_the_tier_has_already_is_written_and_durable_at_once(tier, writer, reports) -> None:
    submit(writer, 1)
    reports.wait_for(lambda keys: keys["written"] == [1])
    writer.seal_now(LIMIT_S)
    submit(writer, 1)
    reports.wait_for(lambda keys: keys["durable"] == [1, 1])
    assert tier.stats()["blocks_written"] == 1


def test_evicted_keys_are_reported(tmp_path, reports) -> None:
    tier = new_tier(tmp_path, 2 * file_nbytes(SMALL, 2), segment_bytes=2 * SMALL.nbytes)
    writer = TierWriter(tier, **reports.callbacks())
    for key in range(40):
        submit(writer, key)
    assert writer.stop(LIMIT_S) == 0
    assert sorted(reports.keys["evicted"] + tier.blocks()[0]) == list(range(40))
    assert reports.keys["evicted"]
    tier.close()


def test_a_callback_that_fails_ends_the_thread_and_says_so(tier, reports) -> None:
    callbacks = reports.callbacks()

    def fail(keys: list[int]) -> None:
        raise RuntimeError("the channel is closed")

    writer = TierWriter(tier, **(callbacks | {"on_written": fail}))
    submit(writer, 1)
    reports.wait_for(lambda keys: keys["dropped"] == [1])
    assert writer.stop(LIMIT_S) == 0
    assert str(writer.failure) == "the channel is closed"
    assert not submit(writer, 2)
    assert writer.seal_now(LIMIT_S)


def test_removing_reaches_what_waits_what_is_open_and_what_is_sealed(
    tier_at, tmp_path, tier, writer, reports, monkeypatch
) -> None:
    submit(writer, 0)
    submit(writer, 1)
    reports.wait_for(lambda keys: len(keys["written"]) == 2)
    assert writer.seal_now(LIMIT_S)
    submit(writer, 2)
    reports.wait_for(lambda keys: len(keys["written"]) == 3)
    gate = Gate(tier, monkeypatch)
    submit(writer, 3)
    assert gate.entered.wait(LIMIT_S)
    submit(writer, 4)
    assert writer.remove([0, 2, 4, 99])
    gate.open()
    reports.wait_for(lambda keys: keys["removed"] == [0, 2, 4, 99])
    assert sorted(reports.keys["dropped"]) == [2, 4]
    assert writer.stop(LIMIT_S) == 0
    assert sorted(reports.keys["durable"]) == [0, 1, 3]
    assert not writer.remove([1])
    tier.close()
    again = tier_at(tmp_path)
    assert sorted(again.blocks()[0]) == [1, 3]


def test_a_removal_that_cannot_be_made_sure_is_not_reported_as_done(
    tier, writer, reports, monkeypatch
) -> None:
    def refused(keys: list[int]) -> Never:
        raise TierWriteError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tier, "remove", refused)
        writer.remove([1])
        assert writer.seal_now(LIMIT_S)
    assert writer.stats()["removals_failed"] == 1
    assert (reports.keys["removed"], reports.keys["kept"]) == ([], [1])


def test_a_removal_that_comes_while_the_writer_stops_is_refused_or_reported(
    tier, writer, reports, monkeypatch
) -> None:
    taken, seal = [], tier.seal

    def while_sealing() -> list[int]:
        taken.append(writer.remove([7]))
        return seal()

    monkeypatch.setattr(tier, "seal", while_sealing)
    assert writer.stop(LIMIT_S) == 0
    assert taken == [bool(reports.keys["removed"])]


def test_an_idle_writer_rewrites_what_is_half_dead(tier_at, tmp_path, reports, monkeypatch) -> None:
    monkeypatch.setattr("store.ssd.tier_writer.COMPACT_CHECK_S", 0.01)
    tier = tier_at(tmp_path)
    writer = TierWriter(tier, **reports.callbacks())
    for key in range(8):
        submit(writer, key)
    reports.wait_for(lambda keys: len(keys["written"]) == 8)
    assert writer.seal_now(LIMIT_S)
    writer.remove(range(5))
    reports.wait_for(lambda keys: len(keys["removed"]) == 5)
    compacted = threading.Event()
    compact = tier.compact

    def watched(nbytes: int, *, merge_small: bool = False) -> int:
        copied = compact(nbytes, merge_small=merge_small)
        if tier.stats()["files_compacted"]:
            compacted.set()
        return copied

    monkeypatch.setattr(tier, "compact", watched)
    assert compacted.wait(LIMIT_S) or tier.stats()["files_compacted"]
    assert tier.stats()["files_compacted"] == 1
    assert writer.stop(LIMIT_S) == 0
    assert sorted(tier.blocks()[0]) == [5, 6, 7]
    tier.check()


def test_a_writer_that_is_told_to_compact_merges_small_files_at_once(tier, writer, reports) -> None:
    for key in range(3):
        submit(writer, key)
        reports.wait_for(lambda keys, count=key + 1: len(keys["written"]) == count)
        assert writer.seal_now(LIMIT_S)
    assert tier.stats()["files_sealed"] == 3
    writer.compact()
    deadline = time.monotonic() + LIMIT_S
    while not tier.stats()["files_compacted"] and time.monotonic() < deadline:
        writer.seal_now(LIMIT_S)  # a turn of its loop
    assert tier.stats()["files_compacted"] == 3
    assert sorted(tier.blocks()[0]) == [0, 1, 2]
