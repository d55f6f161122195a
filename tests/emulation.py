"""Models that are served without weights: a folder, its profile, and the tokens that an emulated rank draws.

Used by the tests of the emulated engine. The tokenizer's text tells every id, as in tests/cluster/tiny.py.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from mooncake_lite.engine.emulated import FIRST, digest_after, emulated_token
from mooncake_lite.messages import Sampling
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.compute import ComputeCost, PassTerms
from mooncake_lite.profiles.file import (
    VERSION,
    ComputeSection,
    EngineUsed,
    Profile,
    ProfiledModel,
    model_fingerprint,
    write_profile,
)
from scheduler.instance.step import Draw

VOCABULARY = 199
EOS = 2

TINY = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMOL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
"""Shapes of KV: a token has 1.5 kB in float32, and 46 kB as with the default model."""

COST = ComputeCost(prefill=PassTerms(2e-3, 1e-5, 0.0), decode=PassTerms(2e-3, 1e-4, 0.0))
"""Short times: 5 ms for a chunk of 256 tokens, 4 ms for 16 sequences."""

WORTH_LOADING = ComputeCost(prefill=PassTerms(2e-3, 1e-3, 0.0), decode=COST.decode)
"""64 ms for a block: a placement that compares rather loads KV than computes it, however busy we are."""


def model_folder(folder: Path, shape: dict[str, int] = TINY, context: int = 4096) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": shape["num_attention_heads"] * shape["head_dim"],
        "intermediate_size": 256,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "eos_token_id": EOS,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    inner = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(f"<{i}>", special=True, normalized=False) for i in (1, EOS)])
    inner.save(str(folder / "tokenizer.json"))
    return folder


def profile_of(folder: Path, cost: ComputeCost = COST, dtype: str = "float32", cpu: str = "none") -> Profile:
    """A profile of the model in a folder, as if it had been measured."""
    sizes = load_config(folder)
    kv = [sizes.layers, sizes.kv_heads, sizes.head_dim, 4]
    model = ProfiledModel(folder.name, model_fingerprint(sizes), kv)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    section = ComputeSection(EngineUsed(dtype, "cpu", "auto", 2), cost, {}, [])
    return Profile(VERSION, model, {"cpu": cpu}, date, {}).with_section("compute", section)


def profile_file(folder: Path, cost: ComputeCost = COST, cpu: str = "none") -> Path:
    """Write profile_of(folder) beside the folder. cpu: a real engine takes the profile of its own alone."""
    path = folder.with_name(f"{folder.name}.profile.json")
    write_profile(path, profile_of(folder, cost, cpu=cpu))
    return path


def flags(folder: Path, cost: ComputeCost = WORTH_LOADING) -> list[str]:
    """What `serve` takes to emulate a model, whose folder is made here."""
    model_folder(folder)
    return [str(folder), "--engine", "emulated", "--profile", str(profile_file(folder, cost))]


def answer(prompt: list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """The first tokens that an emulated rank answers to a prompt, with no end of the text among them."""
    sampling = sampling or Sampling(0.0)
    digest, tokens = FIRST, list(prompt)
    for token in prompt:
        digest = digest_after(digest, token)
    for index in range(count):
        tokens.append(emulated_token(digest, Draw(sampling, tokens, index, frozenset()), VOCABULARY))
        digest = digest_after(digest, tokens[-1])
    return tokens[len(prompt) :]
