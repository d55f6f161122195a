"""One answer as it comes: from the tokens of a request to pieces of text, its usage and its end.

Used by `endpoints`, once per request, streaming or not. Brings together the open request (order),
the detokenizer (whole characters) and the stop strings; knows no HTTP and no JSON.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from mooncake_lite.gateway.cluster_view import ClusterView, OpenRequest
from mooncake_lite.gateway.exposition import GatewayMetrics
from mooncake_lite.gateway.logprobs import TokenLogprobs, token_logprobs
from mooncake_lite.gateway.shapes import Tally
from mooncake_lite.gateway.stops import StopFinder
from mooncake_lite.messages import Submit, Tokens
from mooncake_lite.model import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; `finish` is set in the last piece alone.

    logprobs   of the tokens that came, where the request asks for them; their text may come later
    """

    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerText:
    """Tokens in, text out: whole characters, nothing of a stop string or behind one.

    min_tokens   stop strings are looked for in what follows so many tokens
    tally        counts each token that was used, those of a stop string included
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], min_tokens: int, tally: Tally):
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopFinder(stops)
        self._min_tokens = min_tokens
        self._tally = tally
        self._offset = 0

    def push(self, message: Tokens) -> Piece:
        """The text that these tokens complete. A stop string ends the answer whatever the tokens say."""
        shown = []
        logprobs: list[TokenLogprobs] = []
        for token, found in zip(message.token_ids, message.logprobs or itertools.repeat(None)):
            self._tally.completion_tokens += 1
            if found is not None:
                logprobs.append(token_logprobs(self._tokenizer, token, found, self._offset))
                self._offset += len(logprobs[-1].token)
            text = self._detokenizer.push([token])
            early = self._tally.completion_tokens <= self._min_tokens
            shown.append(text if early else self._stops.push(text))
            if self._stops.found:
                return Piece("".join(shown), "stop", tuple(logprobs))
        finish = message.finish
        if finish is not None:
            shown.append(self._stops.push(self._detokenizer.flush()))
            finish = "stop" if self._stops.found else finish
            shown.append(self._stops.flush())
        return Piece("".join(shown), finish, tuple(logprobs))


async def pieces_of(
    cluster: ClusterView,
    request: OpenRequest,
    submit: Submit,
    text: AnswerText,
    tally: Tally,
    metrics: GatewayMetrics,
    *,
    began: float,
    token_timeout_s: float,
) -> AsyncGenerator[Piece, None]:
    """Submits a request and yields its answer, ending with the piece that has a finish.

    began   time.monotonic() at the request's arrival
    Raises RequestError when the cluster refuses or fails it. Closing the iterator early, or an error,
    cancels the work; `request` is closed in any case.
    """
    last: float | None = None
    try:
        cluster.submit(request, submit)
        while True:
            for message in await request.next(token_timeout_s):
                now = time.monotonic()
                if submit.max_tokens:
                    metrics.observe_tokens(now - began if last is None else None, now - (last or now))
                last = now
                _note(tally, message)
                piece = text.push(message)
                if piece.finish is not None:
                    metrics.observe_end(piece.finish, now - began, tally)
                yield piece
                if piece.finish is not None:
                    return
    finally:
        cluster.close(request)


def _note(tally: Tally, message: Tokens) -> None:
    """Keep what a message says besides tokens. Ranks may repeat earlier stages in the last message."""
    if message.index == 0 and not tally.cached_tokens:
        tally.cached_tokens = dict(message.cached_tokens)
    tally.spans += [span for span in message.spans if span not in tally.spans]
