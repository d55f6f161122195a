"""The library: `LLM` in this process, on a tiny model. Against a cluster: tests/cluster/test_serving.py."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Regex, pre_tokenizers

import mooncake_lite
from mooncake_lite import LLM, SamplingParams
from mooncake_lite.engine.local import generate_all
from mooncake_lite.errors import ClusterError, ConfigError, RequestError
from mooncake_lite.gateway.answer_types import CompletionTokensDetails
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from tests.cluster.tiny import prompts, tiny_folder, words
from tests.python import printed_by

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("qwen3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_bytes="1MiB", threads=1)  # 682 tokens: two prompts at a time


def expected(folder: Path, asked: list[list[int]]) -> list[tuple[int, ...]]:
    said: list[list[int]] = [[] for _ in asked]
    for number, token in generate_all(load_model(folder), asked, Sampling(0.0), 12, frozenset()):
        said[number].append(token)
    return [tuple(tokens) for tokens in said]


def test_a_batch_that_exceeds_the_pages_gets_the_answers_of_one_that_does_not(llm: LLM, folder: Path) -> None:
    asked = prompts()
    outputs = llm.generate(asked, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected(folder, asked)
    assert [output.outputs[0].text for output in outputs] == [
        "".join(f"<{token}>" for token in output.outputs[0].token_ids if token not in (1, 2))
        for output in outputs
    ]
    assert [output.num_prompt_tokens for output in outputs] == [len(prompt) for prompt in asked]


def test_a_second_question_about_a_document_reuses_its_pages(llm: LLM) -> None:
    document = [9, 8, 7, 6] * 40  # two full blocks and a half
    (first,) = llm.generate([*document, 11], GREEDY)
    (second,) = llm.generate([*document, 12], GREEDY)
    (several,) = llm.generate([*document, 13], SamplingParams(n=3, seed=1, max_tokens=4))
    assert [each.num_cached_tokens for each in (first, second, several)] == [0, 128, 128]


def test_without_prefix_caching_nothing_is_reused(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_bytes="1MiB", threads=1, enable_prefix_caching=False)
    outputs = [llm.generate([9, 8, 7, 6] * 40, GREEDY)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0] == outputs[1]


def test_drafts_are_made_where_a_request_or_the_model_asks_for_them_and_change_no_answer(
    llm: LLM, folder: Path
) -> None:
    def drafts(of: LLM) -> float:
        process: Any = of._answering
        return float(process._rank.counters["spec_decode_num_draft_tokens_total"])

    asked = prompts(4)
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain = llm.generate(asked, SamplingParams(**params))  # type: ignore[arg-type]
    assert drafts(llm) == 0
    drafted = llm.generate(asked, SamplingParams(**params, speculate=True))  # type: ignore[arg-type]
    assert drafts(llm) > 0
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]

    always = LLM(str(folder), kv_cache_bytes="1MiB", threads=1, speculate="prompt-lookup")
    always.generate(asked, SamplingParams(**params, speculate=False))  # type: ignore[arg-type]
    assert drafts(always) == 0
    assert [one.outputs for one in always.generate(asked, SamplingParams(**params))] == [  # type: ignore[arg-type]
        one.outputs for one in plain
    ]
    assert drafts(always) > 0


TEXT = "".join(f"<{token}>" for token in prompts()[0])


@pytest.fixture(scope="module")
def chats(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in this process. Its prompts are the messages as they are, and each <7> in them is a token."""
    path = tmp_path_factory.mktemp("chats")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    inner = words()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("<[0-9]+>"), "isolated")
    inner.save(str(path / "tokenizer.json"))
    template = {"chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}"}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    return LLM(str(path), kv_cache_bytes="1MiB", threads=1, batch_invariant=True)._answering


def opened(process: Any, **fields: Any) -> Any:
    """What is known of a chat that has been answered."""
    body = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 40}
    one = process._prepare("chat", {**body, **fields})
    process._run([one])
    return one


def test_a_predicted_answer_is_accepted_where_it_is_right(chats: Any) -> None:
    def asked(**fields: Any) -> tuple[str, Any]:
        one = opened(chats, ignore_eos=True, logit_bias={"1": -100, "2": -100}, **fields)
        return "".join(one.shown[0]), one.tally.usage().completion_tokens_details

    answer, unpredicted = asked()
    assert unpredicted == CompletionTokensDetails(0, 0)
    right = asked(prediction={"type": "content", "content": answer})
    assert right[0] == answer
    assert right[1].accepted_prediction_tokens > 20
    assert right[1].accepted_prediction_tokens + right[1].rejected_prediction_tokens == 40
    off = asked(prediction={"type": "content", "content": answer}, speculate=False)
    assert off == (answer, CompletionTokensDetails(0, 40))
    stops = re.findall("<[0-9]+>", answer)[4:24]  # some stand before drafts that are accepted, too
    for stop in stops:
        ended = asked(prediction={"type": "content", "content": answer}, stop=[stop])
        assert ended[0] == answer[: answer.index(stop)]
        assert sum(msgspec.structs.astuple(ended[1])) == 40
    wrong = asked(prediction={"type": "content", "content": TEXT})
    assert wrong[0] == answer
    assert wrong[1].rejected_prediction_tokens > 0


