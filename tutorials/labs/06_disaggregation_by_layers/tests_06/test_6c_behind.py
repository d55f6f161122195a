"""6c: the last blocks of a prompt leave behind its last pass, layer by layer."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import Group, Rows, brief, drawn, expect_unchanged, rank, task, tokens_of, wrong

Given = dict[str, Any]
Chunk = list[Any]


class Chosen(msgspec.Struct):
    """The groups, the halves that are left, what the pool has after the pass, and questions for pages."""

    groups: list[Group]
    halves: list[int]
    pool: dict[str, Rows]
    changed: bool
    asked: int


def last(lab: Judge, given: Given) -> Chunk:
    """The chunk that ends the computing of a prompt: it draws the first token."""
    return [given["name"], given["computed"], tokens_of(lab, given) - given["computed"], True, True]


def ending(lab: Judge, name: str, blocks: int, left: int | None = None, **more: Any) -> Given:
    """A prompt whose last pass comes. left: blocks that have not begun to leave; None: all."""
    given = task(name, blocks, **more)
    if left is not None:
        given["copied"] = blocks + (given["tail"] > 0) - given["load"] - left
    size = lab.size.block_tokens
    given["computed"] = size * max(given["load"], given["load"] + given["copied"] - lab.random.randint(0, 1))
    given["computed"] = min(given["computed"], tokens_of(lab, given) - 1)
    return given


def behind(
    lab: Judge,
    tasks: list[Given],
    chunks: list[Chunk] | None = None,
    writes: list[list[Any]] | None = None,
    halves: list[int] | None = None,
    least: int = 1,
    **more: Any,
) -> Chosen:
    chunks = [last(lab, given) for given in tasks] if chunks is None else chunks
    inputs = rank(lab, tasks, chunks=chunks, writes=writes or [], least=least, **more)
    inputs["halves"] = [0, 1] if halves is None else halves
    called = (
        f"next_behind(state, chunks of {', '.join(map(said, chunks)) or 'no prompt'}, writes={writes or []}, "
        f"free_halves={inputs['halves']}), {'; '.join(map(told, tasks))}"
    )
    seen = lab.ask("behind", inputs, Chosen, called)
    words = {given["name"]: told(given) for given in tasks}
    words |= {chunk[0]: f"{words[chunk[0]]}; chunk {said(chunk)}" for chunk in chunks}
    lab.trace(drawn(f"groups that leave behind the pass; halves left: {seen.halves}", seen.groups, words))
    expect_unchanged(lab, seen.changed, called)
    return seen


def said(chunk: Chunk) -> str:
    """A chunk in words."""
    name, first, count, prompt, draws = chunk
    kind = "" if prompt else ", of the running batch"
    return f"{name} (tokens {first} to {first + count - 1}{kind}{', draws' if draws else ''})"


def told(given: Given) -> str:
    """A task in words."""
    blocks = given["blocks"] + (given["tail"] > 0) - given["load"]
    return f"{given['name']} has {blocks} blocks in `out`, {given['copied']} copied"


def most(lab: Judge) -> int:
    """Blocks for which a half has space, two layers of each."""
    return int(lab.size.half_blocks * lab.size.layers // 2)


def test_every_layer_of_the_last_blocks_leaves_behind_the_pass(lab: Judge) -> None:
    for blocks in (1, 2, lab.random.randint(3, 9)):
        given = ending(lab, "a", blocks, tail=lab.random.randint(0, 3))
        seen = behind(lab, [given])
        count = blocks + (given["tail"] > 0)
        lab.expect(
            (brief(seen.groups), [group.behind for group in seen.groups]),
            ([("a", 0, 0, count)], [True]),
            f"next_behind() of a prompt with {count} blocks (task, half, first, blocks; behind)",
            "all blocks that have not begun to leave are one group, `behind` the pass",
        )
        lab.expect(
            wrong(lab, given, seen.pool, list(range(count))),
            [],
            "next_behind() (what is wrong in the pool after the pass)",
            "every layer of every block is in the pool: pages and places are those of the same blocks",
        )


def test_blocks_that_have_begun_to_leave_are_not_in_it(lab: Judge) -> None:
    load = lab.random.randint(1, 2)
    for left in (1, 3):
        given = ending(lab, "a", load + 7, left, load=load)
        seen = behind(lab, [given])
        lab.expect(
            (brief(seen.groups), [group.places for group in seen.groups]),
            ([("a", 0, 7 - left, left)], [[f"a:{number}" for number in range(load + 7 - left, load + 7)]]),
            f"next_behind() of a prompt with 7 blocks in `out`, {7 - left} copied (group, places)",
            "the group begins at the block `copied` of `out`",
        )
        lab.expect(
            wrong(lab, given, seen.pool, list(range(load + 7 - left, load + 7))),
            [],
            "next_behind() (what is wrong in the pool after the pass)",
            "blocks of `job.load` count in the sequence, and not in `out`",
        )


def test_blocks_of_earlier_chunks_that_still_wait_are_in_it(lab: Judge) -> None:
    size, load = lab.size.block_tokens, lab.random.randint(0, 2)
    copied, ahead = lab.random.randint(0, 2), lab.random.randint(2, 3)
    given = task("a", load + 7, load=load, copied=copied, computed=size * (load + copied + ahead))
    seen = behind(lab, [given])
    lab.expect(
        brief(seen.groups),
        [("a", 0, copied, 7 - copied)],
        f"next_behind() of a pass that begins {ahead} blocks behind `copied` (task, half, first, blocks)",
        "all blocks that have not begun to leave are in the group, also those of earlier chunks",
    )
    lab.expect(
        wrong(lab, given, seen.pool, list(range(load + copied, load + 7))),
        [],
        "next_behind() (what is wrong in the pool after the pass)",
        "pages and places are those of the same blocks",
    )


def test_blocks_that_begin_in_the_same_step_are_not_in_it(lab: Judge) -> None:
    a, b = ending(lab, "a", 8, 6), ending(lab, "b", 5, 4)
    for writes, a_first, b_first in (
        ([["a", 2]], 4, 1),
        ([["a", 1], ["a", 2]], 5, 1),
        ([["b", 3], ["a", 1]], 3, 4),
    ):
        seen = behind(lab, [a, b], writes=writes)
        lab.expect(
            brief(seen.groups),
            [("a", 0, a_first, 8 - a_first), ("b", 1, b_first, 5 - b_first)],
            f"next_behind() of a (2 of 8 blocks copied) and b (1 of 5), writes={writes} (groups)",
            "a group of `writes` begins in this step, so `copied` does not count it; each task has its own",
        )


def test_only_the_pass_that_ends_a_prompt_counts(lab: Judge) -> None:
    size = lab.size.block_tokens
    given = task("a", 9, computed=2 * size, copied=2)
    other = ending(lab, "b", 2)
    chunks = [["a", 2 * size, 3 * size, True, False], last(lab, other)]
    seen = behind(lab, [given, other], chunks)
    lab.expect(
        brief(seen.groups),
        [("b", 0, 0, 2)],
        "next_behind() of a prompt that goes on, and of one that ends (task, half, first, blocks)",
        "a chunk that draws no token is not the last one of its prompt, whose blocks leave by chunks",
    )


def test_the_running_batch_has_no_last_blocks(lab: Judge) -> None:
    size = lab.size.block_tokens
    running = task("r", 3, computed=3 * size - 1, stage="running", duty="decode")
    chunk = ["r", 3 * size - 1, 1, False, True]
    other = ending(lab, "b", 3)
    for chunks in ([chunk], [chunk, last(lab, other)]):
        seen = behind(lab, [running, other], chunks)
        lab.expect(
            brief(seen.groups),
            [("b", 0, 0, 3)] * (len(chunks) - 1),
            "next_behind() of a running sequence, alone and beside a prompt (task, half, first, blocks)",
            "a chunk of the running batch draws a token too, but is not of a prompt",
        )


def test_a_half_has_space_for_two_layers_of_all_blocks(lab: Judge) -> None:
    space = most(lab)
    for left, half_blocks, layers in (
        (space, lab.size.half_blocks, lab.size.layers),
        (space + 1, lab.size.half_blocks, lab.size.layers),
        (7, 3, 5),
        (8, 3, 5),
    ):
        fits = left <= half_blocks * layers // 2
        seen = behind(lab, [ending(lab, "a", left + 2, left)], half_blocks=half_blocks, layers=layers)
        lab.expect(
            (brief(seen.groups), seen.halves),
            ([("a", 0, 2, left)], [1]) if fits else ([], [0, 1]),
            f"next_behind() of {left} blocks, {layers} layers, halves of {half_blocks} (groups, halves left)",
            f"each part of a half takes a layer of all blocks: {half_blocks} * {layers} // 2 blocks at most",
        )


def test_so_few_blocks_are_as_fast_as_a_whole(lab: Judge) -> None:
    least = lab.random.randint(3, 5)
    for left in (least - 1, least):
        seen = behind(lab, [ending(lab, "a", 7, left)], least=least)
        lab.expect(
            brief(seen.groups),
            [("a", 0, 7 - left, left)] if left == least else [],
            f"next_behind() of {left} blocks where least={least} (task, half, first, blocks)",
            "fewer blocks than `limits.least` move whole, after the pass",
        )


def test_nothing_leaves_where_nothing_is_left(lab: Judge) -> None:
    given = ending(lab, "a", 5, 2)
    seen = behind(lab, [given], writes=[["a", 2]])
    lab.expect(
        (brief(seen.groups), seen.halves),
        ([], [0, 1]),
        "next_behind() of a prompt whose last blocks begin to leave in the same step (groups, halves left)",
        "a group has at least one block, and takes no half without",
    )


def test_each_group_takes_a_half(lab: Judge) -> None:
    tasks = [ending(lab, name, lab.random.randint(1, 4)) for name in "cab"]
    counts = {given["name"]: given["blocks"] for given in tasks}
    for halves in ([0, 1], [1, 0], [1], []):
        seen = behind(lab, tasks, halves=halves)
        served = list(zip("cab", halves))
        lab.expect(
            (brief(seen.groups), seen.halves),
            ([(name, half, 0, counts[name]) for name, half in served], []),
            f"next_behind() of three prompts that end, with the free halves {halves} (groups, halves left)",
            "chunks are served in their order, as long as there are free halves; each takes the first one",
        )
        for name, _ in served:
            (given,) = [one for one in tasks if one["name"] == name]
            lab.expect(
                wrong(lab, given, seen.pool, list(range(counts[name]))),
                [],
                f"next_behind() (what is wrong in the pool of {name})",
                "each task has its own pages and places",
            )


def test_a_prompt_that_does_not_fit_leaves_its_half_to_the_next_one(lab: Judge) -> None:
    large, small = ending(lab, "a", most(lab) + 1), ending(lab, "b", 3)
    for least, tiny in ((1, most(lab) + 2), (3, 2)):
        seen = behind(lab, [large, ending(lab, "c", tiny), small], halves=[1], least=least)
        lab.expect(
            (brief(seen.groups), seen.halves),
            ([("b", 1, 0, 3)], []),
            f"next_behind() of {most(lab) + 1}, {tiny} and 3 blocks, least={least} (groups, halves)",
            "a prompt whose blocks do not leave by layers takes no half, and the next one may",
        )


def test_pages_are_asked_only_for_blocks_that_leave(lab: Judge) -> None:
    first, second = lab.size.last_blocks, lab.size.last_blocks + 3
    tasks = [
        ending(lab, "a", first + 9, first),
        ending(lab, "b", 4 * most(lab), 3 * most(lab)),
        ending(lab, "c", second + 5, second),
        ending(lab, "d", first + 1, first),
    ]
    seen = behind(lab, tasks, half_blocks=lab.size.half_blocks)
    lab.cost(seen.asked, 2 * (first + second), needed=first + second)
    lab.expect(
        [(group.job, len(group.places)) for group in seen.groups],
        [("a", first), ("c", second)],
        "next_behind() of four prompts that end (task and blocks of each group)",
        "two halves are free, and one of the prompts has too many blocks",
    )
