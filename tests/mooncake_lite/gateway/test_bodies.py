"""What a request body may say, and the field that is named when it says something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway import bodies
from mooncake_lite.gateway.fields import NEUTRAL
from mooncake_lite.messages import Sampling

pytestmark = pytest.mark.quick


def completion(**fields: Any) -> bodies.Ask:
    return bodies.parse_completion(msgspec.json.encode({"prompt": "hello", **fields}))


def chat(**fields: Any) -> bodies.Ask:
    messages = [{"role": "user", "content": "hello"}]
    return bodies.parse_chat(msgspec.json.encode({"messages": messages, **fields}))


def refused(parse: Callable[..., bodies.Ask], *given: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*given, **fields)
    assert caught.value.status == 400
    return caught.value


REFUSED_VALUES: dict[str, Any] = {
    "use_beam_search": True, "length_penalty": 0.5,
    "prompt_logprobs": 1, "suffix": "end", "return_token_ids": True,
    "return_tokens_as_token_ids": True, "logprob_token_ids": [1], "watermarking": True,
    "repetition_detection": {"min_count": 3}, "thinking_token_budget": 9,
    "verbosity": "low",
    "include_stop_str_in_output": True, "skip_special_tokens": False, "typical_p": 0.9,
    "bad_words": ["no"], "allowed_token_ids": [1],
    "logits_processors": ["x"], "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}}, "guided_json": {}, "guided_regex": "a*", "guided_choice": ["a"],
    "guided_grammar": "g", "modalities": ["audio"], "audio": {"voice": "x"},
    "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}],
    "function_call": {"name": "f"}, "web_search_options": {}, "reasoning_effort": "high",
    "add_generation_prompt": False, "continue_final_message": True, "chat_template": "x",
    "chat_template_kwargs": {"a": 1}, "documents": [{}], "truncate_prompt_tokens": 10,
    "prompt_embeds": "x", "mm_processor_kwargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_that_would_be_disobeyed_is_refused_by_name_and_taken_when_neutral(name: str) -> None:
    for neutral in NEUTRAL[name]:
        chat(**{name: neutral})
        completion(**{name: neutral})
    for parse in (chat, completion):
        error = refused(parse, **{name: REFUSED_VALUES[name]})
        assert (error.param, "not supported" in error.message) == (name, True)


def test_true_is_not_the_number_one() -> None:
    assert refused(completion, length_penalty=True).param == "length_penalty"


def test_harmless_and_unknown_fields_are_ignored() -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "foo": [1]}

    assert completion(seed=1, **harmless) == completion(seed=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 11}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": "one"}, "seed"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": [1]}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 3}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"speculate": 1}, "speculate"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_value_names_its_field(fields: dict[str, Any], param: str) -> None:
    for parse in (chat, completion):
        assert refused(parse, **fields).param == param


def test_lists_may_be_as_long_as_their_limit() -> None:
    for parse in (chat, completion):
        assert len(parse(stop_token_ids=list(range(64))).stop_ids) == 64
        assert len(parse(stop=["x" * 1024] * 16).stops) == 16
        assert len(parse(logit_bias={str(n): 1 for n in range(1024)}).sampling.logit_bias) == 1024


def test_logprobs_are_a_number_in_completions_and_a_switch_with_a_number_in_chats() -> None:
    assert completion().sampling.logprobs == chat().sampling.logprobs == -1
    assert completion(logprobs=0).sampling.logprobs == chat(logprobs=True).sampling.logprobs == 0
    assert completion(logprobs=5).sampling.logprobs == chat(logprobs=True, top_logprobs=5).sampling.logprobs
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs == -1
    for parse, fields, param in (
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
    ):
        assert refused(parse, **fields).param == param


def test_what_chooses_tokens_reaches_the_ranks() -> None:
    ask = chat(
        min_p=0.1, repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5, seed=5,
        logit_bias={"7": -100, "8": 2.5}, min_tokens=3, stop_token_ids=[9],
    )  # fmt: skip
    assert ask.sampling == Sampling(1.0, 1.0, 0, 5, 0.1, 1.2, -1.0, 0.5, {7: -100.0, 8: 2.5}, 3, -1)
    assert ask.stop_ids == (9,)


def test_what_a_request_leaves_out_is_its_models() -> None:
    own = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    raw = msgspec.json.encode({"prompt": "hello", "top_p": 0.5, "seed": 1})
    assert bodies.parse_completion(raw, own).sampling == Sampling(0.6, 0.5, 20, 1, 0.05, 1.1)


@pytest.mark.parametrize(
    "prompt", [None, 5, [], {}, [1.5], [True], [1, "a"], [[1], "a"], [[1], []], [[]], [[[1], [2]]], [["a"]]]
)
def test_a_prompt_is_text_or_ids_or_a_list_of_such(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_the_four_shapes_of_prompts() -> None:
    assert completion(prompt="hello").prompts == completion(prompt=["hello"]).prompts == ("hello",)
    assert completion(prompt=[1, 2]).prompts == completion(prompt=[[1, 2]]).prompts == ([1, 2],)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[[1, 2], [3]]).prompts == ([1, 2], [3])


def test_a_prompt_in_very_many_lists_is_no_bug_of_ours() -> None:
    """JSON may come deeper than Python's functions can call each other: Python 3.12 counts them apart."""
    prompt: Any = "hello"
    for _ in range(2 * sys.getrecursionlimit()):
        prompt = [prompt]
    refused(bodies._prompts, prompt)


