"""3d: the queues of S3-FIFO, on small cases and on a trace."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_lite.labs.judging import Judge

from .queues import ALL, Offer, Step, expect_same, in_words, names, offers, replayed, trace_of

Queue = list[int]


class Queues:
    """S3-FIFO as its paper draws it, on plain lists; the item that came in first stands in front."""

    def __init__(self, places: int) -> None:
        self.places, self.small_places = places, max(1, places // 10)
        self.small: Queue = []
        self.main: Queue = []
        self.ghost: Queue = []
        self.uses: dict[int, int] = {}
        self.newest = -1
        self.looked_at = 0

    def insert(self, item: int) -> None:
        known = item in self.ghost
        if known:
            self.ghost.remove(item)
        (self.main if known else self.small).append(item)
        self.uses[item] = 0
        self.newest = item

    def use(self, item: int) -> None:
        self.uses[item] = min(self.uses[item] + 1, 3)

    def remove(self, item: int, evicted: bool) -> None:
        if len(self.uses) > self.places:
            queue = self.small if self.newest in self.small else self.main
            queue.append(queue.pop(queue.index(self.newest)))
        if item in self.main:
            self.main.remove(item)
        else:
            self.small.remove(item)
            if evicted:
                self.ghost.append(item)
                del self.ghost[: max(0, len(self.ghost) - (self.places - self.small_places))]
        del self.uses[item]

    def next_item(self, done: set[int]) -> int | None:
        """Judge items until one is to be yielded; None when all are done."""
        most = self.small_places + (self.newest in self.small and len(self.uses) > self.places)
        while any(item not in done for item in self.uses):
            small_has = any(item not in done for item in self.small)
            main_has = any(item not in done for item in self.main)
            from_small = small_has and (len(self.small) >= most or not main_has)
            queue = self.small if from_small else self.main
            item = queue.pop(0)
            self.looked_at += 1
            if item in done:
                queue.append(item)
            elif from_small and self.uses[item] > 1:
                self.main.append(item)
                self.uses[item] = 0
            elif not from_small and self.uses[item] > 0:
                self.main.append(item)
                self.uses[item] -= 1
            else:
                queue.insert(0, item)
                return item
        return None

    def offered(self, most: int, held: Sequence[int] | None = None) -> tuple[list[int], int | None]:
        """Return (what is yielded, the victim). held: what the caller passes; None: it only looks."""
        inserted_first = len(self.uses) > self.places
        done = {self.newest} if inserted_first else set()
        found: list[int] = []
        while len(found) < most:
            item = self.next_item(done)
            if item is None:
                if inserted_first and self.newest not in found:
                    item = self.newest
                else:
                    break
            if held is not None and item not in held:
                return found, item
            found.append(item)
            if len(found) < most and item not in done:
                done.add(item)
                queue = self.small if item in self.small else self.main
                queue.append(queue.pop(queue.index(item)))
        return found, None

    def play(self, step: Step) -> tuple[list[int], int | None]:
        """Make one step; return what it was offered."""
        verb, *more = step
        if verb == "insert":
            self.insert(more[0])
        elif verb == "use":
            self.use(more[0])
        elif verb == "delete":
            self.remove(more[0], evicted=False)
        elif verb == "offer":
            return self.offered(more[0])
        else:
            passed, victim = self.offered(ALL, more[0])
            if victim is not None:
                self.remove(victim, evicted=True)
            return passed, victim
        return [], None


def queue_offers(lab: Judge, places: int, steps: Sequence[Step]) -> list[Offer]:
    title = "both queues, the item in front comes first; * for each use"
    return offers(lab, "s3fifo", places, steps, title, ["small", "main"])


def queues_of(offer: Offer) -> str:
    """Both queues before an answer, as a message names them."""
    small, main = (queue or "nothing" for queue in offer.drawn)
    return f"small: {small} and main: {main}"


def evictions(count: int, held: Sequence[int] = ()) -> list[Step]:
    """Evictions, and nothing comes in between."""
    return [("evict", list(held))] * count


def victims_after(lab: Judge, places: int, steps: list[Step]) -> list[int | None]:
    return [offer.victim for offer in queue_offers(lab, places, steps)]


def test_an_item_that_is_not_used_twice_leaves_from_the_small_queue(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [*(("insert", item, None) for item in (a, b, c, d)), ("use", b)]
    lab.expect(
        victims_after(lab, 20, [*steps, *evictions(2)]),
        [a, b],
        f"20 places, 2 of them small; {in_words(steps)}, and two evictions (victims)",
        "the item in front of the small queue goes unless it was used more than once: one use is not enough",
    )


def test_an_item_that_was_used_twice_moves_to_the_main_queue(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [
        *(("insert", item, None) for item in (a, b, c, d)),
        *[("use", a), ("use", a), ("use", a), ("use", b), ("use", b)],
    ]
    lab.expect(
        victims_after(lab, 10, [*steps, *evictions(4)]),
        [c, d, a, b],
        f"10 places, 1 of them small; {in_words(steps)}, and four evictions (victims)",
        f"{a} and {b} move to the main queue and have no uses there, so {a} leaves first although it was used"
        " more. The main queue is judged when the small one is short",
    )


def test_a_used_item_of_the_main_queue_goes_around_with_one_use_less(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [
        *[("insert", a, None), ("use", a), ("use", a), ("insert", b, None), ("use", b), ("use", b)],
        *[("insert", c, None), ("insert", d, None), ("evict", []), ("use", a), ("use", a), ("use", b)],
    ]
    lab.expect(
        victims_after(lab, 10, [*steps, *evictions(3)]),
        [c, d, b, a],
        f"10 places, 1 of them small; {in_words(steps)}, and three more evictions (victims)",
        f"{a} and {b} are in the main queue. {a} has two uses and goes around twice, {b} once",
    )


def test_the_small_queue_is_judged_while_it_has_its_places_or_more(lab: Judge) -> None:
    items = names(lab, 9)
    twice: list[Step] = [("use", item) for item in items[:4] for _ in range(2)]
    steps: list[Step] = [*(("insert", item, None) for item in items), *twice]
    lab.expect(
        victims_after(lab, 30, [*steps, *evictions(5)]),
        [*items[4:7], *items[:2]],
        f"30 places, 3 of them small; {in_words(steps)}, and five evictions (victims)",
        "the small queue gives victims while it has 3 items or more, and the main one when it has fewer",
    )


def test_a_main_queue_without_items_leaves_the_choice_to_the_small_one(lab: Judge) -> None:
    a, b, c = names(lab, 3)
    steps: list[Step] = [("insert", a, None), ("insert", b, None), ("insert", c, None)]
    lab.expect(
        victims_after(lab, 100, [*steps, *evictions(3)]),
        [a, b, c],
        f"100 places, 10 of them small; {in_words(steps)}, and three evictions (victims)",
        "nothing is in the main queue, so a short small queue is judged too",
    )


def test_an_item_that_may_not_go_is_passed_and_keeps_its_uses(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [*(("insert", item, None) for item in (a, b, c, d)), ("use", a)]
    seen = queue_offers(lab, 10, [*steps, ("evict", [a, b]), ("use", a), ("evict", []), ("offer", ALL)])
    lab.expect(
        ([seen[0].offered, seen[0].victim], seen[1].victim),
        ([[a, b], c], d),
        f"10 places, 1 of them small; {in_words(steps)}; evict with {a} and {b} held, hit {a}, evict",
        f"{a} and {b} go to the back of their queue, so {d} is in front. {a} keeps its use: the next one "
        "is its second",
    )
    lab.expect(
        seen[2].offered,
        [b, a],
        f"victims() with {queues_of(seen[2])} (all that is yielded)",
        f"{a} was used twice in all, so it moves to the main queue when it is in front",
    )


def test_asking_again_offers_the_same_item_first(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    steps: list[Step] = [*(("insert", item, None) for item in (a, b, c, d)), ("use", a), ("use", a)]
    seen = queue_offers(lab, 10, [*steps, *[("offer", 1)] * 3, ("evict", []), *[("offer", 1)] * 2])
    lab.expect(
        ([offer.offered for offer in seen[:3]], seen[3].victim, [offer.offered for offer in seen[4:]]),
        ([[b]] * 3, b, [[c]] * 2),
        f"10 places, 1 of them small; {in_words(steps)}; victims() for one item, three times; evict; and"
        " victims() for one item, twice",
        f"an item goes to the back only when the caller asks for the next one. So {b} is still in front when"
        " victims() is called again",
    )


def test_every_item_is_offered_exactly_once(lab: Judge) -> None:
    a, b, c, d = names(lab, 4)
    start: list[Step] = [*(("insert", item, None) for item in (a, b, c, d)), ("use", a), ("use", a)]
    (offer,) = queue_offers(lab, 20, [*start, ("offer", ALL)])
    lab.expect(
        offer.offered,
        [b, c, d, a],
        f"20 places, 2 of them small; {in_words(start)} (all that is yielded)",
        f"items that are done count in the length of their queue: with {b} and {c} done, the small queue"
        f" still has 3 items, so {d} is judged before {a}, which is in the main queue",
    )
    for places, small in ((40, 4), (12, 1)):
        items = names(lab, 12)
        used = [item for item in items for _ in range(lab.random.choice([0, 2, 3, 4]))]
        lab.random.shuffle(used)
        steps: list[Step] = [*(("insert", item, None) for item in items), *(("use", item) for item in used)]
        model = Queues(places)
        for step in steps:
            model.play(step)
        (offer,) = queue_offers(lab, places, [*steps, ("offer", ALL)])
        lab.expect(
            offer.offered,
            model.offered(ALL)[0],
            f"{places} places, {small} of them small; {in_words(steps)} (all that is yielded)",
            "each item once: those that are done wait at the back of their queue until all others are done",
        )


def test_the_newest_item_is_judged_last_when_it_came_in_first(lab: Judge) -> None:
    items = names(lab, 11)
    steps: list[Step] = [("insert", item, None) for item in items]
    (offer,) = queue_offers(lab, 10, [*steps, ("offer", ALL)])
    lab.expect(
        offer.offered,
        items,
        f"10 places, 11 items: {in_words(steps)} (all that is yielded)",
        "with more items than places, the newest one has just come in: it is yielded after all others",
    )
    items = names(lab, 21)
    steps = [("insert", item, None) for item in items]
    twice: list[Step] = [("use", item) for item in items[:19] for _ in range(2)]
    (offer,) = queue_offers(lab, 20, [*steps[:20], *twice, *steps[20:], ("offer", 2)])
    lab.expect(
        offer.offered,
        items[:2],
        f"20 places, 2 of them small; {items[:19]} were used twice, {items[19]} was not, {items[20]} came in "
        "last, as item 21 (first two)",
        "with the newest item in it, the small queue may have 3 items, so the main one is judged",
    )


def test_the_newest_item_is_passed_when_it_is_in_front(lab: Judge) -> None:
    a, b, c, d, ghost = names(lab, 5)
    steps: list[Step] = [
        *[("insert", ghost, None), ("evict", [])],
        *[("insert", a, None), ("use", a), ("use", a), ("insert", b, None), ("use", b), ("use", b)],
        *[("insert", c, None), ("evict", []), ("use", a), ("use", b)],
        *[("insert", d, None), ("use", d), ("use", d), ("insert", ghost, None), ("use", ghost)],
    ]
    seen = queue_offers(lab, 3, [*steps, ("offer", ALL), ("offer", 1)])
    lab.expect(
        seen[-2].offered,
        [d, a, b, ghost],
        f"3 places, 1 of them small; {in_words(steps)} (all that is yielded)",
        f"{ghost} came back, so it enters the main queue, as the newest of 4 items. It is done from the"
        f" beginning: after {a} and {b} it is in front, and goes to the back like all that are done",
    )
    lab.expect(
        [told for told in seen[-1].drawn[1].split() if told.startswith(str(ghost))],
        [f"{ghost}*"],
        f"3 places, 1 of them small; {in_words(steps)}, ask for all ({ghost} in the main queue)",
        "an item that is done is not judged again: whatever its uses, it keeps them",
    )
    items = names(lab, 11)
    steps = [*(("insert", item, None) for item in items), *[("use", items[10])] * 2]
    seen = queue_offers(lab, 10, [*steps, ("offer", 2), ("offer", ALL)])
    lab.expect(
        seen[-1].offered,
        [*items[1:10], items[0], items[10]],
        f"10 places, 11 items: {in_words(steps)}, ask for 2, and then for all (all that is yielded)",
        f"{items[0]} was passed and is behind {items[10]}, which is done from the beginning. So"
        f" {items[10]} stays in the small queue, whatever its uses, and is yielded last",
    )


def test_a_random_history_follows_the_paper(lab: Judge) -> None:
    for insert_first in (False, True):
        model = Queues(20)
        steps: list[Step] = []
        expected = []
        items = names(lab, 40)
        for _ in range(160):
            item = lab.random.choice(items[:25] if lab.random.random() < 0.7 else items)
            full = len(model.uses) == 20
            held = lab.random.sample(items, 12) if lab.random.random() < 0.3 else []
            more: list[Step] = [("insert", item, None)]
            if item in model.uses:
                more = [("use", item)] if lab.random.random() < 0.95 else [("delete", item)]
            elif full:
                more = [more[0], ("evict", [])] if insert_first else [("evict", held), more[0]]
            elif lab.random.random() < 0.1:
                more = [("offer", lab.random.randint(1, 4)), more[0]]
            for step in more:
                if step[0] == "insert" and len(model.uses) == 20 and not insert_first:
                    continue
                found = model.play(step)
                steps.append(step)
                if step[0] in ("evict", "offer"):
                    expected.append((len(steps), found))
        for row, (offer, (count, found)) in enumerate(zip(queue_offers(lab, 20, steps), expected)):
            lab.compares(row)
            lab.expect(
                (offer.offered, offer.victim),
                found,
                f"20 places, 2 of them small; step {count}: {in_words(steps[count - 1 : count])}, with"
                f" {queues_of(offer)} (passed, victim)",
                "items are judged as in the paper, and those that may not go are passed",
            )


def model_of(requests: Sequence[list[int]], places: int, *, insert_first: bool) -> tuple[list[int], int, int]:
    """Return (victims, hits, items looked at) of a replay."""
    model, victims, hits = Queues(places), list[int](), 0
    for item in (item for ids in requests for item in ids):
        if item in model.uses:
            hits += 1
            model.use(item)
            continue
        steps: list[Step] = [("insert", item, None)]
        if len(model.uses) == places:
            steps = [*steps, ("evict", [])] if insert_first else [("evict", []), *steps]
        for step in steps:
            _, victim = model.play(step)
            victims += [victim] if victim is not None else []
    return victims, hits, model.looked_at


def test_the_victims_on_a_trace_are_those_of_the_paper(lab: Judge) -> None:
    requests = trace_of(lab)
    victims, hits, _ = model_of(requests, lab.size.pool_blocks, insert_first=True)
    seen = replayed(lab, "s3fifo", requests, insert_first=True)
    expect_same(lab, seen, victims, hits, requests, "a block comes in before one goes")
    victims, hits, looked_at = model_of(requests, lab.size.pool_blocks, insert_first=False)
    seen = replayed(lab, "s3fifo", requests, insert_first=False)
    expect_same(lab, seen, victims, hits, requests, "a block goes before one comes in")
    lab.cost(seen.steps, 4 * looked_at, needed=looked_at)
