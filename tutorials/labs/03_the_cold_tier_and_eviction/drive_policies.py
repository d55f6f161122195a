"""The child's side of 3c and 3d: calls the policies with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mooncake_lite.labs.counting import CountedLookUps
from store.policies.contract import BlockFacts
from store.policies.leaves_first import LeavesFirst
from store.policies.s3fifo import S3FIFO
from store.ranking import Ranking

MOST_DRAWN = 16
"""Items of a queue, or of a tree, that `labs show` draws."""


class WatchedRanking(Ranking[int]):
    """A ranking that counts as a CountedLookUps does."""

    _asked = _walked = 0

    def _walk(self) -> None:
        self._asked += 1
        self._walked += 1

    def ascending(self) -> Iterator[int]:
        """Count each item that comes out. `first` has counted the first one."""
        for number, item in enumerate(super().ascending()):
            if number:
                self._walk()
            yield item

    def first(self) -> int:
        """Count an item."""
        self._walk()
        return super().first()

    def key(self, item: int) -> Any:
        """Count a look-up."""
        self._asked += 1
        return super().key(item)

    def __contains__(self, item: int) -> bool:
        self._asked += 1
        return super().__contains__(item)

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            self._walk()
            yield item


class Reads:
    """What a region has read of these books while it ran, and nothing else; _asked and _walked as theirs."""

    def __init__(self, books: Sequence[CountedLookUps | WatchedRanking]) -> None:
        self._books = books
        self._walked = self._asked = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is read meanwhile."""
        walked, asked = self._all()
        try:
            yield
        finally:
            now = self._all()
            self._walked += now[0] - walked
            self._asked += now[1] - asked

    def _all(self) -> tuple[int, int]:
        return sum(book._walked for book in self._books), sum(book._asked for book in self._books)


def shortened(items: list[str]) -> str:
    """Return the items that are drawn: the last three too, and how many are left out before them."""
    left_out = len(items) - MOST_DRAWN
    if left_out > 0:
        items = [*items[: MOST_DRAWN - 3], f"({left_out} more)", *items[-3:]]
    return " ".join(items)


class SeenLeaves(LeavesFirst):
    """The policy of 3c. Its region reads a tree and a ranking."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._parent, self._children, self._used = (CountedLookUps() for _ in range(3))
        self._leaves = WatchedRanking()
        self._reads = Reads([self._parent, self._children, self._used, self._leaves])

    @property
    def steps(self) -> int:
        """Return what was read."""
        return self._reads._asked

    def drawn(self) -> list[str]:
        """Return the items from cold to hot: each after a slash after its parent."""
        cold_first = sorted(self._used, key=lambda item: dict.__getitem__(self._used, item))
        parents = [dict.__getitem__(self._parent, item) for item in cold_first]
        pairs = zip(cold_first, parents)
        return [shortened([f"{item}" if parent is None else f"{parent}/{item}" for item, parent in pairs])]


class SeenQueues(S3FIFO):
    """The policy of 3d. Its region reads two queues."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small, self._main = CountedLookUps(), CountedLookUps()
        self._reads = Reads([self._small, self._main])

    @property
    def steps(self) -> int:
        """Return the larger of the counts: each of them is 1 for an item that is looked at."""
        return max(self._reads._walked, self._reads._asked - self._reads._walked)

    def drawn(self) -> list[str]:
        """Return both queues, the oldest item first, with one * for each use."""
        queues = self._small, self._main
        return [shortened([f"{item}{'*' * uses}" for item, uses in queue.items()]) for queue in queues]


Seen = SeenLeaves | SeenQueues


def offered(policy: Seen) -> Iterator[int]:
    """Yield what the region yields, and count what it reads."""
    items = policy.victims(0.0)
    while True:
        try:
            with policy._reads.counted():
                item = next(items)
        except StopIteration:
            return
        yield item


def evict(policy: Seen, held: set[int]) -> tuple[list[int], int | None]:
    """Evict the first item that is not held; return (items that were passed, the victim)."""
    passed = []
    for item in itertools.islice(offered(policy), 2 * len(policy) + 2):
        if item not in held:
            policy.on_remove(item, evicted=True)
            return passed, item
        passed.append(item)
    return passed, None


def policy_of(name: str, capacity: int) -> Seen:
    """Return the policy of a task."""
    return SeenLeaves(capacity) if name == "leaves-first" else SeenQueues(capacity)


def events(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play events to a policy; tell what the region offered in steps that ask it.

    Steps: ["insert", item, parent], ["use", item], ["delete", item], ["offer", most] which only looks,
    ["evict", held items]. The history ends before a step that is not possible after a wrong victim.
    """
    policy = policy_of(inputs["policy"], inputs["capacity"])
    seen = []
    for verb, *more in inputs["steps"]:
        if verb in ("insert", "use", "delete") and (verb == "insert") is (more[0] in list(policy)):
            break
        if verb == "insert":
            policy.on_insert(more[0], BlockFacts(parent=more[1]), 0.0)
        elif verb == "use":
            policy.on_access(more[0], 0.0)
        elif verb == "delete":
            policy.on_remove(more[0], evicted=False)
        else:
            drawn = policy.drawn()
            victim = None
            if verb == "offer":
                items = list(itertools.islice(offered(policy), more[0]))
            else:
                items, victim = evict(policy, set(more[0]))
            seen.append({"offered": items, "victim": victim, "drawn": drawn})
    return seen


def replay(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play requests, each a list of blocks, to a policy. Tells victims, hits and what the region read.

    insert_first   a new block comes in before another is evicted, as in `simulate cache`
    held           blocks that may not be evicted
    """
    policy = policy_of(inputs["policy"], inputs["capacity"])
    present: set[int] = set()
    held = set(inputs["held"])
    victims: list[int] = []
    hits = 0

    def make_room(most: int) -> None:
        if len(present) > most:
            _, victim = evict(policy, held)
            if victim is not None:
                present.discard(victim)
                victims.append(victim)

    for ids in inputs["requests"]:
        for item, parent in zip(ids, [None, *ids]):
            if item in present:
                hits += 1
                policy.on_access(item, 0.0)
                continue
            if not inputs["insert_first"]:
                make_room(inputs["capacity"] - 1)
            policy.on_insert(item, BlockFacts(parent=parent), 0.0)
            present.add(item)
            if inputs["insert_first"]:
                make_room(inputs["capacity"])
    return {"victims": victims, "hits": hits, "steps": policy.steps}


CALLS = {"events": events, "replay": replay}
