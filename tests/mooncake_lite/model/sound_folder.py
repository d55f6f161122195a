"""A whole model folder in a few kilobytes, made without torch, for tests that damage one file of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from mooncake_lite.model.config import load_config
from mooncake_lite.model.weights import expected_shapes
from tests.mooncake_lite.gateway.fake_cluster import make_model_folder


def sound_folder(folder: Path, rows: int | None = None) -> Path:
    """Every file that is read, with weights of zeros. rows: of the embedding; by default one per token."""
    make_model_folder(folder)
    if rows is not None:
        rewrite(folder, "config.json", vocab_size=rows)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    write_weights(folder)
    return folder


def tokens_of(folder: Path) -> int:
    """The number of tokens that the tokenizer has."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def write_weights(folder: Path) -> None:
    """Write weights of zeros, as config.json wants them."""
    shapes = expected_shapes(load_config(folder))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(zeros, folder / "model.safetensors")


def rewrite(folder: Path, name: str, **changes: Any) -> None:
    """Change some fields of a JSON file; a field set to ... is removed."""
    data = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def edit_tokenizer(folder: Path, edit: Any) -> None:
    """Let `edit` change the parsed tokenizer.json."""
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    edit(description)
    path.write_text(json.dumps(description))


def add_token(folder: Path, text: str = "<|tool|>", **changes: Any) -> int:
    """Give the tokenizer an added token behind all others; its id. The model does not get it."""
    path = folder / "tokenizer.json"
    inner = Tokenizer.from_file(str(path))
    inner.add_special_tokens([text])
    inner.save(str(path))
    token_id = inner.token_to_id(text)
    assert token_id is not None
    return token_id


def move_token(folder: Path, text: str, to: int) -> None:
    """Give a token of the ordinary vocabulary another id."""
    edit_tokenizer(folder, lambda description: description["model"]["vocab"].update({text: to}))
