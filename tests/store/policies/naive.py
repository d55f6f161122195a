"""The same policies, slow and after the words of their papers: each is given references, and says which hit.

They make room before they insert, as papers do, unless their name says otherwise. Lists scanned from end to
end; nothing here is shared with store.policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.store.policies.pools import facts_of

Hits = list[bool]


def smallest(key: Callable[[dict, int], tuple], references: Sequence[int], blocks: int) -> Hits:
    """Insert, then drop the item with the smallest key(state, item); state: item -> (uses, last use)."""
    state: dict[int, tuple[int, int]] = {}
    hits = []
    for number, item in enumerate(references):
        hits.append(item in state)
        state[item] = (state.get(item, (0, 0))[0] + 1, number)
        if len(state) > blocks:
            del state[min(state, key=lambda other: key(state, other))]
    return hits


def lru(references: Sequence[int], blocks: int) -> Hits:
    return smallest(lambda state, item: (state[item][1],), references, blocks)


def lfu(references: Sequence[int], blocks: int) -> Hits:
    return smallest(lambda state, item: state[item], references, blocks)


def length(references: Sequence[int], blocks: int) -> Hits:
    def key(state: dict, item: int) -> tuple:
        return state[item][0], -facts_of(item).position, state[item][1]

    return smallest(key, references, blocks)


def leaves_first(references: Sequence[int], blocks: int) -> Hits:
    def key(state: dict, item: int) -> tuple:
        return any(facts_of(other).parent == item for other in state), state[item][1]

    return smallest(key, references, blocks)


def belady(references: Sequence[int], blocks: int) -> Hits:
    present: list[int] = []
    hits = []
    for number, item in enumerate(references):
        hits.append(item in present)
        if item not in present:
            present.append(item)
        if len(present) > blocks:
            rest = references[number + 1 :]
            present.remove(max(present, key=lambda i: rest.index(i) if i in rest else len(rest)))
    return hits


def gdsf(references: Sequence[int], blocks: int) -> Hits:
    age, uses, worth, ranked = 0.0, dict[int, int](), dict[int, float](), dict[int, int]()
    hits = []
    for number, item in enumerate(references):
        hits.append(item in worth)
        uses[item] = uses[item] + 1 if item in worth else 1
        worth[item] = age + uses[item] * (facts_of(item).cost_s / facts_of(item).nbytes)
        ranked[item] = number
        if len(worth) > blocks:
            victim = min(worth, key=lambda other: (worth[other], ranked[other]))
            age = worth.pop(victim)
    return hits


def sieve(references: Sequence[int], blocks: int) -> Hits:
    """NSDI 2024, algorithm 1. The tail of the queue is its first element."""
    queue: list[int] = []
    visited: dict[int, bool] = {}
    hand: int | None = None
    hits = []
    for item in references:
        hits.append(item in visited)
        if item in visited:
            visited[item] = True
            continue
        if len(queue) == blocks:
            place = queue.index(hand) if hand is not None else 0
            while visited[queue[place]]:
                visited[queue[place]] = False
                place = (place + 1) % len(queue)
            hand = queue[place + 1] if place + 1 < len(queue) else None
            del visited[queue.pop(place)]
        queue.append(item)
        visited[item] = False
    return hits


def s3fifo(references: Sequence[int], blocks: int) -> Hits:
    """SOSP 2023, algorithm 1, one block at a time. The tail of a queue is its first element."""
    small: list[int] = []
    main: list[int] = []
    ghost: list[int] = []
    freq: dict[int, int] = {}
    hits = []
    places = max(1, blocks // 10)

    def evict() -> None:
        while True:
            if len(small) >= places or not main:
                item = small.pop(0)
                if freq[item] > 1:
                    main.append(item)
                    freq[item] = 0
                    continue
                if blocks > places:
                    ghost.append(item)
                    del ghost[: -(blocks - places)]
            else:
                item = main.pop(0)
                if freq[item] > 0:
                    freq[item] -= 1
                    main.append(item)
                    continue
            del freq[item]
            return

    for item in references:
        hits.append(item in freq)
        if item in freq:
            freq[item] = min(freq[item] + 1, 3)
            continue
        known = item in ghost  # looked up before room is made, which can push this very name out
        if known:
            ghost.remove(item)
        if len(freq) == blocks:
            evict()
        (main if known else small).append(item)
        freq[item] = 0
    return hits


def arc(references: Sequence[int], c: int) -> Hits:
    """FAST 2003, figure 4. The LRU end of a list is its first element."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0
    hits = []

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p) or not t2):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in references:
        hits.append(x in t1 or x in t2)
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(c, p + max(len(b2) / len(b1), 1))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0.0, p - max(len(b1) / len(b2), 1))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(b1) + len(t2) + len(b2) >= c:
                if len(t1) + len(b1) + len(t2) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits
