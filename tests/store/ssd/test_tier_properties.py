"""Promises of the HDF5 tier, tried at random: kills, flipped bits, short files, full disks, any order of
verbs. `make test` kills a writer at 20 moments; `make soak` SOAK times as often.
"""

from __future__ import annotations

import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
from functools import cache
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from store.errors import BadBlock, BlockMissing, TierWriteError
from store.ssd.segment_file import HEADER_NBYTES
from store.ssd.segment_frame import blocks_at
from store.ssd.segment_writer import file_nbytes
from store.ssd.tier import HDF5Tier
from tests.conftest import examples
from tests.store.samples import SMALL, append, fill, loaded, new_tier

ROOMY = 1 << 30
LIMIT_S = 30.0
KEYS = tuple(range(1, 8))


def write_for_ever(folder: str, seed: int, out: int) -> None:
    """Append, seal, remove and rewrite, and say so before or after; the end is a kill."""
    choose, durable = random.Random(seed), []
    tier = new_tier(folder, segment_bytes=6 * SMALL.nbytes)
    for key in range(1, 10**6):
        os.write(out, b"written %d\n" % key)
        append(tier, key)
        if choose.random() < 0.4:
            sealed = tier.seal()
            durable += sealed
            os.write(out, b"durable " + b" ".join(b"%d" % k for k in sealed) + b"\n")
        if durable and choose.random() < 0.4:
            gone = choose.sample(durable, min(2, len(durable)))
            os.write(out, b"removing " + b" ".join(b"%d" % k for k in gone) + b"\n")
            tier.remove(gone)
            os.write(out, b"removed " + b" ".join(b"%d" % k for k in gone) + b"\n")
            durable = [k for k in durable if k not in gone]
        if choose.random() < 0.5:
            tier.compact(SMALL.nbytes, merge_small=True)


def killed_after(folder: str, seed: int, lines: int, delay_s: float) -> dict[bytes, set[int]]:
    """What a writer said that was killed this long after so many lines."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_for_ever(folder, seed, into)
        finally:
            os._exit(1)
    os.close(into)
    said, until = b"", time.monotonic() + LIMIT_S
    while said.count(b"\n") < lines and time.monotonic() < until and select.select([out], [], [], LIMIT_S)[0]:
        said += os.read(out, 4096)
    select.select([], [], [], delay_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, said
    while more := os.read(out, 1 << 16):
        said += more
    os.close(out)
    found: dict[bytes, set[int]] = {word: set() for word in (b"written", b"durable", b"removing", b"removed")}
    for line in said.splitlines(keepends=True):
        word, *keys = line.split()
        found[word].update(map(int, keys))
    return found


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.integers(1, 120), st.floats(0, 0.004))
def test_after_a_kill_what_was_durable_reads_back_and_what_was_removed_stays_away(seed, lines, delay) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = killed_after(folder, seed, lines, delay)
        tier = new_tier(folder)
        tier.check()
        served = set(tier.blocks()[0])
        assert said[b"durable"] - said[b"removing"] <= served
        assert not said[b"removed"] & served
        assert served <= said[b"written"]
        assert all(loaded(tier, key) for key in served)
        assert tier.stats()["files_bad"] == 0
        append(tier, 10**7)  # and it goes on
        tier.seal()
        tier.close()
        assert not list(Path(folder).glob("*.open"))


@cache
def sealed_bytes() -> bytes:
    """A sealed file with the blocks KEYS."""
    with tempfile.TemporaryDirectory() as folder:
        tier = new_tier(folder)
        fill(tier, KEYS)
        tier.close()
        return (Path(folder) / "seg-00000001.h5").read_bytes()


def start_with(raw: bytes, folder: str) -> HDF5Tier:
    (Path(folder) / "seg-00000001.h5").write_bytes(raw)
    return new_tier(folder)


BLOCKS_AT = blocks_at(SMALL.nbytes)
PLACES = st.one_of(
    st.integers(0, 200),
    st.integers(HEADER_NBYTES - 16, HEADER_NBYTES + 200),
    st.integers(0, BLOCKS_AT + len(KEYS) * SMALL.nbytes + 200),
    st.integers(0, 1 << 20),
)


@settings(max_examples=examples(200))
@given(PLACES, st.integers(0, 7))
@example(HEADER_NBYTES - 1, 0)
@example(HEADER_NBYTES, 0)
@example(BLOCKS_AT - 1, 7)
@example(BLOCKS_AT, 0)
@example(BLOCKS_AT + len(KEYS) * SMALL.nbytes - 1, 7)
@example(BLOCKS_AT + len(KEYS) * SMALL.nbytes, 0)
@example(-1, 7)
def test_a_flipped_bit_costs_its_block_or_its_file_and_nothing_else(place, bit) -> None:
    raw = bytearray(sealed_bytes())
    place %= len(raw)
    raw[place] ^= 1 << bit
    row = (place - BLOCKS_AT) // SMALL.nbytes
    with tempfile.TemporaryDirectory() as folder:
        tier = start_with(raw, folder)
        if place < BLOCKS_AT or row >= len(KEYS):
            assert (len(tier), tier.stats()["files_bad"]) == (0, 1)
        else:
            bad = 0
            for key in KEYS:
                try:
                    assert loaded(tier, key)
                except BadBlock:
                    assert key == KEYS[row]
                    bad += 1
            assert bad == tier.stats()["bad_blocks"] == 1
        tier.close()


@settings(max_examples=examples(60))
@given(st.integers(0, 90_000), st.integers(0, 2**32))
def test_a_full_disk_costs_blocks_and_never_what_was_durable(limit, seed) -> None:
    """The limit on a file's size stands for the disk; it hits appends, seals, removals and rewriting."""
    choose, durable = random.Random(seed), set()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as folder:
        tier = new_tier(folder, segment_bytes=20 * SMALL.nbytes)
        for key in KEYS:
            append(tier, key)
        durable.update(tier.seal())
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            for key in range(10, 60):
                try:
                    append(tier, key, now=key * 10.0)
                    if choose.random() < 0.1:
                        durable.update(tier.seal())
                    if choose.random() < 0.1:
                        gone = choose.choice(KEYS)
                        tier.remove([gone])
                        durable.discard(gone)
                    tier.compact(ROOMY, merge_small=True)
                except TierWriteError:
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        durable -= set(tier.take_evicted())
        tier.check()
        durable.update(tier.seal())
        tier.close()
        again = new_tier(folder)
        again.check()
        assert set(again.blocks()[0]) == durable
        assert all(loaded(again, key) for key in durable)
        again.close()


