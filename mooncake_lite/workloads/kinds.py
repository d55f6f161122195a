"""Kinds of workloads that can be made: what their prompts share, how long they and their answers are.

Used by `workload make`; `KINDS` lists them. Chat with shared documents is `simulator/sessions.py`. Pure:
equal arguments give equal traces in every process. Explained in docs/how-to/make-a-workload.md.

A kind has sessions, and a session has turns, about `pause_s` apart. Each turn has a text as its prompt. An id
of the trace names the whole prefix that its block ends: what two texts share is made once, and the second is
a copy that goes on. A prompt that continues a turn contains the answer to that turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import exp
from random import Random
from statistics import NormalDist

from msgspec import structs

from mooncake_lite.workloads.arrivals import interleaved, times_ms
from mooncake_lite.workloads.rescale import at_times
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest

GOLDEN = 5**0.5 / 2 - 0.5
"""Multiples of it, less their whole parts, are spread evenly: few sessions already have the median wanted."""

Turns = Iterator[tuple[float, TraceRequest]]
"""Of a session: (seconds since the turn before, its prompt and answer, with the ids of full blocks alone)."""


class Text:
    """Tokens of which only the blocks are known.

    ids    of the full blocks
    rest   tokens after them
    """

    __slots__ = ("_fresh", "ids", "rest")

    def __init__(self, fresh: Iterator[int], ids: Sequence[int] = (), rest: int = 0) -> None:
        self._fresh, self.ids, self.rest = fresh, list(ids), rest

    def __len__(self) -> int:
        return len(self.ids) * BLOCK_TOKENS + self.rest

    def add(self, tokens: int) -> Text:
        """Add tokens that no other text has, and return this text."""
        blocks, self.rest = divmod(self.rest + tokens, BLOCK_TOKENS)
        self.ids += islice(self._fresh, blocks)
        return self

    def copy(self, most_tokens: int | None = None) -> Text:
        """Return a text that begins with this one, or with the first tokens of it."""
        tokens = len(self) if most_tokens is None else min(len(self), most_tokens)
        return Text(self._fresh, self.ids[: tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS)

    def asked(self, answer: int) -> TraceRequest:
        """Return this text as a prompt. answer: tokens of the answer, which is not added."""
        return TraceRequest(0, len(self), answer, list(self.ids))


def drawn(dice: Random, mean: float, spread: float) -> int:
    """Draw a length of at least 1: log-normal, spread is the standard deviation of its logarithm."""
    return max(1, round(mean * dice.lognormvariate(-spread * spread / 2, spread)))


def drawn_of(dice: Random, texts: Sequence[Text], skew: float) -> Text:
    """Draw text n, from 0, in proportion to 1 / (n + 1) ** skew."""
    return dice.choices(texts, [(number + 1) ** -skew for number in range(len(texts))])[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Singles:
    """Requests that continue no other request. Lengths are means, in tokens.

        prompt:   template | hot document, or text of its own | question

    template_tokens   of the template, with which a share of the prompts begin, from a moment of the trace on
    documents         hot ones: document d, from 0, is asked about in proportion to 1 / (d + 1) ** skew
    hot_share         of the prompts that have a hot document; the others have own_tokens
    spread            of the logarithms of document, own text and answer
    """

    about: str
    template_tokens: int = 0
    template_share: float = 1.0
    template_moment: float = 0.0
    documents: int = 0
    document_tokens: int = 0
    hot_share: float = 0.0
    skew: float = 1.0
    own_tokens: int
    question_tokens: int = 1
    answer_tokens: int
    spread: float = 0.6
    arrivals: str = "poisson"
    pause_s: float = 0.0
    median_turns: int = 1
    turns_spread: float = 0.0

    def shared(self, dice: Random, fresh: Iterator[int]) -> list[Text]:
        """Return the empty text, the template, and the template with each of the hot documents."""
        template = Text(fresh).add(self.template_tokens)
        lengths = [drawn(dice, self.document_tokens, self.spread) for _ in range(self.documents)]
        return [Text(fresh), template, *(template.copy().add(length) for length in lengths)]

    def session(self, dice: Random, shared: list[Text], turns: int, moment: float) -> Turns:
        """Yield one turn."""
        hot, templated = dice.random() < self.hot_share, dice.random() < self.template_share
        document = drawn_of(dice, shared[2:], self.skew) if hot else None
        text = (document or shared[templated and moment >= self.template_moment]).copy()
        if document is None:
            text.add(drawn(dice, self.own_tokens, self.spread))
        text.add(self.question_tokens)
        yield 0.0, text.asked(drawn(dice, self.answer_tokens, self.spread))


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """Completions in an editor: a session edits one file, near its end. Lengths are means, in tokens.

        prompt:   what the repository's files have in common | the file, up to the cursor

    repositories, repository_tokens   repository r, from 0, is edited in proportion to 1 / (r + 1)
    file_tokens    of a file when it is opened; most_tokens: of a prompt, older lines then leave the file
    edit_tokens    that the cursor is before the end of the turn before; typed_tokens: written since then
    accepted       share of the answers that stay in the file
    median_turns, turns_spread   of a session; the spread is that of their logarithm
    answer_tokens  of an answer. Prompts of Azure's public trace of code (2023) have 2,048 tokens in the mean,
                   answers 28; the other numbers are our choice
    """

    about: str
    repositories: int = 40
    repository_tokens: int = 1024
    file_tokens: int = 800
    most_tokens: int = 7_437
    edit_tokens: int = 40
    typed_tokens: int = 50
    accepted: float = 0.3
    median_turns: int = 20
    turns_spread: float = 0.8
    answer_tokens: int = 28
    spread: float = 0.8
    arrivals: str = "poisson"
    pause_s: float = 8.0

    def shared(self, dice: Random, fresh: Iterator[int]) -> list[Text]:
        """Return what the files of each repository begin with."""
        lengths = [drawn(dice, self.repository_tokens, self.spread / 2) for _ in range(self.repositories)]
        return [Text(fresh).add(length) for length in lengths]

    def session(self, dice: Random, shared: list[Text], turns: int, moment: float) -> Turns:
        """Yield the turns of one file."""
        repository = drawn_of(dice, shared, 1.0)
        text = repository.copy().add(drawn(dice, self.file_tokens, self.spread))
        for _ in range(turns):
            if len(text) > self.most_tokens:
                text = repository.copy().add(drawn(dice, self.file_tokens, self.spread))
            answer = drawn(dice, self.answer_tokens, self.spread)
            yield dice.expovariate(1 / self.pause_s), text.asked(answer)
            if dice.random() < self.accepted:
                text.add(answer)
            cursor = max(len(repository), len(text) - drawn(dice, self.edit_tokens, self.spread))
            text = text.copy(cursor).add(drawn(dice, self.typed_tokens, self.spread))


@dataclass(frozen=True, kw_only=True, slots=True)
class Agents:
    """Agents that call tools: each turn's prompt is all that came before. Lengths are means, in tokens.

        prompt:   instructions and tools | task | answer | result | answer | result | ...
        subagent: all of a prompt of its parent | order | answer | result | ...       then: report | ...

    instructions_tokens   shared by all sessions
    task_tokens           with the files that a session begins with
    result_tokens         of a tool, added after each turn; also of an order and a report
    most_tokens           of a context: above it, the text after the task becomes a summary of summary_tokens
    fork_share            of the turns after which a subagent works, for subagent_turns; its parent waits
    median_turns          of a session, those of its subagents included
    turns_spread, spread  of the logarithms of turns and lengths
    pause_s               from one turn to the next: answer and tool

    Published of 2026: 154,000 tokens in and 523 out per turn, 96 % of the input cached (TraceLab, arXiv
    2606.30560); a median of 7 s between turns of tool loops (WEKA, 20 billion tokens). These numbers give a
    median of 43 turns, 142,000 tokens in, 444 out, and 97 % of the input cached. All others are our choice.
    """

    about: str
    instructions_tokens: int = 20_000
    task_tokens: int = 52_000
    result_tokens: int = 2_200
    most_tokens: int = 262_144
    summary_tokens: int = 8_000
    fork_share: float = 0.03
    subagent_turns: int = 8
    median_turns: int = 43
    turns_spread: float = 0.8
    answer_tokens: int = 444
    spread: float = 1.0
    arrivals: str = "poisson"
    pause_s: float = 10.0

    def shared(self, dice: Random, fresh: Iterator[int]) -> list[Text]:
        """Return the instructions."""
        return [Text(fresh).add(self.instructions_tokens)]

    def session(self, dice: Random, shared: list[Text], turns: int, moment: float) -> Turns:
        """Yield the turns of an agent, and those of its subagents between them."""
        text = shared[0].copy().add(drawn(dice, self.task_tokens, self.spread / 2))
        begin = len(text)
        while turns:
            yield self._turn(dice, text)
            turns -= 1
            if dice.random() < self.fork_share:
                fork = text.copy().add(drawn(dice, self.result_tokens, self.spread))
                for _ in range(min(turns, self.subagent_turns)):
                    yield self._turn(dice, fork)
                    turns -= 1
            if len(text) > self.most_tokens:
                text = text.copy(begin).add(self.summary_tokens)

    def _turn(self, dice: Random, text: Text) -> tuple[float, TraceRequest]:
        """Return a turn, and add its answer and the tool's result to the text."""
        prompt = text.asked(drawn(dice, self.answer_tokens, self.spread))
        text.add(prompt.output_length + drawn(dice, self.result_tokens, self.spread))
        return dice.expovariate(1 / self.pause_s), prompt


