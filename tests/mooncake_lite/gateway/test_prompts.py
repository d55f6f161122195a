"""From an Ask to a Submit: token ids, keys, and the room that the context leaves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec.structs import replace

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.prompt_work import (
    MAX_ECHOED_LOGPROBS,
    MESSAGE_CHARS,
    Prepared,
    PromptWork,
    salt_of,
)
from mooncake_lite.gateway.prompts import Prompts
from mooncake_lite.gateway.settings import Limits, Settings
from mooncake_lite.messages import Logprobs, Submit, Tokens
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from store.keys import block_digest, prefix_keys
from transport.wire import encode

pytestmark = pytest.mark.quick

FINGERPRINT = b"weights"


def settings(model_folder: Path, **config: Any) -> Settings:
    return Settings(
        run_dir=model_folder, config=ServeConfig(block_size=16, **config), model_folder=model_folder,
        served_id="tiny", max_model_len=64, fingerprint=FINGERPRINT, weights="float32",
        name="gateway-0", curve=None, parent_pid=0, limits=Limits(),
    )  # fmt: skip


@pytest.fixture
def prompts(model_folder: Path) -> Iterator[Prompts]:
    prompts = Prompts(settings(model_folder), load_tokenizer(model_folder))
    yield prompts
    prompts.close()


def submit(prompts: Prompts, **fields: Any) -> Submit:
    (message,) = prepare(prompts, **fields).submits
    return message


def prepare(prompts: Prompts, **fields: Any) -> Prepared:
    return asyncio.run(prompts.prepare("completion", "r", msgspec.json.encode(fields)))


def refused(prompts: Prompts, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(prompts, **fields)
    assert caught.value.status == 400
    return caught.value


def test_full_blocks_have_keys_and_digests_and_the_tail_has_none(prompts: Prompts) -> None:
    ids = list(range(40))

    message = submit(prompts, prompt=ids)

    assert message.body.token_ids == ids
    assert message.body.salt == FINGERPRINT
    assert message.request.keys == prefix_keys(ids, 16, FINGERPRINT)
    assert len(message.request.keys) == 2
    assert message.request.digests == [block_digest(ids[:16]), block_digest(ids[16:32])]


def test_a_cache_salt_isolates(prompts: Prompts) -> None:
    ids = list(range(32))

    salted = [submit(prompts, prompt=ids, cache_salt=salt).request for salt in ("", "alice", "bob")]

    keys = [request.keys for request in salted]
    assert salted[0].digests == salted[1].digests
    assert len({tuple(chain) for chain in keys}) == 3
    assert len({key for chain in keys for key in chain}) == 6
    assert submit(prompts, prompt=ids, cache_salt="alice").request.keys == keys[1]


def test_no_cache_salt_can_pretend_to_be_other_weights() -> None:
    assert salt_of(b"abc", "d") != salt_of(b"abcd", "")
    assert len(salt_of(b"abc", "x" * 10_000)) == 3 + 16


def test_no_keys_when_reuse_is_off(model_folder: Path) -> None:
    prompts = Prompts(settings(model_folder, enable_prefix_caching=False), load_tokenizer(model_folder))

    message = submit(prompts, prompt=list(range(32)))

    assert (message.request.keys, message.request.digests) == ([], [])
    prompts.close()


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(prompts: Prompts) -> None:
    for length in (64, 100):
        error = refused(prompts, prompt=[5] * length)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
        assert f"{length} tokens" in error.message
        assert "64" in error.message


class NeverTokenises(Tokenizer):
    """A tokenizer that must not be asked for tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "") -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenised")


