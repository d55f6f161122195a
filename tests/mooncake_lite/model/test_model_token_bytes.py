"""No token stands for more bytes than the bound says, and where that cannot be known there is no bound."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from mooncake_lite.model.token_bytes import COMPOSITION, TokenBytes, byte_alphabet, token_bytes
from mooncake_lite.model.tokenizer import Tokenizer

pytestmark = pytest.mark.quick

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("e", "e"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]


def byte_level(*missing: int) -> Inner:
    """As GPT-2, Llama 3 and Qwen; without the bytes `missing`, as the default model is."""
    tokens = [shown for byte, shown in enumerate(byte_alphabet()) if byte not in missing]
    tokens += ["".join(pair) for pair in MERGES]
    inner = Inner(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return inner


def qwen() -> Inner:
    """NFC, a pattern of its own, then bytes."""
    inner = byte_level()
    inner.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    return inner


def llama_2() -> Inner:
    """A mark for each blank, rare characters spelled in bytes."""
    merges = [("▁", "a"), ("▁", "▁"), ("e", "e")]
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "e", "é", "▁a", "▁▁", "ee"]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Inner(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.ByteFallback()
    return inner


def unigram() -> Inner:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("a", -2.0), ("e", -2.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    inner = Inner(models.Unigram(pieces, 0, True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return inner


def short_of_words() -> Inner:
    """Each character that is unknown is one unknown token."""
    return Inner(
        models.BPE(vocab={"<unk>": 0, "a": 1, "ab": 2, "b": 3}, merges=[("a", "b")], unk_token="<unk>")
    )


SHAPES: dict[str, Callable[[], Inner]] = {
    "byte level": byte_level,
    "byte level without some bytes": lambda: byte_level(0x04, 0x0A, 0xC4, 0xF1),
    "qwen": qwen,
    "llama 2": llama_2,
    "unigram": unigram,
    "an unknown token for each": short_of_words,
}
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("ae é\u0301\u0308\u1fbe\u212a\x04<|end|>\U00041000", max_size=60),
    st.builds(lambda part, times: part * times, st.text(max_size=3), st.integers(1, 200)),
)


@pytest.mark.parametrize("shape", SHAPES)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_says(shape: str, text: str) -> None:
    tokenizer = made(shape)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


_MADE: dict[str, Tokenizer] = {}


def made(shape: str) -> Tokenizer:
    if shape not in _MADE:
        _MADE[shape] = Tokenizer(SHAPES[shape](), (0,), None, 2**20)
    return _MADE[shape]


def bound(inner: Inner) -> TokenBytes | None:
    return token_bytes(json.loads(inner.to_str()))


def test_the_longest_token_is_counted_in_bytes_of_text() -> None:
    assert bound(byte_level()) == TokenBytes(len("<|end|>"))
    assert bound(byte_level(0x04, 0xF1)) == TokenBytes(len("<|end|>"), b"\x04\xf1")
    assert bound(qwen()) == TokenBytes(len("<|end|>") * COMPOSITION)
    assert bound(llama_2()) == TokenBytes(len("<0x00>"))
    assert made("byte level without some bytes").fewest_tokens("\x04" * 100) == 0
    assert made("byte level").fewest_tokens("x" * 100) == -(-100 // 7)


def changed(**parts: Any) -> Inner:
    inner = byte_level()
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner


def eager_token() -> Inner:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return inner


UNBOUNDED: dict[str, Callable[[], Inner]] = {
    "strips blanks": lambda: changed(normalizer=normalizers.Strip()),
    "removes a text": lambda: changed(normalizer=normalizers.Replace("a", "")),
    "removes a pattern": lambda: changed(normalizer=normalizers.Replace(Regex("a+"), "b")),
    "leaves blanks out": lambda: changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "leaves words out": lambda: changed(pre_tokenizer=pre_tokenizers.Split("a", "removed")),
    "a token with the blanks before it": eager_token,
    "one unknown token for many characters": lambda: Inner(
        models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    ),
    "no token for an unknown character": lambda: Inner(models.BPE(vocab={"a": 0}, merges=[])),
    "one unknown token for a word": lambda: Inner(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "no spelling of some bytes, and a normal form before": lambda: changed(
        normalizer=normalizers.NFC(), model=byte_level(4).model
    ),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_shrink_a_text_at_will_has_no_bound(kind: str) -> None:
    inner = UNBOUNDED[kind]()
    assert bound(inner) is None
    assert Tokenizer(inner, (0,), None, 2**20).fewest_tokens("a" * 1000) == 0


@pytest.mark.parametrize(("composed", "apart"), [("NFC", "NFD"), ("NFKC", "NFKD")])
def test_no_normal_form_is_shorter_than_a_quarter_of_its_text(composed: Any, apart: Any) -> None:
    """Each character of a text lends its bytes, in equal parts, to the characters that it falls into."""
    planes = range(0x30000)  # beyond, no character falls into others
    characters = [chr(code) for code in planes if not 0xD800 <= code < 0xE000]
    most: dict[str, float] = {}
    for character in characters:
        parts = unicodedata.normalize(apart, character)
        for part in parts:
            most[part] = max(most.get(part, 0), len(character.encode()) / len(parts))
    for character in characters:
        if unicodedata.is_normalized(composed, character):
            source_bytes = sum(most[part] for part in unicodedata.normalize(apart, character))
            assert source_bytes <= COMPOSITION * len(character.encode())
