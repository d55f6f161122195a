"""Request bodies: from the bytes of a POST to one valid `Ask`, or a RequestError that names the field.

Called by `endpoints`. Checks all that can be checked without the tokenizer; knows no cluster.
Types are checked by msgspec, ranges here, fields that cannot be obeyed in `fields`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.fields import NEUTRAL, NEUTRAL_IN_CHATS, refuse_unsupported
from mooncake_lite.gateway.sampling import OPENAI, SamplingBody, sampling_of, stop_ids_of, top_logprobs
from mooncake_lite.messages import Sampling

MAX_STOPS = 16
"""Stop strings of one request. OpenAI takes 4; tasks of lm-eval have more."""

MAX_STOP_CHARS = 1024
"""The text held back while it may be the start of a stop string is shorter than this."""

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; /v1/chat/completions takes what is left of the context."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: a stream ends with a chunk that has the usage and no choices."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only those of type "text" are taken."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a chat. Tool calls are named here so that they are refused and not overlooked."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class GenerateBody(SamplingBody, kw_only=True):
    """Base of the bodies of both generating endpoints."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


class ChatBody(GenerateBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerateBody, kw_only=True):
    """POST /v1/completions: a text, token ids, or a list of several prompts of one of these kinds."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: prompt or messages, and not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


Prompt = str | list[int] | list[dict[str, str]]
"""Text, token ids, or the messages of a chat as a template wants them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One valid request to generate, before its prompts are tokenised.

    prompts      one, or several of the same kind; never messages and another kind
    n            answers to each prompt
    echo         the prompt stands before its answers
    max_tokens   None when the client left it out; 0: the prompt's KV is computed, and no answer
    seeded       whether the client gave the seed
    """

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int
    echo: bool
    max_tokens: int | None
    sampling: Sampling
    seeded: bool
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    add_special_tokens: bool
    cache_salt: str


def parse_chat(raw: bytes, defaults: Sampling = OPENAI) -> Ask:
    """Return the Ask of a chat completion's body. defaults: of sampling. Raises RequestError."""
    body = _typed(raw, ChatBody, NEUTRAL | NEUTRAL_IN_CHATS)
    prompts = (template_messages(body.messages),)
    return _ask(body, prompts, sampling_of(body, defaults, _chat_logprobs(body)))


def parse_completion(raw: bytes, defaults: Sampling = OPENAI) -> Ask:
    """Return the Ask of a completion's body. defaults: of sampling. Raises RequestError."""
    body = _typed(raw, CompletionBody)
    logprobs = -1 if body.logprobs is None else top_logprobs("logprobs", body.logprobs)
    sampling = sampling_of(body, defaults, logprobs)
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    return _ask(body, _prompts(body.prompt), sampling, echo=bool(body.echo))