def test_a_text_that_cannot_fit_is_refused_by_its_length_without_being_tokenised(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.__class__ = NeverTokenises
    work = PromptWork(settings(model_folder), tokenizer)
    text = "hello " * 200
    messages = [{"role": "user", "content": text}]
    for kind, body in (("completion", {"prompt": text}), ("chat", {"messages": messages})):
        with pytest.raises(RequestError, match="bytes, at least") as caught:
            work.do(kind, "r", msgspec.json.encode(body))  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == next(iter(body))
        assert "maximum context length is 64 tokens" in caught.value.message


def test_a_text_that_may_fit_is_not_refused_by_its_length(prompts: Prompts) -> None:
    longest = "stream " * 9  # as many bytes as a short prompt of long tokens has
    assert len(submit(prompts, prompt=longest).body.token_ids) < 64


def test_too_many_ids_are_refused_before_any_is_looked_at(prompts: Prompts) -> None:
    assert refused(prompts, prompt=[-1] * 64).code == "context_length_exceeded"


def chat(prompts: Prompts, **fields: Any) -> Submit:
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": "hello"}], **fields})
    (message,) = asyncio.run(prompts.prepare("chat", "r", raw)).submits
    return message


@pytest.mark.parametrize(
    ("config", "usual"),
    [
        ({}, False),
        ({"speculate": "prompt-lookup"}, True),
        ({"engine": "emulated"}, False),
        ({"engine": "emulated", "speculate": "0.5"}, True),
    ],
)
def test_drafts_are_made_as_the_server_says_unless_the_request_says_otherwise(
    model_folder: Path, config: dict[str, Any], usual: bool
) -> None:
    prompts = Prompts(settings(model_folder, **config), load_tokenizer(model_folder))
    prediction = {"type": "content", "content": "hello world"}
    for asked, expected in ((None, usual), (True, True), (False, False)):
        assert submit(prompts, prompt="hello", speculate=asked).body.speculates is expected
        assert chat(prompts, speculate=asked).body.speculates is expected
        predicting = chat(prompts, speculate=asked, prediction=prediction).body
        assert predicting.speculates is (asked is not False)
        assert predicting.predicted == prompts.tokenizer.encode("hello world", add_special_tokens=False)
    assert chat(prompts).body.predicted == submit(prompts, prompt="hello").body.predicted == []
    prompts.close()


def test_a_prediction_gets_no_special_tokens(prompts: Prompts) -> None:
    added: list[bool] = []

    class Noting(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "") -> list[int]:
            if param == "prediction":
                added.append(add_special_tokens)
            return super().encode(text, add_special_tokens=add_special_tokens, param=param)

    prompts.tokenizer.__class__ = Noting
    chat(prompts, add_special_tokens=True, prediction={"type": "content", "content": "hello"})
    assert added == [False]


def test_a_prediction_as_long_as_the_context_is_refused_before_it_is_tokenised(prompts: Prompts) -> None:
    def predicted(text: str) -> list[int]:
        return chat(prompts, prediction={"type": "content", "content": text}).body.predicted

    assert len(predicted("z" * 63)) == 63
    with pytest.raises(RequestError, match=r"the prediction has 64 tokens, .* by 1 tokens or more") as caught:
        predicted("z" * 64)
    assert (caught.value.param, caught.value.code) == ("prediction", "context_length_exceeded")

    class NeverTokenisesIt(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "") -> list[int]:
            assert param != "prediction"
            return super().encode(text, add_special_tokens=add_special_tokens, param=param)

    prompts.tokenizer.__class__ = NeverTokenisesIt
    with pytest.raises(RequestError, match=r"bytes, at least .*; shorten the prediction") as caught:
        predicted("hello " * 200)
    assert (caught.value.param, caught.value.code) == ("prediction", "context_length_exceeded")


def test_an_error_that_quotes_its_body_is_cut(prompts: Prompts) -> None:
    with pytest.raises(RequestError) as caught:
        submit(prompts, prompt="x", model="m" * 30_000)
    assert caught.value.param == "model"
    assert len(caught.value.message) < 2 * MESSAGE_CHARS


def test_max_tokens_beyond_the_context_is_refused_with_what_is_left(prompts: Prompts) -> None:
    assert submit(prompts, prompt=[5] * 60, max_tokens=4).request.max_tokens == 4
    with pytest.raises(RequestError, match="at most 4") as caught:
        submit(prompts, prompt=[5] * 60, max_tokens=5)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_the_default_length_is_16_for_completions_and_the_rest_of_the_context_for_chats(
    prompts: Prompts,
) -> None:
    assert submit(prompts, prompt=[5] * 10).request.max_tokens == 16
    assert submit(prompts, prompt=[5] * 60).request.max_tokens == 4
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": "hello"}]})
    message = asyncio.run(prompts.prepare("chat", "r", raw)).submits[0]
    assert message.request.max_tokens == 64 - len(message.body.token_ids)


def test_an_id_outside_the_vocabulary_is_named(prompts: Prompts) -> None:
    size = prompts.tokenizer.vocab_size
    for bad in (-1, size, 2**70):
        assert refused(prompts, prompt=[5, bad]).param == "prompt[1]"


def test_an_empty_text_is_refused(prompts: Prompts) -> None:
    assert "no tokens" in refused(prompts, prompt="").message


def test_a_request_may_wait_as_long_as_its_gateway_waits_for_a_token(prompts: Prompts) -> None:
    assert submit(prompts, prompt="hello").request.wait_limit_s == Limits().token_timeout_s == 600.0


def test_a_text_longer_than_the_longest_answer_is_refused_with_the_numbers(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = msgspec.json.encode({"tokens": prompts.tokenizer.encode("🦊" * 20)})
    (whole,) = asyncio.run(prompts.answer("detokenize", raw))
    monkeypatch.setattr("mooncake_lite.gateway.prompt_work.ANSWER_BYTES", len(whole))
    assert asyncio.run(prompts.answer("detokenize", raw)) == [whole]
    monkeypatch.setattr("mooncake_lite.gateway.prompt_work.ANSWER_BYTES", len(whole) - 1)
    with pytest.raises(RequestError, match=f"{len(whole)} bytes, the limit is {len(whole) - 1}") as caught:
        asyncio.run(prompts.answer("detokenize", raw))
    assert caught.value.param == "tokens"


def test_ignore_eos_sends_no_end_tokens(prompts: Prompts) -> None:
    assert submit(prompts, prompt="hello").body.stop_ids == [1]
    assert submit(prompts, prompt="hello", ignore_eos=True).body.stop_ids == []


def test_stop_ids_of_the_request_join_those_of_the_model(prompts: Prompts) -> None:
    assert submit(prompts, prompt="hello", stop_token_ids=[9, 7]).body.stop_ids == [9, 7, 1]
    assert submit(prompts, prompt="hello", stop_token_ids=[9], ignore_eos=True).body.stop_ids == [9]


def test_sampling_that_cannot_be_obeyed_is_refused(prompts: Prompts) -> None:
    for param, fields in {
        "stop_token_ids[1]": {"stop_token_ids": [5, 10**6]},
        "logit_bias[0]": {"logit_bias": {"1000000": 1.0}},
        "min_tokens": {"min_tokens": 11, "max_tokens": 10},
    }.items():
        assert refused(prompts, prompt="hello", **fields).param == param


def test_each_prompt_is_a_request_of_its_own_to_the_cluster(prompts: Prompts) -> None:
    several = prepare(prompts, prompt=[[5, 6], [7] * 30], n=2, seed=3, cache_salt="alice").submits
    for message in several:
        alone = submit(prompts, prompt=message.body.token_ids, n=2, seed=3, cache_salt="alice")
        assert replace(message, request=replace(message.request, request_id="r")) == alone
        assert message.request.n == 2
    assert [message.request.request_id for message in several] == ["r", "r-1"]
    assert prepare(prompts, prompt=["hello", "the lazy dog"]).echoes == [[], []]


def test_equal_prompts_without_a_seed_get_different_ones(prompts: Prompts) -> None:
    submits = prepare(prompts, prompt=["x", "x", "x"]).submits
    assert len({message.body.sampling.seed for message in submits}) == 3


def test_one_wrong_prompt_of_several_is_named(prompts: Prompts) -> None:
    for wrong in (["a", "x" * 1000], ["a", ""], [[5], [6] * 64]):
        assert refused(prompts, prompt=wrong).param == "prompt[1]"
    assert refused(prompts, prompt=[[5], [6, -1]]).param == "prompt[1][1]"


def test_more_prompts_than_may_wait_and_more_answers_than_run_at_once_are_refused_with_the_limit(
    model_folder: Path,
) -> None:
    prompts = Prompts(settings(model_folder, max_queue=3, max_num_seqs=2), load_tokenizer(model_folder))
    assert len(prepare(prompts, prompt=["a"] * 3, n=2).submits) == 3
    for fields, param, flag in (
        ({"prompt": ["a"] * 4}, "prompt", "at most 3 .* --max-queue"),
        ({"prompt": "a", "n": 3}, "n", "at most 2, .* --max-num-seqs"),
    ):
        error = refused(prompts, **fields)
        assert (error.param, re.search(flag, error.message) is not None) == (param, True)
    prompts.close()


def test_a_prompt_whose_logprobs_are_wanted_shares_no_kv(prompts: Prompts) -> None:
    message = submit(prompts, prompt=[5] * 40, echo=True, logprobs=2)
    assert (message.request.keys, message.request.digests, message.body.salt) == ([], [], b"")
    assert submit(prompts, prompt=[5] * 40, echo=True).request.keys


def test_an_echo_is_the_prompt_as_it_was_sent(prompts: Prompts) -> None:
    text = "hello  <|end|>"
    ids = prompts.tokenizer.encode(text)
    assert prepare(prompts, prompt=[text, "b"], echo=True).echoes == [[text], ["b"]]
    pieces = [prompts.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    for prompt in (ids, text):
        assert prepare(prompts, prompt=prompt, echo=True, logprobs=0).echoes == [pieces]


def test_more_logprobs_of_prompts_than_fit_into_a_message_are_refused(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [Logprobs(-1.5, [(2**20, -0.5)] * 20)] * (MAX_ECHOED_LOGPROBS // 21)
    encode(Tokens("r", 0, [1], prompt_logprobs=most))  # raises when it is too long
    monkeypatch.setattr("mooncake_lite.gateway.prompt_work.MAX_ECHOED_LOGPROBS", 60)
    assert prepare(prompts, prompt=[[5] * 10, [5] * 20], echo=True, logprobs=1)
    for fields in ({"logprobs": 2}, {"logprobs": 1, "n": 2}):
        error = refused(prompts, prompt=[[5] * 10, [5] * 20], echo=True, **fields)
        assert (error.param, "the limit is 60" in error.message) == ("logprobs", True)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_emulated_engine_has_no_logprobs_and_says_so(
    model_folder: Path, kind: Literal["chat", "completion"]
) -> None:
    work = PromptWork(settings(model_folder, engine="emulated"), load_tokenizer(model_folder))
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    else:
        body = {"prompt": [1, 2, 3], "logprobs": 2}
    with pytest.raises(RequestError, match=r"logprobs are not available: .* --engine emulated") as caught:
        work.do(kind, "r", msgspec.json.encode(body))
    assert caught.value.status == 400
    body.pop("logprobs")
    body.pop("top_logprobs", None)
    assert isinstance(work.do(kind, "r", msgspec.json.encode(body)), Prepared)
