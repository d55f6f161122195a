"""6d: a store by layers takes, sends and waits so that as little as possible is left after the pass."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Given = dict[str, Any]


class Seen(msgspec.Struct):
    """The acts, each with its tick, and what the pool has at the end. Fields: as drive.py tells them."""

    acts: list[list[Any]]
    pool: list[list[int]]
    ended_at: int
    taken: int
    early: list[int]
    changed: bool
    problem: str


class Decided(msgspec.Struct):
    """The act for one state, and whether the state was changed."""

    act: list[Any]
    changed: bool


def cut(layers: int, size: int) -> list[tuple[int, int]]:
    """Groups of `size` layers; the last one may have fewer."""
    return [(first, min(first + size, layers)) for first in range(0, layers, size)]


def given(lab: Judge, **more: Any) -> Given:
    """A store of the variant: `size` layers in a group."""
    known: Given = {
        "layers": lab.size.layers,
        "blocks": lab.random.randint(1, 4),
        "size": 2,
        "fails_after": None,
    }
    known |= {"layer_ticks": 5, "copy_ticks": 1, "send_ticks": lab.size.send_ticks, **more}
    return known | {"groups": cut(known["layers"], known.pop("size"))}


def said(case: Given) -> str:
    """The case in words."""
    times = ", ".join(f"{case[name]} {name}" for name in ("layer_ticks", "copy_ticks", "send_ticks"))
    fails = "" if case["fails_after"] is None else f", the pass fails after {case['fails_after']} layers"
    return (
        f"next_act() again and again: {case['layers']} layers in {len(case['groups'])} groups, {times}{fails}"
    )


def store(lab: Judge, case: Given) -> Seen:
    seen = lab.ask("store", case, Seen, said(case))
    lab.trace(drawn(case, seen))
    return seen


def drawn(case: Given, seen: Seen) -> dict[str, Any]:
    """A table for `labs show`: when each act happens, beside the layer that the pass computes then."""
    rows = []
    for tick, verb, *words in seen.acts[:40]:
        ticks = case["layer_ticks"]
        layer = tick // ticks if ticks else case["layers"]
        what = (
            f"layers {words[0]} to {words[1] - 1}, part {words[2]}"
            if verb == "take"
            else " ".join(map(str, words))
        )
        rows.append([str(tick), f"layer {layer}" if layer < case["layers"] else "over", verb, what])
    title = f"a store by layers; {seen.problem or 'it ended'} at tick {seen.ended_at}"
    return {"kind": "table", "title": title, "columns": ["tick", "pass", "act", "of"], "rows": rows}


def wrong(case: Given, seen: Seen, layers: int) -> list[str]:
    """What is wrong in the pool in the first so many layers; all blocks are compared."""
    found = []
    for block in range(case["blocks"]):
        for layer in range(layers):
            number = seen.pool[block][layer]
            if number != 1000 * block + layer:
                what = "nothing" if number < 0 else f"layer {number % 1000} of block {number // 1000}"
                found.append(f"block {block}, layer {layer} has {what}")
    return found[:4]


def best_end(case: Given) -> int:
    """The tick at which the last byte has left, if nothing waits longer than it must."""
    ends: list[int] = []
    free_at = link_free_at = 0
    for number, (first, end) in enumerate(case["groups"]):
        part_free_at = ends[number - 2] if number > 1 else 0
        begin = max(free_at, end * case["layer_ticks"], part_free_at)
        free_at = begin + case["copy_ticks"] * (end - first)
        link_free_at = max(link_free_at, free_at) + case["send_ticks"] * (end - first)
        ends.append(link_free_at)
    return ends[-1]


def speeds(lab: Judge) -> list[Given]:
    """Passes, copies and links of different speeds, and groups of different sizes."""
    slow, fast = lab.random.randint(7, 12), lab.random.randint(1, 3)
    return [
        given(lab, layer_ticks=slow, send_ticks=fast),
        given(lab, layer_ticks=fast, send_ticks=slow),
        given(lab, layer_ticks=fast, send_ticks=slow, size=3),
        given(lab, layer_ticks=0, send_ticks=slow, copy_ticks=0),
        given(lab, layer_ticks=5, send_ticks=5, copy_ticks=4, size=1),
        given(lab, size=lab.size.layers),
        given(lab, layers=lab.random.randint(5, 9) * 2 + 1, size=2),
    ]


def ask(lab: Judge, states: list[Given]) -> list[list[Any]]:
    """Return the act of each state."""
    called = f"next_act(Leaving({states[0]}))" + f" and {len(states) - 1} more" * (len(states) > 1)
    seen = lab.ask("decide", [dict(state) for state in states], list[Decided], called)
    rows = [[told(state), " ".join(map(str, one.act))] for state, one in zip(states, seen)]
    lab.trace({"kind": "table", "title": "what comes next", "columns": ["state", "act"], "rows": rows})
    lab.expect([one.changed for one in seen], [False] * len(seen), f"{called} (changed)", "it only chooses")
    return [one.act for one in seen]


def told(state: Given) -> str:
    """A state in words, without its groups."""
    return ", ".join(f"{name}={value}" for name, value in state.items() if name != "groups")


def decides(lab: Judge, state: Given, expected: list[Any], breaks: str) -> None:
    (act,) = ask(lab, [state])
    lab.expect(
        act, expected, f"next_act() of {len(state['groups'])} groups of 2 layers, {told(state)}", breaks
    )


def test_every_layer_of_every_block_reaches_the_pool(lab: Judge) -> None:
    for case in speeds(lab):
        seen = store(lab, case)
        lab.expect(seen.problem, "", f"{said(case)} (what goes wrong)", "docstring of next_act")
        lab.expect(
            wrong(case, seen, case["layers"]),
            [],
            f"{said(case)} (what is wrong in the pool)",
            "a layer leaves once it is computed, and its part is not filled again before it has left",
        )


def test_a_layer_is_taken_once_the_pass_has_computed_it(lab: Judge) -> None:
    for case in speeds(lab):
        seen = store(lab, case)
        lab.expect(
            seen.early,
            [],
            f"{said(case)} (layers that were taken before they were computed)",
            "a group is computed when its last layer is; `reached` counts layers: layer 3 needs reached = 4",
        )


def test_the_exact_moment_at_which_a_group_is_computed(lab: Judge) -> None:
    groups, number = cut(20, 2), lab.random.randint(1, 8)
    first = 2 * number
    state = {"groups": groups, "taken": number, "begun": number, "flying": 0}
    for reached, expected in (
        (first, ["wait", "computed"]),
        (first + 1, ["wait", "computed"]),
        (first + 2, ["take", first, first + 2, number % 2]),
        (20, ["take", first, first + 2, number % 2]),
    ):
        decides(lab, state | {"reached": reached}, expected, f"group {number} ends with layer {first + 1}")


def test_groups_leave_in_their_order_through_both_parts(lab: Judge) -> None:
    case = given(lab, size=lab.random.randint(1, 3))
    seen = store(lab, case)
    taken = [act[2:] for act in seen.acts if act[1] == "take"]
    lab.expect(
        taken,
        [[first, end, number % 2] for number, (first, end) in enumerate(case["groups"])],
        f"{said(case)} (first layer, end and part of each Take)",
        "group n goes through part n % 2: one part is filled while the other one leaves",
    )


def test_what_was_taken_is_sent_before_anything_else(lab: Judge) -> None:
    groups, number = cut(20, 2), lab.random.randint(0, 9)
    for reached, flying, aborted in (
        (20, 0, False),
        (2 * number + 2, 1, False),
        (20, 1, False),
        (19, 1, True),
    ):
        state = {"groups": groups, "taken": number + 1, "begun": number, "flying": min(flying, number)}
        decides(
            lab,
            state | {"reached": reached, "aborted": aborted},
            ["send"],
            "what lies in a part and does not leave keeps its part busy, and the link idle",
        )


def test_a_part_is_not_filled_while_its_bytes_leave(lab: Judge) -> None:
    number = lab.random.randint(2, 8)
    state = {"groups": cut(20, 2), "taken": number, "begun": number, "reached": 20}
    first = 2 * number
    for flying, expected in (
        (2, ["wait", "sent"]),
        (1, ["take", first, first + 2, number % 2]),
        (0, ["take", first, first + 2, number % 2]),
    ):
        decides(
            lab,
            state | {"flying": flying},
            expected,
            "transfers end in their order: while two fly, both parts are in use; with one, a part is free",
        )


def test_the_store_ends_when_the_last_byte_has_left(lab: Judge) -> None:
    count = lab.random.randint(3, 10)
    done = {"groups": cut(2 * count, 2), "taken": count, "begun": count, "reached": 2 * count}
    for flying, expected in ((2, ["wait", "sent"]), (1, ["wait", "sent"]), (0, ["end"])):
        decides(
            lab,
            done | {"flying": flying},
            expected,
            "when all groups have begun to leave, the store waits for those that fly, and then ends",
        )
    for case in speeds(lab):
        seen = store(lab, case)
        lab.expect(
            (seen.problem, seen.acts[-1][1:], seen.taken),
            ("", ["end"], len(case["groups"])),
            f"{said(case)} (what goes wrong, last act, groups taken)",
            "it ends once, when all groups have left",
        )


def test_after_the_pass_has_failed_no_layer_is_waited_for(lab: Judge) -> None:
    groups, number = cut(20, 2), lab.random.randint(1, 8)
    for flying in (0, 1):
        state = {"groups": groups, "taken": number, "begun": number, "flying": flying, "aborted": True}
        decides(
            lab, state | {"reached": 2 * number + 1}, ["end"], "the layers that it waits for will never come"
        )
    for case in speeds(lab)[:3]:
        case["fails_after"] = lab.random.randint(2, case["layers"] - 1)
        seen = store(lab, case)
        whole = sum(end <= case["fails_after"] for _, end in case["groups"])
        lab.expect(
            (seen.problem, seen.early, seen.acts[-1][1:], seen.taken),
            ("", [], ["end"], whole),
            f"{said(case)} (what goes wrong, layers taken early, last act, groups taken)",
            "groups that were computed before may leave; then the store ends",
        )


def test_a_pass_that_fails_after_its_last_layer_does_not_stop_the_store(lab: Judge) -> None:
    count = lab.random.randint(3, 9)
    state = {"groups": cut(2 * count, 2), "reached": 2 * count, "aborted": True}
    decides(
        lab, state | {"taken": 1, "begun": 1}, ["take", 2, 4, 1], "all layers are computed: they may leave"
    )
    decides(
        lab,
        state | {"taken": 2, "begun": 2, "flying": 2},
        ["wait", "sent"],
        "two groups fly, so both parts are in use, also after a pass that has failed",
    )
    ended = state | {"taken": count, "begun": count, "flying": 1}
    decides(lab, ended, ["wait", "sent"], "all groups have begun to leave, so the store waits for their end")


def test_nothing_waits_that_could_go_on(lab: Judge) -> None:
    for case in speeds(lab):
        seen = store(lab, case)
        end = best_end(case)
        lab.expect(
            (seen.problem, seen.ended_at),
            ("", end),
            f"{said(case)} (what goes wrong, tick of the end)",
            f"a group that is computed, and whose part is free, leaves at once: all has left at {end}",
        )


def test_little_is_left_after_the_pass(lab: Judge) -> None:
    case = given(lab, layers=lab.size.store_layers)
    seen = store(lab, case)
    over = case["layers"] * case["layer_ticks"]
    lab.cost(seen.ended_at - over, best_end(case) - over)
    lab.expect(
        (seen.problem, wrong(case, seen, case["layers"])),
        ("", []),
        f"{said(case)} (what goes wrong, what is wrong in the pool)",
        "every layer of every block reaches the pool",
    )
