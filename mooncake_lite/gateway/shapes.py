"""Answers in exactly the shapes of OpenAI's API: whole ones, and the chunks of streams as dictionaries.

Used by `endpoints`. Knows no request's life: everything comes as arguments. One `Shaper` is one
answer, so that id, time and model are the same in all chunks of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from mooncake_lite.gateway import answer_types as types
from mooncake_lite.gateway.logprobs import TokenLogprobs, in_chat_shape, in_text_shape
from mooncake_lite.messages import Span

Logprobs = Sequence[TokenLogprobs]


@dataclass(slots=True)
class Tally:
    """The usage of one request so far, with all its prompts and answers.

    predicted       tokens of the prediction, once for each answer
    accepted        tokens of the answers that were drafts from the prediction
    cached_tokens   prompt tokens whose KV was reused, by tier
    spans           stages, as the ranks measured them
    hints           what became of the request's hints
    """

    prompt_tokens: int
    completion_tokens: int = 0
    predicted: int = 0
    accepted: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    hints: list[types.HintAnswer] = field(default_factory=list)

    def usage(self) -> types.Usage:
        """OpenAI's usage object."""
        total = self.prompt_tokens + self.completion_tokens
        return types.Usage(
            self.prompt_tokens,
            self.completion_tokens,
            total,
            types.PromptTokensDetails(sum(self.cached_tokens.values())),
            types.CompletionTokensDetails(self.accepted, max(0, self.predicted - self.accepted)),
        )

    def trace(self) -> dict[str, Any]:
        """Return the origins of cached tokens and the times of stages, our own addition to an answer."""
        tiers = {"dram": 0, "ssd": 0} | self.cached_tokens
        return {"cached_tokens": tiers, "spans": [msgspec.structs.asdict(span) for span in self.spans]}


@dataclass(slots=True)
class Whole:
    """A whole answer, put together from its pieces."""

    text: str = ""
    finish: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Shaper:
    """Makes the chunks, or the one object, that answer one request. Each choice is an answer.

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

    def whole(self, answers: Sequence[Whole], tally: Tally) -> types.Completion:
        """The answer to a request that does not stream."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        form: Any = types.ChatCompletion if self.chat else types.TextCompletion
        more = self._more(tally)
        whole: types.Completion = form(**self._common, choices=choices, usage=tally.usage(), **more)
        return whole

    def opening(self, count: int) -> list[dict[str, Any]]:
        """The chunks before the first text: the role of each of `count` choices. Texts have none."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk([self._choice(index, role, None)]) for index in range(count if self.chat else 0)]

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]:
        """A chunk with text, or with the logprobs of tokens whose text comes later."""
        return self._chunk([self._choice(index, {"content": text} if self.chat else text, None, logprobs)])

    def ending(self, index: int, finish: str) -> dict[str, Any]:
        """The last chunk of a choice: the reason of its end."""
        return self._chunk([self._choice(index, {} if self.chat else "", finish)])

    def closing(self, ending: dict[str, Any], tally: Tally) -> list[dict[str, Any]]:
        """The last chunks of a stream: that of the choice that ended last and, when asked for, the usage."""
        chunks = [ending]
        if self._include_usage:
            chunks.append(self._chunk([]) | {"usage": tally.usage()})
        chunks[-1] |= self._more(tally)
        return chunks

    def _more(self, tally: Tally) -> dict[str, Any]:
        """Our own additions to an answer, or its last chunk, that the client asked for."""
        trace = {"mooncake_lite": tally.trace()} if self._trace else {}
        return trace | ({"kv_hints": tally.hints} if tally.hints else {})

    def _whole_choice(self, index: int, answer: Whole) -> types.ChatChoice | types.TextChoice:
        logprobs, finish = self._logprobs(answer.logprobs), cast(types.FinishReason, answer.finish)
        if self.chat:
            return types.ChatChoice(index, types.AssistantMessage(answer.text), logprobs, finish)
        return types.TextChoice(index, answer.text, logprobs, finish)

    def _choice(
        self, index: int, content: Any, finish: str | None, logprobs: Logprobs = ()
    ) -> dict[str, Any]:
        name = "delta" if self.chat else "text"
        return {"index": index, name: content, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def _logprobs(self, logprobs: Logprobs) -> Any:
        if not logprobs:
            return None
        return in_chat_shape(logprobs) if self.chat else in_text_shape(logprobs)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return {**self._common, "object": kind, "choices": choices, **usage}


def event(answer: dict[str, Any] | types.ErrorAnswer) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
