"""The types of answers, exactly as OpenAI's API and ours have them.

Used by all that answers. `openapi` describes them. The events of a stream are in `shapes`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

import msgspec

from mooncake_lite.messages import HintOutcome, Verb

FinishReason = Literal["stop", "length"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose KV was reused."""

    cached_tokens: Count


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of a prediction that are in the answer as drafts, and the others."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(msgspec.Struct):
    """Tokens of one request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class HintAnswer(msgspec.Struct, tag_field="object", tag="kv.hint"):
    """What became of a hint.

    blocks     full blocks of the prefix; affected: how many of them the hint applies to, the first ones
    lasts_s    for how long, in seconds; of a prefetch that is deferred, until it begins; 0: neither
    reason     what was done, or why not, in one line
    """

    verb: Verb
    outcome: HintOutcome
    blocks: Count
    affected: Count
    lasts_s: float
    reason: str


class AssistantMessage(msgspec.Struct):
    """The answer of a chat."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class TokenLogprob(TypedDict):
    """A token with its logprob. bytes: of its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """The logprobs of a chat's answer."""

    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The logprobs of a text completion; those of a prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class ChatChoice(msgspec.Struct):
    """One of the answers of a chat completion."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class TextChoice(msgspec.Struct):
    """One of the answers of a text completion."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(msgspec.Struct, kw_only=True):
    """Base of both completions. mooncake_lite: the trace; kv_hints: of its hints; if the client asked."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    mooncake_lite: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    kv_hints: list[HintAnswer] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Completion, kw_only=True, tag_field="object", tag="chat.completion"):
    """OpenAI's chat completion."""

    choices: list[ChatChoice]


class TextCompletion(Completion, kw_only=True, tag_field="object", tag="text_completion"):
    """OpenAI's text completion."""

    choices: list[TextChoice]


class ModelCard(msgspec.Struct, kw_only=True, tag_field="object", tag="model"):
    """The served model. default_sampling: temperature, top_p and top_k, as far as the model names them."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    default_sampling: dict[str, float]


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    """A list of the one model."""

    data: list[ModelCard]


class TokenIds(msgspec.Struct):
    """The token ids of a text or a chat."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class ResetAnswer(msgspec.Struct):
    """Blocks that were removed, from DRAM or SSD, and blocks that are in use and stay."""

    removed_blocks: Count
    kept_blocks: Count


class Health(msgspec.Struct):
    """The state of the cluster: whether it serves requests, missing ranks, and troubles."""

    status: Literal["ok", "starting", "unavailable", "lost", "stopping"]
    detail: str
    weights: str
    degraded: list[str]


class Version(msgspec.Struct):
    """The version of mooncake-lite."""

    version: str


class ErrorDetails(msgspec.Struct):
    """param: the field of the body that is wrong, if it is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object: the answer to every request that has no success."""

    error: ErrorDetails
