"""The data of a class: the beats of made-up ranks, and the messages of one answer whose rank dies.

Some ranks pause without being dead. Messages come twice and out of order, and some come after the recall.
"""

from __future__ import annotations

import random

import msgspec

TICK_S = 0.25
MOST_PAUSE_TICKS = 60


class RankBeats(msgspec.Struct):
    """The beats of one rank in seconds, and when it died; None: it lives at the end."""

    rank: int
    beats_s: list[float]
    died_s: float | None


def made_beats(draw: random.Random, ranks: int, ticks: int = 1200) -> list[RankBeats]:
    """Ranks beat every tick. At times one pauses, mostly for a second or two, and half of them die."""
    made = []
    for rank in range(1, ranks + 1):
        dies_at = draw.randrange(ticks // 4, ticks - 100) if rank % 2 else None
        beats, tick = [], draw.randrange(4)
        while tick < (ticks if dies_at is None else dies_at):
            beats.append(tick * TICK_S)
            pause = min(int(4 * draw.paretovariate(1.1)), MOST_PAUSE_TICKS) if draw.random() < 1 / 60 else 1
            tick += pause
        if dies_at is not None and beats[-1] < (dies_at - 1) * TICK_S:
            beats.append((dies_at - 1) * TICK_S)  # no rank dies in a pause
        made.append(RankBeats(rank, beats, None if dies_at is None else dies_at * TICK_S))
    return made


class AnswerMessage(msgspec.Struct):
    """One message of an answer as its gateway gets it: tokens of an attempt, or a recall of that attempt."""

    attempt: int
    recall: bool = False
    index: int = 0
    token_ids: list[int] = []
    finish: str | None = None


def made_messages(draw: random.Random, tokens: int, piece_tokens: int) -> list[AnswerMessage]:
    """A rank dies behind the middle of an answer; one message is lost with it. Another rank goes on."""
    answer = [draw.randrange(50_000) for _ in range(tokens)]
    first = _pieces(draw, answer, 1, 0, piece_tokens)
    dies = len(first) // 2 + draw.randint(0, len(first) // 4)
    lost = dies - draw.randint(2, 4)
    done = first[lost].index
    heard = _disturbed(draw, [one for one in first[:dies] if one.index != done])
    late = _disturbed(draw, first[dies : dies + 4])
    second = _disturbed(draw, _pieces(draw, answer, 2, done, piece_tokens))
    for one in late:
        second.insert(draw.randrange(min(8, len(second))), one)
    return [*heard, AnswerMessage(1, recall=True), *second]


def _pieces(
    draw: random.Random, answer: list[int], attempt: int, begin: int, piece_tokens: int
) -> list[AnswerMessage]:
    """The messages of an attempt in order, from this token on."""
    found = []
    while begin < len(answer):
        piece = answer[begin : begin + draw.randint(1, piece_tokens)]
        found.append(AnswerMessage(attempt, index=begin, token_ids=piece))
        begin += len(piece)
    found[-1].finish = "length"
    return found


def _disturbed(draw: random.Random, messages: list[AnswerMessage]) -> list[AnswerMessage]:
    """Some messages come twice, and some are overtaken by a few others."""
    places = [(place + 4 * draw.random() * (draw.random() < 0.3), one) for place, one in enumerate(messages)]
    places += [(place + 6 * draw.random(), one) for place, one in places if draw.random() < 0.25]
    return [one for _, one in sorted(places, key=lambda pair: pair[0])]


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get, one file for each figure."""
    beats = made_beats(random.Random(f"{seed} beats"), sizes["ranks"])
    draw = random.Random(f"{seed} messages")
    messages = made_messages(draw, 3 * sizes["answer_tokens"], sizes["piece_tokens"])
    return {
        f"{name}.jsonl": b"".join(msgspec.json.encode(one) + b"\n" for one in made)
        for name, made in (("beats", beats), ("messages", messages))
    }
