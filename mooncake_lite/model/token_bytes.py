"""How much text one token can stand for: a text that is long enough is too long, and need not be tokenised.

Used by tokenizer.py. Reads the description in tokenizer.json and runs nothing. A kind of step that it does
not know may shrink a text or leave parts of it out: then there is no bound. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers

COMPOSITION = 4
"""No Unicode normal form has less than a quarter of its text's UTF-8 bytes; a bold Z of 4 bytes becomes Z."""

CHARACTER_BYTES = 4
"""The longest character in UTF-8; an unknown token may stand for any one character."""

KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Split", "Punctuation")
"""Steps that cut a text into words and keep all of it; the last two unless their behavior is "Removed"."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bound of one tokenizer: k tokens stand for at most k * longest bytes of text.

    longest   UTF-8 bytes, at least 1
    dropped   bytes that the vocabulary does not have; they become no token and do not count
    """

    longest: int
    dropped: bytes = b""

    def fewest_tokens(self, text: bytes) -> int:
        """A lower bound of the number of tokens of a text in UTF-8."""
        counted = len(text.translate(None, self.dropped)) if self.dropped else len(text)
        return -(-counted // self.longest)


def token_bytes(description: dict[str, Any]) -> TokenBytes | None:
    """The bound of the tokenizer with this description (a parsed tokenizer.json); None when it has none."""
    normalizers = steps_of(description.get("normalizer"), "normalizers")
    splitters = steps_of(description.get("pre_tokenizer"), "pretokenizers")
    added = description.get("added_tokens") or []
    byte_level = any(step["type"] == "ByteLevel" for step in normalizers + splitters)
    shrinking = _shrinking(normalizers)
    dropped = _dropped(description["model"], byte_level)
    if shrinking is None or dropped is None or (dropped and normalizers):
        return None
    if any(step["type"] not in KEEPS_ALL or step.get("behavior") == "Removed" for step in splitters):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes all blanks around it along
    vocabulary = _vocabulary(description["model"])
    # A byte-level vocabulary writes each byte as one character.
    lengths = [len(token) if byte_level else len(token.encode()) for token in vocabulary]
    lengths += [len(token["content"].encode()) for token in added]
    return TokenBytes(math.ceil(max([CHARACTER_BYTES, *lengths]) * shrinking), dropped)


def last_id(description: dict[str, Any]) -> int:
    """The highest id of a token of the tokenizer with this description; -1 when it has none."""
    model = description["model"]
    ids = range(len(model["vocab"])) if model["type"] == "Unigram" else model["vocab"].values()
    return max([*ids, *(token["id"] for token in description.get("added_tokens") or [])], default=-1)


def steps_of(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence, which may hold sequences; none when there is no step."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[name] for inner in steps_of(part, name)]


def _shrinking(normalizers: list[dict[str, Any]]) -> float | None:
    """How many times as many bytes as its normal form a text may have; None when that is not bounded."""
    factor = 1.0
    for step in normalizers:
        if step["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
            factor *= COMPOSITION
        elif step["type"] == "Replace" and "String" in step["pattern"] and step["content"]:
            factor *= max(1.0, len(step["pattern"]["String"].encode()) / len(step["content"].encode()))
        elif step["type"] not in ("Prepend", "ByteLevel"):
            return None
    return factor


def _vocabulary(model: dict[str, Any]) -> list[str]:
    if model["type"] == "Unigram":
        return [piece for piece, _ in model["vocab"]]
    return list(model["vocab"])


def _dropped(model: dict[str, Any], byte_level: bool) -> bytes | None:
    """Bytes that become no token; None when one token may stand for a text of any length.

    That is so where the unknown token stands for whole words or for a run of characters.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return None
    vocabulary = set(_vocabulary(model))
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return b""
    if model["type"] == "Unigram":
        return None
    if model.get("unk_token") is not None:
        return None if model.get("fuse_unk") else b""
    if not byte_level or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    return bytes(byte for byte, shown in enumerate(byte_alphabet()) if shown not in vocabulary)


def byte_alphabet() -> list[str]:
    """The character that byte-level vocabularies write for each of the 256 bytes.

    Printable characters of Latin-1 stand for themselves, the others for what follows U+00FF.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    alphabet = [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet
