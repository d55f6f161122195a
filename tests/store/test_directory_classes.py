"""The directory with shares of service classes: whose blocks are evicted, and for whom a block counts."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.directory import Directory
from store.errors import PoolFull
from store.objects import Wanted
from store.policies import policy_factory
from tests.conftest import examples
from tests.store.samples import SMALL

pytestmark = pytest.mark.quick

BLOCK = SMALL.nbytes
HIGH, LOW = 0, 1
SUMS = [1] * SMALL.layers


def pool(blocks: int, share: float) -> Directory:
    directory = Directory(SMALL, policy=policy_factory("lru", shares=(share, 0.0)))
    directory.add_segment(1, blocks * BLOCK, 0)
    return directory


def put(directory: Directory, class_id: int, *keys: int, now: float = 0.0) -> None:
    for key in keys:
        obj = directory.allocate("r", BLOCK, now=now, key=key, digest=key, class_id=class_id)
        directory.put_end(obj.object_id, SUMS, now)
    directory.check()


class Use(NamedTuple):
    """What a class does: put blocks, read them, or read and keep them until the next such use."""

    class_id: int
    what: str
    keys: range


USES = st.builds(
    Use,
    st.integers(0, 2),
    st.sampled_from(["put", "put", "read", "keep"]),
    st.builds(lambda first, count: range(first, first + count), st.integers(0, 20), st.integers(1, 4)),
)


@given(
    uses=st.lists(USES, min_size=20, max_size=60),
    shares=st.sampled_from([(0.5, 0.0, 0.0), (0.25, 0.25, 0.5)]),
)
@settings(max_examples=examples(60))
def test_no_use_by_one_class_takes_a_share_from_another(uses: list[Use], shares: tuple[float, ...]) -> None:
    directory = Directory(SMALL, policy=policy_factory("lru", shares=shares))
    directory.add_segment(1, 8 * BLOCK, 0)
    for now, use in enumerate(uses):
        before = {obj.key: obj.class_id for obj in directory.visible_objects()}
        if use.what == "put":
            wanted = [Wanted(BLOCK, key, key, class_id=use.class_id) for key in use.keys]
            with suppress(PoolFull):
                for obj in directory.allocate_many("r", wanted, now=now):
                    directory.put_end(obj.object_id, SUMS, now)
        else:
            found = directory.lookup(list(use.keys), list(use.keys), now, class_id=use.class_id)
            if use.what == "keep":
                directory.release("reader", now)
                directory.lease("reader", [obj.object_id for obj in found], now, now + 10.0)
        directory.release("r", now)
        directory.check()
        for other, share in enumerate(shares):
            mine = [key for key, class_id in before.items() if class_id == other]
            evicted = len(mine) - len(there(directory, *mine))
            assert other == use.class_id or evicted <= max(0, len(mine) - int(8 * share))


def there(directory: Directory, *keys: int) -> list[int]:
    return [key for key in keys if directory.find(key) is not None]


def test_a_flood_of_a_low_class_leaves_the_share_of_a_high_one() -> None:
    directory = pool(6, 0.5)
    put(directory, HIGH, 1, 2, 3)
    put(directory, LOW, *range(10, 30))
    assert there(directory, 1, 2, 3) == [1, 2, 3]

    put(directory, HIGH, 4, now=1.0)  # takes back what the low class borrowed, and may then lose it again
    assert there(directory, 1, 2, 3, 4) == [1, 2, 3, 4]
    put(directory, LOW, 30, 31, 32, now=2.0)
    assert there(directory, 1, 2, 3, 4) == [1, 2, 3, 4], "the low class has blocks of its own to give"


def test_a_block_counts_for_the_highest_class_that_used_it() -> None:
    directory = pool(4, 0.5)
    put(directory, LOW, 1, 2, 3, 4)
    found = directory.lookup([1, 2], [1, 2], 1.0, class_id=HIGH)
    assert [obj.class_id for obj in found] == [HIGH, HIGH]
    directory.lookup([1, 2], [1, 2], 2.0, class_id=LOW)
    directory.lookup([3], [3], 2.0)
    directory.lookup([4], [4], 2.0, class_id=HIGH, touch=False)
    assert [directory.find(key).class_id for key in (1, 2, 3, 4)] == [HIGH, HIGH, LOW, LOW]

    put(directory, LOW, *range(10, 20), now=3.0)
    assert there(directory, 1, 2, 3, 4) == [1, 2]


def test_a_second_put_of_a_key_by_a_higher_class_is_a_use_of_it() -> None:
    directory = pool(4, 0.5)
    first = directory.allocate("low", BLOCK, now=0.0, key=1, digest=1, class_id=LOW)
    second = directory.allocate("high", BLOCK, now=0.0, key=1, digest=1, class_id=HIGH)
    assert directory.put_end(first.object_id, SUMS, 0.0)
    assert not directory.put_end(second.object_id, SUMS, 0.0)
    assert directory.find(1).class_id == HIGH
    directory.check()


def test_a_low_class_is_told_what_it_will_never_get() -> None:
    directory = pool(4, 0.5)
    put(directory, HIGH, 1, 2, 3)
    assert directory.spared(LOW, []) == 2
    assert directory.spared(LOW, directory.lookup([1], [1], 1.0, touch=False)) == 1
    assert directory.spared(HIGH, []) == 0
    with pytest.raises(PoolFull):
        directory.allocate_many("low", [Wanted(BLOCK, class_id=LOW)] * 3, now=1.0)
    directory.check()
    assert there(directory, 1, 2, 3) == [2, 3], "only what is above the share has gone"
    assert len(directory.allocate_many("low", [Wanted(BLOCK, class_id=LOW)] * 2, now=1.0)) == 2


def test_a_cold_copy_of_a_protected_class_stays() -> None:
    """Copies that nobody reads go first, but not for a class that may not evict them."""
    directory = Directory(SMALL, policy=policy_factory("lru", shares=(0.5, 0.0)), copy_cold_s=10.0)
    directory.add_segment(1, 2 * BLOCK, 0)
    directory.add_segment(2, 2 * BLOCK, 1)
    put(directory, HIGH, 1)
    other = 3 - directory.find(1).rank
    _, copy = directory.replicate("copy", 1, 1, rank=other, now=0.0, until=1.0)
    directory.put_end(copy.object_id, SUMS, 0.0)
    directory.release("copy", 1.0)
    put(directory, LOW, *range(10, 16), now=100.0)
    assert len(directory.locations(1, 1)) == 2
