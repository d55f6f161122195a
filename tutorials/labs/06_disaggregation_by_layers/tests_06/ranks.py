"""Ranks as drive_blocks.py is asked to build them, and what must lie in the pool then, layer by layer."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Rows = list[list[int]]
"""KV of some tokens: for each layer the numbers of the tokens."""

MOST_WRONG = 4
"""Wrong numbers that a message shows."""


class Group(msgspec.Struct):
    """A WriteGroup. Fields: as there, with the name of the task for its job."""

    half: int
    job: str
    first: int
    places: list[str]
    pages: list[int]
    numbers: list[int]
    behind: bool


def kv(job: int, layer: int, token: int) -> int:
    """The KV of a token in a layer: each has a number of its own."""
    return 1_000_000 * job + 10_000 * layer + token


def task(name: str, blocks: int, **more: Any) -> dict[str, Any]:
    """A prompt that fills so many blocks, perhaps with a tail. Nothing is computed or has begun to leave.

    load       blocks that came from the pool; computed: tokens whose KV is in the pages
    to_load    blocks that the task still wants of them, if not all
    copied     blocks of `out` that have begun to leave; out: numbers of the blocks in it, if not the usual
    stage, duty, problem   as in State, Job and Task
    """
    given = {"name": name, "job": 1 + ord(name[0]) % 7, "blocks": blocks, "tail": 0, "load": 0, "out": None}
    given |= {
        "to_load": None,
        "duty": "prefill",
        "copied": 0,
        "problem": "",
        "computed": 0,
        "stage": "prefilling",
    }
    return given | more


def rank(lab: Judge, tasks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The inputs of drive_blocks.py. Pages are dealt out at random, so that their numbers mean nothing.

    duties   in `more`: what the rank does besides the duties of its tasks
    """
    size = lab.size.block_tokens
    count = sum(2 * given["blocks"] + 2 for given in tasks)
    return {
        "layers": lab.size.layers, "block_tokens": size, "half_blocks": lab.size.half_blocks, "tasks": tasks,
        "pages": lab.random.sample(range(count), count), "halves": [0, 1], **more,
    }  # fmt: skip


def tokens_of(lab: Judge, given: dict[str, Any]) -> int:
    """Tokens of a prompt."""
    return int(lab.size.block_tokens * given["blocks"] + given["tail"])


def wrong(lab: Judge, given: dict[str, Any], pool: dict[str, Rows], numbers: list[int]) -> list[str]:
    """What is wrong in these blocks of a task in the pool: all layers and tokens are compared."""
    found, size, end = [], lab.size.block_tokens, tokens_of(lab, given)
    for number in numbers:
        rows = pool.get(f"{given['name']}:{number}", [])
        expected = [
            [kv(given["job"], layer, token) for token in range(size * number, min(size * (number + 1), end))]
            for layer in range(lab.size.layers)
        ]
        found += wrong_cells(f"block {number}", rows, expected, size * number)
    return found[:MOST_WRONG]


def wrong_cells(what: str, rows: Rows, expected: Rows, first: int) -> list[str]:
    """Where rows are not those expected. first: number of the first token."""
    if not rows:
        return [f"{what} is not there"]
    found = []
    for layer, right in enumerate(expected):
        row = rows[layer] if layer < len(rows) else []
        row = row + [-1] * (len(right) - len(row))
        bad = [place for place, number in enumerate(right) if row[place] != number]
        if bad:
            seen, wanted = row[bad[0]], right[bad[0]]
            found.append(f"{what}, layer {layer}, token {first + bad[0]}: {named(seen)}, not {named(wanted)}")
    return found


def named(number: int) -> str:
    """A number of the memory in words."""
    if number < 1_000_000:
        return "nothing" if number < 0 else "bad bytes"
    return f"KV of layer {number % 1_000_000 // 10_000}, token {number % 10_000}"


def drawn(title: str, groups: list[Group], asked: dict[str, str]) -> dict[str, Any]:
    """A table for `labs show`: the groups that were chosen, then the tasks without one in words (`asked`)."""
    rows = [
        [
            group.job,
            str(group.half),
            str(group.first),
            " ".join(place.split(":")[1] for place in group.places),
            "behind the pass" if group.behind else "now",
        ]
        for group in groups
    ]
    begun = {group.job for group in groups}
    rows += [[name, "-", "-", words, "no group"] for name, words in asked.items() if name not in begun]
    columns = ["task", "half", "first", "blocks (numbers)", "leaves"]
    return {"kind": "table", "title": title, "columns": columns, "rows": rows}


def brief(groups: list[Group]) -> list[tuple[str, int, int, int]]:
    """(task, half, first, number of blocks) of each group."""
    return [(group.job, group.half, group.first, len(group.places)) for group in groups]


def expect_unchanged(lab: Judge, changed: bool, called: str) -> None:
    """The region has only chosen."""
    before = "as before"
    lab.expect(
        "changed" if changed else before, before, f"{called} (the books)", "it chooses; it changes nothing"
    )
