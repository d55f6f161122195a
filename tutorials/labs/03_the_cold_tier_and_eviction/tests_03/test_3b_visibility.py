"""3b: a block becomes visible once, and its tier gets it once; until it is saved, it stays in DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Step = tuple[Any, ...]


class After(msgspec.Struct):
    """The books of the directory after one step. A put is named by the number of its step, from 0.

    said       what the step came to
    visible    key -> the put that lookups find
    states     put -> state, of all that are there
    waiting    puts that are unsaved
    policies   rank -> keys that the policy of its segment may evict
    told       (key, parent, time) of each block that a policy was told about in this step
    used       put -> time of its last use
    events     since the step before
    owners     with anything of their own
    skipped, copies   counters: saves_skipped, copies_stored
    """

    said: str
    visible: dict[str, int]
    states: dict[str, str]
    waiting: list[int]
    policies: dict[str, list[int]]
    told: list[tuple[Any, Any, Any]]
    used: dict[str, Any]
    events: list[str]
    owners: list[str]
    skipped: int
    copies: int


Segments = Sequence[tuple[int, int, int | None]]
"""(rank, blocks, saver) of each."""


def play(
    lab: Judge,
    segments: Segments,
    steps: Sequence[Step],
    share: float = 0.5,
    only: str = "",
    head_dim: int = 8,
) -> list[After]:
    """Play steps, and return what was seen after each, or after those of one verb.

    head_dim   of the blocks, which have 32 bytes for each. A range takes 256 bytes or a multiple of that
    """
    inputs = {"segments": segments, "max_unsaved_share": share, "steps": steps, "only": only}
    inputs["head_dim"] = head_dim
    what = f"{len(steps)} steps: {'; '.join(map(words, steps))}"
    seen = lab.ask("puts", inputs, list[After], called=what)
    if only:
        return seen
    rows = [
        [
            f"#{number}",
            words(step),
            after.said,
            " ".join(f"{key}=#{put}" for key, put in after.visible.items()),
            " ".join(f"#{put}" for put in after.waiting),
        ]
        for number, (step, after) in enumerate(zip(steps, seen))
    ]
    title = "each step, which put lookups find under each key, and unsaved puts; #3 is the put of step #3"
    columns = ["step", "call", "came back", "visible", "unsaved"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def words(step: Step) -> str:
    """The step as a message names it."""
    verb, *more = step
    forms = {
        "put": "put_start(owner={}, rank={}, key={})",
        "copy": "put_copy(owner={}, rank={}, of #{})",
        "end": "put_end(#{})",
        "find": "lookup({})",
        "release": "release({})",
        "take": "take_saves()",
        "saved": "saved(rank={}, key={})",
        "durable": "durable(rank={}, key={})",
    }
    return forms[verb].format(*more)


def called(steps: Sequence[Step], number: int, what: str) -> str:
    return f"step #{number}: {words(steps[number])} ({what})"


def keys_of(lab: Judge, count: int) -> list[int]:
    return lab.random.sample(range(100, 1000), count)


TIER: Segments = [(0, 8, 0)]
"""One segment of eight blocks, whose rank has a tier."""

NO_TIER: Segments = [(0, 4, None)]
ONE = 0
"""The only rank of both."""


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


def test_a_block_stays_in_dram_until_its_tier_has_it(lab: Judge) -> None:
    a, b, c = keys_of(lab, 3)
    steps: list[Step] = [
        ("put", "r0", 0, None),
        ("put", "r1", 0, a),
        ("put", "r1", 0, b),
        ("end", 1),
        ("end", 2),
        ("put", "r2", 0, c),
        ("saved", 0, b),
        ("put", "r2", 0, c),
        ("find", a),
        ("find", b),
    ]
    seen = play(lab, [(0, 3, 0)], steps, share=1.0)
    lab.expect(
        [after.waiting for after in seen[3:7]],
        [[1], [1, 2], [1, 2], [1]],
        "put_end() of two blocks, another put_start(), and saved() of the second block (unsaved puts)",
        "a block waits for its save from the moment it is visible until its tier reports it",
    )
    lab.expect(
        [after.said for after in seen[5:]],
        ["full", "", "allocated", "dram of rank 0", "not found"],
        f"3 places, one private and two unsaved; {'; '.join(map(words, steps[5:]))}",
        "an unsaved block is not evicted: its bytes are nowhere else. After saved() it may go",
    )


def test_a_segment_without_a_saver_saves_nothing(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [("put", "r1", 0, a), ("end", 0), ("take",), ("put", "r2", 0, b), ("end", 3)]
    seen = play(lab, [(0, 1, None), (1, 1, 1)], steps, share=0.5)
    lab.expect(
        (seen[1].waiting, seen[1].skipped, seen[2].said),
        ([], 0, ""),
        called(steps, 1, "unsaved puts, saves_skipped, what take_saves() then returns"),
        "no tier saves the blocks of a segment whose saver is None, so none waits, and no save is skipped"
        " either",
    )
    lab.expect(
        (seen[3].said, seen[4].visible),
        ("allocated", {str(b): 3}),
        f"one place; {'; '.join(map(words, steps))} (results)",
        "a block that no tier has to save can be evicted at once",
    )


def test_a_key_that_a_tier_knows_is_not_saved_again(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [
        ("put", "r1", 0, a),
        ("end", 0),
        ("take",),
        ("durable", 0, a),
        ("put", "r2", 0, b),
        ("put", "r2", 0, b + 1000),
        ("find", a),
        ("put", "r2", 1, a),
        ("end", 7),
        ("take",),
    ]
    seen = play(lab, [(0, 2, 0), (1, 2, 1)], steps, share=1.0)
    lab.expect(
        (seen[2].said, seen[6].said),
        (f"rank 0: [{a}]", "ssd of rank 0"),
        "a block is put and saved, and then evicted from DRAM (take_saves(), lookup())",
        "a visible block is handed to its tier once",
    )
    lab.expect(
        (seen[8].said, seen[8].waiting, seen[9].said),
        ("visible", [], ""),
        f"{called(steps, 8, 'result, unsaved puts, what take_saves() then returns')}; rank 0 has it on SSD",
        "a block that any tier knows becomes visible and is not written again",
    )


def test_a_key_that_a_tier_knows_is_no_skipped_save(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [
        ("put", "r1", 0, a),
        ("end", 0),
        ("take",),
        ("durable", 0, a),
        ("put", "r2", 0, None),
        ("put", "r2", 0, None),
        ("put", "r2", 1, b),
        ("end", 6),
        ("put", "r2", 1, a),
        ("end", 8),
    ]
    seen = play(lab, [(0, 2, 0), (1, 3, 1)], steps, share=0.6)
    lab.expect(
        (seen[9].said, seen[9].waiting, seen[9].skipped),
        ("visible", [6], 0),
        f"{called(steps, 9, 'result, unsaved puts, saves_skipped')}; rank 0 has {a} on SSD, and the share of"
        " rank 1 is used up",
        "the share is asked only for a block that has to be saved: one that a tier knows is not counted as"
        " skipped",
    )


def test_a_block_that_another_rank_saves_comes_to_the_ssd_of_that_rank(lab: Judge) -> None:
    (a,) = keys_of(lab, 1)
    segments: Segments = [(0, 8, 0), (1, 8, 0)]
    steps: list[Step] = [("put", "r1", 1, a), ("end", 0), ("take",), ("saved", 0, a), ("durable", 0, a)]
    seen = play(lab, segments, steps)
    lab.expect(
        (seen[1].waiting, seen[4].events),
        ([0], [f"BlockStored {a} ssd of rank 0"]),
        f"{called(steps, 4, 'unsaved puts after put_end(), and events now')}; rank 0 is the saver of rank 1",
        "the save is started for the saver of the segment, which may be another rank: its report ends it",
    )


def test_saves_are_taken_in_order_by_the_tier_that_keeps_the_segment(lab: Judge) -> None:
    keys = keys_of(lab, 5)
    segments: Segments = [(0, 8, 0), (1, 8, 0), (2, 8, 2), (3, 8, None)]
    ranks = [0, 1, 2, 3, 1]
    steps: list[Step] = [("put", "r1", rank, key) for rank, key in zip(ranks, keys)]
    order = lab.random.sample(range(5), 5)
    steps += [("end", number) for number in order]
    steps += [("take",), ("take",)]
    seen = play(lab, segments, steps)
    of_saver: dict[int, list[int]] = {}
    for number in order:
        if (saver := segments[ranks[number]][2]) is not None:
            of_saver.setdefault(saver, []).append(keys[number])
    lab.expect(
        [after.said for after in seen[10:]],
        ["; ".join(f"rank {saver}: {saves}" for saver, saves in of_saver.items()), ""],
        f"put_end() of {[keys[n] for n in order]}, on ranks {[ranks[n] for n in order]}; take_saves() twice",
        "a rank's saver saves its blocks in the order in which they became visible. Rank 0 saves for 0, 1"
        " too, and nothing saves those of rank 3",
    )
    lab.expect(
        seen[9].waiting,
        sorted(n for n in range(5) if ranks[n] != 3),
        "put_end() of five blocks (unsaved puts)",
        "a block waits for its save, and one that no tier saves does not",
    )


def test_at_most_its_share_of_a_segment_waits(lab: Judge) -> None:
    for places, share in (
        lab.random.choice([(5, 0.4), (6, 0.5), (8, 0.25)]),
        (lab.random.choice([5, 7, 9]), 0.5),
    ):
        most = int(places * share)
        keys = keys_of(lab, places)
        steps: list[Step] = [("put", "r1", 0, key) for key in keys]
        steps += [("end", number) for number in range(places)]
        seen = play(lab, [(0, places, 0)], [*steps, ("take",)], share=share)
        for number, after in enumerate(seen[places:-1]):
            lab.expect(
                (after.said, len(after.waiting), after.skipped),
                ("visible", min(number + 1, most), max(0, number + 1 - most)),
                f"put_end() of #{number + 1}; share {share} of {places} blocks (result, waiting, skipped)",
                f"at most {share} x {places} blocks wait for a slow disk, this one included: one that just"
                " reaches the share waits, and one beyond it is counted",
            )
        lab.expect(
            seen[-1].said,
            f"rank 0: {keys[:most]}",
            f"take_saves() after {places} blocks became visible, share {share}",
            "a save that was skipped is not handed to the tier",
        )


def test_a_block_counts_in_the_share_with_its_own_bytes(lab: Judge) -> None:
    keys = keys_of(lab, 3)
    steps: list[Step] = [("put", "r1", 0, key) for key in keys]
    steps += [("end", number) for number in range(3)]
    seen = play(lab, [(0, 4, 0)], steps, share=0.48, head_dim=7)
    lab.expect(
        [(after.waiting, after.skipped) for after in seen[3:]],
        [([0], 0), ([0, 1], 0), ([0, 1], 1)],
        "put_end() of three blocks of 224 bytes in ranges of 256; share 0.48 of 1,024 bytes, which is 491"
        " (unsaved puts, saves_skipped)",
        "a block is added with its nbytes to what is unsaved: 256 + 224 bytes are within the share",
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


def test_each_block_is_written_once(lab: Judge) -> None:
    size = lab.size
    steps: list[Step] = []
    fresh, per_turn = 1000, size.turn_blocks
    talks = [list(range(10 * talk, 10 * talk + 4)) for talk in range(size.talks)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            if turn:
                talk += range(fresh, fresh + per_turn)
                fresh += per_turn
            begin = len(steps)
            steps += [("put", f"r{turn}-{number}", 0, key) for key in talk]
            steps += [("end", begin + place) for place in range(len(talk))]
            steps += [("release", f"r{turn}-{number}"), ("take",)]
            steps += [("durable", 0, key) for key in talk]
    blocks = len({key for talk in talks for key in talk})
    taken = play(lab, [(0, 3 * (4 + 3 * per_turn), 0)], steps, only="take")
    written = sum(len(after.said.split(",")) for after in taken if after.said)
    lab.cost(written, blocks)
    lab.expect(
        written,
        blocks,
        f"{size.talks} conversations of 4 turns in a small pool (blocks handed to the tier)",
        "a block that comes back after it was evicted is on SSD already, and is not written again",
    )