def parse_tokenize(raw: bytes) -> tuple[TokenizeBody, str | list[dict[str, str]]]:
    """Return a tokenize body, and its prompt: text or a chat's messages. Raises RequestError."""
    body = _typed(raw, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return body, template_messages(body.messages)
    assert body.prompt is not None
    return body, body.prompt


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """Return a detokenize body, with any ids. Raises RequestError."""
    body: DetokenizeBody = _typed(raw, DetokenizeBody, {})
    return body


def template_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Return messages as chat templates need them: role and one text. Raises RequestError."""
    if not messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    if message.tool_calls or message.function_call is not None:
        raise RequestError("tool calls are not supported by this server", param=f"{where}.tool_calls")
    if message.role in ("tool", "function"):
        raise RequestError(f"role {message.role} is not supported by this server", param=f"{where}.role")
    # OpenAI renamed "system" for newer models; the templates of local models know the old name only.
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    if message.content is None:
        if role != "assistant":
            raise RequestError(f"a message of role {message.role} needs content", param=f"{where}.content")
        return {"role": role, "content": ""}
    texts = []
    for j, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"content part of type {part.type!r} is not supported; only text parts are",
                param=f"{where}.content[{j}]",
            )
        texts.append(part.text)
    return {"role": role, "content": "".join(texts)}


def _typed(raw: bytes, kind: type[Any], neutral: dict[str, tuple[Any, ...]] = NEUTRAL) -> Any:
    try:
        body = msgspec.json.decode(plain_text(raw))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {_json_problem(raw, str(error))}") from None
    if not isinstance(body, dict):
        raise RequestError('the body must be a JSON object, as {"prompt": "hello"}')
    refuse_unsupported(body, neutral)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        raise RequestError(message.replace("$.", ""), param=_field_of(message)) from None


def _json_problem(raw: bytes, message: str) -> str:
    """Return why a body is not JSON: msgspec's message, except where that wrongly says "truncated"."""
    if not raw.strip():
        return "it is empty"
    if "truncated" in message and re.search(rb"\\u[dD][89a-fA-F]", raw):
        return "a text has half of a surrogate pair, which is no character"
    return message


def _field_of(message: str) -> str | None:
    """Return the field of a msgspec message: its path, or the missing name at that path."""
    path = re.search(r" - at `\$\.?([^`]*)`$", message)
    missing = re.search(r"required field `([^`]+)`", message)
    parts = [found.group(1) for found in (path, missing) if found]
    return ".".join(part for part in parts if part) or None


def _prompts(prompt: str | list[Any]) -> tuple[str | list[int], ...]:
    """Return the prompts of a body in one of four shapes: a text, token ids, or a list of one of these."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return (prompt,)
    several = prompt if isinstance(prompt, list) else []
    if several and (all(isinstance(one, str) for one in several) or all(map(_are_ids, several))):
        return tuple(several)
    raise RequestError(
        "prompt must be a text, a list of token ids, a list of texts, or a list of lists of token ids; "
        "no list may be empty",
        param="prompt",
    )


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)


def _chat_logprobs(body: ChatBody) -> int:
    if body.logprobs:
        return top_logprobs("top_logprobs", body.top_logprobs or 0)
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return -1


def _ask(
    body: ChatBody | CompletionBody, prompts: tuple[Prompt, ...], sampling: Sampling, *, echo: bool = False
) -> Ask:
    options = body.stream_options
    max_tokens = _max_tokens(body)
    chat, special = isinstance(body, ChatBody), body.add_special_tokens
    return Ask(
        chat=chat,
        model=body.model,
        prompts=prompts,
        n=_choices(body, max_tokens),
        echo=echo,
        max_tokens=max_tokens,
        sampling=sampling,
        seeded=body.seed is not None,
        stops=_stops(body.stop),
        stop_ids=stop_ids_of(body),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        ignore_eos=bool(body.ignore_eos),
        add_special_tokens=not chat if special is None else special,
        cache_salt=body.cache_salt or "",
    )


def _choices(body: GenerateBody, max_tokens: int | None) -> int:
    """Return the number of answers to a prompt. Raises RequestError."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise RequestError(f"n={n} must be at least 1", param="n")
    if n > 1 and max_tokens == 0:
        raise RequestError(f"n={n} answers of max_tokens=0 would all be empty; leave n out", param="n")
    if body.best_of not in (None, n):
        raise RequestError(
            f"best_of={body.best_of} is not supported by this server unless it equals n={n}; leave it out",
            param="best_of",
        )
    return n


def _max_tokens(body: GenerateBody) -> int | None:
    first, second = body.max_tokens, body.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise RequestError(
            f"max_tokens={first} and max_completion_tokens={second} contradict each other; give one",
            param="max_completion_tokens",
        )
    name, wanted = ("max_tokens", first) if first is not None else ("max_completion_tokens", second)
    if wanted is not None and wanted < 0:
        raise RequestError(f"{name}={wanted} must be at least 0", param=name)
    return wanted


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string of {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed", param="stop"
            )
    return stops
