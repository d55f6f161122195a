"""6e: blocks that do not come, or come wrong, are read again, computed, or given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import MOST_WRONG, Rows, kv, rank, task, tokens_of, wrong_cells

Given = dict[str, Any]


class Seen(msgspec.Struct):
    """What became of a task. Fields: as drive_blocks.py tells them.

    computed_from   the first token that its rank computes; reads: (first block, blocks) of each transfer
    said            outcomes: name, and the blocks or the reason of some
    """

    stage: str
    computed_from: int
    reads: list[tuple[int, int]]
    said: list[list[Any]]
    failed_reads: int
    by_layers: bool
    loading: bool
    kv: Rows
    problem: str


def load(
    lab: Judge,
    given: Given,
    fails: dict[int, str] | None = None,
    by_layers: list[Any] | None = None,
    landed: int = 0,
    waits: int = 0,
    others: Sequence[Given] = (),
    **more: Any,
) -> Seen:
    inputs = rank(lab, [given, *others], landed=landed, waits=waits, by_layers=by_layers, **more)
    inputs["fails"] = {str(number): how for number, how in (fails or {}).items()}
    if by_layers is not None:
        inputs["least"] = 1
    called = called_with(given, fails or {}, by_layers, landed, waits)
    seen = lab.ask("load", inputs, Seen, called)
    lab.trace(drawn(called, fails or {}, by_layers, seen))
    return seen


def expect_sound_books(lab: Judge, seen: Seen, called: str) -> None:
    """The last of a test: a rule of its own says more than the assertion that has failed."""
    lab.expect(
        seen.problem,
        "",
        f"{called}, and then check() of the books (exception)",
        "check() asserts that a task is in one stage, and that its pages are its own",
    )


def called_with(
    given: Given, fails: dict[int, str], by_layers: list[Any] | None, landed: int, waits: int
) -> str:
    """The call in words."""
    what = {
        "prefill": "a prompt", "decode": "a task that only decodes", "prefetch": "a prefetch",
        "both": "a task that computes and decodes",
    }[given["duty"]]  # fmt: skip
    words = f"_read_failed() of {what} that loads {given['load']} blocks"
    words += f", {landed} of them in its pages before" * bool(landed)
    if by_layers is not None:
        return f"{words} by layers, {by_layers[0]} in layer {by_layers[1]}"
    if waits:
        return f"{words}, while {waits} blocks that have come wait in a half"
    numbers = ", ".join(f"{number} ({how})" for number, how in fails.items())
    return f"{words}, where transfers fail: {numbers or 'none'}"


def drawn(title: str, fails: dict[int, str], by_layers: list[Any] | None, seen: Seen) -> dict[str, Any]:
    """A table for `labs show`: the transfers, and what became of the task."""
    rows = []
    for number, (first, count) in enumerate(seen.reads[:20]):
        how = (by_layers[0] if by_layers else fails.get(number, "")) or "good"
        rows.append([f"transfer {number}", f"blocks {first} to {first + count - 1}", how])
    rows.append(["task", seen.stage, f"computes from token {seen.computed_from} on"])
    return {"kind": "table", "title": title, "columns": ["what", "which", "outcome"], "rows": rows}


def half(lab: Judge) -> int:
    return int(lab.size.half_blocks)


def prompt(lab: Judge, load: int, **more: Any) -> Given:
    """A prompt of which so many blocks are in the pool; the rest is computed."""
    blocks = load + lab.random.randint(1, 3)
    return task("p", blocks, load=load, stage="loading", tail=lab.random.randint(1, 3), **more)


def expect_right_kv(lab: Judge, given: Given, seen: Seen, called: str) -> None:
    """Every layer and token of the pages is right when the rank has computed what it wants to compute."""
    expected = [
        [kv(given["job"], layer, token) for token in range(tokens_of(lab, given))]
        for layer in range(lab.size.layers)
    ]
    lab.expect(
        wrong_cells("the pages", seen.kv, expected, 0)[:MOST_WRONG],
        [],
        f"{called} (what is wrong in the pages when tokens from {seen.computed_from} on are computed)",
        "what did not come, or came wrong, is computed, in every layer",
    )
    expect_sound_books(lab, seen, called)


def test_a_block_that_stays_bad_is_computed(lab: Judge) -> None:
    groups = lab.random.randint(3, 5)
    for how in ("bad", "lost"):
        for group in (0, 1, groups - 1):
            given = prompt(lab, groups * half(lab))
            seen = load(lab, given, {group: how, group + 1: how})
            called = f"_read_failed() when group {group} of {groups} is {how} twice"
            lab.expect(
                (seen.stage, seen.computed_from),
                ("prefilling", group * half(lab) * lab.size.block_tokens),
                f"{called} (stage, first token to compute)",
                "after the second failure the prompt computes the blocks from `first` on",
            )
            expect_right_kv(lab, given, seen, called)


def test_a_group_is_read_once_more_first(lab: Judge) -> None:
    groups = lab.random.randint(3, 5)
    load_blocks = groups * half(lab)
    bad = lab.random.randrange(groups)
    given = prompt(lab, load_blocks)
    seen = load(lab, given, {bad: lab.random.choice(["bad", "lost"])})
    order = [*range(bad + 1), *range(bad, groups)]
    lab.expect(
        (seen.reads, seen.failed_reads, seen.computed_from),
        ([(half(lab) * group, half(lab)) for group in order], 1, load_blocks * lab.size.block_tokens),
        f"_read_failed() when group {bad} of {groups} fails once (transfers, failed_reads, first token)",
        "the first failure counts, and the same group is read again; then reading goes on",
    )
    expect_right_kv(lab, given, seen, "_read_failed() after one failure")


def test_a_second_failure_of_another_group_counts_too(lab: Judge) -> None:
    given = prompt(lab, 4 * half(lab))
    seen = load(lab, given, {0: "lost", 3: "bad"})
    lab.expect(
        (seen.reads[-1], seen.failed_reads, seen.computed_from),
        ((2 * half(lab), half(lab)), 2, 2 * half(lab) * lab.size.block_tokens),
        "_read_failed() when group 0 fails once, then group 2 (last transfer, failed_reads, first token)",
        "failures of a task count together: after MOST_READ_AGAIN of them nothing is read again",
    )
    expect_right_kv(lab, given, seen, "_read_failed() after failures of two groups")


def test_blocks_that_are_in_pages_before_stay(lab: Judge) -> None:
    landed = lab.random.randint(1, 5)
    given = prompt(lab, landed + 2 * half(lab))
    seen = load(lab, given, {0: "bad", 1: "bad"}, landed=landed)
    lab.expect(
        (seen.stage, seen.computed_from, seen.said[-1]),
        ("prefilling", landed * lab.size.block_tokens, ["Loaded", landed]),
        f"_read_failed() when the group after {landed} blocks fails twice (stage, first token, outcome)",
        "blocks before `first` are used; Loaded says how many came",
    )
    expect_right_kv(lab, given, seen, "_read_failed()")


def test_a_prompt_waits_for_blocks_that_have_come_and_wait_in_a_half(lab: Judge) -> None:
    waits, landed = half(lab), lab.random.randint(0, 3)
    given = prompt(lab, landed + waits + 2 * half(lab))
    seen = load(lab, given, waits=waits, landed=landed)
    called = f"_read_failed() while {waits} blocks before `first` wait in a half"
    lab.expect(
        (seen.stage, seen.computed_from, len(seen.said)),
        ("prefilling", (landed + waits) * lab.size.block_tokens, 1),
        f"{called} (stage, first token to compute, outcomes)",
        "it goes on when `landed` reaches `first`, and not before: those blocks need not be computed",
    )
    lab.expect(seen.reads, [], f"{called} (transfers after it)", "no later block is read any more")
    expect_right_kv(lab, given, seen, called)


def test_a_task_that_decodes_its_own_prompt_computes_the_blocks(lab: Judge) -> None:
    given = prompt(lab, 2 * half(lab), duty="both")
    seen = load(lab, given, {1: "bad", 2: "bad"})
    called = "_read_failed() of a task that computes and decodes, when group 1 of 2 is bad twice"
    lab.expect(
        (seen.stage, seen.computed_from),
        ("prefilling", half(lab) * lab.size.block_tokens),
        f"{called} (stage, first token to compute)",
        "PREFILL is among the duties of the task, so it computes the blocks and does not fail",
    )
    expect_right_kv(lab, given, seen, called)


def test_a_prefetch_gives_up(lab: Judge) -> None:
    given = task("f", 3 * half(lab), load=3 * half(lab), stage="loading", duty="prefetch")
    for fails in ({0: "lost", 1: "lost"}, {1: "bad", 2: "bad"}):
        seen = load(lab, given, fails)
        lab.expect(
            (seen.stage, seen.loading, seen.said[-1], seen.failed_reads),
            ("gone", False, ["Prefetched", 0], 2),
            f"_read_failed() of a prefetch, {fails} (stage, whether it loads, outcome, failed_reads)",
            "nothing waits for a prefetch: it ends after the second failure",
        )
        expect_sound_books(lab, seen, "_read_failed() of a prefetch")


def test_a_task_that_only_decodes_fails(lab: Judge) -> None:
    blocks = 2 * half(lab)
    given = task("d", blocks - 1, load=blocks, tail=2, stage="loading", duty="decode")
    for duties, where in (([], "that only decodes"), (["prefill"], "that also computes prompts")):
        how = lab.random.choice(["bad", "lost"])
        seen = load(lab, given, {0: how, 1: how}, duties=duties)
        called = f"_read_failed() of a task that only decodes, on a rank {where}"
        lab.expect(
            (seen.stage, seen.loading, seen.said[-1]),
            ("gone", False, ["Failed", f"KV could not be moved: {how}"]),
            f"{called} (stage, whether the rank loads, outcome)",
            "the duties of the task decide, not those of the rank: it leaves `loading`, and fails",
        )
        expect_sound_books(lab, seen, called)


def test_a_task_that_only_decodes_reads_again_first(lab: Judge) -> None:
    blocks = 2 * half(lab)
    given = task("d", blocks - 1, load=blocks, tail=2, stage="loading", duty="decode")
    seen = load(lab, given, {1: "bad"})
    lab.expect(
        (seen.stage, seen.failed_reads, [first for first, _ in seen.reads]),
        ("running", 1, [0, half(lab), half(lab)]),
        "_read_failed() of a task that only decodes, after one failure (stage, failed_reads, transfers)",
        "the first failure changes nothing but the count and what is read next",
    )
    expect_sound_books(lab, seen, "_read_failed() of a task that only decodes")


def test_a_load_by_layers_that_fails_is_computed_at_once(lab: Judge) -> None:
    for how in ("bad", "lost"):
        layer = lab.random.randint(lab.size.layers // 2 + 1, lab.size.layers - 1)
        given = prompt(lab, half(lab) + 1)
        seen = load(lab, given, by_layers=[how, layer])
        called = f"_read_failed() of a load by layers that is {how} in layer {layer}"
        lab.expect(
            (seen.stage, seen.by_layers, seen.computed_from, len(seen.reads)),
            ("prefilling", False, 0, 1),
            f"{called} (stage, by_layers, first token to compute, transfers)",
            "the pass has computed nothing: the prompt is computed without the blocks; nothing is read again",
        )
        expect_right_kv(lab, given, seen, called)


def test_a_load_by_layers_that_fails_keeps_what_was_there_before(lab: Judge) -> None:
    landed = lab.random.randint(1, 3)
    given = prompt(lab, landed + 4)
    seen = load(lab, given, by_layers=["bad", lab.size.layers - 1], landed=landed)
    lab.expect(
        (seen.stage, seen.by_layers, seen.computed_from, seen.said),
        ("prefilling", False, landed * lab.size.block_tokens, [["BadBlocks"], ["Loaded", 0]]),
        f"_read_failed() of a load by layers after {landed} blocks (stage, by_layers, first token, outcomes)",
        "what lay in pages of the rank before the load is right, and is used",
    )
    expect_right_kv(lab, given, seen, "_read_failed() of a load by layers")


def test_a_load_by_layers_that_fails_leaves_another_task_loading(lab: Judge) -> None:
    given, other = prompt(lab, half(lab) + 1), task("q", 3, load=2, stage="loading")
    seen = load(lab, given, by_layers=["lost", lab.size.layers - 1], others=[other])
    called = "_read_failed() of a load by layers, while another task is in `state.loading`"
    lab.expect(
        (seen.stage, seen.loading),
        ("prefilling", True),
        f"{called} (stage, whether the rank loads)",
        "a task that came by layers is in `prefilling`: `loading` is another one, which goes on",
    )
    expect_right_kv(lab, given, seen, called)


def test_as_few_tokens_as_possible_are_computed_again(lab: Judge) -> None:
    blocks = lab.size.load_blocks
    given = task("p", blocks + 1, load=blocks, stage="loading")
    group = lab.size.bad_block // half(lab)
    seen = load(lab, given, {group: "bad", group + 1: "bad"})
    computed = tokens_of(lab, given) - seen.computed_from
    needed = tokens_of(lab, given) - group * half(lab) * lab.size.block_tokens
    lab.cost(computed, needed)
    expect_right_kv(
        lab, given, seen, f"_read_failed() when block {lab.size.bad_block} of {blocks} is bad twice"
    )
