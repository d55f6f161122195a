"""3c: a block goes only after all blocks that continue it; of those without any, the coldest."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_lite.labs.judging import Judge

from .queues import ALL, Offer, Step, expect_same, in_words, names, offers, replayed, trace_of


class Tree:
    """The blocks of a pool: who is whose parent, and when each was used."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.now = 0

    def insert(self, item: int, parent: int | None) -> None:
        self.parent[item] = parent
        self.use(item)

    def use(self, item: int) -> None:
        self.now += 1
        self.used[item] = self.now

    def remove(self, item: int) -> None:
        del self.parent[item], self.used[item]

    def offered(self) -> list[int]:
        """All blocks in the order of eviction."""
        left = set(self.parent)
        leaves = [item for item in left if item not in self.parent.values()]
        found = sorted(leaves, key=self.used.__getitem__)
        left -= set(found)
        while left:
            may_go = [item for item in left if not any(self.parent[other] == item for other in left)]
            found.append(min(may_go, key=self.used.__getitem__))
            left.remove(found[-1])
        return found

    def victim(self) -> int:
        """The first block in that order."""
        inner = set(self.parent.values())
        return next(item for item in sorted(self.used, key=self.used.__getitem__) if item not in inner)


def tree_offers(lab: Judge, steps: Sequence[Step]) -> list[Offer]:
    title = "the blocks, the one used longest ago in front; 12/17 is block 17 after its parent 12"
    return offers(lab, "leaves-first", 100, steps, title, ["from cold to hot"])


def expect_order(lab: Judge, steps: list[Step], expected: list[int], breaks: str) -> None:
    """Compare all that is offered after these events with the order that is expected."""
    (offer,) = tree_offers(lab, [*steps, ("offer", ALL)])
    lab.expect(offer.offered, expected, f"victims() after {in_words(steps)} (all that is yielded)", breaks)


