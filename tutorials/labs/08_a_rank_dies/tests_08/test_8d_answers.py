"""8d: tokens that come twice, or out of order, or from an attempt that was given up, are passed on once."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .data import made_messages

Step = list[Any]


class Pushed(msgspec.Struct):
    """After one step: what came out (index, tokens, finish, cached), all tokens so far, and what waits.

    waiting   (index, number of tokens, finish or "") of each message
    """

    turn: list[tuple[int, list[int], str | None, dict[str, int]]]
    token_ids: list[int]
    waiting: list[tuple[int, int, str]]
    ended: bool


class Seen(msgspec.Struct):
    """All steps, and the reads of the table of waiting messages."""

    seen: list[Pushed]
    asked: int


def push(lab: Judge, steps: list[Step], max_tokens: int) -> Seen:
    inputs = {"max_tokens": max_tokens, "steps": steps}
    seen = lab.ask("push", inputs, Seen, called=f"push() of {len(steps)} messages: {steps}")
    lab.trace(drawn(steps, seen))
    return seen


def drawn(steps: list[Step], seen: Seen) -> dict[str, Any]:
    """A table for `labs show`: each message, what came out, and what waits after it."""
    rows = [
        [told(step), " ".join(f"{one[0]}:{one[1]}{one[2] or ''}" for one in after.turn), held(after)]
        for step, after in list(zip(steps, seen.seen))[:24]
    ]
    columns = ["message", "came out (index: tokens)", "waits (index: number of tokens)"]
    return {"kind": "table", "title": "messages of one answer", "columns": columns, "rows": rows}


def held(after: Pushed) -> str:
    return ", ".join(f"{index}: {count}{finish and f' {finish}'}" for index, count, finish in after.waiting)


def told(step: Step) -> str:
    if step[0] != "tokens":
        return " ".join(map(str, step))
    _, index, token_ids, finish, attempt = step
    return f"attempt {attempt}, index {index}: {token_ids}{f' {finish}' if finish else ''}"


def answer(lab: Judge, tokens: int) -> list[int]:
    return [lab.random.randrange(1000) for _ in range(tokens)]


def pieces(
    lab: Judge, tokens: list[int], attempt: int = 1, begin: int = 0, finish: bool = True
) -> list[Step]:
    """The messages of an answer from `begin` on, in order; the last one ends it."""
    found: list[Step] = []
    while begin < len(tokens):
        size = lab.random.randint(1, lab.size.piece_tokens)
        found.append(["tokens", begin, tokens[begin : begin + size], None, attempt])
        begin += size
    if finish:
        found[-1][3] = "length"
    return found


class Model:
    """What must come out: one cell per index, and how far the answer is passed on."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.least, self.ended = max_tokens, 0, False
        self.out: list[int] = []
        self.kept: dict[int, tuple[list[int], str | None, dict[str, int]]] = {}

    def step(self, step: Step) -> list[tuple[int, list[int], str | None, dict[str, int]]]:
        if step[0] == "recall":
            self.least = max(self.least, step[1] + 1)
            self.kept = {}
            return []
        if step[0] == "end":
            self.ended, self.kept = True, {}
            return []
        _, index, tokens, finish, attempt = step
        outside = index < 0 or index + len(tokens) > self.max_tokens
        if self.ended or outside or attempt < self.least:
            return []
        if index not in self.kept or len(tokens) >= len(self.kept[index][0]):
            self.kept[index] = tokens, finish, {"dram": 64} if index == 0 else {}
        turn = []
        while not self.ended and (due := [one for one in self.kept if one <= len(self.out)]):
            first = min(due)
            came, finish, cached = self.kept.pop(first)
            at = len(self.out)
            new = came[at - first :]
            if new or (finish and first + len(came) == at):
                self.out += new
                self.ended = bool(finish)
                turn.append((at, new, finish, cached if first == at else {}))
        if self.ended:
            self.kept = {}
        return turn


WAITING = (
    "only a message that begins beyond `next` waits, and none after the end or a recall; "
    "of two that begin at one index the longer one waits; of equal length, the last one"
)


