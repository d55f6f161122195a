"""8c: a request whose work is lost goes on from what its client has, fails after some tries, or just ends."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

Step = list[Any]
PAUSE_S, MOST_TRIES = 0.5, 3
DECODES = 5
STAGES = ("prefilling", "loading", "decoding", "ending")
"""Stages in which tokens may be on their way to the client."""
UNFINISHED_BLOCKS = {"promoting": 3, "prefilling": 3, "loading": 1, "decoding": 0}
"""Blocks that the rank of a request writes in each stage, its tail included."""


class After(msgspec.Struct):
    """What the books say about a request after its work was lost. Fields: as drive.py tells them."""

    stage: str
    is_open: bool
    tries: int
    pause_s: float
    waits: bool
    has_place: bool
    worker: int
    attempt: int
    sent: list[list[Any]]
    leases: int
    writing: int
    quarantined: int
    problem: str
    now: float
    joined: list[float | None]
    reasons: list[str]


def lose(lab: Judge, steps: list[Step]) -> list[After]:
    called = f"lose() after {'; '.join(' '.join(map(str, step)) for step in steps)}"
    seen = lab.ask("lose", {"decodes": DECODES, "steps": steps}, list[After], called=called)
    lab.trace(drawn(steps, seen))
    lab.expect(
        [after.problem for after in seen if after.problem],
        [],
        f"{called} and then check() of all books",
        "the books agree: an open request waits in a line, has a place, or waits for an answer",
    )
    return seen


def drawn(steps: list[Step], seen: list[After]) -> dict[str, Any]:
    """A table for `labs show`: each step, and what has become of the request after each loss."""
    rows, left = [], iter(seen)
    for verb, *words in steps:
        after = next(left, None) if verb == "lose" else None
        became = ["", "", ""] if after is None else [after.stage, str(after.tries), said(after)]
        rows.append([f"{verb} {' '.join(map(str, words))}", *became])
    return {
        "kind": "table",
        "title": "requests, and what became of them",
        "columns": ["step", "stage", "tries", "messages"],
        "rows": rows[:30],
    }


def said(after: After) -> str:
    return "; ".join(" ".join(map(str, message)) for message in after.sent) or "none"


def some_name(lab: Judge) -> str:
    return f"r{lab.random.randrange(1000)}"


def again(name: str) -> list[Step]:
    """A request that was recalled comes so far that it decodes again."""
    return [["recalled", name, 3], ["wait", 2.0], ["bring", name, "decoding", 1]]


def test_a_request_with_tokens_on_their_way_is_recalled_once(lab: Judge) -> None:
    name = some_name(lab)
    for stage in STAGES:
        (after,) = lose(lab, [["bring", name, stage, 1], ["lose", name, False]])
        lab.expect(
            (after.stage, after.sent, after.reasons, after.waits),
            ("recalling", [["Recall", name, 1, [0]]], ["its work is lost"], False),
            f"lose() of a request that is {stage} (stage, messages, why it is recalled, waits in line)",
            "only the gateway knows what the client has: it is asked, and until it answers nothing begins",
        )


def test_all_branches_are_recalled_in_one_message(lab: Judge) -> None:
    name, count = some_name(lab), lab.size.answers
    (after,) = lose(lab, [["bring", name, "decoding", count], ["lose", name, False]])
    lab.expect(
        (after.stage, after.sent),
        ("recalling", [["Recall", name, 1, list(range(count))]]),
        f"lose() of a request with {count} answers (stage, messages)",
        "one Recall asks for all answers of a request",
    )


def test_a_request_without_tokens_waits_again(lab: Judge) -> None:
    name = some_name(lab)
    for stage, dies in product(("queued", "promoting"), (True, False)):
        steps = [["bring", "first", "prefilling", 1]] if stage == "queued" else []
        steps += [["bring", name, stage, 1], *([["dies", name, "decode"]] if dies else [])]
        (after,) = lose(lab, [*steps, ["lose", name, False]])
        lab.expect(
            (after.stage, after.waits, after.has_place, after.sent, after.tries, after.pause_s),
            ("held", True, False, [], 0 if dies else 1, 0.0 if dies else PAUSE_S),
            f"lose() of a request that is {stage}, {'its decode rank dies' if dies else 'all ranks live'} "
            "(stage, waits in line, has a place, messages, tries, pause_s)",
            "no token is on its way, so no gateway is asked: the request waits for another place at once, "
            "also after a failed try, which counts; `pause_s` is left as it is",
        )
        lab.expect(
            after.joined,
            [after.now],
            f"lose(..., now={after.now:g}) of a request that is {stage} (when it joined the line)",
            "it waits from now on",
        )


def test_a_failed_try_counts_and_makes_a_longer_pause(lab: Judge) -> None:
    name = some_name(lab)
    stage = lab.random.choice(STAGES[:3])
    seen = lose(lab, [["bring", name, stage, 1], ["lose", name, False], *again(name), ["lose", name, False]])
    lab.expect(
        [(after.stage, after.tries, after.pause_s) for after in seen],
        [("recalling", 1, PAUSE_S), ("recalling", 2, 2 * PAUSE_S)],
        f"lose() of a request whose rank lives, while it is {stage} and again later (stage, tries, pause_s)",
        "no rank is lost, so the try has failed: it counts, and the pause grows with it",
    )


def test_after_the_last_try_the_request_fails(lab: Judge) -> None:
    name = some_name(lab)
    tries = [["lose", name, False], *again(name)] * (MOST_TRIES - 1)
    seen = lose(lab, [["bring", name, "decoding", 1], *tries, ["lose", name, False]])
    lab.expect(
        seen[-1].reasons,
        ["its work is lost"],
        f"lose() for the {MOST_TRIES}th time (what its client is told)",
        "the client hears why its request fails",
    )
    lab.expect(
        [(after.is_open, after.sent) for after in seen[-2:]],
        [
            (True, [["Recall", name, MOST_TRIES - 1, [0]]]),
            (False, [["Fail", name], ["Forget", name, "failed"]]),
        ],
        f"lose() for the {MOST_TRIES}rd time while all ranks live (still open, messages; of the last two)",
        f"with the try number {MOST_TRIES} the request fails: its client is told, and nothing is recalled",
    )


def test_a_lost_rank_is_no_failed_try(lab: Judge) -> None:
    name, deaths = some_name(lab), MOST_TRIES + 1
    dies = [["dies", name, "decode"], ["lose", name, False]]
    steps = [["bring", name, "decoding", 1], *dies]
    for _ in range(deaths - 1):
        steps += [*again(name), *dies]
    seen = lose(lab, steps)
    lab.expect(
        [(after.stage, after.tries, after.pause_s) for after in seen],
        [("recalling", 0, 0.0)] * deaths,
        f"lose() of a request whose decode rank dies {deaths} times (stage, tries, pause_s)",
        "a lost rank is no fault of the request: it goes on at once, however often that happens",
    )


def test_a_lost_store_rank_is_no_failed_try_either(lab: Judge) -> None:
    name = some_name(lab)
    for stage in ("prefilling", "loading"):
        (after,) = lose(lab, [["bring", name, stage, 1], ["dies", name, "store"], ["lose", name, False]])
        lab.expect(
            (after.stage, after.tries),
            ("recalling", 0),
            f"lose() of a request that is {stage} after the store rank died (stage, tries)",
            "a rank that has its KV counts like its own, as long as the request has places there",
        )


def test_a_request_that_only_waits_for_its_gateway_has_not_failed(lab: Judge) -> None:
    name = some_name(lab)
    (after,) = lose(lab, [["bring", name, "ending", 1], ["lose", name, False]])
    lab.expect(
        (after.stage, after.tries, after.pause_s),
        ("recalling", 0, 0.0),
        "lose() of a request that is ending (stage, tries, pause_s)",
        "its rank had done everything: `_is_lost` knows that, as long as the request is in this stage",
    )


def test_a_request_whose_client_has_left_just_ends(lab: Judge) -> None:
    name = some_name(lab)
    for first in ([], [["dies", name, "prefill"]]):
        steps = [
            ["bring", name, "prefilling", 1],
            ["bring", name, "cancelled", 1],
            *first,
            ["lose", name, False],
        ]
        (after,) = lose(lab, steps)
        lab.expect(
            (after.stage, after.is_open, after.sent, after.tries),
            ("over", False, [["Forget", name, "cancelled"]], 0),
            "lose() of a request that was cancelled (stage, still open, messages, tries)",
            "its client has left: it takes the step DROP and ends with `cancelled_as`",
        )


def test_space_that_late_bytes_may_reach_is_quarantined(lab: Judge) -> None:
    name = some_name(lab)
    for stage, blocks in UNFINISHED_BLOCKS.items():
        for may_still_write in (False, True):
            (after,) = lose(lab, [["bring", name, stage, 1], ["lose", name, may_still_write]])
            lab.expect(
                (after.writing, after.quarantined, after.leases),
                (0, blocks if may_still_write else 0, 0),
                f"lose(may_still_write={may_still_write}) of a request that is {stage} "
                "(blocks being written, quarantined, leases)",
                "what the request held is free, but space that its rank may still write is kept from others",
            )


def test_quarantine_does_not_depend_on_how_the_request_goes_on(lab: Judge) -> None:
    name = some_name(lab)
    cancelled = [["bring", name, "prefilling", 1], ["bring", name, "cancelled", 1]]
    failed = [["bring", name, "prefilling", 1]]
    failed += [["lose", name, True], ["recalled", name, 3], ["wait", 2.0]] * (2 * MOST_TRIES)
    for steps, what in (([*cancelled, ["lose", name, True]], "was cancelled"), (failed, "fails at last")):
        seen = lose(lab, steps)
        lab.expect(
            (seen[-1].is_open, seen[-1].writing, seen[-1].quarantined),
            (False, 0, 3 * len(seen)),
            f"lose(may_still_write=True) of a request that {what}, {len(seen)} times "
            "(still open, blocks written, quarantined)",
            "late bytes land also when the request has ended",
        )


def test_everything_that_a_request_held_is_free(lab: Judge) -> None:
    name = some_name(lab)
    for stage in STAGES:
        (after,) = lose(lab, [["bring", name, stage, 1], ["lose", name, False]])
        lab.expect(
            (after.has_place, after.worker, after.leases, after.writing, after.quarantined),
            (False, -1, 0, 0, 0),
            f"lose() of a request that is {stage} (has a place, worker, leases, blocks written, quarantined)",
            "slots, leases and places are for others from now on",
        )


def test_any_history_of_deaths_and_failures_is_counted(lab: Judge) -> None:
    name = some_name(lab)
    for _ in range(3):
        deaths = [True, True, True, *[False] * (MOST_TRIES - 1)]
        lab.random.shuffle(deaths)
        history = [(lab.random.choice(("loading", "decoding")), dies) for dies in deaths]
        steps: list[Step] = []
        expected, tries = [], 0
        for stage, dies in history:
            steps += [["bring", name, stage, 1], *([["dies", name, "decode"]] if dies else [])]
            steps += [["lose", name, False], ["recalled", name, 3], ["wait", 2.0]]
            tries += not dies
            expected.append(("recalling", tries, 0.0 if dies else PAUSE_S * tries))
        seen = lose(lab, steps)
        lab.expect(
            [(after.stage, after.tries, after.pause_s) for after in seen],
            expected,
            f"lose() again and again: {told(history)} (stage, tries, pause_s)",
            "failed tries count over the whole life of the request, deaths of ranks do not",
        )


def told(history: list[tuple[str, bool]]) -> str:
    return ", ".join(f"{stage} and {'its rank dies' if dies else 'the try fails'}" for stage, dies in history)


def test_one_message_is_sent_for_each_stream_that_was_under_way(lab: Judge) -> None:
    streams = [f"s{number}" for number in range(lab.size.streams)]
    waiting = [f"q{number}" for number in range(lab.size.queued)]
    steps: list[Step] = [["bring", name, "decoding", 2] for name in streams]
    steps += [["bring", "busy", "prefilling", 1], *[["bring", name, "queued", 1] for name in waiting]]
    for name in (*streams, *waiting):
        steps += [["dies", name, "decode"], ["lose", name, False]]
    seen = lose(lab, steps)
    lab.cost(sum(len(after.sent) for after in seen), len(streams))
    lab.expect(
        [after.stage for after in seen],
        ["recalling"] * len(streams) + ["held"] * len(waiting),
        f"lose() of {len(streams)} requests that decode and of {len(waiting)} that are queued (stages)",
        "only streams that are under way need an answer of their gateway",
    )
