"""Each policy does what its paper says: the whole algorithm against a slow twin, and what it is known for."""

from __future__ import annotations

import random

import pytest

from store.policies import NAMES
from store.policies.arc import ARC
from store.policies.contract import BlockFacts
from store.policies.gdsf import GDSF
from store.policies.sketch import FrequencySketch
from tests.store.policies import naive
from tests.store.policies.pools import Pool, evictions, hits, make, stream

pytestmark = pytest.mark.quick

TWINS = {
    "lru": naive.lru,
    "lfu": naive.lfu,
    "length": naive.length,
    "s3fifo": naive.s3fifo,
    "sieve": naive.sieve,
    "arc": naive.arc,
    "gdsf": naive.gdsf,
    "leaves-first": naive.leaves_first,
    "belady": naive.belady,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [1, 2, 7, 25])
@pytest.mark.parametrize("name", TWINS)
def test_the_hits_are_those_of_the_slow_twin(name: str, blocks: int, seed: int) -> None:
    references = stream(seed, 700, 40)
    assert hits(name, references, blocks) == TWINS[name](references, blocks)


@pytest.mark.parametrize("name", ["lru", "sieve"])
def test_making_room_first_or_last_gives_the_same_hits(name: str) -> None:
    """The paper makes room first; in the replay the new block is in already, and must not be judged."""
    references = stream(5, 2000, 60)
    assert hits(name, references, 20) == hits(name, references, 20, room_first=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "belady"])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_hits_more_blocks_than_the_oracle(name: str, seed: int) -> None:
    """Belady 1966: for blocks of one size, evicting what is used last in the future is optimal (MIN)."""
    references = stream(seed, 500, 40)
    assert sum(hits(name, references, 10)) <= sum(hits("belady", references, 10))


def test_lru_forgets_what_it_has_not_seen_for_longest() -> None:
    assert evictions("lru", [1, 2, 3, 1, 4, 5], 3) == [2, 3]


def test_lfu_keeps_what_was_popular_once() -> None:
    """The known weakness of counts that never age: 1 stays although it is never used again."""
    assert 1 not in evictions("lfu", [1, 1, 1, *range(2, 30)], 3)
    assert 1 in evictions("lru", [1, 1, 1, *range(2, 30)], 3)


def test_length_aware_evicts_what_occurs_later_in_requests() -> None:
    """Mooncake (arXiv 2407.00079, 4.2): "similar to LFU but prioritizing eviction of cache blocks occurring
    later in requests". 0, 1, 3, 7 is one path down the tree."""
    assert evictions("length", [0, 1, 3, 7, 2], 4) == [7]
    assert evictions("lfu", [0, 1, 3, 7, 2], 4) == [0]


def test_s3fifo_filters_what_is_used_once_before_it_reaches_the_main_queue() -> None:
    """S3-FIFO: "a small FIFO queue that filters out most objects from entering the main cache". Popular
    blocks survive a scan of a thousand; under LRU none does."""
    popular = list(range(1, 16))
    references = [*popular * 4, *range(1000, 2000), *popular]
    assert all(hits("s3fifo", references, 20)[-len(popular) :])
    assert not any(hits("lru", references, 20)[-len(popular) :])


def test_s3fifo_takes_what_comes_back_soon_into_the_main_queue() -> None:
    """Algorithm 1: on a miss, what is in the ghost queue goes to the main queue. There it outlives a scan
    that it would not have survived in the small one."""
    filled = [*range(100, 120)]
    back = [1, *filled, 1]  # 1 went from the small queue, left its name, and is back
    assert hits("s3fifo", [*back, *range(300, 340), 1], 20)[-1]
    assert not hits("s3fifo", [*filled, 1, *range(300, 340), 1], 20)[-1]


def test_sieve_moves_nothing_on_a_hit_and_keeps_survivors_where_they_are() -> None:
    """SIEVE: a hit sets the visited bit and no more, and the hand goes on where it stopped. 1 and 2 are hit:
    the hand clears their bits, takes 3, and goes on with 4."""
    assert evictions("sieve", [1, 2, 3, 4, 5, 1, 2, 6, 7, 8], 5) == [3, 4, 5]


def test_sieve_is_not_scan_resistant_in_its_second_lap() -> None:
    """The hand comes round: after one lap, a block that was not hit since is taken, popular or not."""
    references = [1, 2, 3, 1, 2, 3, *range(4, 8)]
    assert evictions("sieve", references, 3) == [1, 2, 3, 4]
    assert evictions("lfu", references, 3) == [4, 5, 6, 7]


def test_arc_lets_a_scan_pass_through() -> None:
    """ARC: "it allows one-time sequential requests to pass through without polluting the cache"."""
    popular = list(range(10))
    references = [*popular, *popular, *range(1000, 1500), *popular]
    assert all(hits("arc", references, 20)[-len(popular) :])
    assert not any(hits("lru", references, 20)[-len(popular) :])


