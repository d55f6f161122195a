"""Small random models of three kinds, in which a few token ids are poison.

The embedding's rows of these ids are NaN, infinite, or so large that their squares are infinite in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.cluster import tiny
from tests.cluster.drawn import Vocabulary
from tests.mooncake_lite.model.conftest import tiny_model

VALUES = (math.nan, math.inf, 1e30)
"""Of all elements of the rows of `Vocabulary.poison`, in its order."""

WORDS = ("the", "ferry", "quiet", "harbour", "return", "im", "user", "12")

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def padded_llama(folder: Path) -> Vocabulary:
    """SentencePiece's way: blanks as U+2581, bytes for what is rare; 25 rows more than ids."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_letters("▁")]
    bpe = _bpe(alphabet, (f"▁{word}" for word in WORDS), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner = Tokenizer(bpe)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(list(steps))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ids = inner.get_vocab_size()
    bytes_of_no_text = (3 + 0xFD, 3 + 0xFE, 3 + 0xFF)
    return _save("llama", folder, inner, Vocabulary(ids, ids + 25, bytes_of_no_text))


def qwen2_with_a_gap(folder: Path) -> Vocabulary:
    """Byte-level; the last added token stands after a gap of 40 ids."""
    alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = _bpe(alphabet, (f"Ġ{word}" for word in WORDS), gap_then="<|late|>")
    inner = Tokenizer(bpe)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(alphabet[:3])
    inner.add_tokens(["<|late|>"])
    late = inner.token_to_id("<|late|>")
    poison = tuple(inner.token_to_id(chr(byte)) for byte in (0xFD, 0xFE, 0xFF))
    return _save("qwen2", folder, inner, Vocabulary(late - 40, late + 24, poison), bos_token_id=None)


def mistral_with_a_window(folder: Path) -> Vocabulary:
    """The text tells every id; a token sees 48 tokens and no more."""
    size = tiny.VOCABULARY
    vocabulary = Vocabulary(size, size, (size - 3, size - 2, size - 1))
    return _save("mistral", folder, tiny.words(), vocabulary, sliding_window=48)


def poison_the_head(folder: Path) -> None:
    """Make one logit NaN in every row, whatever the prompt."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][9] = math.nan
    save_file(tensors, path, {"format": "pt"})


def _letters(*more: str) -> list[str]:
    return [*more, *sorted({letter for word in WORDS for letter in word})]


def _bpe(alphabet: list[str], words: Iterable[str], gap_then: str = "", **how: Any) -> models.BPE:
    """A byte-pair encoding that merges each of the words from its left."""
    pieces, merges = dict.fromkeys(alphabet), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces[word[:end]] = None
                merges.append((word[: end - 1], word[end - 1]))
    ids = {piece: number for number, piece in enumerate(pieces)}
    if gap_then:
        ids[gap_then] = len(ids) + 40
    return models.BPE(vocab=ids, merges=merges, **how)


def _save(family: str, folder: Path, inner: Tokenizer, vocabulary: Vocabulary, **changes: Any) -> Vocabulary:
    sizes = {"vocab_size": vocabulary.rows, "max_position_embeddings": tiny.CONTEXT}
    made = tiny_model(family, folder, **sizes, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        for token, value in zip(vocabulary.poison, VALUES, strict=True):
            made.get_input_embeddings().weight[token] = value
    made.save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return vocabulary