def test_n_is_the_number_of_answers_and_best_of_can_only_repeat_it() -> None:
    assert completion().n == chat().n == 1
    assert completion(n=3).n == chat(n=3, best_of=3).n == 3
    for parse in (completion, chat):
        for fields, param in (
            ({"n": 0}, "n"),
            ({"n": "two"}, "n"),
            ({"n": True}, "n"),
            ({"n": 2, "max_tokens": 0}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"n": 2, "best_of": 1}, "best_of"),
        ):
            assert refused(parse, **fields).param == param


def test_a_completion_with_echo_and_logprobs_has_those_of_its_prompt() -> None:
    assert completion().sampling.prompt_logprobs == completion(logprobs=3).sampling.prompt_logprobs == -1
    assert completion(echo=True).sampling.prompt_logprobs == -1
    assert completion(echo=True, logprobs=0).sampling.prompt_logprobs == 0
    assert completion(echo=True, logprobs=3).sampling.prompt_logprobs == 3
    assert chat(echo=False).echo is False
    error = refused(chat, echo=True)
    assert (error.param, "not supported" in error.message) == ("echo", True)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}],
         "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    ],
)  # fmt: skip
def test_a_wrong_message_names_its_place(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param
    assert refused(bodies.parse_tokenize, msgspec.json.encode({"messages": messages})).param == param


@pytest.mark.parametrize(
    ("prediction", "param", "words"),
    [
        ("x = 1", "prediction", "Expected `object | null`"),
        ({"content": "x"}, "prediction.type", "missing required field"),
        ({"type": "content"}, "prediction.content", "missing required field"),
        ({"type": "text", "content": "x"}, "prediction.type", 'set it to "content"'),
        ({"type": "content", "content": None}, "prediction.content", "Expected"),
        ({"type": "content", "content": [5]}, "prediction.content[0]", "Expected"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
         "prediction.content[1]", "only text parts are"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]", "only text parts are"),
    ],
)  # fmt: skip
def test_a_wrong_prediction_names_its_place(prediction: Any, param: str, words: str) -> None:
    error = refused(chat, prediction=prediction)
    assert error.param is not None
    assert error.param.removesuffix("[...]") == param
    assert words in error.message


def test_a_prediction_is_a_text_or_text_parts_and_goes_with_all_that_openai_refuses_beside_it() -> None:
    parts = [{"type": "text", "text": "a = "}, {"type": "text", "text": "1"}]
    for content in ("a = 1", parts):
        beside = {"n": 2, "logprobs": True, "presence_penalty": 1, "max_completion_tokens": 5}
        assert chat(prediction={"type": "content", "content": content}, **beside).prediction == "a = 1"
    assert chat(prediction={"type": "content", "content": []}).prediction == ""
    assert chat().prediction is chat(prediction=None).prediction is None
    assert completion(prediction={"type": "content", "content": "x"}).prediction is None


def test_a_missing_field_is_named() -> None:
    assert refused(bodies.parse_chat, b"{}").param == "messages"
    assert refused(bodies.parse_completion, b"{}").param == "prompt"


PARSERS = [bodies.parse_chat, bodies.parse_completion, bodies.parse_tokenize, bodies.parse_detokenize]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"[]", b'"x"', b'{"a": NaN}', b"{}x"],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    for parse in PARSERS:
        refused(parse, raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b" ", "it is empty"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "he', "truncated"),
        (b"null", "must be a JSON object"),
    ],
)
def test_what_is_wrong_with_the_json_is_told(raw: bytes, says: str) -> None:
    assert says in refused(bodies.parse_completion, raw).message


def test_messages_reach_the_template_with_all_their_fields() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "weight": 0.5},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]

    assert chat(messages=messages).prompts == (messages,)


def test_both_names_of_max_tokens_mean_the_same() -> None:
    assert completion(max_completion_tokens=7).max_tokens == 7
    assert completion(max_tokens=7, max_completion_tokens=7).max_tokens == 7
    assert completion(max_tokens=0).max_tokens == completion(max_completion_tokens=0).max_tokens == 0
    assert completion().max_tokens is None


def test_the_defaults_are_those_of_openai() -> None:
    ask = chat()

    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k) == (1.0, 1.0, 0)
    assert (ask.stream, ask.stops, ask.ignore_eos, ask.cache_salt) == (False, (), False, "")
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(stop="x").stops == ("x",)
    assert chat(seed=5).sampling.seed == 5