Kind = Singles | Code | Agents

KINDS: dict[str, Kind] = {
    "code": Code(about="completions in an editor: files of a repository begin alike, edits are near the end"),
    "rag": Singles(
        # 60 % of the requests ask for 3 % of the documents: RAGCache, arXiv 2404.12457.
        about="questions about documents in one template: 60 % about few hot ones, 40 % about unique ones",
        template_tokens=1024, documents=200, document_tokens=4096, hot_share=0.6, own_tokens=4096,
        question_tokens=64, answer_tokens=256,
    ),
    "agents": Agents(about="agents that call tools: contexts grow to 142,000 tokens in the mean, and fork"),
    "batch": Singles(
        about="long unique prompts that are all there at once, as for a job at night",
        own_tokens=16_384, answer_tokens=512, arrivals="together",
    ),
    "reasoning": Singles(
        about="questions of 100 tokens with answers of 32,000 tokens",
        own_tokens=100, answer_tokens=32_000, spread=0.4,
    ),
    "viral": Singles(
        about="unique prompts, until in the middle of the trace four of five begin with one template",
        template_tokens=6144, template_share=0.8, template_moment=0.5, own_tokens=2048, answer_tokens=256,
    ),
    "unique": Singles(
        about="prompts of which no two share a block: no cache helps",
        own_tokens=8192, answer_tokens=256,
    ),
    "flood": Singles(
        # Between two questions about one document come 64 * 9 prompts: 58 million tokens, of which a node of
        # the paper holds 3 million.
        about="questions about 64 documents, which nine times as many prompts of 100,000 tokens evict",
        documents=64, document_tokens=16_384, hot_share=0.1, skew=0.0, own_tokens=100_000, question_tokens=64,
        answer_tokens=256, spread=0.3,
    ),
}  # fmt: skip
"""All kinds by their names on the command line."""


def made(kind: Kind, requests: int, rate: float, seed: int, arrivals: str | None = None) -> Trace:
    """Make a trace of a kind. Ids are numbers in the order in which blocks come.

    rate       requests per second, in the mean over the trace. Where so few requests at this rate take less
               time than sessions would, the pauses of sessions are shorter
    arrivals   from `ARRIVALS`; None: the kind's own
    """
    times, named, fresh = times_ms(arrivals or kind.arrivals, requests, rate, seed), dict[int, int](), count()

    def numbered(prompt: TraceRequest) -> TraceRequest:
        partial = [next(fresh)] if prompt.input_length % BLOCK_TOKENS else []
        ids = [named.setdefault(each, len(named)) for each in [*prompt.hash_ids, *partial]]
        return structs.replace(prompt, hash_ids=ids)

    at_once = max(1, round(min(requests, rate * kind.pause_s)))
    prompts = interleaved(_sessions(kind, requests, seed, fresh), at_once)
    return Trace(at_times([numbered(prompt) for prompt in prompts], times))


def _sessions(kind: Kind, requests: int, seed: int, fresh: Iterator[int]) -> Iterator[Turns]:
    """Yield sessions that have so many turns together. The last one is cut."""
    dice = Random(f"shared {seed}")
    shared, first, before = kind.shared(dice, fresh), dice.random(), 0
    for number in count():
        quantile = NormalDist().inv_cdf(max((first + number * GOLDEN) % 1, 1e-9))
        turns = max(1, round(kind.median_turns * exp(kind.turns_spread * quantile)))
        turns = min(turns, requests - before)
        yield kind.session(Random(f"session {seed} {number}"), shared, turns, before / requests)
        before += turns
        if before == requests:
            return