def expect_as_modelled(lab: Judge, steps: list[Step], max_tokens: int, rule: str) -> Model:
    seen, model = push(lab, steps, max_tokens), Model(max_tokens)
    for number, (step, after) in enumerate(zip(steps, seen.seen), 1):
        turn = model.step(step)
        where = f"message {number} of {len(steps)}: {told(step)}"
        lab.expect(after.turn, turn, f"{where} (index, tokens, finish, cached tokens of what came out)", rule)
        lab.expect(
            after.waiting,
            sorted((index, len(came), finish or "") for index, (came, finish, _) in model.kept.items()),
            f"{where} (index, number of tokens and finish of each message in waiting)",
            WAITING,
        )
        lab.expect(
            (after.token_ids, after.ended),
            (model.out, model.ended),
            f"{where} (token_ids, ended)",
            "all that was passed on joins token_ids, and a finish that was passed on ends the answer",
        )
    return model


def test_a_message_that_comes_before_its_turn_waits(lab: Judge) -> None:
    tokens = answer(lab, 4 + lab.size.piece_tokens)
    steps = pieces(lab, tokens)
    expect_as_modelled(
        lab, [*steps[1:], steps[0]], len(tokens), "messages are passed on in the order of their indices"
    )


def test_a_message_that_comes_twice_is_passed_on_once(lab: Judge) -> None:
    tokens = answer(lab, lab.size.answer_tokens)
    steps = pieces(lab, tokens)
    doubled = [step for step in steps[:-1] for _ in (0, 1)]
    lab.random.shuffle(doubled)
    expect_as_modelled(
        lab, [*doubled, steps[-1]], len(tokens), "a token is passed on once, however often it comes"
    )


def test_tokens_that_were_passed_on_are_cut_off(lab: Judge) -> None:
    tokens = answer(lab, 12)
    cut = lab.random.randint(3, 6)
    steps: list[Step] = [
        ["tokens", 0, tokens[:cut], None, 1],
        ["tokens", cut - 2, tokens[cut - 2 : cut + 2], None, 1],
        ["tokens", cut - 1, tokens[cut - 1 : cut + 1], None, 1],
        ["tokens", cut + 3, tokens[cut + 3 : cut + 4], None, 1],
        ["tokens", cut, tokens[cut : cut + 4], None, 1],
        ["tokens", cut + 2, tokens[cut + 2 :], "length", 1],
    ]
    expect_as_modelled(lab, steps, 12, "of a message that overlaps, only the new tokens are passed on")


def test_of_a_waiting_message_that_overlaps_the_new_tokens_are_passed_on(lab: Judge) -> None:
    tokens = answer(lab, 9)
    steps: list[Step] = [
        ["tokens", 3, tokens[3:7], None, 1],
        ["tokens", 4, tokens[4:6], None, 1],
        ["tokens", 0, tokens[:5], None, 1],
        ["tokens", 7, tokens[7:], "length", 1],
    ]
    rule = "what begins at `next` or before it has its turn, also if it waits; only the others still wait"
    expect_as_modelled(lab, steps, 9, rule)


def test_of_two_messages_at_one_index_the_longer_one_waits(lab: Judge) -> None:
    tokens = answer(lab, 9)
    steps: list[Step] = [
        ["tokens", 3, tokens[3:6], None, 1],
        ["tokens", 3, tokens[3:4], None, 1],
        ["tokens", 6, tokens[6:7], None, 1],
        ["tokens", 6, tokens[6:9], None, 1],
        ["tokens", 6, tokens[6:9], "stop", 1],
        ["tokens", 0, tokens[:3], None, 1],
    ]
    expect_as_modelled(lab, steps, 9, WAITING)


def test_after_a_recall_older_attempts_are_dropped(lab: Judge) -> None:
    tokens = answer(lab, lab.size.answer_tokens)
    old = pieces(lab, tokens, attempt=1, finish=False)
    heard = lab.random.randint(1, len(old) - 2)
    done = sum(len(step[2]) for step in old[:heard])
    new = pieces(lab, tokens, attempt=2, begin=done)
    late = [["tokens", step[1], [token + 1000 for token in step[2]], None, 1] for step in old[heard:]]
    steps = [*old[:heard], old[heard + 1], ["recall", 1], *late, *new[:1], *late, *new[1:]]
    model = expect_as_modelled(
        lab, steps, len(tokens), "after Recall, tokens of this attempt and of older ones are not taken"
    )
    assert model.out == tokens


