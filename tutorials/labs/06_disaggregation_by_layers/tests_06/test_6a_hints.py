"""6a: a decode rank is told of the blocks that it can load, when enough of them are new to it."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Step = list[Any]
BLOCK_TOKENS, TAIL = 64, 9


class Hint(msgspec.Struct):
    """A Prefetch. blocks: their numbers in load + store; checked: each names its checksum."""

    rank: int
    name: str
    attempt: int
    blocks: list[int]
    checked: bool
    tokens: int


class Seen(msgspec.Struct):
    """The hints of each step, and the values of `hinted` of each request at the end."""

    seen: list[list[Hint]]
    hinted: dict[str, list[int]]


def play(lab: Judge, steps: list[Step], prefetches: bool = True) -> Seen:
    shown = "; ".join(said(step) for step in steps[:12]) + (
        f" and {len(steps) - 12} more" * (len(steps) > 12)
    )
    seen = lab.ask(
        "hints", {"prefetches": prefetches, "steps": steps}, Seen, called=f"prefetch() after {shown}"
    )
    lab.trace(drawn(steps, seen))
    return seen


def said(step: Step) -> str:
    """A step in words."""
    verb, name, *words = step
    if verb == "arrive":
        keys, blocks, tail = words
        return f"{name} arrives with {blocks} blocks and {tail} tokens{'' if keys else ', without keys'}"
    if verb == "stored":
        first, count = words
        return f"blocks {first} to {first + count - 1} of {name} are stored"
    told = {"again": "is looked at again", "moves": "gets another decode rank", "unplaced": "loses its place"}
    return f"{name} {told.get(verb, 'loses its decode rank' if verb == 'dies' else verb)}"


def drawn(steps: list[Step], seen: Seen) -> dict[str, Any]:
    """A table for `labs show`: each step, and the hint that it leads to."""
    rows = []
    for step, hints in list(zip(steps, seen.seen))[:24]:
        text = "; ".join(f"{len(hint.blocks)} blocks to rank {hint.rank}" for hint in hints)
        rows.append([said(step), text or "none"])
    return {"kind": "table", "title": "blocks and hints", "columns": ["step", "hint"], "rows": rows}


def due(total: int, written: list[int], known: int = 0) -> list[int]:
    """How many blocks each hint names, 0 for none, when so many are there after each step."""
    found = []
    for count in written:
        pays = count > known and 8 * (count - known) >= total - known
        found.append(count if pays else 0)
        known = count if pays else known
    return found


def counts(seen: Seen) -> list[int]:
    """How many blocks the hint of each step names; 0: there is none."""
    return [sum(len(hint.blocks) for hint in hints) for hints in seen.seen]


def keys(lab: Judge, count: int) -> list[int]:
    return lab.random.sample(range(1, 10**6), count)


def arrives(lab: Judge, blocks: int, names: list[int] | None = None) -> Step:
    """A request comes whose prompt has so many blocks and a tail. names: the keys of its blocks."""
    return ["arrive", "a", keys(lab, blocks) if names is None else names, blocks, TAIL]


def one_by_one(name: str, blocks: int, first: int = 0) -> list[Step]:
    return [["stored", name, number, 1] for number in range(first, blocks)]


RULE = (
    "a hint pays when the new blocks are at least an eighth of the blocks that the rank was not told of, and "
    "at least one; compare without rounding, and leave out the tail: it is no full block"
)


def test_a_hint_comes_with_each_eighth_of_what_is_missing(lab: Judge) -> None:
    for blocks in (8, 16, lab.size.prompt_blocks, lab.random.randint(17, 60)):
        steps = [arrives(lab, blocks), *one_by_one("a", blocks)]
        seen = play(lab, steps)
        lab.expect(
            counts(seen),
            due(blocks, list(range(blocks + 1))),
            f"prefetch() after each of {blocks} blocks is stored (blocks that each hint names, 0: no hint)",
            RULE,
        )


def test_a_chunk_that_brings_too_little_is_told_with_the_next_one(lab: Judge) -> None:
    blocks = 8 * lab.random.randint(4, 7)
    part = blocks // 8
    steps = [arrives(lab, blocks), ["stored", "a", 0, part - 1]]
    steps += [["stored", "a", part - 1, 1], ["stored", "a", part, 1], ["stored", "a", part + 1, part]]
    seen = play(lab, steps)
    lab.expect(
        counts(seen),
        due(blocks, [0, part - 1, part, part + 1, 2 * part + 1]),
        f"prefetch() of a prompt of {blocks} blocks (blocks that the hint of each step names, 0: no hint)",
        f"{part} of {blocks} blocks are exactly an eighth, and pay; {part - 1} do not",
    )


def test_of_a_short_prompt_each_block_is_told(lab: Judge) -> None:
    blocks = lab.random.randint(3, 7)
    seen = play(lab, [arrives(lab, blocks), *one_by_one("a", blocks)])
    lab.expect(
        counts(seen),
        list(range(blocks + 1)),
        f"prefetch() after each of {blocks} blocks is stored (blocks that each hint names, 0: no hint)",
        "where an eighth is less than one block, one new block pays, and none does not",
    )


def test_without_a_new_block_there_is_no_hint(lab: Judge) -> None:
    blocks = lab.random.randint(2, 20)
    again: list[Step] = [["again", "a"]]
    steps = [arrives(lab, blocks), *again, ["stored", "a", 0, blocks], *again * 2]
    seen = play(lab, steps)
    lab.expect(
        counts(seen),
        [0, 0, blocks, 0, 0],
        f"prefetch() of a prompt of {blocks} blocks, also again (blocks that each hint names, 0: no hint)",
        "the same hint is sent once: `hinted` knows what the rank was told",
    )


def test_a_hint_names_all_blocks_from_the_first_one_on(lab: Judge) -> None:
    blocks = lab.random.randint(9, 30)
    seen = play(lab, [arrives(lab, blocks), *one_by_one("a", blocks)])
    for hints in seen.seen:
        for hint in hints:
            lab.expect(
                (hint.blocks, hint.tokens, hint.checked),
                (list(range(len(hint.blocks))), len(hint.blocks) * BLOCK_TOKENS, True),
                "prefetch() (numbers of the blocks in load + store, num_tokens, each with a check)",
                "a hint names every block that can be read, as `written` lists them, and their tokens",
            )
    lab.expect(
        {(hint.rank, hint.name, hint.attempt) for hints in seen.seen for hint in hints},
        {(3, "a", 1)},
        "prefetch() (rank, request and attempt of all hints)",
        "the hint goes to the decode rank of the request, and names the present attempt",
    )


def test_a_block_behind_a_gap_cannot_be_loaded(lab: Judge) -> None:
    blocks = lab.random.randint(12, 16)
    steps = [arrives(lab, blocks)]
    steps += [["stored", "a", 4, 3], ["stored", "a", 2, 2], ["stored", "a", 0, 2]]
    seen = play(lab, steps)
    lab.expect(
        counts(seen),
        [0, 0, 0, 7],
        f"prefetch() when later chunks of {blocks} blocks come first (blocks that each hint names)",
        "KV is of use to a decode rank from the first block on: `written` ends before the gap",
    )


def warm(lab: Judge, prefix: int, blocks: int) -> tuple[list[Step], list[int]]:
    """A first request stores `prefix` blocks; the second one begins with them. Returns steps and its keys."""
    first = keys(lab, prefix)
    rest = [1 + key + 10**6 for key in keys(lab, blocks - prefix)]
    return [["arrive", "w", first, prefix, 0], ["stored", "w", 0, prefix], ["ended", "w"]], [*first, *rest]


def test_the_known_beginning_is_told_when_the_prefill_begins(lab: Judge) -> None:
    blocks = lab.random.randint(24, 40)
    prefix = blocks // 2
    steps, names = warm(lab, prefix, blocks)
    steps += [arrives(lab, blocks, names), *one_by_one("a", blocks - prefix)]
    seen = play(lab, steps)
    lab.expect(
        counts(seen)[3:],
        due(blocks, list(range(prefix, blocks + 1))),
        f"prefetch() of {blocks} blocks of which {prefix} were in the pool before (blocks of each hint)",
        "blocks of `present.load` can be read at once; `load` and `store` together are the prompt's blocks",
    )


def test_another_decode_rank_is_told_from_the_beginning(lab: Judge) -> None:
    blocks = 8 * lab.random.randint(2, 4)
    half = blocks // 2
    steps = [arrives(lab, blocks), ["stored", "a", 0, half], ["moves", "a"]]
    steps += [
        ["again", "a"],
        ["again", "a"],
        ["stored", "a", half, blocks - half],
        ["moves", "a"],
        ["again", "a"],
    ]
    seen = play(lab, steps)
    lab.expect(
        [[(hint.rank, len(hint.blocks)) for hint in hints] for hints in seen.seen],
        [[], [(3, half)], [], [(4, half)], [], [(4, blocks)], [], [(3, blocks)]],
        "prefetch() of a prompt whose decode rank changes twice (rank and blocks of each hint)",
        "`hinted` is kept for each decode rank: what rank 3 was told, rank 4 does not know",
    )
    lab.expect(
        seen.hinted["a"],
        [blocks, blocks],
        "prefetch() (values of `present.hinted` at the end)",
        "`hinted` says how many blocks each rank was told of",
    )


def test_after_the_death_of_a_decode_rank_the_next_one_is_told(lab: Judge) -> None:
    blocks = 8 * lab.random.randint(2, 4)
    half = blocks // 2
    steps = [arrives(lab, blocks), ["stored", "a", 0, half], ["dies", "a"]]
    seen = play(lab, [*steps, ["stored", "a", half, 1], ["stored", "a", half + 1, blocks - half - 1]])
    lab.expect(
        [[(hint.rank, hint.blocks[-1]) for hint in hints] for hints in seen.seen],
        [[], [(3, half - 1)], [], [(4, half)], [(4, blocks - 1)]],
        "prefetch() of a prompt whose decode rank dies (rank and last block of each hint)",
        "the rank that takes its place knows nothing, so one more block is enough for a hint of all",
    )


def test_nothing_is_sent_where_a_hint_is_of_no_use(lab: Judge) -> None:
    blocks = lab.random.randint(8, 20)
    names = keys(lab, blocks)
    plain = [arrives(lab, blocks, names)]
    stored: list[Step] = [["stored", "a", 0, blocks]]
    cases = (
        ([*plain, *stored], False, "prefetches are off"),
        ([arrives(lab, blocks, []), *stored], True, "the request has no keys"),
        ([*plain, ["unplaced", "a"], *stored], True, "the request has lost its place"),
    )
    for steps, prefetches, why in cases:
        seen = play(lab, steps, prefetches)
        lab.expect(
            (sum(counts(seen)), seen.hinted["a"]),
            (0, []),
            f"prefetch() where {why} (blocks in all hints, values of `hinted`)",
            f"{why}, so no hint is sent, and none is noted",
        )


def test_few_hints_tell_of_a_long_prompt(lab: Judge) -> None:
    blocks = lab.size.prompt_blocks
    seen = play(lab, [arrives(lab, blocks), *one_by_one("a", blocks)])
    named = counts(seen)
    lab.cost(sum(map(bool, named)), sum(map(bool, due(blocks, list(range(blocks + 1))))))
    lab.expect(
        max(named),
        blocks,
        f"prefetch() after each of {blocks} blocks is stored (most blocks in a hint)",
        "when all blocks are stored, the decode rank has been told of all",
    )
