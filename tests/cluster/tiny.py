"""Tiny random models in folders that a cluster can serve, with a tokenizer whose text tells every id."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.mooncake_lite.model.conftest import tiny_model

VOCABULARY = 199
CONTEXT = 512
TOKEN_NBYTES = 1536
"""KV of one token of the qwen3 model in float32, as of an emulated one: 3 layers, K and V, 2 heads of 32."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}

SIZES = ["--pool-bytes", "32MiB", "--kv-cache-bytes", "32MiB", "--max-model-len", str(CONTEXT)]
FLAGS = ["--threads", "1", *SIZES]
"""One thread per rank: two that wait for each other take several times as long beside other tests."""


def tiny_folder(family: str, folder: Path, context: int = CONTEXT) -> Path:
    """A model of a family; token 7 is written <7>, so equal texts are equal tokens."""
    tiny_model(family, folder, vocab_size=VOCABULARY, max_position_embeddings=context, **FAMILIES[family])
    words().save(str(folder / "tokenizer.json"))
    return folder


def words() -> Tokenizer:
    """A tokenizer that writes token 7 as <7>."""
    inner = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(f"<{i}>", special=True, normalized=False) for i in (1, 2)])
    return inner


def prompts(count: int = 8) -> list[list[int]]:
    """Of 70 to 350 tokens, in pairs that share a prefix of several blocks."""
    chosen = random.Random(5)
    bodies = [[chosen.randrange(3, VOCABULARY) for _ in range(400)] for _ in range(-(-count // 2))]
    return [bodies[i // 2][: 70 + 40 * i] for i in range(count)]
