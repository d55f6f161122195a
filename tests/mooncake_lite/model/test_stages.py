"""Stages of a model: which layers each has, what it reads of the weights, and that they are the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from kernels_numba.matmul.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.engine.engine import Engine
from mooncake_lite.messages import Sampling
from mooncake_lite.model import convert, weights
from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.resolve import pull
from mooncake_lite.model.stages import WHOLE, Stage
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import Weights, load_weights
from scheduler.instance import JobId
from scheduler.instance.step import Chunk, Draw
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL
from tests.mooncake_lite.model.conftest import TinyPublished, tiny_model

SMALL = SMALL_MODEL.config


def stages(count: int) -> list[Stage]:
    return [Stage(number, count) for number in range(count)]


# ------------------------------------------------------------------------------- which layers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layers", "count", "sizes"), [(30, 4, [8, 8, 7, 7]), (30, 2, [15, 15]), (5, 5, [1] * 5), (7, 1, [7])]
)
def test_the_layers_are_spread_and_the_first_stages_have_more(
    layers: int, count: int, sizes: list[int]
) -> None:
    model = replace(SMALL, layers=layers, windows=(None,) * layers)
    parts = [stage.layers(model) for stage in stages(count)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.quick
def test_a_stage_has_the_windows_of_its_layers_and_all_other_sizes_of_the_model() -> None:
    model = replace(SMALL, layers=5, windows=(None, 7, None, 8, 9))
    parts = [stage.part_of(model) for stage in stages(2)]
    assert [part.windows for part in parts] == [(None, 7, None), (8, 9)]
    assert [part.layers for part in parts] == [3, 2]
    assert all(replace(part, layers=5, windows=model.windows) == model for part in parts)
    assert WHOLE.part_of(model) == model


@pytest.mark.quick
def test_one_stage_is_first_and_one_is_last_and_a_whole_model_is_both() -> None:
    assert [(one.is_first, one.is_last) for one in stages(3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert (WHOLE.is_first, WHOLE.is_last) == (True, True)


# ------------------------------------------------------------------------------- which weights


def parts_of(folder: Path, count: int, choice: str = "float32") -> list[Weights]:
    source, config = weight_source(folder, choice, "float32", "cpu"), load_config(folder)
    return [load_weights(source, config, "float32", "cpu", stage) for stage in stages(count)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_its_layers_the_first_the_embedding_and_the_last_norm_and_head(
    tied: bool, tmp_path: Path
) -> None:
    tiny_model("llama", tmp_path, tie_word_embeddings=tied)
    (whole,) = parts_of(tmp_path, 1)
    first, middle, last = parts_of(tmp_path, 3)
    for layer, part in enumerate((first, middle, last)):
        (own,) = part.layers
        torch.testing.assert_close(own.down.weight, whole.layers[layer].down.weight, rtol=0, atol=0)
        torch.testing.assert_close(own.mlp_norm, whole.layers[layer].mlp_norm, rtol=0, atol=0)
    assert torch.equal(first.embedding, whole.embedding)  # type: ignore[arg-type]
    assert torch.equal(last.norm, whole.norm)  # type: ignore[arg-type]
    assert torch.equal(last.head.weight, whole.head.weight)  # type: ignore[arg-type, union-attr]
    assert torch.equal(last.head.weight, first.embedding) is tied  # type: ignore[arg-type, union-attr]
    assert [part.embedding is None for part in (first, middle, last)] == [False, True, True]
    for part in (first, middle):
        assert (part.norm, part.head) == (None, None)


class Asked(dict[str, torch.Tensor]):
    """Tensors by name, which notes the names that are asked for."""

    names: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("tied", "stage", "others"),
    [
        (False, Stage(0, 2), {"embed_tokens"}),
        (False, Stage(1, 3), set()),
        (False, Stage(1, 2), {"norm", "lm_head"}),
        (True, Stage(1, 2), {"norm", "embed_tokens"}),
    ],
)
def test_tensors_of_other_stages_are_not_converted(
    tied: bool, stage: Stage, others: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", tmp_path, tie_word_embeddings=tied)
    config, read = load_config(tmp_path), weights._read_tensors
    monkeypatch.setattr(weights, "_read_tensors", lambda *args: Asked(read(*args)))
    Asked.names.clear()
    found = load_weights(weight_source(tmp_path, "auto", "bfloat16", "cpu"), config, "bfloat16", "cpu", stage)
    assert found.layers[0].query.weight.dtype == torch.bfloat16
    of_layers = {name for name in Asked.names if ".layers." in name}
    assert {int(name.split(".")[2]) for name in of_layers} == {*stage.layers(config)}
    assert {name.split(".")[-2] for name in Asked.names - of_layers} == others


def test_a_stage_has_the_blocks_of_its_layers_and_puts_no_others_in_order(
    own_cache: Path, tiny_published: TinyPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(tiny_published.wheel, published=tiny_published.published)
    ordered: list[int] = []
    unpermuted = convert.unpermuted

    def counted(data: np.ndarray, heads: int) -> np.ndarray:
        ordered.append(heads)
        return unpermuted(data, heads)

    monkeypatch.setattr(convert, "unpermuted", counted)
    for choice in ("published", "auto"):
        ordered.clear()
        first, last = parts_of(folder, 2, choice)
        assert ordered == [4, 2] * 2, "Q and K of one layer of each stage"
        for layer, part in enumerate((first, last)):
            (own,) = part.layers
            expected = tiny_published.tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
            assert isinstance(own.query.weight, GgufRows)
            np.testing.assert_array_equal(dequantize_v0(own.query.weight), expected)
            assert (own.query.dense is not None) is (choice == "auto")
        assert isinstance(first.embedding, GgufRows) is (choice == "published")
        assert isinstance(last.head.weight, GgufRows)  # type: ignore[union-attr]
        assert (first.norm, first.head, last.embedding) == (None, None, None)
        assert last.norm is not None


# ------------------------------------------------------------------------------- all together


def chunk(name: str, token_ids: list[int], start: int, pages: tuple[int, ...]) -> Chunk:
    draw = Draw(Sampling(0.8, top_k=9, seed=4), token_ids, 0, frozenset())
    return Chunk(JobId(name, 0), token_ids, start, pages, (draw,), True)


STEPS = [
    [chunk("a", [*range(5, 25)], 0, (3, 1)), chunk("b", [*range(90, 60, -1)], 0, (2, 0))],
    [chunk("c", [*range(40, 57)], 0, (4, 5)), chunk("a", [7], 20, (3, 1)), chunk("b", [8, 9], 30, (2, 0))],
    [chunk("a", [11], 21, (3, 1)), chunk("c", [12], 17, (4, 5))],
]
"""Prompts, a mixed pass, and one that only decodes."""


def test_stages_one_after_the_other_give_the_bits_of_the_whole_model(tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path, tie_word_embeddings=True)
    whole = Engine(load_model(tmp_path, batch_invariant=True), 8, 64)
    first, middle, last = (
        Engine(load_model(tmp_path, batch_invariant=True, stage=stage), 8, 64) for stage in stages(3)
    )
    for engine in (whole, first, middle, last):
        engine.caches.zero_()
    for step in STEPS:
        expected = whole.compute(step)
        hidden = first.pass_on(step)
        assert hidden.shape == (sum(len(one.token_ids) for one in step), 64 * 4)
        assert last.compute(step, None, middle.pass_on(step, None, hidden)) == expected
    for layer, engine in enumerate((first, middle, last)):
        assert torch.equal(engine.caches[0], whole.caches[layer])
