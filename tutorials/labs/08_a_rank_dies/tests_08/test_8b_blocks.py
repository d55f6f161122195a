"""8b: what lies on a lost rank is gone, whatever its state; copies stay, and its owners are told."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Place = tuple[str, int]
Step = list[Any]


class Seen(msgspec.Struct):
    """The answer of remove_segment, and what the pool has afterwards. Fields: as drive.py tells them."""

    raised: str
    owners: list[str]
    there: list[str]
    found: list[Place | None]
    unsaved: list[int]
    evictable: list[int]
    saving: int
    to_save: list[int]
    leased: dict[str, list[str]]
    events: list[tuple[str, int, int, str]]
    problem: str
    visited: int
    savers: list[tuple[int, int | None]]
    fits: int


def segments(lab: Judge, blocks: int = 12) -> list[list[Any]]:
    """(rank, blocks, whether it has a tier, which tier saves its blocks): none has one."""
    return [[rank, blocks, False, None] for rank in range(1, lab.size.segments + 1)]


def remove(
    lab: Judge,
    steps: list[Step],
    keys: list[int],
    rank: int,
    parts: list[list[Any]] | None = None,
    after: list[Step] | None = None,
) -> Seen:
    parts, after = parts or segments(lab), after or []
    inputs = {"segments": parts, "steps": steps, "rank": rank, "keys": keys, "after": after}
    seen = lab.ask("remove", inputs, Seen, called=f"remove_segment({rank}) after {steps}")
    savers = {at: at if has_tier else saver for at, _, has_tier, saver in parts}
    lab.trace(drawn([*steps, *after], rank, seen, savers))
    if any(rank == part[0] for part in parts):
        lab.expect(seen.raised, "", f"remove_segment({rank}) (exception)", "the rank has a segment")
    return seen


def expect_exact_books(lab: Judge, rank: int, seen: Seen) -> None:
    """The last of a test: a rule of its own says more than the assertion that has failed."""
    lab.expect(
        seen.problem,
        "",
        f"remove_segment({rank}) and then check() (exception)",
        "check() asserts that all books agree; the docstring says what leaves each of them",
    )


def drawn(steps: list[Step], rank: int, seen: Seen, savers: dict[int, int | None]) -> dict[str, Any]:
    """A table for `labs show`: each object, what becomes of it, and the saver of its rank."""
    rows, key_of, savers_after = [], {}, savers | dict(seen.savers)
    for verb, *words in steps:
        if verb not in ("put", "copy"):
            rows.append(["", "", f"{verb} {' '.join(map(str, words))}", "", "", "", ""])
            continue
        name, at, what, *_ = words
        state, owner = f"copy of {what}", ""
        if verb == "put":
            key_of[name], owner = what, words[3]
            state = "being written" if not words[4] else "private" if what is None else f"key {what}"
        is_there = name in seen.there
        unsaved = "yes" if is_there and key_of.get(name) in seen.unsaved else "no"
        saver, later = (f"{of[at] or 'none'}" for of in (savers, savers_after))
        saver += f", then {later}" * (later != saver)
        rows.append([name, f"{at}", state, owner, "there" if is_there else "gone", unsaved, saver])
    columns = ["object", "rank", "state", "owner", "after", "unsaved after", "saver of the rank"]
    title = f"rank {rank} is lost; told: {', '.join(seen.owners) or 'no owner'}"
    return {"kind": "table", "title": title, "columns": columns, "rows": rows[:30]}


def visible(lab: Judge, count: int, first: int = 1) -> tuple[list[Step], dict[int, int]]:
    """Visible blocks on random ranks, and at least one on each; and the rank of each key."""
    ranks = [1 + number % lab.size.segments for number in range(count)]
    lab.random.shuffle(ranks)
    rank_of = dict(enumerate(ranks, first))
    return [["put", f"block {key}", rank, key, "writer", True] for key, rank in rank_of.items()], rank_of


def lost_rank(lab: Judge) -> int:
    return lab.random.randint(1, lab.size.segments)


def test_blocks_of_the_lost_rank_are_misses_and_all_others_stay(lab: Judge) -> None:
    steps, rank_of = visible(lab, 4 * lab.size.segments)
    rank = lost_rank(lab)
    seen = remove(lab, steps, list(rank_of), rank)
    lab.expect(
        dict(zip(rank_of, seen.found)),
        {key: None if at == rank else ("dram", at) for key, at in rank_of.items()},
        f"remove_segment({rank}), then lookup() of each key (key: tier and rank)",
        "blocks in the DRAM of the lost rank are misses; blocks of other ranks are found where they were",
    )
    expect_exact_books(lab, rank, seen)


def test_a_copy_on_another_rank_stays_readable(lab: Judge) -> None:
    steps, rank_of = visible(lab, 2 * lab.size.segments)
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    expected = dict(rank_of)
    for key, at in rank_of.items():
        if at in (rank, other):
            steps.append(["copy", f"copy {key}", other if at == rank else rank, f"block {key}"])
            expected[key] = other
    seen = remove(lab, steps, list(rank_of), rank)
    lab.expect(
        dict(zip(rank_of, seen.found)),
        {key: None if at == rank else ("dram", at) for key, at in expected.items()},
        f"remove_segment({rank}) of blocks that have copies (key: tier and rank)",
        "a copy on another rank stays, and of a copied block only the copy on the lost rank goes",
    )
    expect_exact_books(lab, rank, seen)


def test_an_object_in_any_state_goes_with_its_segment(lab: Judge) -> None:
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    steps: list[Step] = []
    for at, word in ((rank, "lost"), (other, "safe")):
        steps += [
            ["put", f"{word} visible", at, 10 * at, "a", True],
            ["put", f"{word} written", at, 10 * at + 1, f"{word} writer", False],
            ["put", f"{word} tail", at, None, f"{word} reader", True],
            ["put", f"{word} bad", at, 10 * at + 2, "b", True],
            ["lease", f"{word} lessee", f"{word} bad"],
            ["bad", f"{word} bad"],
            ["put", f"{word} late", at, 10 * at + 3, f"{word} failed", False],
            ["late", f"{word} failed", at],
        ]
    seen = remove(lab, steps, [], rank)
    lab.expect(
        sorted(seen.there),
        sorted(f"safe {state}" for state in ("visible", "written", "tail", "bad", "late")),
        f"remove_segment({rank}) (objects that are there afterwards)",
        "visible, being written, private, unlisted or quarantined: every object of the lost rank goes",
    )
    expect_exact_books(lab, rank, seen)


def test_owners_of_what_was_not_published_and_lessees_are_told(lab: Judge) -> None:
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    steps: list[Step] = [
        ["put", "v1", rank, 1, "published", True],
        ["put", "v2", rank, 2, "published", True],
        ["put", "v3", other, 3, "published", True],
        ["put", "w1", rank, 4, "writes here", False],
        ["put", "w2", rank, 5, "writes here", False],
        ["put", "w3", other, 6, "writes elsewhere", False],
        ["put", "t1", rank, None, "has a tail", True],
        ["put", "q1", rank, 7, "failed here", False],
        ["late", "failed here", rank],
        ["put", "q2", other, 8, "failed elsewhere", False],
        ["late", "failed elsewhere", other],
        ["lease", "reads early", "w2"],
        ["lease", "reads both", "v1", "v3"],
        ["lease", "reads here", "v1", "v2"],
        ["lease", "reads elsewhere", "v3"],
        ["lease", "writes here", "v1"],
    ]
    seen = remove(lab, steps, [], rank)
    lab.expect(
        seen.owners,
        ["failed here", "has a tail", "reads both", "reads early", "reads here", "writes here"],
        f"remove_segment({rank})",
        "told are the owners of objects that were not published (QUARANTINED, too), and the lessees of every "
        "object: sorted, each once",
    )
    expect_exact_books(lab, rank, seen)


def test_leases_on_other_ranks_stay(lab: Judge) -> None:
    steps, rank_of = visible(lab, 3 * lab.size.segments)
    rank, leases = lost_rank(lab), {}
    for number in range(4):
        keys = lab.random.sample(list(rank_of), 4)
        steps.append(["lease", f"reader {number}", *[f"block {key}" for key in keys]])
        left = sorted(f"block {key}" for key in keys if rank_of[key] != rank)
        if left:
            leases[f"reader {number}"] = left
    seen = remove(lab, steps, [], rank)
    lab.expect(
        seen.leased,
        leases,
        f"remove_segment({rank}) (owner: leased objects)",
        "a lease ends only with its object",
    )
    expect_exact_books(lab, rank, seen)


def test_its_ssd_tier_goes_too(lab: Judge) -> None:
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    parts = [[at, 12, True, None] for at in range(1, lab.size.segments + 1)]
    both = lab.random.sample(range(100, 120), 6)
    steps: list[Step] = [["tier", rank, *both[:4]], ["tier", other, *both[2:]]]
    seen = remove(lab, steps, both, rank, parts)
    lab.expect(
        dict(zip(both, seen.found)),
        {key: ("ssd", other) if number >= 2 else None for number, key in enumerate(both)},
        f"remove_segment({rank}) of keys on SSD (key: tier and rank)",
        "keys that only the lost rank's tier has are misses; another tier keeps its own",
    )
    expect_exact_books(lab, rank, seen)


def test_blocks_that_it_was_to_save_stay_in_dram_and_may_be_evicted(lab: Judge) -> None:
    rank = lost_rank(lab)
    others = [at for at in range(1, lab.size.segments + 1) if at != rank]
    parts = [[rank, 12, True, None], [others[0], 12, False, rank], [others[1], 12, True, None]]
    saved_here, saved_elsewhere = [1, 2, 3], [4, 5]
    steps: list[Step] = [["put", f"block {key}", others[0], key, "w", True] for key in saved_here]
    steps += [["put", f"block {key}", others[1], key, "w", True] for key in saved_elsewhere]
    if lab.random.random() < 0.5:
        steps.append(["told"])
    more = [["put", "block 6", others[0], 6, "w", True], ["put", "block 7", others[1], 7, "w", True]]
    seen = remove(lab, [*steps, *more], [1, 2, 3, 6], rank, parts)
    lab.expect(
        (seen.found, seen.unsaved, seen.evictable),
        ([("dram", others[0])] * 4, [4, 5, 7], [1, 2, 3, 6]),
        f"remove_segment({rank}), the saver of rank {others[0]} (places of its blocks, unsaved, evictable)",
        "blocks that only the lost rank was to save are not unsaved any more: they may be evicted",
    )
    told = ["told"] in steps
    lab.expect(
        (seen.saving, seen.to_save),
        (3, [7] if told else [4, 5, 7]),
        f"remove_segment({rank}) (saves under way, what tiers are still told to save)",
        "no save of the lost rank is left, and those of other tiers go on",
    )
    expect_exact_books(lab, rank, seen)


def test_what_is_published_later_is_not_for_a_lost_tier(lab: Judge) -> None:
    rank = lost_rank(lab)
    others = [at for at in range(1, lab.size.segments + 1) if at != rank]
    parts = [[rank, 12, True, None], [others[0], 12, False, rank], [others[1], 12, True, None]]
    steps: list[Step] = [["put", f"block {number}", others[number], number, "w", False] for number in (0, 1)]
    after = [["publish", "block 0"], ["publish", "block 1"]]
    seen = remove(lab, steps, [0, 1], rank, parts, after)
    lab.expect(
        dict(seen.savers),
        {others[0]: None, others[1]: others[1]},
        f"remove_segment({rank}), the saver of rank {others[0]} (the savers of the other ranks)",
        "other segments whose saver was the lost rank have none now",
    )
    lab.expect(
        (seen.found, seen.unsaved, seen.evictable),
        ([("dram", others[0]), ("dram", others[1])], [1], [0]),
        f"remove_segment({rank}), then put_end() of a block of each other rank (places, unsaved, evictable)",
        "what is published later is saved only where its segment has a saver",
    )
    expect_exact_books(lab, rank, seen)


def test_saves_of_lost_blocks_by_another_tier_are_forgotten(lab: Judge) -> None:
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    parts = [[rank, 12, False, other], [other, 12, True, None]]
    steps: list[Step] = [["put", f"block {key}", rank, key, "w", True] for key in (1, 2)]
    steps += [["put", "block 3", other, 3, "w", True]]
    seen = remove(lab, steps, [1, 2, 3], rank, parts)
    lab.expect(
        (seen.saving, seen.to_save, seen.found),
        (1, [3], [None, None, ("dram", other)]),
        f"remove_segment({rank}), whose blocks rank {other} was to save (saves under way, to save, found)",
        "a block that is gone is not saved",
    )
    expect_exact_books(lab, rank, seen)


def test_each_place_that_is_lost_is_one_event(lab: Judge) -> None:
    rank = lost_rank(lab)
    other = rank % lab.size.segments + 1
    parts = [[rank, 12, True, None], [other, 12, True, None]]
    steps: list[Step] = [
        ["put", "block 1", rank, 1, "w", True],
        ["put", "block 2", other, 2, "w", True],
        ["copy", "copy 2", rank, "block 2"],
        ["put", "written", rank, 3, "v", False],
        ["tier", rank, 2, 8],
        ["tier", other, 8],
    ]
    seen = remove(lab, steps, [], rank, parts)
    expected = [(1, "dram"), (2, "dram"), (2, "ssd"), (8, "ssd")]
    lab.expect(
        sorted(seen.events),
        sorted(("BlockRemoved", key, rank, tier) for key, tier in expected),
        f"remove_segment({rank}) (events that it adds to _events, sorted)",
        "the scheduler's index hears of each place that can no longer be read, in DRAM and on SSD",
    )
    expect_exact_books(lab, rank, seen)


def test_new_blocks_are_put_only_where_a_segment_is(lab: Judge) -> None:
    steps, _ = visible(lab, 2 * lab.size.segments)
    rank = lost_rank(lab)
    seen = remove(lab, steps, [], rank)
    lab.expect(
        seen.fits,
        12 * (lab.size.segments - 1),
        f"remove_segment({rank}), then as many put_start as fit",
        f"each of the {lab.size.segments - 1} segments that are left has 12 blocks; the lost one has none",
    )
    expect_exact_books(lab, rank, seen)


def test_a_rank_without_a_segment_is_an_error(lab: Judge) -> None:
    steps, rank_of = visible(lab, 2 * lab.size.segments)
    rank = lab.size.segments + lab.random.randint(1, 3)
    seen = remove(lab, steps, list(rank_of), rank)
    lab.expect(
        (seen.raised, dict(zip(rank_of, seen.found))),
        ("UnknownObject", {key: ("dram", at) for key, at in rank_of.items()}),
        f"remove_segment({rank}) of a rank without a segment (exception, where each key is found)",
        "it raises UnknownObject, and changes nothing",
    )


def test_each_object_is_visited_a_few_times(lab: Judge) -> None:
    count, blocks = lab.size.segments, lab.size.blocks
    steps: list[Step] = [
        ["put", f"block {key}", 1 + key % count, key, "w", True] for key in range(count * blocks)
    ]
    rank = lost_rank(lab)
    seen = remove(lab, steps, list(range(count * blocks)), rank, segments(lab, blocks))
    every = count * blocks
    lab.cost(seen.visited, 4 * every, needed=every)
    lab.expect(
        sum(place is None for place in seen.found),
        blocks,
        f"remove_segment({rank}) of {blocks} blocks (blocks that are misses)",
        "exactly the blocks of the lost rank are misses",
    )
    expect_exact_books(lab, rank, seen)
