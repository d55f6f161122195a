"""Request bodies: from the bytes of a POST to one valid `Ask`, or a RequestError that names the field.

Called by `endpoints`. Checks all that can be checked without the tokenizer; knows no cluster.
Types and limits are checked by msgspec, fields that cannot be obeyed in `fields`, the rest here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.fields import NEUTRAL, NEUTRAL_IN_CHATS, refuse_unsupported
from mooncake_lite.gateway.sampling import OPENAI, NumLogprobs, NumTokens, SamplingBody, TokenId, sampling_of
from mooncake_lite.messages import Sampling, Verb

MAX_STOPS = 16
"""Stop strings of one request. OpenAI takes 4; tasks of lm-eval have more."""

MAX_STOP_CHARS = 1024
"""The text held back while it may be the start of a stop string is shorter than this."""

Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
NumChoices = Annotated[int, Meta(ge=1, extra_json_schema={"maximum": "$most_choices"})]
Model = Annotated[str, Meta(extra_json_schema={"enum": "$models"})]

Text = Annotated[str, Meta(min_length=1)]
Ids = Annotated[list[TokenId], Meta(min_length=1, extra_json_schema={"maxItems": "$most_tokens"})]
_SEVERAL = Meta(min_length=1, extra_json_schema={"maxItems": "$most_prompts"})
_FORMS = (Text, Ids, Annotated[list[Text], _SEVERAL], Annotated[list[Ids], _SEVERAL])
OfForms = Meta(extra_json_schema={"anyOf": [msgspec.json.schema(form) for form in _FORMS]})
"""What `_prompts` accepts. msgspec has no unions of two kinds of lists."""

TIMED: tuple[Verb, ...] = ("prefetch", "pin", "retain")
"""Verbs with seconds."""

Session = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]  # a day: KV to be kept for longer is asked for again
Copies = Annotated[int, Meta(ge=1, le=1024)]  # more than a cluster has stores

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; /v1/chat/completions takes what is left of the context."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: a stream ends with a chunk that has the usage and no choices."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only those of type "text" are taken."""

    type: Annotated[str, Meta(extra_json_schema={"const": "text"})]
    text: Annotated[str | None, Meta(extra_json_schema={"type": "string"})] = None


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the answer will mostly repeat; of types there is only "content"."""

    type: Annotated[str, Meta(extra_json_schema={"const": "content"})]
    content: str | list[ContentPart]


class ChatMessage(msgspec.Struct, kw_only=True):
    """What is checked of a message; all its fields reach the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class KvHints(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Hints about a request's own prompt and answer. The values are copies, seconds, or whether."""

    share: Copies | None = None
    prefetch: Seconds | None = None
    demote: bool | None = None
    pin: Seconds | None = None
    retain: Seconds | None = None

    @property
    def given(self) -> dict[Verb, float]:
        """Return the value of each verb that is given, in the order of the verbs."""
        values = {verb: getattr(self, verb) for verb in get_args(Verb)}
        return {
            verb: float(value) for verb, value in values.items() if value is not None and value is not False
        }


class GenerateBody(SamplingBody, kw_only=True):
    """Base of the bodies of both generating endpoints."""

    model: Model | None = None
    n: NumChoices | None = None
    best_of: NumChoices | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    speculate: bool | None = None
    session: Session | None = None
    kv_hints: KvHints | None = None


class ChatBody(GenerateBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    prediction: Prediction | None = None


class CompletionBody(GenerateBody, kw_only=True):
    """POST /v1/completions: a text, token ids, or a list of several prompts of one of these kinds."""

    prompt: Annotated[Any, OfForms]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: prompt or messages, and not both."""

    model: Model | None = None
    prompt: Annotated[str, Meta(extra_json_schema={"minLength": 1})] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: Model | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class HintBody(msgspec.Struct, kw_only=True):
    """POST /v1/kv/hints: a verb, and prompt or messages, or else a session."""

    verb: Verb
    model: Model | None = None
    prompt: Text | Ids | None = None
    messages: list[ChatMessage] | None = None
    session: Session | None = None
    seconds: Seconds | None = None
    copies: Copies | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


for _kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, HintBody):
    msgspec.json.Decoder(_kind)  # reads its fields now: msgspec 0.22 crashes when two threads do at once

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One valid request to generate, before its prompts are tokenised.

    prompts      one, or several of the same kind; never messages and another kind
    n            answers to each prompt
    echo         the prompt stands before its answers
    max_tokens   None when the client left it out; 0: the prompt's KV is computed, and no answer
    seeded       whether the client gave the seed
    speculate    whether drafts are made; None when the client left it out
    session      of the tenant; "": none
    hints        verb -> seconds or copies; to be given when all answers have ended
    prediction   what the client expects as the answer; None: there is no prediction
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
    speculate: bool | None
    session: str
    hints: dict[Verb, float]
    prediction: str | None


def parse_chat(raw: bytes, defaults: Sampling = OPENAI) -> Ask:
    """Return the Ask of a chat completion's body. defaults: of sampling. Raises RequestError."""
    fields, body = _parsed(raw, ChatBody, NEUTRAL | NEUTRAL_IN_CHATS)
    _check_messages(body.messages)
    prompts = (fields["messages"],)
    return _ask(body, prompts, sampling_of(body, defaults, _chat_logprobs(body)))


def parse_completion(raw: bytes, defaults: Sampling = OPENAI) -> Ask:
    """Return the Ask of a completion's body. defaults: of sampling. Raises RequestError."""
    body = _typed(raw, CompletionBody)
    logprobs = -1 if body.logprobs is None else body.logprobs
    sampling = sampling_of(body, defaults, logprobs)
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    return _ask(body, _prompts(body.prompt), sampling, echo=bool(body.echo))


def parse_tokenize(raw: bytes) -> tuple[TokenizeBody, str | list[dict[str, Any]]]:
    """Return a tokenize body, and its prompt: text or a chat's messages. Raises RequestError."""
    fields, body = _parsed(raw, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        _check_messages(body.messages)
        return body, fields["messages"]
    assert body.prompt is not None
    return body, body.prompt


def parse_hint(raw: bytes) -> HintBody:
    """Return a hint's body. A prompt in it is still to be read as that of a request. Raises RequestError."""
    body: HintBody = _typed(raw, HintBody)
    prompts = (body.prompt is not None) + (body.messages is not None)
    if prompts > 1 or (not prompts and body.session is None):
        raise RequestError("give prompt or messages, or else a session", param="prompt")
    for name, verbs in (("seconds", TIMED), ("copies", ("share",))):
        if getattr(body, name) is not None and body.verb not in verbs:
            raise RequestError(f"{name} belongs to {', '.join(verbs)}, not to {body.verb}", param=name)
    return body


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """Return a detokenize body, with any ids. Raises RequestError."""
    body: DetokenizeBody = _typed(raw, DetokenizeBody, {})
    return body


def _check_messages(messages: list[ChatMessage]) -> None:
    """Raises RequestError for no message, one without content, and content that is no text."""
    if not messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if message.content is None and message.role != "assistant":
            raise RequestError(f"a message of role {message.role} needs content", param=where)
        _text_of(message.content or "", where)


def _text_of(content: str | list[ContentPart], where: str) -> str:
    """Return a content as one text. Raises RequestError for a part that is no text."""
    if isinstance(content, str):
        return content
    for j, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"content part of type {part.type!r} is not supported; only text parts are",
                param=f"{where}[{j}]",
            )
    return "".join(part.text or "" for part in content)


def _prediction(body: GenerateBody) -> str | None:
    """Return the text that is predicted, of a chat alone. Raises RequestError for what is no text."""
    prediction = body.prediction if isinstance(body, ChatBody) else None
    if prediction is None:
        return None
    if prediction.type != "content":
        raise RequestError(
            f'a prediction of type {prediction.type!r} is not supported; set it to "content"',
            param="prediction.type",
        )
    return _text_of(prediction.content, "prediction.content")


def _typed(raw: bytes, kind: type[Any], neutral: dict[str, tuple[Any, ...]] = NEUTRAL) -> Any:
    return _parsed(raw, kind, neutral)[1]


def _parsed(
    raw: bytes, kind: type[Any], neutral: dict[str, tuple[Any, ...]] = NEUTRAL
) -> tuple[dict[str, Any], Any]:
    """Return a body as its JSON says, and as a struct. Raises RequestError."""
    try:
        body = msgspec.json.decode(plain_text(raw))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {_json_problem(raw, str(error))}") from None
    if not isinstance(body, dict):
        raise RequestError('the body must be a JSON object, as {"prompt": "hello"}')
    body = {name: _whole(value) for name, value in body.items()}
    refuse_unsupported(body, neutral)
    try:
        return body, msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        raise RequestError(_in_words(message, body), param=_field_of(message)) from None


def _whole(value: Any, depth: int = 2) -> Any:
    """Return numbers without a fraction as integers, in lists and in objects too: in JSON 3.0 is 3."""
    if isinstance(value, dict) and depth == 2:
        return {name: _whole(each, 0) for name, each in value.items()}
    if isinstance(value, list) and depth:
        return [_whole(each, depth - 1) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json_problem(raw: bytes, message: str) -> str:
    """Return why a body is not JSON: msgspec's message, except where that wrongly says "truncated"."""
    if not raw.strip():
        return "it is empty"
    if "truncated" in message and re.search(rb"\\u[dD][89a-fA-F]", raw):
        return "a text has half of a surrogate pair, which is no character"
    return message


def _in_words(message: str, body: dict[str, Any]) -> str:
    """Return a msgspec message, in full words where a number or a length is beyond a limit."""
    found = re.match(r"Expected `\w+`( of length)? ([<>]=?) (\S+) - at `\$\.(\w+)`$", message)
    if found is None:
        return message.replace("$.", "")
    length, sign, limit, name = found.groups()
    what = f"the length of {name}" if length else f"{name}={body[name]}"
    words = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
    return f"{what} must be {words[sign]} {limit.removesuffix('.0')}"


def _field_of(message: str) -> str | None:
    """Return the field of a msgspec message: its path, or the missing name at that path."""
    path = re.search(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])?`$", message)
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
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return -1


def _ask(
    body: ChatBody | CompletionBody, prompts: tuple[Prompt, ...], sampling: Sampling, *, echo: bool = False
) -> Ask:
    options = body.stream_options
    max_tokens = _max_tokens(body)
    hints = body.kv_hints.given if body.kv_hints is not None else {}
    for name in ("session", "kv_hints"):
        if len(prompts) > 1 and getattr(body, name):
            raise RequestError(f"{name} belongs to one prompt, and prompt has {len(prompts)}", param=name)
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
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        ignore_eos=bool(body.ignore_eos),
        add_special_tokens=not chat if special is None else special,
        cache_salt=body.cache_salt or "",
        speculate=body.speculate,
        session=body.session or "",
        hints=hints,
        prediction=_prediction(body),
    )


def _choices(body: GenerateBody, max_tokens: int | None) -> int:
    """Return the number of answers to a prompt. Raises RequestError."""
    n = 1 if body.n is None else body.n
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
    return first if first is not None else second
