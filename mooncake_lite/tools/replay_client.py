"""Plays a trace against a server: each request is sent at its time, whatever became of the ones before it.

Used by `replay`. It knows the OpenAI API, and notes when pieces of answers come. Explained in
docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from mooncake_lite.errors import UserError
from mooncake_lite.tools.chat import model_card
from mooncake_lite.tools.client import (
    BROKE_OFF,
    CONTROL,
    AnswerFailed,
    event_of,
    events,
    one_line,
    problem_of,
)
from mooncake_lite.workloads.metrics import COMPLETED, FAILED, REJECTED, Record
from mooncake_lite.workloads.text import prompt_of, text_of_block
from mooncake_lite.workloads.traces import Trace, TraceRequest
from transport.messaging.descriptors import raise_limit

CONNECT_LIMIT_S, PROBE_LIMIT_S = 10.0, 120.0
LOST_S = 30.0
"""A server that takes no connection for so long is lost. A gateway that is started anew takes seconds."""

KEPT_OPEN_S = 2.0
"""How long an idle connection is used again: less than servers keep it, 5 s for most of them."""

CAUSE_LENGTH = 80
POOL = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_OPEN_S)

STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}


class Cached(msgspec.Struct):
    """Details of `Usage`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens, as the server counts them; None where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None


class Choice(msgspec.Struct):
    """A piece of the answer."""

    text: str | None = None


class Chunk(msgspec.Struct):
    """What matters of an event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None


@dataclass(slots=True)
class Played:
    """A request of the trace, and what became of it. `record` has seconds since the begin of the run.

    late_s   from its time in the trace to the time when it was sent
    """

    request: TraceRequest
    late_s: float
    record: Record
    usage: Usage

    @property
    def cached_tokens(self) -> int | None:
        """Return how many tokens of the prompt were cached; None where the server does not say."""
        return (self.usage.prompt_tokens_details or Cached()).cached_tokens


def accepted_fields(client: httpx.Client, url: str, model: str | None) -> dict[str, Any]:
    """Ask for one token, to learn which fields the server takes. Raises UserError when it takes none.

    Returns the fields that every request has: the model, and `ignore_eos` unless the server refuses it.
    """
    name = model or model_card(client, url, None).get("id")
    if not name:
        raise UserError(f"the server at {url} lists no model; name one with --model")
    fields = {**STREAMED, "model": name, "ignore_eos": True}
    if (reply := _probe(client, url, fields)).status_code in (400, 422):
        del fields["ignore_eos"]
        reply = _probe(client, url, fields)
    if reply.status_code != 200:
        raise UserError(f"the server at {url} refuses a completion: {problem_of(reply)}")
    try:
        list(events(reply.text.splitlines()))
    except AnswerFailed as error:
        raise UserError(f"the server at {url} does not stream as the OpenAI API does: {error}") from None
    return fields


def _probe(client: httpx.Client, url: str, fields: dict[str, Any]) -> httpx.Response:
    """Ask for one token. Raises UserError when there is no answer."""
    body = {**fields, "prompt": text_of_block(0, 1), "max_tokens": 1}
    try:
        return client.post("/v1/completions", json=body, timeout=PROBE_LIMIT_S)
    except httpx.HTTPError as error:
        raise UserError(f"the server at {url} does not answer a completion: {one_line(error)}") from None


@dataclass(slots=True)
class Player:
    """Plays a trace once.

    fields       of every request
    patience_s   longest time from sending a request to the end of its answer
    told         called when a request has ended
    played       in the order of their ends
    sent         number of requests that were sent; those that a Ctrl-C cut off are not in `played`
    stopped      why not all were sent, or waited for; "" when all were
    """

    client: httpx.AsyncClient
    trace: Trace
    fields: dict[str, Any]
    patience_s: float
    told: Callable[[], None] = lambda: None
    lost_s: float = LOST_S
    played: list[Played] = field(default_factory=list)
    sent: int = 0
    stopped: str = ""
    _began_s: float = 0.0
    _unreachable_since_s: float = 0.0

    async def play(self) -> None:
        """Send all requests and wait for their ends, or until Ctrl-C, or until the server is lost."""
        raise_limit()  # an overloaded server has thousands of connections open
        self._began_s = time.perf_counter()
        first_ms = self.trace.requests[0].timestamp
        try:
            async with asyncio.TaskGroup() as group:
                for request in self.trace.requests:
                    at_s = (request.timestamp - first_ms) / 1e3
                    await asyncio.sleep(max(0.0, at_s - self._now_s()))
                    if self.stopped:
                        break
                    self.sent += 1
                    group.create_task(self._one(request, at_s))
        except asyncio.CancelledError:  # Ctrl-C: what has ended is kept
            self.stopped = "interrupted"

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _one(self, request: TraceRequest, at_s: float) -> None:
        """Send a request, and note its end."""
        prompt = prompt_of(request, self.trace.block_tokens)
        body = json.dumps({**self.fields, "prompt": prompt, "max_tokens": max(1, request.output_length)})
        times_s, usage = list[float](), list[Usage]()
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(self.patience_s):
                outcome, cause = await self._ask(body, times_s, usage)
        except TimeoutError:
            outcome, cause = FAILED, f"no whole answer within {self.patience_s:g} s"
        except (httpx.ConnectError, httpx.ConnectTimeout):
            outcome, cause = FAILED, "no connection"
            self._unreachable_since_s = self._unreachable_since_s or sent_s
            if sent_s - self._unreachable_since_s > self.lost_s:
                self.stopped = f"the server has taken no connection for {self.lost_s:g} s"
        except (httpx.HTTPError, AnswerFailed) as error:
            outcome, cause = FAILED, CONTROL.sub(" ", one_line(error))[:CAUSE_LENGTH]
        else:
            self._unreachable_since_s = 0.0
        last = usage[-1] if usage else Usage()
        record = Record(sent_s, times_s, outcome, cause, last.completion_tokens)
        self.played.append(Played(request, sent_s - at_s, record, last))
        self.told()

    async def _ask(self, body: str, times_s: list[float], usage: list[Usage]) -> tuple[str, str]:
        """Send a body, and note when pieces of text come. Returns (outcome, cause).

        Raises AnswerFailed and httpx.HTTPError.
        """
        headers, heard_s = {"Content-Type": "application/json"}, list[float]()
        async with self.client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                return REJECTED, _refusal_of(response)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                event = event_of(line)
                if event is None:
                    times_s += [] if times_s else heard_s[:1]  # tokens without text
                    return (COMPLETED, "") if times_s else (FAILED, "an answer without a choice")
                chunk = _chunk_of(event)
                if chunk.choices:
                    heard_s.append(self._now_s())
                if any(choice.text for choice in chunk.choices):
                    times_s.append(heard_s[-1])
                if chunk.usage is not None:
                    usage.append(chunk.usage)
        raise AnswerFailed(BROKE_OFF)


def _chunk_of(event: dict[str, Any]) -> Chunk:
    """Return what matters of an event. Raises AnswerFailed for one of another form."""
    try:
        return msgspec.convert(event, Chunk)
    except msgspec.ValidationError as error:
        raise AnswerFailed(f"the server sent an event of another form: {error}") from None


def _refusal_of(response: httpx.Response) -> str:
    """Return the status and OpenAI's code or type: causes to count, where messages would all differ."""
    try:
        error = response.json()["error"]
        word = error.get("code") or error.get("type") or ""
    except (ValueError, KeyError, TypeError, AttributeError):
        word = ""
    return CONTROL.sub(" ", f"HTTP {response.status_code} {word}").strip()[:CAUSE_LENGTH]