class Tiers(RuleBasedStateMachine):
    """Any order of verbs, against a dictionary."""

    keys = st.integers(1, 30)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.capacity = 12 * file_nbytes(SMALL, 5)
        self.sealed: set[int] = set()
        self.open: set[int] = set()
        self.start()

    def start(self) -> None:
        self.tier = new_tier(self.folder, self.capacity, segment_bytes=5 * SMALL.nbytes)

    @rule(keys=st.lists(keys, min_size=1, max_size=6))
    def append(self, keys) -> None:
        for key in keys:
            assert append(self.tier, key) == (key not in self.sealed)
            if key not in self.sealed:
                self.open.add(key)

    @rule()
    def seal(self) -> None:
        assert set(self.tier.seal()) == self.open
        self.sealed |= self.open
        self.open = set()

    @rule(keys=st.lists(keys, min_size=1, max_size=6))
    def remove(self, keys) -> None:
        assert set(self.tier.remove(keys)) == set(keys) & (self.sealed | self.open)
        self.sealed -= set(keys)
        self.open -= set(keys)

    @rule(steps=st.integers(1, 5), merge=st.booleans())
    def compact(self, steps, merge) -> None:
        for _ in range(steps):
            self.tier.compact(2 * SMALL.nbytes, merge_small=merge)

    @rule(key=keys)
    def load(self, key) -> None:
        try:
            assert loaded(self.tier, key)
            assert key in self.sealed
        except BlockMissing:
            assert key not in self.sealed

    @rule(sealed_first=st.booleans())
    def restart(self, sealed_first) -> None:
        """In peace: the open file is sealed. After a kill it is gone: a copy of the folder is one."""
        if sealed_first:
            self.tier.close()
            self.sealed |= self.open
        else:
            copy = tempfile.mkdtemp()
            shutil.copytree(self.folder, copy, dirs_exist_ok=True)
            self.tier.close()
            shutil.rmtree(self.folder)
            self.folder = copy
        self.open = set()
        self.start()

    @invariant()
    def the_tier_agrees_with_the_model(self) -> None:
        self.tier.check()
        assert self.tier.take_evicted() == []  # there is room for all
        assert set(self.tier.blocks()[0]) == self.sealed
        assert self.tier.nbytes <= self.capacity

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=examples(60), stateful_step_count=40)
