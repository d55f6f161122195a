"""The text of each token, over all ids and kinds of tokenizers. The judge is the library's own decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncake_lite.model.detokenizer import HELD_TOKENS
from mooncake_lite.model.tokenizer import Tokenizer
from tests.conftest import examples
from tests.mooncake_lite.model.made_tokenizers import ADDED, KINDS

pytestmark = pytest.mark.quick

MADE = {name: Tokenizer(inner, (2,), None, inner.get_vocab_size() + 9) for name, inner in
        ((name, make()) for name, make in KINDS.items())}  # fmt: skip
UNKNOWN = 5
"""How many ids of the model the tokenizer does not have here."""


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids, often of bytes, control tokens, the added token, or unknown ones."""
    size = tokenizer.vocab_size - 9
    special = st.sampled_from([0, 1, 2, size - 1, size])
    return st.lists(
        st.one_of(st.integers(0, size + UNKNOWN), st.integers(3, size // 2), special), max_size=20
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=examples(30))
@given(data=st.data())
def test_each_token_has_one_text_and_together_they_are_the_whole(
    kind: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = MADE[kind]
    ids = data.draw(ids_of(tokenizer))
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)

    known = detokenizer.texts(ids[:cut])
    texts = [*known, *detokenizer.texts(ids[cut:]), *detokenizer.rest()]

    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.rest() == []


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (["<0x80>", "▁the"], ["\ufffd", " the"]),
        (["<0x20>", "<0x41>", "▁the"], ["", "A", " the"]),
        (["▁", "▁", "▁the"], ["", " ", " the"]),
        (["<0xC3>", "<s>", "<0xA9>", "<0x41>"], ["", "", "é", "A"]),
        (["<0xC3>", "<0xA9>", "<0xC3>"], ["\ufffd", "\ufffd", "\ufffd"]),
    ],
)
def test_the_first_tokens_of_an_answer_and_runs_of_bytes(tokens: list[str], texts: list[str]) -> None:
    tokenizer, inner = MADE["llama2"], KINDS["llama2"]()
    ids = [inner.token_to_id(token) for token in tokens]
    detokenizer = tokenizer.detokenizer()

    assert detokenizer.texts(ids) + detokenizer.rest() == texts
    assert "".join(texts) == inner.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_an_answer_goes_on_where_its_prompt_ends(kind: str, data: st.DataObject) -> None:
    tokenizer = MADE[kind]
    text = data.draw(st.sampled_from(["the ferry", "the", "no ", "", "É", "quiet  the"]))
    prompt = tokenizer.encode(text)
    answer = data.draw(ids_of(tokenizer))
    if tokenizer.spelled(prompt[-1]) is not None and not tokenizer.is_special(prompt[-1]):
        answer = [3 + ord("a"), *answer] if kind == "byte_level" else [tokenizer.encode("the")[-1], *answer]

    detokenizer = tokenizer.detokenizer(prompt)
    texts = detokenizer.texts(answer) + detokenizer.rest()

    assert tokenizer.decode(prompt) + "".join(texts) == tokenizer.decode(prompt + answer)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
@settings(max_examples=examples(30))
@given(text=st.text("aé猫🦊 \n\x00", max_size=10))
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    tokenizer = MADE[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = (detokenizer := tokenizer.detokenizer()).texts(ids) + detokenizer.rest()
    spelled = [tokenizer.spelled(token) for token in ids]
    data = [said.encode() if raw is None else raw for raw, said in zip(spelled, texts)]

    assert b"".join(data).decode() == "".join(texts)
    ends = [len("".join(texts[: i + 1])) for i in range(len(ids))]
    whole = [len(b"".join(data[: i + 1]).decode(errors="ignore")) for i in range(len(ids))]
    assert ends == whole, "a character belongs to the token that completes it"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(30))
@given(text=st.text("the ferry quiet É猫\ufffd\u2460 \n", max_size=14), special=st.booleans())
def test_the_pieces_of_a_text_are_one_for_each_token_and_join_to_it(
    kind: str, text: str, special: bool
) -> None:
    tokenizer = MADE[kind]
    ids = tokenizer.encode(text, add_special_tokens=special)
    assume(ids)
    pieces = tokenizer.pieces(text, add_special_tokens=special)

    assert "".join(pieces) == text
    assert len(pieces) == len(ids)


def test_a_piece_is_what_its_token_stands_for() -> None:
    def pieces(kind: str, text: str) -> list[str]:
        return MADE[kind].pieces(text)

    assert pieces("byte_level", f"no 猫{ADDED}the") == ["", "n", "o", " ", "猫", ADDED, "t", "h", "e"]
    assert pieces("llama2", "the ferry") == ["", "the", " ferry"]
    assert pieces("llama2", "the 🦊") == ["", "the", " ", "", "", "", "🦊"]
    assert pieces("metaspace", "The  FERRY") == ["", "The", " ", " FERRY"]


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
@settings(max_examples=examples(10))
@given(data=st.data())
def test_a_long_run_of_bytes_is_shown_in_parts_and_is_the_same_text(kind: str, data: st.DataObject) -> None:
    """As of Thai or Korean in Llama 2, which has no tokens for them."""
    tokenizer = MADE[kind]
    text = data.draw(st.text(" aé한🦊", min_size=100, max_size=200))
    token_of = {tokenizer.spelled(token): token for token in range(3, 259)}
    ids = [token_of[bytes([byte])] for byte in text.encode()]
    for position in data.draw(st.lists(st.integers(0, len(ids)), max_size=4)):
        ids.insert(position, 1)
    ids += tokenizer.encode("the", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    shown, held = "", 0
    for number, token in enumerate(ids):
        shown += detokenizer.push([token])
        held = max(held, number - len(shown.encode()))

    assert shown + detokenizer.flush() == tokenizer.decode(ids)
    assert held <= HELD_TOKENS + 8


def test_a_long_run_of_bytes_that_breaks_keeps_what_was_shown() -> None:
    tokenizer = MADE["llama2"]
    a, half, (the,) = 3 + 0x41, 3 + 0xC3, tokenizer.encode("the", add_special_tokens=False)
    for ids in ([a] * HELD_TOKENS + [half], [a] * HELD_TOKENS + [half, a], [a] * HELD_TOKENS + [half, half]):
        detokenizer = tokenizer.detokenizer()
        text = detokenizer.push([*ids, the]) + detokenizer.flush()
        assert text == "A" * HELD_TOKENS + "\ufffd" * (len(ids) - HELD_TOKENS) + " the"


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        *[("byte_level", name) for name in ("Ģ", "ç", "ÿ", "<s>")],
        *[("llama2", f"<0x{byte}>") for byte in ("80", "E7", "FF", "41")],
        ("llama2", "<s>"), ("metaspace", "\ufffd"), ("metaspace", "▁"), ("wordpiece", "##s"),
        *[(kind, None) for kind in KINDS],
    ],
)  # fmt: skip
def test_a_token_that_comes_thousands_of_times_costs_the_same_each_time(
    kind: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: an id that the tokenizer does not have."""
    tokenizer = MADE[kind]
    token_id = tokenizer.vocab_size - 1 if token is None else KINDS[kind]().token_to_id(token)
    sizes: list[int] = []
    decode = tokenizer.decode

    def counted(ids: list[int], **how: Any) -> str:
        sizes.append(len(ids))
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.push([token_id]) for _ in range(8000)]
    rest = detokenizer.flush()

    assert "".join(shown) + rest == decode([token_id] * 8000)
    assert sum(sizes) <= 4 * 8000
    assert len(rest) <= HELD_TOKENS
