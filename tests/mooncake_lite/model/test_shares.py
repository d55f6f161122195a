"""Shares of a model: which layers and heads each has, what it reads of the weights; stages are the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from kernels_numba.matmul.linear_layers import GgufRows, dequantize_v0
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.engine import Engine
from mooncake_lite.errors import ModelError
from mooncake_lite.messages import Sampling
from mooncake_lite.model import convert, weights
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.resolve import pull
from mooncake_lite.model.shares import shares_of, whole
from mooncake_lite.model.sizes import num_pages, page_nbytes
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import Weights, load_weights
from scheduler.instance import JobId
from scheduler.instance.step import Chunk, Draw
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL
from tests.mooncake_lite.model.conftest import TinyPublished, tiny_model

SMALL = SMALL_MODEL.config


# ------------------------------------------------------------------------------- which layers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layers", "count", "sizes"), [(30, 4, [8, 8, 7, 7]), (30, 2, [15, 15]), (5, 5, [1] * 5), (7, 1, [7])]
)
def test_the_layers_are_spread_and_the_first_stages_have_more(
    layers: int, count: int, sizes: list[int]
) -> None:
    model = replace(SMALL, layers=layers, windows=(None,) * layers)
    parts = [share.layers for share in shares_of(model, count)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.quick
def test_a_stage_has_the_windows_of_its_layers_and_all_other_sizes_of_the_model() -> None:
    model = replace(SMALL, layers=5, windows=(None, 7, None, 8, 9))
    parts = [share.part_of(model) for share in shares_of(model, 2)]
    assert [part.windows for part in parts] == [(None, 7, None), (8, 9)]
    assert [part.layers for part in parts] == [3, 2]
    assert all(replace(part, layers=5, windows=model.windows) == model for part in parts)
    assert whole(model).part_of(model) == model


@pytest.mark.quick
def test_one_stage_is_first_and_one_is_last_and_a_whole_model_is_both() -> None:
    assert [(one.is_first, one.is_last) for one in shares_of(SMALL, 3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert (whole(SMALL).is_first, whole(SMALL).is_last) == (True, True)


# ------------------------------------------------------------------------------- which heads


def sized(heads: int, kv_heads: int, inner: int = 1536, vocab: int = 49152) -> ModelConfig:
    return replace(SMALL, heads=heads, kv_heads=kv_heads, intermediate_size=inner, vocab_size=vocab)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("heads", "members", "dealt"),
    [
        ((9, 3), 1, [(9, 3)]),
        ((9, 3), 2, [(6, 2), (3, 1)]),
        ((9, 3), 3, [(3, 1)] * 3),
        ((12, 6), 3, [(4, 2)] * 3),
        ((14, 2), 2, [(7, 1)] * 2),
        ((16, 8), 3, [(6, 3), (6, 3), (4, 2)]),
    ],
)
def test_members_hold_kv_heads_unequal_by_one_at_most_and_the_queries_that_read_them(
    heads: tuple[int, int], members: int, dealt: list[tuple[int, int]]
) -> None:
    model = sized(*heads)
    shares = shares_of(model, members=members)
    parts = [share.part_of(model) for share in shares]
    assert [(part.heads, part.kv_heads) for part in parts] == dealt
    assert [head for share in shares for head in share.heads] == list(range(heads[0]))
    assert [head for share in shares for head in share.kv_heads] == list(range(heads[1]))
    group = heads[0] // heads[1]
    for share in shares:
        assert {head // group for head in share.heads} == {*share.kv_heads}
        assert share.layers == range(model.layers)
        assert share.largest(model) == shares[0]
        assert share.is_first
        assert share.is_last


@pytest.mark.quick
@pytest.mark.parametrize(
    ("members", "inner", "ends"),
    [
        (2, 1536, [768, 1536]),
        (3, 1536, [512, 1024, 1536]),
        (2, 4864, [2432, 4864]),
        (3, 4864, [1600, 3232, 4864]),
    ]
    + [(3, 112, [32, 64, 112]), (3, 80, [26, 53, 80])],
)
def test_the_mlp_and_the_vocabulary_are_cut_at_blocks_where_there_are_enough(
    members: int, inner: int, ends: list[int]
) -> None:
    shares = shares_of(sized(9, 3, inner, inner), members=members)
    for spans in ([share.inner for share in shares], [share.vocab for share in shares]):
        assert [span.stop for span in spans] == ends
        assert [span.start for span in spans] == [0, *ends[:-1]]


@pytest.mark.quick
def test_more_members_than_kv_heads_and_members_of_stages_are_refused() -> None:
    with pytest.raises(ModelError, match="size 3: the model has 2 key/value heads; use at most so many"):
        shares_of(sized(14, 2), members=3)
    with pytest.raises(ValueError, match="2 stages, 2 members and 1 turns: only one"):
        shares_of(sized(14, 2), stages=2, members=2)


@pytest.mark.quick
def test_all_members_have_as_many_pages_as_the_one_with_the_most_kv_heads() -> None:
    model, config = sized(9, 3), ServeConfig(kv_cache_bytes=2**26)
    pages = [num_pages(config, model, share) for share in shares_of(model, members=2)]
    assert pages == [2**26 // page_nbytes(config, sized(6, 2))] * 2


# ------------------------------------------------------------------------------- which weights


def parts_of(folder: Path, stages: int, choice: str = "float32") -> list[Weights]:
    source, config = weight_source(folder, choice, "float32", "cpu"), load_config(folder)
    return [load_weights(source, config, "float32", "cpu", share) for share in shares_of(config, stages)]


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
    ("tied", "stage", "count", "others"),
    [
        (False, 0, 2, {"embed_tokens"}),
        (False, 1, 3, set()),
        (False, 1, 2, {"norm", "lm_head"}),
        (True, 1, 2, {"norm", "embed_tokens"}),
    ],
)
def test_tensors_of_other_stages_are_not_converted(
    tied: bool, stage: int, count: int, others: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", tmp_path, tie_word_embeddings=tied)
    config, read = load_config(tmp_path), weights._read_tensors
    monkeypatch.setattr(weights, "_read_tensors", lambda *args: Asked(read(*args)))
    Asked.names.clear()
    share = shares_of(config, count)[stage]
    found = load_weights(weight_source(tmp_path, "auto", "bfloat16", "cpu"), config, "bfloat16", "cpu", share)
    assert found.layers[0].query.weight.dtype == torch.bfloat16
    of_layers = {name for name in Asked.names if ".layers." in name}
    assert {int(name.split(".")[2]) for name in of_layers} == {*share.layers}
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
        Engine(load_model(tmp_path, batch_invariant=True, share=share), 8, 64)
        for share in shares_of(load_config(tmp_path), 3)
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
