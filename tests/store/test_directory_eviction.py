"""The live directory and its eviction policy: the same decisions as in a replay, and what else follows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from mooncake_lite.simulator.replay import Workload, replay
from store.directory import Directory
from store.objects import ObjectState, Wanted
from store.policies import POLICIES, BlockFacts, Policy, policy_factory
from tests.store.samples import SMALL, digest_of

pytestmark = pytest.mark.quick

BLOCK, SUMS = SMALL.nbytes, [1] * SMALL.layers
BLOCKS = 12


class Recorder(Policy):
    """Writes down what a policy decides; everything else is the policy's own."""

    def __init__(self, policy: Policy):
        super().__init__(policy.capacity)
        self.policy = policy
        self.decided: list[tuple[str, int]] = []

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        if self.policy.admits(item, facts, now):
            return True
        self.decided.append(("kept out", item))
        return False

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        self.policy.on_insert(item, facts, now)

    def on_access(self, item: int, now: float) -> None:
        self.policy.on_access(item, now)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        self.decided.append(("evicted" if evicted else "deleted", item))
        self.policy.on_remove(item, evicted=evicted)

    def victims(self, now: float) -> Iterator[int]:
        return self.policy.victims(now)

    def __len__(self) -> int:
        return len(self.policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self.policy)

    def check(self) -> None:
        self.policy.check()


def conversations(seed: int, requests: int = 120) -> Workload:
    """Turns of a few conversations that all begin alike; some never come back."""
    draw = random.Random(seed)
    talks: list[list[int]] = [[0, 1] for _ in range(6)]
    facts = {0: BlockFacts(BLOCK, 1.0), 1: BlockFacts(BLOCK, 1.5, 0, 0, 1)}
    made: list[tuple[float, list[int]]] = []
    for number in range(requests):
        place = min(int(draw.paretovariate(0.8)) - 1, len(talks) - 1)
        for _ in range(draw.randrange(3)):
            item, parent, position = len(facts), talks[place][-1], len(talks[place])
            facts[item] = BlockFacts(BLOCK, 1.0 + position / 2, 0, parent, position)
            talks[place] = [*talks[place], item]
        made.append((float(number), talks[place]))
        if len(talks[place]) > 8:
            talks[place] = [0, 1]
    return Workload(made, facts, sum(len(ids) for _, ids in made))


def live(workload: Workload, recorder: Recorder) -> int:
    """The same events, told to a directory; returns the hits.

    Its pool has one block more than the policy knows of. An object that is allocated and given up at once
    makes the directory evict when it is full, so that room is made after an insertion, as in the replay.
    """
    directory = Directory(SMALL, policy=lambda blocks: recorder)
    directory.add_segment(1, (BLOCKS + 1) * BLOCK, 0)
    hits = 0
    for now, ids in workload.requests:
        leading = True
        for item in ids:
            leading &= bool(directory.lookup([item], [digest_of(item)], now))
            hits += leading
            if directory.lookup([item], [digest_of(item)], now, touch=False):
                continue
            facts = workload.facts[item]
            wanted = Wanted(
                BLOCK, item, digest_of(item), facts.cost_s, parent=facts.parent, position=facts.position
            )
            (obj,) = directory.allocate_many("put", [wanted], now=now)
            directory.put_end(obj.object_id, SUMS, now)
            directory.release("put", now)
            directory.put_revoke(directory.allocate("room", BLOCK, now=now).object_id, now=now)
        directory.check()
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*POLICIES, "lru+second-hit", "arc+size"])
def test_the_directory_and_the_replay_decide_alike_given_the_same_events(name: str, seed: int) -> None:
    workload = conversations(seed)
    recorders = [Recorder(policy_factory(name)(BLOCKS)) for _ in range(2)]
    counted = replay(workload, recorders[0], BLOCKS)
    assert live(workload, recorders[1]) == counted.hits > 50
    assert recorders[0].decided == recorders[1].decided
    assert len(recorders[0].decided) > 50


