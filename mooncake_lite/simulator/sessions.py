"""Conversations that share beginnings: the workload of the experiments.

Used by `experiment.py`. A conversation asks about a document, and some documents are asked about far more
often than others. Each turn continues the turn before it and its answer. Equal seeds give equal conversations
at every rate. Explained in docs/explain/experiments.md.

    document | question | answer | question | answer | ...
    `- shared by conversations     `- the next turn's prompt begins with all before it
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from mooncake_lite.simulator.tokens import Opaque
from mooncake_lite.simulator.workload import Request, mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionMix:
    """What conversations are like. Lengths are in tokens.

    documents         how many there are; document d, from 0, is asked about in proportion to 1 / (d + 1)
    document_tokens   (least, most), drawn evenly for each document
    question_tokens, answer_tokens   means of log-normal lengths
    spread            standard deviation of the logarithm of these lengths
    turns             mean number of questions of a conversation: geometric
    pause_s           mean time from one question of a conversation to the next
    most_tokens       a conversation ends when its text has more; a prompt may be longer by one question
    most_answer_tokens   limit that each request names; longer answers are cut
    """

    documents: int = 200
    document_tokens: tuple[int, int] = (4_096, 32_768)
    question_tokens: int = 512
    answer_tokens: int = 256
    spread: float = 0.8
    turns: float = 3.0
    pause_s: float = 40.0
    most_tokens: int = 65_536
    most_answer_tokens: int = 2_048


@dataclass(slots=True)
class Text:
    """What has been said in a conversation: lengths and keys, never tokens.

    keys      of its full blocks
    rest      tokens after the last full block
    flavour   stands for what those tokens and all that follow are
    """

    block_tokens: int
    keys: list[int]
    rest: int
    flavour: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.keys) * self.block_tokens + self.rest

    def append(self, num_tokens: int) -> None:
        """Add tokens."""
        blocks, self.rest = divmod(self.rest + num_tokens, self.block_tokens)
        for _ in range(blocks):
            self.keys.append(mixed(self.keys[-1] if self.keys else 0, self.flavour))


@dataclass(slots=True)
class _Session:
    """A conversation, with dice of its own. text: the document, and all questions and answers so far."""

    number: int
    dice: Random
    text: Text


class Sessions:
    """The requests of a run, in the order of their times. See `Source`.

    rate   requests per second, in the mean
    """

    def __init__(self, seed: int, num_requests: int, rate: float, mix: SessionMix, block_tokens: int) -> None:
        self.num_requests = num_requests
        self._mix, self._seed, self._block_tokens = mix, seed, block_tokens
        self._dice = Random(mixed(seed, 1))
        self._gap_s = mix.turns / rate
        self._weights = [1 / (number + 1) for number in range(mix.documents)]
        self._turns: list[tuple[float, int, _Session]] = []
        self._made = self._begun = 0
        self._now = 0.0
        self._next_begins_s = self._gap()

    def next(self) -> Request:
        """Return one more request."""
        while not self._turns or self._next_begins_s <= self._turns[0][0]:
            heappush(self._turns, (self._next_begins_s, self._begun, self._begin()))
            self._next_begins_s += self._gap()
        at, number, session = heappop(self._turns)
        request = self._turn(session, at - self._now)
        self._now = at
        mix, dice = self._mix, session.dice
        is_over = dice.random() < 1 / mix.turns or session.text.num_tokens > mix.most_tokens
        if not is_over:
            heappush(self._turns, (at + dice.expovariate(1 / mix.pause_s), number, session))
        return request

    def _gap(self) -> float:
        return self._dice.expovariate(1 / self._gap_s)

    def _begin(self) -> _Session:
        number, self._begun = self._begun, self._begun + 1
        dice = Random(mixed(self._seed, 2, number))
        (document,) = dice.choices(range(self._mix.documents), self._weights)
        text = Text(self._block_tokens, [], 0, mixed(self._seed, 3, document))
        text.append(Random(mixed(self._seed, 4, document)).randint(*self._mix.document_tokens))
        return _Session(number, dice, text)

    def _turn(self, session: _Session, after_s: float) -> Request:
        """Add a question to a conversation, and then its answer."""
        mix, dice = self._mix, session.dice
        session.text.flavour = dice.getrandbits(64)
        session.text.append(_length(dice, mix.question_tokens, mix.spread))
        num_tokens, most = session.text.num_tokens, mix.most_answer_tokens
        answer = min(most, _length(dice, mix.answer_tokens, mix.spread))
        session.text.append(answer)
        self._made += 1
        return opaque_request(
            f"r{self._made}", list(session.text.keys), self._block_tokens, num_tokens, answer, most, after_s
        )


def _length(dice: Random, mean: float, spread: float) -> int:
    """Draw a length of at least 1 with this mean."""
    return max(1, round(mean * dice.lognormvariate(-spread * spread / 2, spread)))


def opaque_request(
    request_id: str,
    keys: list[int],
    block_tokens: int,
    num_tokens: int,
    answer_tokens: int,
    max_tokens: int,
    after_s: float,
) -> Request:
    """Make a request of which only lengths and keys are known. keys: of the blocks of prompt and answer."""
    prompt = Opaque(keys, block_tokens, num_tokens)
    known = keys[: num_tokens // block_tokens]
    digests = [key ^ 1 for key in known]
    return Request(request_id, prompt, known, digests, max_tokens, answer_tokens, after_s=after_s)