def test_an_odd_request_has_the_answers_that_it_has_without_drafts(chats: Any) -> None:
    def asked(**fields: Any) -> tuple[Any, ...]:
        one = opened(chats, **fields)
        finishes = [text.finish for text in one.answers.texts]
        return ["".join(shown) for shown in one.shown], one.token_ids, finishes, one.tally.completion_tokens

    (answer,), ((*ids,),), _, _ = asked(ignore_eos=True)
    (stop,) = re.findall("<[0-9]+>", answer)[7:8]
    counters = chats._rank.counters
    accepted = counters["spec_decode_num_accepted_tokens_total"]
    odd: list[dict[str, Any]] = [
        {"max_tokens": 1}, {"max_tokens": 2}, {"min_tokens": 20}, {"stop": [stop], "min_tokens": 12},
        {"stop": [stop], "n": 3, "ignore_eos": True}, {"stop_token_ids": [ids[9]]},
        {"stop_token_ids": [ids[9]], "min_tokens": 15}, {"n": 3, "temperature": 1.0, "seed": 4},
        {"frequency_penalty": 0.7, "temperature": 0.8, "seed": 1}, {"repetition_penalty": 1.3},
        {"logprobs": True, "top_logprobs": 3}, {"logit_bias": {"5": 3.0}},
    ]  # fmt: skip
    predictions = [
        "",
        "<5>",
        answer * 2,
        [],
        [{"type": "text", "text": ""}, {"type": "text", "text": answer}],
    ]
    for fields in odd:
        plain = asked(**fields, speculate=False)
        assert asked(**fields, speculate=True) == plain
        for content in predictions:
            assert asked(**fields, prediction={"type": "content", "content": content}) == plain
    assert counters["spec_decode_num_accepted_tokens_total"] > accepted + 200


def test_several_answers_and_stop_strings(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    (free,) = llm.generate([5, 6], params)
    assert [output.index for output in free.outputs] == [0, 1, 2]
    assert len({output.text for output in free.outputs}) == 3
    third = f"<{free.outputs[0].token_ids[2]}>"
    stopping = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=30, ignore_eos=True, stop=third)
    (stopped,) = llm.generate([5, 6], stopping)
    whole, cut = free.outputs[0], stopped.outputs[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(third)], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) <= 3


def test_wrong_requests_and_options_say_what_would_be_right(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match="temperature=9 must be at most 2"):
        llm.generate("<5>", SamplingParams(temperature=9))
    with pytest.raises(RequestError, match="repetition_penalty=1e-38 must be at least 1e-06"):
        llm.generate("<5>", SamplingParams(repetition_penalty=1e-38))
    with pytest.raises(RequestError, match="token id 199 is not in the vocabulary, 0 to 198"):
        llm.generate([5, 199], GREEDY)
    with pytest.raises(RequestError, match="at least one is needed"):
        llm.generate("")
    with pytest.raises(ConfigError, match=r"n=16 answers may need .* give more kv_cache_bytes"):
        llm.generate("<5>", SamplingParams(n=16, max_tokens=400))
    with pytest.raises(ConfigError, match="unknown key 'dtyp'"):
        LLM(str(folder), dtyp="float32")
    with pytest.raises(ConfigError, match="leave them out"):
        LLM(cluster="http://127.0.0.1:1", dtype="float32")
    assert llm.generate([]) == []


def test_after_an_interruption_the_next_call_starts_anew(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts()[:2]
    runner = llm._answering._runner  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(runner, "run", lambda step: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(asked, GREEDY)
    assert [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY)] == expected(folder, asked)


def test_building_it_leaves_the_environment_of_the_process_alone(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba refuses to compile once NUMBA_NUM_THREADS differs from the threads that it has started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    LLM(str(folder), kv_cache_bytes="1MiB", threads=1)
    assert dict(os.environ) == before


ANSWER: dict[str, Any] = {
    **{"object": "text_completion", "id": "cmpl-1", "created": 1, "model": "m", "system_fingerprint": "f"},
    "choices": [{"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop"}],
    "usage": {
        **{"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    },
}


def of_a_server(monkeypatch: pytest.MonkeyPatch, *answers: httpx.Response) -> LLM:
    """The library before a server that gives these answers, one after the other."""
    left = iter(answers)
    transport = httpx.MockTransport(lambda request: next(left))
    client = httpx.Client(transport=transport, base_url="http://server")
    monkeypatch.setattr("mooncake_lite.llm.open_client", lambda *_: client)
    return LLM(cluster="http://server")


def test_a_request_that_a_cluster_refuses_for_now_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("mooncake_lite.llm.time.sleep", pauses.append)
    waits = [httpx.Response(429, headers={"Retry-After": text}) for text in ("3", "900", "Thu, 26 Nov 2026")]
    (output,) = of_a_server(monkeypatch, *waits, httpx.Response(200, json=ANSWER)).generate("a")
    assert output.outputs[0].text == " Paris"
    assert pauses == [3.0, 10.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (httpx.Response(200, text="<html>"), "sent what is no answer"),
        (httpx.Response(200, json={**ANSWER, "choices": None}), "sent what is no answer"),
        (httpx.Response(401, json={"error": {"message": "wrong key"}}), "wrong key.*api-key"),
    ],
)
def test_what_is_no_answer_is_told_in_one_line(
    answer: httpx.Response, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match=problem):
        of_a_server(monkeypatch, answer).generate("a")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_refused_as_every_wrong_number_is(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = of_a_server(monkeypatch)  # which is never asked
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        with pytest.raises(RequestError, match=f"{name}={value} must be a finite number") as caught:
            llm.generate("a", SamplingParams(**{name: value}))
        assert caught.value.param == name
    with pytest.raises(RequestError, match="must be a finite number") as caught:
        llm.generate("a", SamplingParams(logit_bias={"1": 1.0, "7": value}))
    assert caught.value.param == "logit_bias.7"


def test_importing_the_package_alone_is_light() -> None:
    found = "{'mooncake_lite.llm', 'torch'} & sys.modules.keys()"
    assert printed_by("-c", f"import mooncake_lite, sys; print(*{found})") == "\n"
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        mooncake_lite.LLN  # noqa: B018
