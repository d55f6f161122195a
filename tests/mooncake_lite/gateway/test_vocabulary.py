"""No id reaches a rank that the model has no embedding of, wherever in a request it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.prompt_work import Kind, Prepared, PromptWork
from mooncake_lite.model.tokenizer import load_tokenizer
from tests.mooncake_lite.gateway.test_prompts import settings
from tests.mooncake_lite.model.sound_folder import add_token, edit_tokenizer, rewrite, sound_folder, tokens_of

pytestmark = pytest.mark.quick

TOOL = "<|tool|>"


def work(folder: Path, kind: Kind, **body: Any) -> Prepared | bytes:
    return PromptWork(settings(folder), load_tokenizer(folder)).do(kind, "r", msgspec.json.encode(body))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.fixture
def over(tmp_path: Path) -> tuple[Path, int]:
    """A model whose tokenizer has one token more than the embedding has rows, and the id of this token."""
    folder = sound_folder(tmp_path / "over")
    return folder, add_token(folder, TOOL)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("completion", {"prompt": f"hi {TOOL} there"}, "prompt"),
        ("completion", {"prompt": ["hi", TOOL]}, "prompt[1]"),
        ("completion", {"prompt": TOOL, "max_tokens": 0}, "prompt"),
        ("chat", {"messages": chat("hi", f"so {TOOL}")}, "messages"),
        ("tokenize", {"prompt": TOOL}, "prompt"),
        ("tokenize", {"messages": chat(TOOL)}, "messages"),
    ],
)
def test_a_text_with_a_token_that_only_the_tokenizer_has_is_refused(
    over: tuple[Path, int], kind: Kind, body: dict[str, Any], param: str
) -> None:
    folder, token_id = over
    with pytest.raises(RequestError) as caught:
        work(folder, kind, **body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert f"token '{TOOL}', and its id {token_id} is not in the model's vocabulary" in caught.value.message
    assert f"0 to {token_id - 1}" in caught.value.message


@pytest.mark.parametrize("beyond", [0, 1, 10**6, 2**40])
def test_an_id_beyond_the_embedding_is_refused_in_every_field(over: tuple[Path, int], beyond: int) -> None:
    folder, last = over
    token_id = last + beyond
    fields: dict[str, dict[str, Any]] = {
        "prompt[1]": {"prompt": [5, token_id]},
        "prompt[1][0]": {"prompt": [[5], [token_id]]},
        "stop_token_ids[1]": {"prompt": "a", "stop_token_ids": [1, token_id]},
        "logit_bias[1]": {"prompt": "a", "logit_bias": {"1": 1, str(token_id): 5}},
    }
    if token_id >= 10**9:  # a bias has an id of nine digits at most
        fields["logit_bias"] = fields.pop("logit_bias[1]")
    for param, body in fields.items():
        with pytest.raises(RequestError) as caught:
            work(folder, "completion", **body)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_all_other_text_is_served(over: tuple[Path, int]) -> None:
    for kind, body in (("completion", {"prompt": "<|tool"}), ("chat", {"messages": chat("hello <|end|>")})):
        prepared = work(over[0], kind, **body)  # type: ignore[arg-type]
        assert isinstance(prepared, Prepared)
        assert max(prepared.submits[0].body.token_ids) < over[1]


def test_ids_of_padding_rows_come_back_as_prompts_and_may_be_biased_and_stop(tmp_path: Path) -> None:
    """A model can answer with an id that its tokenizer does not have."""
    folder = sound_folder(tmp_path / "padded", rows=400)
    first, last = tokens_of(folder), 399
    for token_id in (first, last):
        body: dict[str, Any] = {"logit_bias": {str(token_id): -100}, "stop_token_ids": [token_id]}
        prepared = work(folder, "completion", prompt=[5, token_id], **body)
        assert isinstance(prepared, Prepared)
        assert prepared.submits[0].body.token_ids == [5, token_id]
        assert work(folder, "detokenize", tokens=[5, token_id]) == work(folder, "detokenize", tokens=[5])
    for field in ("prompt", "stop_token_ids"):
        with pytest.raises(RequestError, match="token id 400 is not in the vocabulary, 0 to 399"):
            work(folder, "completion", **{"prompt": "a", field: [400]})


def test_a_token_behind_a_gap_of_ids_makes_the_whole_way_round(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path / "holes", rows=400)
    late = tokens_of(folder) + 40

    def add(description: Any) -> None:
        first = description["added_tokens"][0]
        description["model"]["vocab"]["<|late|>"] = late
        description["added_tokens"].append(first | {"id": late, "content": "<|late|>", "special": False})

    edit_tokenizer(folder, add)
    ids = msgspec.json.decode(work(folder, "tokenize", prompt="go <|late|> on"))["tokens"]  # type: ignore[arg-type]
    assert late in ids
    text = msgspec.json.decode(work(folder, "detokenize", tokens=ids))  # type: ignore[arg-type]
    assert text["prompt"] == "go <|late|> on"
    assert isinstance(work(folder, "completion", prompt=ids, logit_bias={str(late): 1}), Prepared)


def test_a_text_that_a_tokenizer_without_unknown_token_cannot_read_is_refused(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path / "words")
    words = {"type": "WordLevel", "vocab": {"hello": 0, "<u>": 1}, "unk_token": "<none>"}
    edit_tokenizer(
        folder, lambda description: description.update(model=words, added_tokens=[], pre_tokenizer=None)
    )
    rewrite(folder, "config.json", vocab_size=2)
    assert isinstance(work(folder, "completion", prompt="hello"), Prepared)
    with pytest.raises(RequestError, match="the tokenizer cannot read this text") as caught:
        work(folder, "completion", prompt=["hello", "there"])
    assert (caught.value.status, caught.value.param) == (400, "prompt[1]")


def test_every_end_token_of_a_model_is_in_its_embedding(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path / "m")
    rewrite(folder, "generation_config.json", eos_token_id=[tokens_of(folder) - 1, 0])
    prepared = work(folder, "completion", prompt="a", stop_token_ids=[3])
    assert isinstance(prepared, Prepared)
    assert prepared.submits[0].body.stop_ids == [3, 0, 1, tokens_of(folder) - 1]  # 1: eos_token
