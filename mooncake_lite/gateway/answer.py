"""One answer as it comes: from the tokens of a request to pieces of text, its usage and its end.

Used by `endpoints`, once per request, streaming or not. Brings together the open request (order),
the detokenizer (whole characters) and the stop strings; knows no HTTP and no JSON.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from mooncake_lite.gateway.cluster_view import ClusterView, OpenRequest
from mooncake_lite.gateway.exposition import GatewayMetrics
from mooncake_lite.gateway.shapes import Tally
from mooncake_lite.gateway.stops import StopFinder
from mooncake_lite.messages import Submit, Tokens
from mooncake_lite.model import Detokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; `finish` is set in the last piece alone."""

    text: str
    finish: str | None


class AnswerText:
    """Tokens in, text out: whole characters, nothing of a stop string or behind one.

    tally   counts each token that was used, those of a stop string included
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], tally: Tally):
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._tally = tally

    def push(self, message: Tokens) -> Piece:
        """The text that these tokens complete. A stop string ends the answer whatever the tokens say."""
        shown = []
        for token in message.token_ids:
            self._tally.completion_tokens += 1
            shown.append(self._stops.push(self._detokenizer.push([token])))
            if self._stops.found:
                return Piece("".join(shown), "stop")
        finish = message.finish
        if finish is not None:
            shown.append(self._stops.push(self._detokenizer.flush()))
            finish = "stop" if self._stops.found else finish
            shown.append(self._stops.flush())
        return Piece("".join(shown), finish)


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
