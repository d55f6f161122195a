"""6b: blocks leave while a prompt is computed: only full ones, as many as fit into the free halves."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import Group, Rows, brief, drawn, expect_unchanged, rank, task, tokens_of, wrong

Given = dict[str, Any]


class Chosen(msgspec.Struct):
    """The groups, the halves that are left, what the pool has after them, and whether the books changed."""

    groups: list[Group]
    halves: list[int]
    pool: dict[str, Rows]
    changed: bool


class Stored(msgspec.Struct):
    """What each step began to write: (step, half, first, blocks), and in which steps all was done."""

    begun: list[tuple[int, int, int, int]]
    computed_at: int
    ended_at: int
    pool: dict[str, Rows]
    problem: str


def writes(lab: Judge, tasks: list[Given], halves: list[int] | None = None, **more: Any) -> Chosen:
    inputs = rank(lab, tasks, asked=[given["name"] for given in tasks], **more)
    inputs["halves"] = [0, 1] if halves is None else halves
    called = f"next_writes(state, {'; '.join(map(said, tasks))}, free_halves={inputs['halves']})"
    seen = lab.ask("writes", inputs, Chosen, called)
    lab.trace(
        drawn(
            f"groups that leave; halves left: {seen.halves}",
            seen.groups,
            {given["name"]: said(given) for given in tasks},
        )
    )
    expect_unchanged(lab, seen.changed, called)
    return seen


def said(given: Given) -> str:
    """A task in words."""
    words = [f"{given['name']}: {given['blocks']} blocks"]
    words += [f"{given['tail']} tokens more"] * bool(given["tail"])
    words += [f"{given['load']} from the pool"] * bool(given["load"])
    words += [f"of which it wants {given['to_load']}"] * (given["to_load"] is not None)
    words += [f"{given['computed']} tokens computed", f"{given['copied']} copied", given["stage"]]
    return ", ".join(words + [given["problem"]] * bool(given["problem"]))


def ended(lab: Judge, name: str, blocks: int, **more: Any) -> Given:
    """A prompt that is computed, and of which blocks still have to leave."""
    given = task(name, blocks, **{"stage": "storing", **more})
    return given | {"computed": tokens_of(lab, given)}


def in_groups(
    lab: Judge, name: str, begin: int, end: int, halves: list[int]
) -> list[tuple[str, int, int, int]]:
    """(task, half, first, blocks) of the groups that blocks begin .. end-1 of `out` make."""
    most = lab.size.half_blocks
    return [
        (name, half, first, min(most, end - first)) for half, first in zip(halves, range(begin, end, most))
    ]


def test_every_layer_of_every_block_reaches_the_pool(lab: Judge) -> None:
    given = task("a", 12, tail=lab.random.randint(1, 3))
    for chunk in (lab.random.randint(1, 7), 3 * lab.size.block_tokens, 10 * lab.size.block_tokens):
        inputs = rank(lab, [given], asked=["a"], chunk_tokens=chunk, line_steps=lab.random.randint(1, 4))
        called = (
            f"next_writes() in each step, while chunks of {chunk} tokens of 12 blocks and a tail are computed"
        )
        seen = lab.ask("stored", inputs, Stored, called)
        lab.expect(
            seen.problem, "", f"{called} (halves)", "a half has one group, until its transfer has ended"
        )
        lab.expect(
            wrong(lab, given, seen.pool, list(range(13))),
            [],
            f"{called} (what is wrong in the pool at the end)",
            "a block leaves once, from its own pages, when all of its tokens are computed",
        )


def test_of_a_prompt_only_full_blocks_leave(lab: Judge) -> None:
    size = lab.size.block_tokens
    for blocks, more in ((0, size - 1), (1, 0), (2, size - 1), (3, 1), (3, lab.random.randint(1, size - 1))):
        given = task("a", 9, computed=size * blocks + more)
        seen = writes(lab, [given])
        lab.expect(
            [len(group.places) for group in seen.groups],
            [blocks] if blocks else [],
            f"next_writes() of a prompt with {given['computed']} computed tokens (blocks of each group)",
            f"blocks have {size} tokens; one that is not full lacks KV, and what left would be wrong",
        )
        lab.expect(
            wrong(lab, given, seen.pool, list(range(blocks))),
            [],
            f"next_writes() of {given['computed']} computed tokens (what is wrong in the pool)",
            "each block comes from its own pages",
        )


def test_blocks_that_came_from_the_pool_do_not_leave_again(lab: Judge) -> None:
    size, load = lab.size.block_tokens, lab.random.randint(2, 5)
    for full in (load - 1, load, load + 1, load + 3):
        given = task("a", 10, load=load, computed=size * full)
        seen = writes(lab, [given])
        lab.expect(
            [group.numbers for group in seen.groups],
            [list(range(load, full))] if full > load else [],
            f"next_writes() of a prompt with {full} full blocks, {load} of them from the pool (numbers)",
            "`out` begins after the blocks of `job.load`, which count among the full ones",
        )
        lab.expect(
            wrong(lab, given, seen.pool, list(range(load, full))),
            [],
            "next_writes() (what is wrong in the pool)",
            "block numbers count from the beginning of the sequence",
        )


def test_blocks_that_were_not_loaded_after_all_are_kept_until_they_are_full(lab: Judge) -> None:
    size, load = lab.size.block_tokens, lab.random.randint(3, 5)
    for wants, full in ((0, 1), (load - 2, load), (1, load + 2)):
        given = task("a", 10, load=load, to_load=wants, computed=size * full)
        seen = writes(lab, [given])
        lab.expect(
            [group.numbers for group in seen.groups],
            [list(range(load, full))] if full > load else [],
            f"next_writes() of {said(given)} (numbers of each group)",
            "`out` begins after all blocks of `job.load`, also when some of them are not loaded but computed",
        )


def test_a_prompt_that_is_computed_stores_its_tail_too(lab: Judge) -> None:
    given = ended(lab, "a", 2, tail=lab.random.randint(1, lab.size.block_tokens - 1))
    for stage in ("storing", "drawing"):
        seen = writes(lab, [given | {"stage": stage}])
        lab.expect(
            brief(seen.groups),
            in_groups(lab, "a", 0, 3, [0, 1]),
            f"next_writes() of a task that is {stage}: 2 full blocks and a tail (task, half, first, blocks)",
            "only a prompt that is still computed keeps blocks back that are not full",
        )
        lab.expect(
            wrong(lab, given, seen.pool, [0, 1, 2]),
            [],
            "next_writes() (what is wrong in the pool)",
            "the tail comes from its own pages, which may be fewer",
        )


def test_a_group_fills_a_half_and_no_more(lab: Judge) -> None:
    most = lab.size.half_blocks
    for blocks in (most - 1, most, most + 1, 2 * most, 2 * most + 3):
        seen = writes(lab, [ended(lab, "a", blocks)])
        lab.expect(
            brief(seen.groups),
            in_groups(lab, "a", 0, blocks, [0, 1]),
            f"next_writes() of {blocks} blocks into halves of {most} (task, half, first, blocks)",
            "a group takes as many blocks as a half has space for, and the next half takes the next ones",
        )
        expected = [(group.first, [f"a:{n}" for n in group.numbers], group.first) for group in seen.groups]
        lab.expect(
            [(group.first, group.places, group.numbers[0]) for group in seen.groups],
            expected,
            "next_writes() (first, places and first number of each group)",
            "`places` and `numbers` are those of the same blocks",
        )
    given = task("b", 2 * most + 3, computed=(2 * most + 1) * lab.size.block_tokens)
    lab.expect(
        brief(writes(lab, [given]).groups),
        in_groups(lab, "b", 0, 2 * most + 1, [0, 1]),
        f"next_writes() of {said(given)} into halves of {most} (task, half, first, blocks)",
        "a prompt that is still computed may begin several groups too",
    )


def test_without_a_free_half_blocks_wait(lab: Judge) -> None:
    most = lab.size.half_blocks
    for halves in ([], [1], [0], [1, 0]):
        seen = writes(lab, [ended(lab, "a", 3 * most)], halves)
        lab.expect(
            (brief(seen.groups), seen.halves),
            (in_groups(lab, "a", 0, 3 * most, halves), []),
            f"next_writes() of {3 * most} blocks with the free halves {halves} (groups, halves left)",
            "each group takes the first free half out of the list; without one the blocks wait",
        )


def test_a_half_that_is_not_needed_stays_free(lab: Judge) -> None:
    seen = writes(lab, [ended(lab, "a", 1), ended(lab, "b", 2, copied=2)], [1, 0])
    lab.expect(
        (brief(seen.groups), seen.halves),
        ([("a", 1, 0, 1)], [0]),
        "next_writes() of one block, and of a task without any that has to leave (groups, halves left)",
        "others use the halves that are left",
    )
    given = task("c", 4, computed=3 * lab.size.block_tokens, duty="both", out=[])
    seen = writes(lab, [given])
    lab.expect(
        (brief(seen.groups), seen.halves),
        ([], [0, 1]),
        f"next_writes() of a prompt that its rank decodes too, {said(given)}, out=[] (groups, halves left)",
        "only blocks of `out` leave: a task that decodes its own prompt writes none, however many are full",
    )


def test_blocks_that_have_begun_to_leave_do_not_leave_twice(lab: Judge) -> None:
    size, copied = lab.size.block_tokens, lab.random.randint(1, 3)
    for given, end in (
        (task("a", 12, copied=copied, computed=size * (copied + 2)), copied + 2),
        (task("a", 12, copied=copied, load=3, computed=size * (copied + 4)), copied + 1),
        (task("a", 12, copied=copied, computed=size * copied), copied),
        (ended(lab, "a", copied + 3, copied=copied), copied + 3),
    ):
        seen = writes(lab, [given])
        lab.expect(
            brief(seen.groups),
            in_groups(lab, "a", copied, end, [0, 1]),
            f"next_writes() of {said(given)} (task, half, first, blocks)",
            "the first block is the one of number `copied` in `out`",
        )
        numbers = list(range(given["load"] + copied, given["load"] + end))
        lab.expect(
            wrong(lab, given, seen.pool, numbers), [], "next_writes() (what is wrong in the pool)", "as above"
        )


def test_tasks_are_served_in_their_order(lab: Judge) -> None:
    most, size = lab.size.half_blocks, lab.size.block_tokens
    old, young = lab.random.sample("bcdefg", 2)
    first, second = ended(lab, old, most + 1), task(young, 9, computed=3 * size)
    for tasks, expected in (
        ([first, second], in_groups(lab, old, 0, most + 1, [0, 1])),
        ([second, first], [*in_groups(lab, young, 0, 3, [0]), *in_groups(lab, old, 0, most, [1])]),
    ):
        seen = writes(lab, tasks)
        lab.expect(
            brief(seen.groups),
            expected,
            f"next_writes() of {'; '.join(map(said, tasks))} (task, half, first, blocks)",
            "a task takes as many halves as it can use, before the next task gets one",
        )


def test_nothing_leaves_of_a_task_that_has_failed(lab: Judge) -> None:
    size = lab.size.block_tokens
    tasks = [
        ended(lab, "a", 2, problem="a transfer has failed"),
        task("b", 5, computed=2 * size, problem="a transfer has failed"),
        ended(lab, "c", 1),
    ]
    seen = writes(lab, tasks)
    lab.expect(
        brief(seen.groups),
        [("c", 0, 0, 1)],
        f"next_writes() of {'; '.join(map(said, tasks))} (task, half, first, blocks)",
        "of a task with a `problem` nothing more leaves, and it takes no half",
    )


def test_of_a_swap_the_blocks_that_the_pool_has_are_left_out(lab: Judge) -> None:
    numbers = sorted(lab.random.sample(range(9), 3))
    given = ended(lab, "a", 9, stage="swapping", out=numbers)
    seen = writes(lab, [given], half_blocks=4)
    lab.expect(
        [(group.first, group.numbers) for group in seen.groups],
        [(0, numbers)],
        f"next_writes() of a task whose `out` has the blocks {numbers} (first, numbers)",
        "`out` says which blocks leave: `first` is a place in `out`, `numbers` are those of the blocks",
    )
    lab.expect(
        wrong(lab, given, seen.pool, numbers),
        [],
        "next_writes() (what is wrong in the pool)",
        "the pages are those of the block's number in the sequence",
    )


def test_of_a_swap_all_blocks_of_out_leave(lab: Judge) -> None:
    blocks = lab.random.randint(5, 7)
    numbers = [*sorted(lab.random.sample(range(1, blocks), 2)), blocks]
    given = task(
        "d", blocks, load=blocks, tail=lab.random.randint(1, 3), stage="swapping", duty="decode", out=numbers
    )
    given["computed"] = tokens_of(lab, given) - 1
    seen = writes(lab, [given], half_blocks=4)
    lab.expect(
        [(group.first, group.numbers) for group in seen.groups],
        [(0, numbers)],
        f"next_writes() of a swap, {said(given)}, out={numbers} (first, numbers)",
        "every task that is not in `state.prefilling` is complete, a swap too: its tail and the blocks of "
        "`job.load` are no reason to keep blocks back, nor is a last token without KV",
    )
    lab.expect(
        wrong(lab, given, seen.pool, numbers[:2]),
        [],
        "next_writes() of a swap (what is wrong in the pool)",
        "the pages are those of the block's number in the sequence",
    )


def test_most_of_a_prompt_leaves_while_it_is_computed(lab: Judge) -> None:
    size, blocks = lab.size, lab.size.prompt_blocks
    given = task("a", blocks)
    chunk = size.chunk_blocks * size.block_tokens
    inputs = rank(lab, [given], asked=["a"], chunk_tokens=chunk, line_steps=size.line_steps)
    called = (
        f"next_writes() in each step, while chunks of {size.chunk_blocks} of {blocks} blocks are computed"
    )
    seen = lab.ask("stored", inputs, Stored, called)
    lab.cost(seen.ended_at - seen.computed_at, steps_behind(lab, blocks))
    lab.expect(
        (wrong(lab, given, seen.pool, list(range(blocks))), seen.problem),
        ([], ""),
        f"{called} (what is wrong in the pool, halves)",
        "every layer of every block reaches the pool",
    )


def steps_behind(lab: Judge, blocks: int) -> int:
    """Steps from the last chunk to the end of the store, when each half that is free takes what is ready."""
    size, full, copied, step = lab.size, 0, 0, 0
    free_at, computed_at = [0, 0], 0
    while copied < blocks or max(free_at) > step:
        step += 1
        for half in (0, 1):
            if free_at[half] <= step and copied < full:
                copied += min(size.half_blocks, full - copied)
                free_at[half] = step + size.line_steps
        if full < blocks:
            full = min(blocks, full + size.chunk_blocks)
            computed_at = step if full == blocks else 0
    return step - computed_at
