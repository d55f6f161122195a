"""A small model to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mooncake_lite.model.conftest import tiny_model

VOCABULARY = 199


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    tiny_model("qwen3", folder, **sizes, tie_word_embeddings=True, head_dim=32)
    return folder
