"""3b: a block becomes visible once, and its key names one object."""

from __future__ import annotations

from mooncake_lite.labs.judging import Judge

from .puts import NO_TIER, ONE, Segments, Step, called, keys_of, play, words


def test_a_block_is_found_after_its_last_report_and_not_before(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [("put", "r1", ONE, a), ("find", a), ("end", 0), ("find", a), ("find", b)]
    seen = play(lab, NO_TIER, steps)
    lab.expect(
        [after.said for after in seen],
        ["allocated", "not found", "visible", "dram of rank 0", "not found"],
        f"{'; '.join(map(words, steps))} (what came back)",
        "put_end makes a block visible under its key, and nothing before it does",
    )
    lab.expect(
        (seen[2].states, seen[2].visible),
        ({"0": "visible"}, {str(a): 0}),
        called(steps, 2, "states, visible"),
        "the object is VISIBLE, and it is the one of its key",
    )
    lab.expect(
        [after.events for after in seen],
        [[], [], [f"BlockStored {a} dram of rank 0"], [], []],
        f"{'; '.join(map(words, steps))} (events of each step)",
        "one BlockStored of tier dram tells the scheduler where the block can be read",
    )


def test_a_visible_block_no_longer_belongs_to_its_request(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [
        ("put", "r1", ONE, a),
        ("put", "r1", ONE, b),
        ("put", "r1", ONE, None),
        ("end", 0),
        ("end", 1),
        ("end", 2),
        ("release", "r1"),
        ("find", a),
        ("find", b),
    ]
    seen = play(lab, NO_TIER, steps)
    lab.expect(
        (seen[6].states, seen[6].owners),
        ({"0": "visible", "1": "visible"}, []),
        called(steps, 6, "states, owners"),
        "at its end a request frees what is private to it. A visible block belongs to no owner (`disown`)",
    )
    lab.expect(
        [after.said for after in seen[7:]],
        ["dram of rank 0"] * 2,
        f"lookup() of both blocks after release({steps[6][1]})",
        "a visible block outlives the request that put it",
    )


def test_a_visible_block_may_be_evicted_and_then_its_key_is_gone(lab: Judge) -> None:
    keys = keys_of(lab, 5)
    steps: list[Step] = []
    for key in keys[:4]:
        steps += [("put", "r1", ONE, key), ("end", len(steps))]
    steps += [("find", keys[0]), ("put", "r2", ONE, keys[4]), ("find", keys[1]), ("find", keys[0])]
    seen = play(lab, NO_TIER, steps)
    lab.expect(
        seen[7].policies,
        {"0": sorted(keys[:4])},
        called(steps, 7, "keys that the policy knows"),
        "the policy of the segment is told of each block that becomes visible, by its key",
    )
    lab.expect(
        seen[7].told,
        [(keys[3], keys[3] - 1, 7.0)],
        called(steps, 7, "key, parent in the facts, and time that the policy is told"),
        "a policy may order blocks by their parents or by time, so it gets the facts and `now` unchanged",
    )
    lab.expect(
        [after.said for after in seen[9:]],
        ["allocated", "not found", "dram of rank 0"],
        f"4 places, 4 visible blocks, the first used again; {'; '.join(map(words, steps[9:]))}",
        "the least recently used block makes room for a new one",
    )


def test_a_copy_leaves_the_first_block_of_its_key_in_place(lab: Judge) -> None:
    (a,) = keys_of(lab, 1)
    segments: Segments = [(0, 4, 0), (1, 4, 1)]
    steps: list[Step] = [
        ("put", "r1", 0, a),
        ("end", 0),
        ("copy", "c1", 1, 0),
        ("end", 2),
        ("find", a),
        ("take",),
    ]
    seen = play(lab, segments, steps)
    after = seen[3]
    lab.expect(
        after.visible,
        {str(a): 0},
        called(steps, 3, "{key: put} that lookups find"),
        "lookups go on finding the object that was published first: a copy does not take its place",
    )
    lab.expect(
        (after.states, after.policies),
        ({"0": "visible", "2": "visible"}, {"0": [a], "1": [a]}),
        called(steps, 3, "states, keys that the policies know"),
        "a copy is VISIBLE in its own segment too, whose policy may evict it",
    )
    lab.expect(
        after.events,
        [f"BlockStored {a} dram of rank 1"],
        called(steps, 3, "events"),
        "each copy has a BlockStored of its own, which tells that the block can be read there too",
    )
    lab.expect(
        after.owners,
        [],
        called(steps, 3, "owners"),
        "a visible copy belongs to no owner any more (`disown`)",
    )
    lab.expect(
        (after.copies, after.waiting, seen[5].said),
        (1, [0], f"rank 0: [{a}]"),
        called(steps, 3, "copies_stored, unsaved puts, and what take_saves() then returns"),
        "a copy joins the others with _join_copies, and it is never saved: its tier has the first one",
    )
    lab.expect(
        after.used,
        {"0": 3.0, "2": 3.0},
        called(steps, 3, "put: time of its last use"),
        "_join_copies gets `now`: a copy that was not used for a minute is evicted before all other blocks",
    )
    seen = play(lab, [(0, 4, None), (1, 4, 1)], steps)
    lab.expect(
        (seen[3].waiting, seen[5].said),
        ([], ""),
        f"{called(steps, 3, 'unsaved puts, and what take_saves() then returns')}; rank 0 has no saver",
        "a copy is never saved, even if no tier knows its key",
    )


def test_the_object_published_first_is_found_even_if_it_was_made_as_a_copy(lab: Judge) -> None:
    (a,) = keys_of(lab, 1)
    segments: Segments = [(0, 4, 0), (1, 4, 1)]
    steps: list[Step] = [("put", "r1", 0, a), ("copy", "c1", 1, 0), ("end", 1)]
    after = play(lab, segments, steps)[-1]
    lab.expect(
        (after.visible, after.copies, after.waiting),
        ({str(a): 1}, 0, [1]),
        f"{'; '.join(map(words, steps))}: the original is still being written ({{key: put}} that lookups"
        " find, copies_stored, unsaved puts)",
        "an object counts as a copy only if its key is visible already. This one is the first, so lookups"
        " find it, and it is saved",
    )
    steps += [("end", 0), ("find", a), ("take",)]
    after = play(lab, segments, steps)[3]
    lab.expect(
        (after.visible, after.copies, after.waiting),
        ({str(a): 1}, 1, [1]),
        called(steps, 3, "{key: put} that lookups find, copies_stored, unsaved puts"),
        "lookups go on finding the object that was published first, which is #1. So #0 joins it as a copy,"
        " and is not saved",
    )


class Model:
    """What must be true of one segment with a tier, after the rules of the sheet."""

    def __init__(self, places: int, share: float) -> None:
        self.places, self.share = places, share
        self.keys: dict[int, int | None] = {}  # put -> key, of all that are there
        self.owner: dict[int, str] = {}
        self.visible: dict[int, int] = {}  # key -> put, the least recently used one in front
        self.waiting: set[int] = set()
        self.known: set[int] = set()
        self.durable: set[int] = set()
        self.saves: list[int] = []
        self.skipped = 0

    def put(self, number: int, owner: str, key: int | None) -> str:
        if len(self.keys) == self.places:
            may_go = [key for key, put in self.visible.items() if put not in self.waiting]
            if not may_go:
                return "full"
            del self.keys[self.visible.pop(may_go[0])]
        self.keys[number], self.owner[number] = key, owner
        return "allocated"

    def end(self, number: int) -> str:
        key = self.keys[number]
        if key is None or key in self.visible:
            return "private"
        del self.owner[number]
        self.visible[key] = number
        if key not in self.known:
            if len(self.waiting) + 1 > self.share * self.places:
                self.skipped += 1
            else:
                self.waiting.add(number)
                self.known.add(key)
                self.saves.append(key)
        return "visible"

    def find(self, key: int) -> str:
        if key in self.visible:
            self.visible[key] = self.visible.pop(key)
            return "dram of rank 0"
        return "ssd of rank 0" if key in self.durable else "not found"

    def release(self, owner: str, ended: set[int]) -> str:
        for number in [n for n, whose in self.owner.items() if whose == owner and n in ended]:
            del self.owner[number], self.keys[number]
        return ""

    def saved(self, key: int) -> str:
        self.waiting.discard(self.visible.get(key, -1))
        return ""


def test_a_random_history_of_requests_follows_the_rules(lab: Judge) -> None:
    model = Model(8, 0.55)
    names = keys_of(lab, 10)
    steps: list[Step] = []
    said: list[tuple[str, dict[str, int], list[int], int]] = []
    owners: list[list[str]] = []
    writing: list[int] = []
    ended: set[int] = set()
    for number in range(90):
        verb = lab.random.choice(["put", "put", "end", "end", "find", "release", "take", "saved", "durable"])
        key = lab.random.choice(names)
        owner = lab.random.choice(["r1", "r2"])
        if verb == "end" and writing:
            put = writing.pop(lab.random.randrange(len(writing)))
            ended.add(put)
            steps.append(("end", put))
            what = model.end(put)
        elif verb == "put" and len(writing) < 3:
            steps.append(("put", owner, 0, key))
            what = model.put(number, owner, key)
            writing += [number] if what == "allocated" else []
        elif verb == "release":
            steps.append(("release", owner))
            what = model.release(owner, ended)
        elif verb == "take":
            steps.append(("take",))
            what, model.saves = f"rank 0: {model.saves}" if model.saves else "", []
        elif verb in ("saved", "durable") and model.known - model.durable - set(model.saves):
            key = lab.random.choice(sorted(model.known - model.durable - set(model.saves)))
            steps.append((verb, 0, key))
            what = model.saved(key)
            model.durable |= {key} if verb == "durable" else set()
        else:
            steps.append(("find", key))
            what = model.find(key)
        visible = {str(key): put for key, put in model.visible.items()}
        said.append((what, visible, sorted(model.waiting), model.skipped))
        owners.append(sorted(set(model.owner.values())))
    for number, after in enumerate(play(lab, [(0, 8, 0)], steps, share=0.55)):
        lab.compares(number)
        lab.expect(
            (after.said, after.visible, after.waiting, after.skipped),
            said[number],
            called(steps, number, "result, {key: put} that lookups find, unsaved puts, saves_skipped"),
            "lookups, evictions and saves follow the rules of the docstring at every step",
        )
        lab.expect(
            after.owners,
            owners[number],
            called(steps, number, "owners of objects that are not visible"),
            "a visible block belongs to no owner any more (`disown`)",
        )
