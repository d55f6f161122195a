"""One streamed question over HTTP, timed at the client, with the trace that the server adds on request.

Called by `demo.story` and by tests. It may know the OpenAI wire format and the trace header, and nothing of
what lies behind the port. The trace is explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from mooncake_lite.errors import ClusterError
from mooncake_lite.event_stream import BrokenStream, chunks, error_message, finish_reason, texts
from mooncake_lite.messages import Span

TRACE_HEADER = {"x-mooncake-lite-trace": "1"}
READ_LIMIT_S = 120.0
"""Longest silence of the server before the demo gives up: a cold prefill of the document on one slow core."""

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back, and when.

    ttft_s      from sending the request to the first chunk with text
    answer_s    from sending the request to the last chunk with text
    cached      prompt tokens whose KV was reused, by tier ("dram", "ssd")
    spans       where the time went, as the ranks measured it
    """

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    answer_s: float
    cached: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, whatever tier they came from."""
        return sum(self.cached.values())

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens after the first one; 0 for an answer of one token."""
        return (
            (self.answer_s - self.ttft_s) / (self.completion_tokens - 1)
            if self.completion_tokens > 1
            else 0.0
        )

    def same_tokens(self, other: Answer) -> bool:
        """Whether both answers are the same: the text, how many tokens it has, and why it ended."""
        return (self.text, self.completion_tokens, self.finish) == (
            other.text,
            other.completion_tokens,
            other.finish,
        )


def ask(
    base_url: str,
    messages: list[Message],
    max_tokens: int,
    *,
    on_text: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Ask greedily, streaming, and wait for the whole answer.

    on_text   called with each piece of text as it comes
    Raises ClusterError when the server refuses, breaks off or stays silent for READ_LIMIT_S.
    """
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    limits = httpx.Timeout(10.0, read=READ_LIMIT_S)
    try:
        with httpx.Client(trust_env=False, timeout=limits) as client:
            sent = clock()
            url = f"{base_url}/v1/chat/completions"
            with client.stream("POST", url, json=body, headers=TRACE_HEADER) as response:
                if response.status_code != 200:
                    response.read()
                    raise ClusterError(f"HTTP {response.status_code}: {error_text(response.text)}")
                return read_answer(response.iter_lines(), sent, on_text, clock)
    except httpx.TimeoutException:
        raise ClusterError(f"the server was silent for {READ_LIMIT_S:.0f} s") from None
    except httpx.HTTPError as error:
        raise ClusterError(f"the connection to the server broke: {error}") from None


def read_answer(
    lines: Iterable[str],
    sent: float,
    on_text: Callable[[str], None],
    clock: Callable[[], float],
) -> Answer:
    """An Answer from the lines of an event stream.

    Raises ClusterError when the stream carries an error, ends before its end mark, or has no usage.
    """
    pieces: list[str] = []
    finish = ""
    usage: dict[str, Any] = {}
    trace: dict[str, Any] = {}
    first = last = sent
    try:
        for chunk in chunks(lines):
            usage = chunk.get("usage") or usage
            trace = chunk.get("mooncake_lite") or trace
            finish = finish_reason(chunk) or finish
            for text in texts(chunk):
                last = clock()
                first = first if pieces else last
                pieces.append(text)
                on_text(text)
    except BrokenStream as error:
        raise ClusterError(str(error)) from None
    if not usage:
        raise ClusterError("the server broke off in the middle of an answer: no usage came")
    return Answer(
        text="".join(pieces),
        finish=finish,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        ttft_s=first - sent,
        answer_s=last - sent,
        cached=dict(trace.get("cached_tokens", {})),
        spans=[Span(**span) for span in trace.get("spans", [])],
    )


def error_text(body: str) -> str:
    """The message of an OpenAI error object, or the beginning of whatever else came back."""
    return error_message(body) or " ".join(body.split())[:200] or "no body"