def test_nothing_comes_after_the_end(lab: Judge) -> None:
    tokens = answer(lab, 10)
    steps: list[Step] = [
        ["tokens", 6, tokens[6:8], None, 1],
        ["tokens", 4, tokens[4:5], None, 1],
        ["tokens", 2, tokens[2:4], "stop", 1],
        ["tokens", 0, tokens[:2], None, 1],
        ["tokens", 4, tokens[4:6], None, 2],
        ["tokens", 0, tokens[:2], None, 2],
    ]
    expect_as_modelled(lab, steps, 10, "a finish ends the answer: what comes later, or waits, is dropped")


def test_an_end_without_new_tokens_is_passed_on_once(lab: Judge) -> None:
    tokens = answer(lab, 6)
    steps: list[Step] = [
        ["tokens", 0, tokens[:4], None, 1],
        ["tokens", 2, [], None, 1],
        ["tokens", 1, tokens[1:3], "stop", 1],
        ["tokens", 4, [], None, 1],
        ["tokens", 2, tokens[2:4], "stop", 1],
        ["tokens", 4, [], "stop", 1],
    ]
    expect_as_modelled(
        lab, steps, 6, "a finish at `next` is news even without a new token; before it, it is old"
    )


def test_what_is_outside_of_the_answer_is_dropped(lab: Judge) -> None:
    tokens = answer(lab, 8)
    steps: list[Step] = [
        ["tokens", -1, tokens[:2], None, 1],
        ["tokens", 6, [*tokens[6:], 7], None, 1],
        ["tokens", 0, [*tokens, 7], "length", 1],
        ["tokens", 0, tokens[:6], None, 1],
        ["tokens", 6, tokens[6:], "length", 1],
    ]
    expect_as_modelled(lab, steps, 8, "an answer has the indices 0 to max_tokens - 1")


def test_any_order_with_drops_doubles_and_recalls_gives_the_answer(lab: Judge) -> None:
    for _ in range(4):
        tokens = answer(lab, lab.size.answer_tokens)
        steps, model, attempt = [], Model(len(tokens)), 1
        for _ in range(lab.random.randint(1, 3)):
            some = pieces(lab, tokens, attempt, len(model.out))
            some = lab.random.choices(some, k=lab.random.randint(1, len(some)))
            for step in [*some, ["recall", attempt], *some[:2]]:
                model.step(step)
                steps.append(step)
            attempt += 1
        last = [] if model.ended else pieces(lab, tokens, attempt, len(model.out))
        steps += lab.random.sample(last * 2, len(last) * 2)
        whole = expect_as_modelled(lab, steps, len(tokens), "no token is lost, sent twice or changed")
        assert whole.out == tokens


def test_the_messages_of_your_class_give_the_whole_answer(lab: Judge) -> None:
    tokens = 3 * lab.size.answer_tokens
    steps: list[Step] = [
        ["recall", one.attempt]
        if one.recall
        else ["tokens", one.index, one.token_ids, one.finish, one.attempt]
        for one in made_messages(lab.draw("messages"), tokens, lab.size.piece_tokens)
    ]
    model = expect_as_modelled(lab, steps, tokens, "the second rank goes on where the answer so far ends")
    assert len(model.out) == tokens


def test_a_waiting_message_is_read_when_its_turn_may_have_come(lab: Judge) -> None:
    tokens, size = answer(lab, lab.size.answer_tokens), lab.size.piece_tokens
    steps: list[Step] = [
        ["tokens", begin, tokens[begin : begin + size], None, 1] for begin in range(0, len(tokens), size)
    ]
    steps[-1][3] = "length"
    count = len(steps)
    seen = push(lab, [*steps[1:], steps[0]], len(tokens))
    lab.cost(seen.asked, count * (count + 1) + 6 * count, needed=count - 1)
    lab.expect(
        [seen.seen[-1].token_ids, *[after.turn for after in seen.seen[:-1]]],
        [tokens, *[[]] * (count - 1)],
        f"{count} messages, of which the first comes last (all tokens, what came out before)",
        "all wait for the first one",
    )