def test_arc_learns_from_ghosts_how_long_the_list_of_things_seen_once_should_be() -> None:
    policy = ARC(4)
    pool = Pool(policy, 4)
    for item in (1, 2, 1, 2, 3, 4, 5, 6):  # 1 and 2 seen again; 3 and 4 leave names in B1
        pool.refer(item)
    assert policy.target == 0
    pool.refer(3)  # a hit in B1: seen once deserves more room
    assert policy.target == 1
    pool.refer(4)
    grown = policy.target
    for item in range(20, 24):
        pool.refer(item)
    gone = next(item for item in (1, 2, 3, 4) if item not in pool.present)
    pool.refer(gone)  # a hit in B2: and less again
    assert policy.target < grown


def test_gdsf_weighs_what_a_block_costs_per_byte_and_how_often_it_is_used() -> None:
    """GDSF looks at "file size, file access frequency and recentness of the last access", and at the cost."""
    policy = GDSF(4)
    for item, nbytes, cost_s in ((1, 1, 4.0), (2, 2, 4.0), (3, 1, 1.0), (4, 4, 4.0)):
        policy.on_insert(item, BlockFacts(nbytes, cost_s), 0.0)
    policy.on_access(3, 1.0)
    policy.on_access(3, 1.0)  # worth 4, 2, 3 and 1
    assert list(policy.victims(2.0)) == [4, 2, 3, 1]


def test_gdsf_ages_so_that_what_was_dear_long_ago_goes_in_the_end() -> None:
    policy = GDSF(2)
    policy.on_insert(1, BlockFacts(1, 3.5), 0.0)
    gone = []
    for item in range(2, 8):
        policy.on_insert(item, BlockFacts(1, 1.0), 0.0)
        victim = next(policy.victims(0.0))
        policy.on_remove(victim, evicted=True)
        gone.append(victim)
        policy.check()
        if victim == 1:
            break
    assert gone == [2, 3, 4, 1]


def test_gdsf_without_costs_is_lru() -> None:
    gdsf, lru = GDSF(3), make("lru", 3)
    draw = random.Random(0)
    for policy in (gdsf, lru):
        for item in range(3):
            policy.on_insert(item, BlockFacts(), 0.0)
    for _ in range(20):
        item = draw.randrange(3)
        gdsf.on_access(item, 0.0)
        lru.on_access(item, 0.0)
        assert list(gdsf.victims(0.0)) == list(lru.victims(0.0))


def test_wtinylfu_decides_from_recent_history_whether_a_newcomer_is_worth_a_resident() -> None:
    """TinyLFU: "decides, based on the recent access history, whether it is worth admitting the new item into
    the cache at the expense of the eviction candidate". Asked for once, 98 loses against the residents, which
    were used three times; asked for four times, it takes the place of one of them."""
    residents = list(range(10))
    assert evictions("wtinylfu", [*residents * 3, 99, 98, 97, 96], 10)[-2:] == [98, 97]
    gone = evictions("wtinylfu", [*residents * 3, 99, 98, 98, 98, 98, 97, 96], 10)
    assert gone[-2] in residents
    assert gone[-1] == 97


def test_wtinylfu_counts_what_is_not_there_and_forgets_by_halves() -> None:
    sketch = FrequencySketch(100)
    for _ in range(9):
        sketch.add(7)
    assert sketch.count(7) == 9
    assert sketch.count(8) == 0
    for item in range(1000, 1000 + 10 * 100 - 9):
        sketch.add(item)
    assert sketch.count(7) in (4, 5)  # 9 halved; another item may share all four counters


def test_leaves_first_evicts_a_block_only_after_those_that_hang_on_it() -> None:
    """SGLang (NeurIPS 2024) evicts the least recently used leaf first, so that common ancestors stay until
    they are leaves themselves. 0 is the coldest of all, and the last to go."""
    assert evictions("leaves-first", [0, 1, 2, 3, 4, 5, 6], 6) == [3]
    pool = Pool(make("leaves-first", 7), 7)
    for item in range(7):
        pool.refer(item)
    gone = []
    while pool.evict():
        gone = [item for _, item in pool.log]
        pool.check()
    assert gone == [3, 4, 1, 5, 6, 2, 0]


def test_leaves_first_evicts_inner_blocks_deepest_first_when_no_leaf_may_go() -> None:
    """1 and 2 hang on 0, 3 on 1, 5 on 2. A chain whose end is pinned must not fill the pool."""
    pool = Pool(make("leaves-first", 5), 5)
    for item in (0, 1, 3, 2, 5):
        pool.refer(item)
    pool.pinned |= {3, 5}
    while pool.evict():
        pool.check()
    assert pool.log == [("evicted", 1), ("evicted", 2), ("evicted", 0)]
    pool.pinned.clear()
    assert pool.evict()
    assert pool.log[-1] == ("evicted", 3)


def test_leaves_first_knows_a_child_that_came_before_its_parent() -> None:
    """The directory publishes the blocks of a request last to first."""
    pool = Pool(make("leaves-first", 3), 3)
    for item in (3, 1, 0):
        pool.refer(item)
        pool.check()
    assert [next(pool.policy.victims(0.0)) for _ in range(2)] == [3, 3]


def test_the_oracle_evicts_what_is_used_again_last() -> None:
    assert evictions("belady", [1, 2, 3, 4, 1, 2, 4, 3], 3)[0] == 3
