"""Answers in exactly the shapes of OpenAI's API, as plain dictionaries.

Used by `endpoints`. Knows no request's life: everything comes as arguments. One `Shaper` is one
answer, so that id, time and model are the same in all chunks of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_lite.gateway.logprobs import TokenLogprobs, in_chat_shape, in_text_shape
from mooncake_lite.messages import Span

Logprobs = Sequence[TokenLogprobs]


@dataclass(slots=True)
class Tally:
    """What one request has used so far.

    cached_tokens   prompt tokens whose KV was reused, by tier
    spans           stages, as the ranks measured them
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }

    def trace(self) -> dict[str, Any]:
        """Where cached tokens came from and where the time went; our own addition to an answer."""
        tiers = {"dram": 0, "ssd": 0} | self.cached_tokens
        spans = [
            {name: getattr(span, name) for name in ("stage", "rank", "seconds", "nbytes", "count")}
            for span in self.spans
        ]
        return {"cached_tokens": tiers, "spans": spans}


class Shaper:
    """Makes the chunks, or the one object, of one answer.

    chat            chat completion, else text completion
    include_usage   a stream ends with a chunk that has usage and no choices; all others say null
    trace           the answer or its last chunk also carries "mooncake_lite"
    """

    def __init__(
        self, *, request_id: str, model: str, fingerprint: str, chat: bool, include_usage: bool, trace: bool
    ):
        self.chat = chat
        self._include_usage = include_usage
        self._trace = trace
        self._common = {
            "id": request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, text: str, finish: str, logprobs: Logprobs, tally: Tally) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        if self.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice: dict[str, Any] = {"index": 0, "message": message}
        else:
            choice = {"index": 0, "text": text}
        choice |= {"logprobs": self._logprobs(logprobs), "finish_reason": finish}
        kind = "chat.completion" if self.chat else "text_completion"
        answer = {**self._common, "object": kind, "choices": [choice], "usage": tally.usage()}
        return answer | ({"mooncake_lite": tally.trace()} if self._trace else {})

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first text: the role. Text completions have none."""
        if not self.chat:
            return None
        return self._chunk([self._choice({"role": "assistant", "content": ""}, None)])

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        """A chunk with text, or with the logprobs of tokens whose text comes later."""
        return self._chunk([self._choice({"content": text} if self.chat else text, None, logprobs)])

    def closing(self, finish: str, tally: Tally) -> list[dict[str, Any]]:
        """The last chunks of a stream: the reason of its end and, when asked for, the usage."""
        chunks = [self._chunk([self._choice({} if self.chat else "", finish)])]
        if self._include_usage:
            chunks.append(self._chunk([]) | {"usage": tally.usage()})
        if self._trace:
            chunks[-1]["mooncake_lite"] = tally.trace()
        return chunks

    def _choice(self, content: Any, finish: str | None, logprobs: Logprobs = ()) -> dict[str, Any]:
        name = "delta" if self.chat else "text"
        return {"index": 0, name: content, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def _logprobs(self, logprobs: Logprobs) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return in_chat_shape(logprobs) if self.chat else in_text_shape(logprobs)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return {**self._common, "object": kind, "choices": choices, **usage}


def model_card(
    served_id: str, max_model_len: int, created: int, default_sampling: dict[str, Any]
) -> dict[str, Any]:
    """One entry of /v1/models. default_sampling: what the model names for requests that do not."""
    return {
        "id": served_id,
        "object": "model",
        "created": created,
        "owned_by": "mooncake-lite",
        "max_model_len": max_model_len,
        "default_sampling": default_sampling,
    }


def to_json(answer: dict[str, Any]) -> bytes:
    """UTF-8 JSON."""
    return msgspec.json.encode(answer)


def event(answer: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
