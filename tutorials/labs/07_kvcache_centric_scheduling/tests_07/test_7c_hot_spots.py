"""7c: which blocks a node reads from others so often that they are copied to it."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

WINDOW_S = 60.0
FAR, NEAR = False, True

Read = tuple[int, list[int], list[bool], float]
"""A prefill: its node, the keys of the prefix, whether each is near, the time."""

Entry = tuple[int, int, float, int]
"""A pair in the books: its key, its node, the time of its last read, its reads."""


class Seen(msgspec.Struct):
    """What on_read() returned, the books after it, and how often it has accessed them."""

    hot: list[int]
    books: list[Entry]
    accesses: int


def hot(
    lab: Judge, reads: list[Read], *, threshold: float, times: int = 2, remembered: int = 1000
) -> list[Seen]:
    inputs: dict[str, Any] = {"threshold": threshold, "times": times, "window_s": WINDOW_S}
    seen = lab.ask(
        "hot",
        {**inputs, "remembered": remembered, "reads": reads},
        list[Seen],
        f"on_read() for {told(reads, 0)}",
    )
    rows = [
        [
            f"{now:g}",
            str(node),
            words(keys, near),
            " ".join(map(str, after.hot)) or "none",
            str(len(after.books)),
        ]
        for (node, keys, near, now), after in zip(reads, seen)
    ]
    title = f"prefills, and what came back; threshold {threshold:g}, times {times}, remembered {remembered}"
    columns = ["s", "node", "keys (* is near)", "hot", "pairs in the books"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def words(keys: list[int], near: list[bool]) -> str:
    """Keys as a message names them."""
    shown = [f"{key}{'*' * is_near}" for key, is_near in zip(keys, near)]
    return " ".join(shown[:14]) + " ..." * (len(shown) > 14)


def told(reads: list[Read], number: int) -> str:
    """A prefill as a message names it."""
    node, keys, near, now = reads[number]
    which = f"prefill {number + 1} of {len(reads)}"
    return f"{which}: node {node} reads {words(keys, near)} (* is near) at {now:g} s"


class Model:
    """The rule on a plain list of pairs, from the one not read for longest to the newest."""

    def __init__(self, threshold: float, times: int, remembered: int) -> None:
        self.threshold, self.times, self.remembered = threshold, times, remembered
        self.books: list[Entry] = []
        self.accesses = 0

    def read(self, node: int, keys: list[int], near: list[bool], now: float) -> list[int]:
        leading = (near + [FAR]).index(FAR)
        if len(keys) <= self.threshold * leading:
            return []
        found = []
        for key in (key for key, is_near in zip(keys, near) if not is_near):
            before = [entry for entry in self.books if entry[:2] == (key, node)]
            count = 1 + sum(reads for _, _, last_s, reads in before if now - last_s <= WINDOW_S)
            self.books = [entry for entry in self.books if entry not in before]
            self.accesses += 2
            if count >= self.times:
                found.append(key)
                self.accesses += 1
            else:
                self.books.append((key, node, now, count))
        forgotten = max(0, len(self.books) - self.remembered)
        self.accesses += forgotten
        self.books = self.books[forgotten:]
        return found


def some_keys(lab: Judge, count: int) -> list[int]:
    return lab.random.sample(range(100, 1000), count)


def far_of(after: Seen, read: Read) -> list[int]:
    """The hot keys without those that were near: whether these are copied is another test's question."""
    _, keys, near, _ = read
    return sorted(set(after.hot) - {key for key, is_near in zip(keys, near) if is_near})


def threshold_of(lab: Judge) -> float:
    return lab.size.threshold_percent / 100


def test_the_second_read_from_afar_asks_for_a_copy(lab: Judge) -> None:
    keys = some_keys(lab, 4)
    reads: list[Read] = [
        (1, keys, [FAR] * 4, 0.0),
        (1, keys[:3], [FAR] * 3, 20.0),
        (1, keys[3:], [FAR], 40.0),
    ]
    for number, (after, expected) in enumerate(
        zip(hot(lab, reads, threshold=threshold_of(lab)), ([], keys[:3], [keys[3]]))
    ):
        lab.expect(
            sorted(after.hot),
            sorted(expected),
            f"{told(reads, number)} (keys to copy, sorted)",
            "each block counts for itself, and its second read makes it hot",
        )


