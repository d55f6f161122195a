"""Tokens in answers: their texts, bytes and offsets, over all kinds of tokenizers and answers of any ids.

Everything of a gateway but its sockets: a body, the messages of a rank, and the pieces or the whole answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lite import messages as m
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.answer import Answers
from mooncake_lite.gateway.logprobs import TokenLogprobs, in_chat_shape, in_text_shape
from mooncake_lite.gateway.prompt_work import Kind, Prepared, PromptWork
from mooncake_lite.gateway.shapes import Tally
from mooncake_lite.model.tokenizer import load_tokenizer
from tests.conftest import examples
from tests.mooncake_lite.gateway import test_prompts
from tests.mooncake_lite.gateway.fake_cluster import make_model_folder
from tests.mooncake_lite.model.made_tokenizers import ADDED, KINDS
from tests.mooncake_lite.model.sound_folder import add_token, rewrite

pytestmark = pytest.mark.quick

TEXTS = ["the ferry", "The  ferry, quiet", "É 猫 🦊", "</s>no", ADDED, "t", " the ", "\u2460\n"]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@dataclass
class Gateway:
    """The work of a gateway with one tokenizer."""

    folder: Path
    inner: tokenizers.Tokenizer = field(repr=False)

    def __post_init__(self) -> None:
        self.inner.save(str(self.folder / "tokenizer.json"))
        self.rows = self.inner.get_vocab_size() + 3
        rewrite(self.folder, "config.json", vocab_size=self.rows)
        rewrite(self.folder, "tokenizer_config.json", chat_template=TEMPLATE, eos_token="</s>")
        self.tokenizer = load_tokenizer(self.folder)
        self.work = PromptWork(test_prompts.settings(self.folder), self.tokenizer)

    def asked(self, kind: Kind, **body: Any) -> Any:
        done = self.work.do(kind, "r", msgspec.json.encode(body))
        return msgspec.json.decode(done) if isinstance(done, bytes) else done


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gateway]:
    return {
        kind: Gateway(make_model_folder(tmp_path_factory.mktemp(kind)), made())
        for kind, made in KINDS.items()
    }


@dataclass
class Said:
    """One answer, as a client puts it together from a stream."""

    text: str = ""
    tokens: list[TokenLogprobs] = field(default_factory=list)


def scored(token: int, best: list[int]) -> m.Logprobs:
    values = {other: -float(place) for place, other in enumerate(best)}
    return m.Logprobs(values.get(token, -9.0), list(values.items()))


def said(gateway: Gateway, prepared: Prepared, ids: list[int], best: list[int], size: int = 1) -> Said:
    """What comes of an answer of these ids, `size` in a message, with the same best tokens everywhere."""
    answers = Answers(gateway.tokenizer, prepared, Tally(0))
    (submit,) = prepared.submits
    is_scored = submit.body.sampling.prompt_logprobs >= 0
    prompt = [scored(token, best) for token in submit.body.token_ids[1:]] if is_scored else []

    async def pieces() -> Said:
        whole = Said()
        for index in range(0, max(1, len(ids)), size):
            some = ids[index : index + size]
            finish = "length" if index + size >= len(ids) else None
            piece = await answers.push(
                m.Tokens(
                    "r", index, some, finish, logprobs=[scored(token, best) for token in some],
                    prompt_logprobs=prompt if index == 0 else [],
                )
            )  # fmt: skip
            assert piece is not None
            whole.text += piece.text
            whole.tokens += piece.logprobs
        return whole

    return asyncio.run(pieces())


@cache
def strategy(rows: int) -> st.SearchStrategy[list[int]]:
    usual = st.integers(0, rows - 1)
    return st.lists(st.one_of(usual, st.integers(3, rows // 2), st.integers(rows - 5, rows - 1)), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_the_tokens_of_a_completion_join_to_its_text_and_its_offsets_point_at_them(
    gateways: dict[str, Gateway], kind: str, data: st.DataObject
) -> None:
    gateway = gateways[kind]
    ids = data.draw(strategy(gateway.rows))
    prompt = data.draw(st.one_of(st.sampled_from(TEXTS), strategy(gateway.rows).filter(bool)))
    echo, size = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    best = data.draw(st.lists(st.integers(0, gateway.rows - 1), min_size=3, max_size=3, unique=True))
    prepared = gateway.asked(
        "completion", prompt=prompt, echo=echo, logprobs=3, max_tokens=12, ignore_eos=True
    )
    before = prepared.submits[0].body.token_ids if echo else []

    whole = said(gateway, prepared, ids, best, size)
    shape = in_text_shape(whole.tokens)

    assert "".join(shape["tokens"]) == whole.text
    assert len(shape["tokens"]) == len(before) + len(ids)
    for token, at in zip(shape["tokens"], shape["text_offset"]):
        assert whole.text[at : at + len(token)] == token
    chosen = list(zip([*before, *ids], shape["tokens"], shape["token_logprobs"], shape["top_logprobs"]))
    for place, (token_id, token, logprob, found) in enumerate(chosen):
        if echo and place == 0:
            assert (logprob, found) == (None, None)
        else:
            assert logprob == found[token] == scored(token_id, best).chosen
            assert len(found) == len({token_id, *best})
    if echo:
        text = (
            prompt if isinstance(prompt, str) else gateway.tokenizer.decode(prompt, skip_special_tokens=False)
        )
        assert whole.text.startswith(text)
    assert said(gateway, prepared, ids, best, size=99) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_the_tokens_and_bytes_of_a_chat_join_to_its_text(
    gateways: dict[str, Gateway], kind: str, data: st.DataObject
) -> None:
    gateway = gateways[kind]
    ids = data.draw(strategy(gateway.rows))
    best = data.draw(st.lists(st.integers(0, gateway.rows - 1), min_size=2, max_size=2, unique=True))
    messages = [{"role": "user", "content": "the"}]
    prepared = gateway.asked("chat", messages=messages, logprobs=True, top_logprobs=2, max_tokens=12)

    whole = said(gateway, prepared, ids, best)
    content = in_chat_shape(whole.tokens)["content"]

    assert whole.text == gateway.tokenizer.decode(ids)
    assert "".join(entry["token"] for entry in content) == whole.text
    data_of = bytes(byte for entry in content for byte in entry["bytes"])
    if kind == "byte_level" or "\ufffd" not in whole.text:
        assert data_of.decode(errors="replace") == whole.text
    for token_id, entry in zip(ids, content):
        assert len(entry["top_logprobs"]) == 2
        same = [other for other, its_id in zip(entry["top_logprobs"], best) if its_id == token_id]
        assert [other["token"] for other in same] == [entry["token"]] * len(same)


def test_bytes_are_those_of_each_part_of_a_character(gateways: dict[str, Gateway]) -> None:
    for kind in ("byte_level", "llama2"):
        gateway = gateways[kind]
        ids = gateway.tokenizer.encode("no🦊", add_special_tokens=False)[-4:]
        prepared = gateway.asked("chat", messages=[{"role": "user", "content": "a"}], logprobs=True)
        content = in_chat_shape(said(gateway, prepared, ids, [ids[0], 1]).tokens)["content"]
        assert [entry["token"] for entry in content] == ["", "", "", "🦊"]
        assert [entry["bytes"] for entry in content] == [[byte] for byte in "🦊".encode()]
        half, control = content[-1]["top_logprobs"]
        assert (half["token"], half["bytes"]) == ("\ufffd", [0xF0])
        assert (control["token"], bytes(control["bytes"])) == ("<s>", b"<s>")


def test_bytes_that_never_become_a_character_are_in_the_text_of_the_last_token(
    gateways: dict[str, Gateway],
) -> None:
    """The end comes in a message of its own, after the token."""
    gateway = gateways["byte_level"]
    ids = gateway.tokenizer.encode("a🦊", add_special_tokens=False)[:-1]
    prepared = gateway.asked("completion", prompt="a", logprobs=0)
    answers = Answers(gateway.tokenizer, prepared, Tally(0))
    for token in [m.Tokens("r", 0, ids, logprobs=[scored(0, [])] * len(ids)), m.Tokens("r", 4, [], "stop")]:
        piece = asyncio.run(answers.push(token))
        assert piece is not None
    assert piece.text == "\ufffd"
    assert [token.chosen.text for token in piece.logprobs] == ["\ufffd"]


def test_a_completion_goes_on_where_its_prompt_ends_and_a_chat_begins_anew(
    gateways: dict[str, Gateway],
) -> None:
    gateway = gateways["llama2"]
    ids = gateway.tokenizer.encode("the ferry", add_special_tokens=False)
    text = {"prompt": "quiet", "echo": True, "logprobs": 0}
    assert said(gateway, gateway.asked("completion", **text), ids, []).text == "quiet the ferry"
    chat = {"messages": [{"role": "user", "content": "quiet"}], "logprobs": True}
    assert said(gateway, gateway.asked("chat", **chat), ids, []).text == "the ferry"


# --------------------------------------------------------------------------------- /tokenize, /detokenize


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "metaspace"])
def test_control_tokens_are_added_as_the_request_says(gateways: dict[str, Gateway], kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    gateway = gateways[kind]
    judge = PreTrainedTokenizerFast(tokenizer_file=str(gateway.folder / "tokenizer.json"))
    for text in ("the ferry", "<s>no", "<s><s>"):
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            is_added = fields.get("add_special_tokens", True)
            expected = judge(text, add_special_tokens=is_added).input_ids
            assert gateway.asked("tokenize", prompt=text, **fields)["tokens"] == expected
            prepared = gateway.asked("completion", prompt=text, echo=True, logprobs=0, **fields)
            assert prepared.submits[0].body.token_ids == expected
            assert len(prepared.echoes[0]) == len(expected)
            messages = [{"role": "user", "content": text.removeprefix("<s>")}]
            is_added = fields.get("add_special_tokens", False)
            expected = judge("<s>" + text.removeprefix("<s>"), add_special_tokens=is_added).input_ids
            assert gateway.asked("tokenize", messages=messages, **fields)["tokens"] == expected
            assert gateway.asked("chat", messages=messages, **fields).submits[0].body.token_ids == expected


@pytest.mark.parametrize("kind", KINDS)
def test_detokenize_keeps_control_tokens_unless_asked_and_tokens_have_names(
    gateways: dict[str, Gateway], kind: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    gateway = gateways[kind]
    judge = PreTrainedTokenizerFast(tokenizer_file=str(gateway.folder / "tokenizer.json"))
    told = gateway.asked("tokenize", prompt=f"the</s> {ADDED}", return_token_strs=True)
    ids = told["tokens"]
    assert told["token_strs"] == judge.convert_ids_to_tokens(ids)
    assert gateway.asked("tokenize", prompt="the")["token_strs"] is None
    for skips in (False, True):
        text = judge.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert gateway.asked("detokenize", tokens=ids, skip_special_tokens=skips)["prompt"] == text
        assert ("<s>" in text) is not skips
    assert "<s>" in gateway.asked("detokenize", tokens=ids)["prompt"]
    with pytest.raises(RequestError, match="skip_special_tokens is not supported"):
        gateway.asked("completion", prompt="a", skip_special_tokens=False)


# ---------------------------------------------------------------------------------------- end tokens


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("written", ["<s>", {"content": "<s>"}])
def test_the_end_token_of_the_tokenizer_ends_an_answer_too(tmp_path: Path, where: str, written: Any) -> None:
    folder = make_model_folder(tmp_path / "m")
    gateway = Gateway(folder, KINDS["llama2"]())
    rewrite(folder, "tokenizer_config.json", eos_token=...)
    (folder / "special_tokens_map.json").write_text("{}")
    rewrite(folder, where, eos_token=written)
    rewrite(folder, "generation_config.json", eos_token_id=[2, 7])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (1, 2, 7)
    gateway.work = PromptWork(test_prompts.settings(folder), tokenizer)
    body = {"prompt": "no", "min_tokens": 3, "stop_token_ids": [9]}
    assert gateway.asked("completion", **body).submits[0].body.stop_ids == [9, 1, 2, 7]
    assert gateway.asked("completion", **body, ignore_eos=True).submits[0].body.stop_ids == [9]


@pytest.mark.parametrize("token", ["<|late|>", "<nothing>", "", None])
def test_an_end_token_that_the_model_cannot_choose_is_none(tmp_path: Path, token: str | None) -> None:
    folder = make_model_folder(tmp_path / "m")
    add_token(folder, "<|late|>")
    rewrite(folder, "tokenizer_config.json", eos_token=token)
    assert load_tokenizer(folder).eos_ids == (1,)