def pool(name: str, blocks: int) -> Directory:
    directory = Directory(SMALL, policy=policy_factory(name))
    directory.add_segment(1, blocks * BLOCK, 0)
    return directory


def put(directory: Directory, keys: list[int], now: float = 0.0, owner: str = "put") -> list[bool]:
    """A prompt of these blocks, published last to first."""
    wanted = [
        Wanted(BLOCK, key, digest_of(key), parent=keys[i - 1] if i else None, position=i)
        for i, key in enumerate(keys)
    ]
    objects = directory.allocate_many(owner, wanted, now=now)
    return directory.put_end_many([obj.object_id for obj in objects], [SUMS] * len(keys), now)


def found(directory: Directory, keys: list[int], now: float = 0.0) -> int:
    directory.check()
    return len(directory.lookup(keys, [digest_of(key) for key in keys], now))


def test_a_block_that_is_not_admitted_serves_its_request_and_goes_with_it() -> None:
    """Decode must still be able to read it; nobody else finds it, and the tier does not get it."""
    directory = Directory(SMALL, policy=policy_factory("lru+second-hit"))
    directory.add_segment(1, 4 * BLOCK, 0, tier=True)
    (obj,) = directory.allocate_many("a", [Wanted(BLOCK, 7, digest_of(7))], now=0)
    assert not directory.put_end(obj.object_id, SUMS, 0)
    assert directory.object(obj.object_id).state is ObjectState.PRIVATE
    assert directory.counters["puts_not_admitted"] == 1
    assert found(directory, [7]) == 0
    assert directory.take_saves() == {}
    directory.release("a", 1)
    assert directory.stats()["free_bytes"] == 4 * BLOCK
    assert put(directory, [7]) == [True]
    assert found(directory, [7]) == 1


def test_leaves_first_keeps_prefixes_whole_in_the_directory() -> None:
    directory = pool("leaves-first", 4)
    put(directory, [1, 2, 3], now=0)
    put(directory, [9], now=1)
    put(directory, [8], now=2)
    assert found(directory, [1, 2, 3], now=3) == 2


def test_a_chain_whose_last_block_is_leased_leaves_room_for_others() -> None:
    """Under leaves-first too, where the other two have a block that hangs on them."""
    directory = pool("leaves-first", 3)
    put(directory, [1, 2, 3])
    leaf = directory.lookup([1, 2, 3], [digest_of(key) for key in (1, 2, 3)], 1)[-1]
    assert leaf.object_id is not None
    directory.lease("reader", [leaf.object_id], 1, until=9)
    assert put(directory, [4], now=2) == [True]
    directory.check()
    assert found(directory, [1], now=2) == 1
    assert found(directory, [1, 2], now=2) == 1


def test_a_block_that_comes_back_into_its_segment_is_known_by_its_name() -> None:
    """Object ids are new for each put; ghosts need the key. ARC lets what comes back into its second list."""
    directory = pool("arc", 3)
    for now, key in enumerate([1, 2, 1, 2, 3, 4, 5, 3]):  # 3 went, and comes back
        if not found(directory, [key], now):
            put(directory, [key], now)
    policy = directory._segments[1].policy
    assert policy.target == 1  # type: ignore[attr-defined]


def test_each_segment_has_a_policy_for_as_many_blocks_as_it_holds() -> None:
    made: list[int] = []

    def make(blocks: int) -> Policy:
        made.append(blocks)
        return policy_factory("sieve")(blocks)

    directory = Directory(SMALL, policy=make)
    directory.add_segment(1, 5 * BLOCK + 17, 0)
    directory.add_segment(2, BLOCK // 2, 0)
    assert made == [5, 1]


def test_a_segment_that_leaves_takes_its_order_with_it() -> None:
    directory = pool("lfu", 2)
    put(directory, [1, 2])
    directory.remove_segment(1)
    directory.add_segment(1, 2 * BLOCK, 0)
    assert put(directory, [3]) == [True]
    directory.check()