def test_hot_keys_come_front_to_back(lab: Judge) -> None:
    keys = some_keys(lab, 6)
    reads: list[Read] = [(1, keys, [FAR] * 6, 1.0 * at) for at in range(2)]
    lab.expect(
        hot(lab, reads, threshold=threshold_of(lab))[1].hot,
        keys,
        f"{told(reads, 1)} (keys to copy)",
        "the keys to copy come front to back, as in `keys`",
    )


def test_only_reads_by_the_same_node_count_together(lab: Judge) -> None:
    keys = some_keys(lab, 2)
    reads: list[Read] = [(node, keys, [FAR, FAR], 1.0 * at) for at, node in enumerate((1, 2, 3, 2))]
    for number, after in enumerate(hot(lab, reads, threshold=threshold_of(lab))):
        lab.expect(
            sorted(after.hot),
            sorted(keys) if number == 3 else [],
            f"{told(reads, number)} (keys to copy, sorted)",
            "a block is hot for a node that has read it `times` times; reads of other nodes do not count",
        )


def test_near_blocks_do_not_count_and_are_not_copied(lab: Judge) -> None:
    a, b, c, d, e, f = keys = some_keys(lab, 6)
    near = [NEAR, FAR, FAR, NEAR, FAR, NEAR]
    seen = hot(lab, [(1, keys, near, 0.0), (1, keys, near, 1.0)], threshold=1.5)
    lab.expect(
        [sorted(after.hot) for after in seen],
        [[], sorted([b, c, e])],
        f"on_read() twice for {words(keys, near)} (* is near; keys to copy each time, sorted)",
        "only blocks that are not near are read from other nodes",
    )
    lab.expect(
        sorted(key for key, *_ in seen[0].books),
        sorted([b, c, e]),
        f"on_read() for {words(keys, near)} (* is near; keys in the books)",
        f"reads of {a}, {d} and {f} do not load another node, so they are not counted",
    )


def test_nothing_counts_unless_the_prefix_is_much_longer_than_its_near_part(lab: Judge) -> None:
    threshold = threshold_of(lab)
    near = 4 * lab.random.randint(2, 5)
    for length in (int(threshold * near), int(threshold * near) + 1):
        keys = some_keys(lab, length)
        reads: list[Read] = [(1, keys, [NEAR] * near + [FAR] * (length - near), 1.0 * at) for at in range(2)]
        seen = hot(lab, reads, threshold=threshold)
        lab.expect(
            far_of(seen[1], reads[1]),
            sorted(keys[near:]) if length > threshold * near else [],
            f"on_read() twice for {length} keys, the first {near} of them near; threshold {threshold:g} "
            "(keys to copy of those that are not near, sorted)",
            "reads count where len(keys) is more than threshold x near; equal is not enough",
        )


def test_the_near_part_ends_at_the_first_block_that_is_not_near(lab: Judge) -> None:
    keys = some_keys(lab, 8)
    near = [NEAR, NEAR, FAR, NEAR, NEAR, NEAR, NEAR, FAR]
    reads: list[Read] = [(1, keys, near, 0.0), (1, keys, near, 1.0)]
    seen = hot(lab, reads, threshold=3.0)
    lab.expect(
        far_of(seen[1], reads[1]),
        sorted([keys[2], keys[7]]),
        f"{told(reads, 1)}; threshold 3 (keys to copy of those that are not near, sorted)",
        "the near prefix has 2 blocks, and 8 is more than 3 x 2: near blocks after a gap are not part of it",
    )


def test_after_a_copy_the_count_begins_anew(lab: Judge) -> None:
    (key,) = some_keys(lab, 1)
    times = lab.random.randint(2, 4)
    reads: list[Read] = [(1, [key], [FAR], 1.0 * at) for at in range(3 * times)]
    for number, after in enumerate(hot(lab, reads, threshold=threshold_of(lab), times=times)):
        is_hot = number % times == times - 1
        lab.expect(
            (after.hot, len(after.books)),
            ([key] if is_hot else [], int(not is_hot)),
            f"{told(reads, number)}; times {times} (keys to copy, pairs in the books)",
            f"every {times}. read makes the block hot, and its pair leaves the books then",
        )