def test_the_leaf_used_longest_ago_comes_first(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [("insert", a, None), ("insert", b, None), ("insert", c, None), ("insert", d, None)]
    expect_order(lab, steps, [a, b, c, d], "without a tree, the order is that of LRU")
    expect_order(lab, [*steps, ("use", a)], [b, c, d, a], "a hit makes a block the hottest")


def test_a_block_comes_after_the_blocks_that_continue_it(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [("insert", a, None), ("insert", b, a), ("insert", c, b), ("insert", d, None)]
    expect_order(
        lab,
        [*steps, ("use", c)],
        [d, c, b, a],
        f"{a} and {b} are the coldest, but {c} continues them and is of no use without them",
    )


def test_an_inner_block_comes_after_all_leaves(lab: Judge) -> None:
    a, b, c, d, e = names(lab, 5)
    steps: list[Step] = [("insert", a, None), ("insert", b, a), ("insert", c, None), ("insert", d, None)]
    expect_order(
        lab,
        [*steps, ("insert", e, c)],
        [b, d, e, a, c],
        f"the child of {a} was yielded first, and still all leaves come before {a}",
    )


def test_inner_blocks_come_from_cold_to_hot_when_their_children_are_done(lab: Judge) -> None:
    a, b, c, d, e, f = names(lab, 6)
    steps: list[Step] = [
        *[("insert", a, None), ("insert", b, a), ("insert", c, None), ("insert", d, c)],
        *[("insert", e, d), ("insert", f, b)],
    ]
    expect_order(
        lab,
        [*steps, *[("use", item) for item in (d, c, b, a)]],
        [e, f, d, c, b, a],
        f"{d} is colder than {b}; when {d} was yielded, its parent {c} is colder than {b} too",
    )


def test_a_block_with_several_children_waits_for_all_of_them(lab: Judge) -> None:
    a, b, c, d, e, f = names(lab, 6)
    steps: list[Step] = [
        *[("insert", a, None), ("insert", b, a), ("insert", c, a), ("insert", d, a)],
        *[("insert", e, c), ("insert", f, None), ("use", a), ("use", c)],
    ]
    expect_order(
        lab,
        steps,
        [b, d, e, f, c, a],
        f"{a} has three children, and the last of them to be yielded is {c}",
    )


def test_a_parent_that_is_gone_is_not_yielded(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [
        ("insert", a, None),
        ("insert", b, a),
        ("insert", c, b),
        ("delete", b),
        ("insert", d, 5),
    ]
    expect_order(
        lab,
        steps,
        [a, c, d],
        f"{b} was deleted, and the parent of {d} was never there: only blocks that are known are yielded",
    )
    expect_order(
        lab,
        [*steps, ("insert", b, a)],
        [c, d, b, a],
        f"{b} came back while {c} was still there, so it is an inner block again, between {c} and {a}",
    )


def test_asking_changes_nothing(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [("insert", a, None), ("insert", b, a), ("insert", c, a), ("insert", d, None)]
    steps.append(("use", a))
    asks: list[Step] = [("offer", 1), ("offer", 3), ("offer", ALL), ("evict", [b, c]), ("evict", [])]
    seen = tree_offers(lab, [*steps, *asks, ("offer", ALL)])
    lab.expect(
        [offer.offered for offer in seen[:3]],
        [[b], [b, c, d], [b, c, d, a]],
        f"victims() three times after {in_words(steps)}, for 1, 3 and all blocks",
        "victims() changes no book, `_children` neither: what was only yielded is offered again, in the same"
        " order",
    )
    lab.expect(
        ([offer.victim for offer in seen[3:5]], seen[5].offered),
        ([d, b], [c, a]),
        f"{in_words(asks[3:])} (victims, and what victims() yields then)",
        "the caller passes blocks that are held, and removes the one that it evicts by itself",
    )


def test_a_random_tree_is_offered_in_order(lab: Judge) -> None:
    for _ in range(4):
        tree = Tree()
        steps: list[Step] = []
        expected = []
        items = names(lab, 60)
        for item in items:
            known = sorted(tree.parent)
            verb = lab.random.choice(["insert", "insert", "insert", "use", "delete", "offer"])
            if verb == "insert" or len(known) < 3:
                parent = lab.random.choice([None, *known, *known[-3:]]) if known else None
                steps.append(("insert", item, parent))
                tree.insert(item, parent)
            elif verb == "use":
                steps.append(("use", lab.random.choice(known)))
                tree.use(steps[-1][1])
            elif verb == "delete":
                steps.append(("delete", lab.random.choice(known)))
                tree.remove(steps[-1][1])
            else:
                steps.append(("offer", ALL))
                expected.append((len(steps), tree.offered()))
        steps.append(("offer", ALL))
        expected.append((len(steps), tree.offered()))
        for row, (offer, (count, order)) in enumerate(zip(tree_offers(lab, steps), expected)):
            lab.compares(row)
            lab.expect(
                offer.offered,
                order,
                f"victims() after {in_words([step for step in steps[: count - 1] if step[0] != 'offer'])}",
                "leaves from cold to hot, and then inner blocks, each after all of its children",
            )


def model_of(requests: Sequence[list[int]], places: int, *, insert_first: bool) -> tuple[list[int], int]:
    """Return (victims, hits) of a replay."""
    tree, victims, hits = Tree(), list[int](), 0
    for ids in requests:
        for item, parent in zip(ids, [None, *ids]):
            if item in tree.parent:
                hits += 1
                tree.use(item)
                continue
            if not insert_first and len(tree.parent) == places:
                victims.append(tree.victim())
                tree.remove(victims[-1])
            tree.insert(item, parent)
            if len(tree.parent) > places:
                victims.append(tree.victim())
                tree.remove(victims[-1])
    return victims, hits


def test_the_victims_on_a_trace_are_those_of_the_rule(lab: Judge) -> None:
    requests = trace_of(lab)
    victims, hits = model_of(requests, lab.size.pool_blocks, insert_first=True)
    seen = replayed(lab, "leaves-first", requests, insert_first=True)
    expect_same(lab, seen, victims, hits, requests, "a block comes in before one goes")
    victims, hits = model_of(requests, lab.size.pool_blocks, insert_first=False)
    seen = replayed(lab, "leaves-first", requests, insert_first=False)
    expect_same(lab, seen, victims, hits, requests, "a block goes before one comes in")
    # Code that counts children before it yields looks up four more entries for each victim; it is lazy too.
    lab.cost(seen.steps, 6 * len(victims), needed=len(victims))
