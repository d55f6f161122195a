"""The segment that a new object gets: the same as a scan of all segments would choose, in every process."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.books.segment import Accounts, Segment
from store.books.segment_order import SegmentOrder, Target
from store.directory import Directory
from store.errors import CopyExists, ObjectInUse, PoolFull
from store.objects import ObjectState, Wanted
from store.policies import policy_factory
from tests.conftest import examples
from tests.store.samples import SMALL, digest_of

BLOCK = SMALL.nbytes
SUMS = [1] * SMALL.layers
SEGMENTS = {1: (3, 0), 2: (2, 0), 5: (3, 1), 6: (1, 1), 7: (2, 2)}
"""rank -> (blocks, node)"""


class Scan(SegmentOrder):
    """The same answers by a look at every segment."""

    def _among(self, target: Target) -> list[Segment]:
        ranks = [target.rank] if target.rank is not None else list(self._by_rank)
        return [self._by_rank[rank] for rank in ranks if rank not in target.without]

    def accounts(self, target: Target) -> Accounts:
        total = Accounts()
        for segment in self._among(target):
            total.add(segment.accounts)
        return total

    def by_room(self, nbytes: int, target: Target) -> Iterator[Segment]:
        order = lambda s: (s.rank != target.first, s.node != target.node, -s.allocator.free_bytes)  # noqa: E731
        yield from sorted(self._among(target), key=order)

    def by_coldness(self, target: Target, now: float) -> Iterator[Segment]:
        found = [(self._coldest(segment, now), segment) for segment in self._among(target)]
        keys = {
            segment.rank: (cold[:2], segment.rank != target.first, segment.node != target.node)
            for cold, segment in found
            if cold is not None
        }
        yield from sorted(
            (segment for cold, segment in found if cold is not None), key=lambda s: keys[s.rank]
        )

    def places(self, nbytes: int, rank: int | None = None) -> int:
        accounts = [segment.accounts for at, segment in self._by_rank.items() if rank in (None, at)]
        return sum((one.capacity - one.pinned) // nbytes for one in accounts)


def pool(policy: str, scans: bool) -> Directory:
    directory = Directory(SMALL, policy=policy_factory(policy), copy_cold_s=6.0, quarantine_s=9.0)
    if scans:
        directory._order = Scan(directory._coldest)
    for rank, (blocks, node) in SEGMENTS.items():
        directory.add_segment(rank, blocks * BLOCK, node, tier=rank == 5)
    return directory


def lived(directory: Directory, seed: int, steps: int) -> Iterator[object]:
    """A random life of a pool; yields all that can be seen of it."""
    random_ = random.Random(seed)
    now = 0.0
    for _ in range(steps):
        now += random_.choice([0.0, 0.0, 1.0, 4.0])
        step = random_.choice(STEPS)
        try:
            yield step(directory, random_, now)
        except (PoolFull, CopyExists, ObjectInUse) as error:
            yield str(error)
        yield directory.drain_events()
        yield directory.next_deadline()
    yield directory.stats()


def owner(random_: random.Random) -> str:
    return f"owner {random_.randrange(5)}"


def put(directory: Directory, random_: random.Random, now: float) -> object:
    first, node, rank = (random_.choice([None, None, *some]) for some in (SEGMENTS, (0, 1, 2), SEGMENTS))
    preferred = {"first": first, "node": node, "rank": rank if random_.random() < 0.2 else None}
    keys = random_.sample(range(40), random_.randrange(1, 4))
    soft, hard = random_.choice([0.0] * 6 + [now + 5]), random_.random() < 0.05
    if random_.random() < 0.2:
        wanted = [Wanted(BLOCK // random_.randrange(1, 4)) for _ in keys]
    else:
        wanted = [Wanted(BLOCK, key, digest_of(key), soft_until=soft, hard_pin=hard) for key in keys]
    made = directory.allocate_many(
        owner(random_), wanted, now=now, contiguous=random_.random() < 0.7, **preferred
    )
    return [(obj.object_id, obj.rank, obj.extents) for obj in made]


def end(directory: Directory, random_: random.Random, now: float) -> object:
    writing = [i for i, obj in directory._objects.items() if obj.state is ObjectState.WRITING]
    return directory.put_end_many(writing, [SUMS] * len(writing), now)


def save(directory: Directory, random_: random.Random, now: float) -> object:
    saves = directory.take_saves()
    for rank, objects in saves.items():
        directory.durable(rank, [obj.key or 0 for obj in objects])
    return list(saves)


def look(directory: Directory, random_: random.Random, now: float) -> object:
    keys = [obj.key or 0 for obj in directory.visible_objects()]
    key = random_.choice(keys or [0])
    found = directory.lookup([key], [digest_of(key)], now, node=random_.randrange(3))
    ids = [hit.object_id for hit in found if hit.object_id is not None]
    directory.lease(owner(random_), ids, now, now + random_.randrange(1, 9))
    return [(hit.rank, hit.tier, hit.offset) for hit in found]


def replicate(directory: Directory, random_: random.Random, now: float) -> object:
    ids = [obj.object_id for obj in directory.visible_objects()]
    if not ids:
        return None
    made = directory.put_copy(random_.choice(ids), now=now, owner=owner(random_))
    return made.rank, made.offset


def stop(directory: Directory, random_: random.Random, now: float) -> object:
    late = random_.random() < 0.3
    directory.revoke_owner(owner(random_), now, writer_may_live=late, writer=random_.choice([None, 1, 2]))
    return directory.settle_writer(1)


def unpin(directory: Directory, random_: random.Random, now: float) -> object:
    for obj in directory.visible_objects():
        directory.pin(obj.key or 0, obj.digest, hard=False, soft_until=random_.choice([0.0, now + 3]))
    return [directory.will_fit([BLOCK] * count) for count in range(14)]


def remove(directory: Directory, random_: random.Random, now: float) -> object:
    keys, kept = directory.removable(now, force=random_.random() < 0.5)
    directory.remove_everywhere(keys[:1], now, force=True)
    return keys, kept


STEPS = [put] * 8 + [end] * 6 + [look] * 4 + [save] * 3 + [replicate, stop, unpin, remove]


@settings(max_examples=examples(50))
@given(st.integers(0, 1 << 32), st.sampled_from(["lru", "lfu", "leaves-first"]))
def test_the_choice_is_that_of_a_scan_of_all_segments(seed: int, policy: str) -> None:
    ours, scan = (pool(policy, scans) for scans in (False, True))
    for step, (mine, theirs) in enumerate(zip(lived(ours, seed, 60), lived(scan, seed, 60), strict=True)):
        assert mine == theirs, f"step {step // 3} of seed {seed}"
        ours.check()


def test_of_two_equally_cold_blocks_the_one_on_the_preferred_segment_goes() -> None:
    for first, node, gone in ((None, None, 1), (None, 1, 5), (7, 1, 7), (None, 2, 7)):
        directory = pool("lru", scans=False)
        for rank, (blocks, _) in SEGMENTS.items():
            wanted = [Wanted(BLOCK, 10 * rank + i, 0) for i in range(blocks)]
            made = directory.allocate_many("put", wanted, now=1, rank=rank)
            directory.put_end_many([obj.object_id for obj in made], [SUMS] * blocks, 1)
        save(directory, random.Random(0), 1)
        (obj,) = directory.allocate_many("r", [Wanted(BLOCK)], now=2, first=first, node=node)
        assert obj.rank == gone
        directory.check()


def test_an_allocation_looks_at_few_of_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(SMALL)
    for rank in range(256):
        directory.add_segment(rank, 4 * BLOCK, rank % 8)
    asked = []
    coldest = directory._order._coldest
    monkeypatch.setattr(
        directory._order, "_coldest", lambda segment, now: asked.append(segment.rank) or coldest(segment, now)
    )
    for now in range(1024 + 64):
        if now == 1024 + 32:  # every segment was asked when the first block went
            asked.clear()
        (obj,) = directory.allocate_many("r", [Wanted(BLOCK, now, 0)], now=now, node=now % 8)
        directory.put_end(obj.object_id, SUMS, now)
    assert len(asked) <= 3 * 32
    directory.check()


PROGRAM = """
from tests.store.test_directory_choice import told
print(told())
"""


def told() -> str:
    """A digest of all that can be seen of a few pools."""
    seen = [repr(one) for seed in range(20) for one in lived(pool("lru", scans=False), seed, 60)]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


def test_equal_events_give_equal_choices_whatever_the_hash_seed_is() -> None:
    heard = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(heard) == 1