def test_the_pairs_not_read_for_longest_are_forgotten(lab: Judge) -> None:
    a, b, c, d, e, last = some_keys(lab, 6)
    reads: list[Read] = [
        (1, [a, b], [FAR] * 2, 0.0),
        (1, [c], [FAR], 1.0),
        (1, [a], [FAR], 2.0),
        (1, [d, last], [FAR, NEAR], 3.0),
        (1, [b, e, c, a], [FAR] * 4, 4.0),
    ]
    books = [[a, b], [a, b, c], [b, c, a], [c, a, d]]
    seen = hot(lab, reads, threshold=threshold_of(lab), times=3, remembered=3)
    for number, (after, kept) in enumerate(zip(seen, books)):
        lab.expect(
            [key for key, *_ in after.books],
            kept,
            f"{told(reads, number)}; 3 pairs may be remembered (keys in the books)",
            "when all blocks are counted, the pairs that were not read for longest are forgotten, down to 3",
        )
    lab.expect(
        seen[4].hot,
        [a],
        f"{told(reads, 4)}; times 3; 3 pairs may be remembered (keys to copy)",
        f"{a} was read twice before; no pair is forgotten before all blocks of the prefill are counted",
    )


def some_reads(lab: Judge, near_share: float) -> list[Read]:
    """Prefills of short prefixes that two nodes read, each with a few keys of others."""
    reads: list[Read] = []
    now = 0.0
    for _ in range(40):
        now += lab.random.choice([1.0, 5.0, 20.0, WINDOW_S])
        first, count = lab.random.randint(0, 12), lab.random.randint(1, 9)
        near = [lab.random.random() < near_share for _ in range(count)]
        reads.append((lab.random.randint(1, 2), [*range(first, first + count)], near, now))
    return reads


def test_random_prefills_copy_what_a_plain_list_says(lab: Judge) -> None:
    for _ in range(6):
        threshold, times = lab.random.choice([1.3, 1.7, 2.1]), lab.random.randint(1, 3)
        reads = some_reads(lab, 0.35)
        model = Model(threshold, times, 1000)
        for number, after in enumerate(hot(lab, reads, threshold=threshold, times=times)):
            lab.expect(
                sorted(after.hot),
                sorted(model.read(*reads[number])),
                f"{told(reads, number)}; threshold {threshold:g}, times {times} (keys to copy, sorted)",
                "the docstring says which reads count, and when a block is hot",
            )


def test_random_books_keep_the_pairs_that_a_plain_list_keeps(lab: Judge) -> None:
    for _ in range(3):
        remembered = lab.random.randint(4, 12)
        reads = some_reads(lab, 0.0)
        model = Model(1.5, 1000, remembered)
        for number, after in enumerate(hot(lab, reads, threshold=1.5, times=1000, remembered=remembered)):
            model.read(*reads[number])
            pairs = list(zip(after.books, model.books))
            wrong = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
            lab.expect(
                (len(after.books), after.books[wrong : wrong + 3]),
                (len(model.books), model.books[wrong : wrong + 3]),
                f"{told(reads, number)}; remembered {remembered} (pairs in the books; from number {wrong} "
                "on: key, node, time, reads)",
                "each block is counted, front to back; then pairs not read for longest are forgotten, and no "
                "others",
            )


def test_the_books_are_accessed_for_blocks_from_afar_alone(lab: Judge) -> None:
    size = lab.size
    keys = some_keys(lab, size.hot_blocks)
    near = [NEAR] * size.near_blocks + [FAR] * (size.hot_blocks - size.near_blocks)
    reads: list[Read] = [(1, keys, near, 1.0 * at) for at in range(size.hot_reads)]
    model = Model(threshold_of(lab), 2, 1000)
    expected = [model.read(*read) for read in reads]
    seen = hot(lab, reads, threshold=threshold_of(lab))
    lab.cost(sum(after.accesses for after in seen), 2 * model.accesses, needed=model.accesses)
    lab.expect(
        far_of(seen[1], reads[1]),
        sorted(expected[1]),
        f"two prefills with {size.hot_blocks} keys, {size.near_blocks} near (keys to copy of those that are "
        "not near, sorted)",
        "the second read makes a block hot",
    )
