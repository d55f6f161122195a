"""Request fields that would change the result and are not supported, with the values that change nothing.

Used by `bodies` before a body is read any further. A field that is in no list here and not in a
body's struct is ignored, as vLLM does; `user`, `metadata`, `store`, `service_tier` are such fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.errors import RequestError

_OFF: tuple[Any, ...] = (None, False)
_EMPTY_LIST: tuple[Any, ...] = (None, [])
_EMPTY_DICT: tuple[Any, ...] = (None, {})
_ABSENT: tuple[Any, ...] = (None,)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # how the answer is searched for
    "use_beam_search": _OFF,
    "length_penalty": (None, 1),
    # what else is returned
    "prompt_logprobs": _ABSENT,
    "suffix": (None, ""),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "logprob_token_ids": _ABSENT,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (None, True),
    # which token is chosen
    "typical_p": (None, 1),
    "bad_words": _EMPTY_LIST,
    "allowed_token_ids": _EMPTY_LIST,
    "logits_processors": _EMPTY_LIST,
    "repetition_detection": _ABSENT,
    "watermarking": _OFF,
    # the answer's form
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _EMPTY_DICT,
    "guided_json": _ABSENT,
    "guided_regex": _ABSENT,
    "guided_choice": _ABSENT,
    "guided_grammar": _ABSENT,
    "modalities": (None, ["text"]),
    "audio": _ABSENT,
    # tools
    "tools": _EMPTY_LIST,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "web_search_options": _ABSENT,
    # how the prompt is built
    "reasoning_effort": (None, "none"),
    "thinking_token_budget": (None, -1),
    "verbosity": (None, "medium"),
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "chat_template": _ABSENT,
    "chat_template_kwargs": _EMPTY_DICT,
    "documents": _EMPTY_LIST,
    "truncate_prompt_tokens": _ABSENT,
    "prompt_embeds": _ABSENT,
    "mm_processor_kwargs": _EMPTY_DICT,
}

NEUTRAL_IN_CHATS: dict[str, tuple[Any, ...]] = {"echo": _OFF}
"""As NEUTRAL, of chats alone."""


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but {"n": true} is a mistake that should be told.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def refuse_unsupported(body: dict[str, Any], neutrals: dict[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raises RequestError with the field's name when the body sets one that would be disobeyed."""
    for name, neutral in neutrals.items():
        if name in body and not any(_same(body[name], value) for value in neutral):
            allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
            raise RequestError(
                f"{name} is not supported by this server; leave it out or set it to {allowed}", param=name
            )
