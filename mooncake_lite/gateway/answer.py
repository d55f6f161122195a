"""The answers to one request as they come: from tokens to pieces of text, their usage and their ends.

Used by `endpoints`, once per request, streaming or not. Brings together the open request (order),
the detokenizer (whole characters) and the stop strings; knows no HTTP and no JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.exposition import GatewayMetrics
from mooncake_lite.gateway.hints import give_hints
from mooncake_lite.gateway.logprobs import TokenLogprobs, prompt_logprobs, token_logprobs
from mooncake_lite.gateway.open_request import OpenRequest
from mooncake_lite.gateway.prompt_work import Prepared
from mooncake_lite.gateway.shapes import Tally
from mooncake_lite.gateway.stops import StopFinder
from mooncake_lite.messages import Logprobs, Tokens
from mooncake_lite.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; `finish` is set in the last piece alone.

    index      of the answer: number of the prompt * answers per prompt + branch
    logprobs   of the tokens whose text is known, where the request asks for them
    """

    index: int
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerText:
    """Turns the tokens of one answer into text: whole characters, up to the first stop string.

    number   of the prompt
    tally    counts each token that was used, those of a stop string included, and those of the prediction
    finish   why the answer has ended; None before its end

    A completion goes on where its prompt ends. Stop strings count only after min_tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared, number: int, tally: Tally):
        body = prepared.submits[number].body
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer([] if prepared.is_chat else body.token_ids)
        self._stops = StopFinder(prepared.stops)
        self._min_tokens = body.sampling.min_tokens
        self._tally = tally
        tally.predicted += len(body.predicted)
        self._before = "".join(prepared.echoes[number])
        self._prompt: tuple[TokenLogprobs, ...] = ()
        self._held: deque[tuple[int, Logprobs, bool]] = deque()
        self._offset = 0
        self.num_tokens = 0
        self.finish: str | None = None

    def follow(self, prompt: tuple[TokenLogprobs, ...]) -> None:
        """Put the logprobs of the prompt's tokens before those of the answer."""
        self._prompt = prompt
        self._offset = prompt[-1].end if prompt else 0

    def push(self, message: Tokens) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """Return the text and logprobs that these tokens complete. A stop string ends the answer."""
        shown, logprobs = [self._before], list(self._prompt)
        self._before, self._prompt = "", ()
        for token, found in zip(message.token_ids, message.logprobs or itertools.repeat(None)):
            self.num_tokens += 1
            self._tally.completion_tokens += 1
            self._tally.accepted += message.predicted
            if found is not None:
                self._held.append((token, found, self._detokenizer.is_at_start))
            texts = self._detokenizer.texts([token])
            logprobs += self._told(texts)
            text = "".join(texts)
            early = self.num_tokens <= self._min_tokens
            shown.append(text if early else self._stops.push(text))
            if self._stops.found:
                self.finish = "stop"
                logprobs += self._told(self._detokenizer.rest())
                return "".join(shown), tuple(logprobs)
        if message.finish is not None:
            texts = self._detokenizer.rest()
            logprobs += self._told(texts)
            shown.append(self._stops.push("".join(texts)))
            self.finish = "stop" if self._stops.found else message.finish
            shown.append(self._stops.flush())
        if message.end_token is not None and len(message.logprobs) > len(message.token_ids):
            end, found = message.end_token, message.logprobs[-1]
            logprobs.append(token_logprobs(self._tokenizer, end, found, self._offset, "", False))
        return "".join(shown), tuple(logprobs)

    def _told(self, texts: list[str]) -> list[TokenLogprobs]:
        """Return the logprobs of the oldest tokens that are held, whose texts these are."""
        told = []
        for text in texts[: len(self._held)]:
            token, found, is_first = self._held.popleft()
            told.append(token_logprobs(self._tokenizer, token, found, self._offset, text, is_first))
            self._offset = told[-1].end
        return told


class Answers:
    """All answers to one request.

    texts   of the answers, by their index
    """

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared, tally: Tally):
        self._tokenizer = tokenizer
        self._tally = tally
        self.submits = prepared.submits
        self._hints = prepared.hints
        self._echoes = prepared.echoes
        self._first = {
            submit.request.request_id: k * submit.request.n for k, submit in enumerate(prepared.submits)
        }
        self.texts = [
            AnswerText(tokenizer, prepared, number, tally)
            for number, submit in enumerate(prepared.submits)
            for _ in range(submit.request.n)
        ]

    @property
    def ended(self) -> bool:
        """Tell whether every answer has its finish."""
        return all(text.finish is not None for text in self.texts)

    async def push(self, message: Tokens) -> Piece | None:
        """Return the piece that a message adds to its answer; None if that has ended."""
        first = self._first[message.request_id]
        index = first + message.branch
        if self.texts[index].finish is not None:
            return None
        self.note(message)
        number = first // self.submits[0].request.n
        submit = self.submits[number]
        if submit.body.sampling.prompt_logprobs >= 0 and message.index == 0 and message.branch == 0:
            # In a thread: it takes long for a long prompt, and others wait for the event loop.
            prompt = await asyncio.to_thread(
                prompt_logprobs,
                self._tokenizer, submit.body.token_ids, self._echoes[number], message.prompt_logprobs,
            )  # fmt: skip
            for text in self.texts[first : first + submit.request.n]:
                text.follow(prompt)
        shown, logprobs = self.texts[index].push(message)
        return Piece(index, shown, self.texts[index].finish, logprobs)

    def note(self, message: Tokens) -> None:
        """Keep the figures of a message. Ranks may repeat earlier stages in the last message."""
        if message.index == 0 and message.branch == 0:
            for tier, count in message.cached_tokens.items():
                self._tally.cached_tokens[tier] = self._tally.cached_tokens.get(tier, 0) + count
        self._tally.spans += [span for span in message.spans if span not in self._tally.spans]

    async def give_hints(self, cluster: ClusterView, request: OpenRequest) -> None:
        """Give the hints about the blocks that are there now. A hint changes no answer, and fails none."""
        if self._hints:
            self._tally.hints = await give_hints(cluster, request.left(cluster.block_tokens), self._hints)


async def pieces_of(
    cluster: ClusterView,
    request: OpenRequest,
    answers: Answers,
    metrics: GatewayMetrics,
    *,
    began: float,
    token_timeout_s: float,
) -> AsyncGenerator[Piece, None]:
    """Submit a request and yield its answers, each ending with a piece that has a finish.

    began   time.monotonic() at the request's arrival
    Raises RequestError when the cluster refuses or fails a part of it. Closing the iterator early, or an
    error, cancels the work; `request` is closed in any case.
    """
    last: dict[int, float] = {}
    try:
        for submit in answers.submits:
            cluster.submit(request, submit)
        while not answers.ended:
            for message in await request.next(token_timeout_s):
                piece = await answers.push(message)
                if piece is None:
                    continue
                now = time.monotonic()
                if answers.submits[0].request.max_tokens:
                    before = last.get(piece.index)
                    metrics.observe_tokens(now - began if before is None else None, now - (before or now))
                last[piece.index] = now
                if piece.finish is not None:
                    cluster.drop(request, message.request_id, message.branch)
                    metrics.observe_end(piece.finish, now - began, answers.texts[piece.index].num_tokens)
                yield piece
        metrics.observe_prompts(sum(submit.request.num_tokens for submit in answers.submits))
        await answers.give_hints(cluster, request)
    finally:
        cluster.close(request)
