"""The forward pass of each family against transformers, on tiny random models and through paged caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import AttentionBatch, load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama, tied": {"family": "llama", "tie_word_embeddings": True},
    "llama, biases everywhere": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama 3 scaling": {"family": "llama", "rope_parameters": LLAMA3},
    "llama, wide heads, sharded": {"family": "llama", "head_dim": 32, "max_shard_size": "40KB"},
    "mistral": {"family": "mistral", "sliding_window": None, "head_dim": 32},
    "mistral, sliding window": {"family": "mistral", "sliding_window": 11, "head_dim": 32},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2, windows in later layers": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "one key head for all": {
        "family": "qwen3",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
}
PROMPTS = [[3, 1, 4, 1, 5], list(range(10, 47)), [7] * 17, [150, 12]]


@pytest.fixture(scope="module", params=list(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]
) -> tuple[Any, Path]:
    """(oracle, folder) of one kind."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny(folder=folder, **KINDS[request.param]), folder


def test_logits_are_those_of_transformers_in_two_chunks_and_decode(
    pair: tuple[Any, Path], paged_loop: Callable[..., Any], device: str
) -> None:
    oracle, folder = pair
    ids = list(range(20, 60))
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    loop = paged_loop(load_model(folder, device=device))

    first = loop.forward({0: ids[:21]}, {0: 0})
    second = loop.forward({0: ids[21:-1]}, {0: 21})
    last = loop.forward({0: ids[-1:]}, {0: len(ids) - 1})

    torch.testing.assert_close(torch.cat([first, second, last]), expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_of_a_batch_are_those_of_transformers(
    pair: tuple[Any, Path], paged_loop: Callable[..., Any], differences: Callable[..., list[str]], device: str
) -> None:
    oracle, folder = pair
    answers = paged_loop(load_model(folder, device=device), sequences=len(PROMPTS)).greedy(PROMPTS, 24)

    for prompt, answer in zip(PROMPTS, answers):
        assert len(answer) == 24
        assert differences(oracle, prompt, answer) == []


def test_only_the_rows_asked_for_get_logits(
    pair: tuple[Any, Path], paged_loop: Callable[..., Any], device: str
) -> None:
    loop = paged_loop(load_model(pair[1], device=device), sequences=2)
    chunks, starts = {0: [5, 6, 7], 1: [8, 9]}, {0: 0, 1: 0}

    every = loop.forward(chunks, starts)
    some = loop.forward(chunks, starts, rows=torch.tensor([4, 2]))

    assert every.dtype == torch.float32
    torch.testing.assert_close(some, every[[4, 2]], rtol=1e-5, atol=1e-5)


def test_the_kv_of_a_prompt_does_not_depend_on_its_neighbours(
    pair: tuple[Any, Path], paged_loop: Callable[..., Any], device: str
) -> None:
    model = load_model(pair[1], device=device)
    alone, together = paged_loop(model), paged_loop(model, sequences=3)

    expected = alone.forward({0: PROMPTS[1]}, {0: 0})
    found = together.forward({2: PROMPTS[0], 0: PROMPTS[1], 1: PROMPTS[2]}, {0: 0, 1: 0, 2: 0})

    begin = len(PROMPTS[0])
    torch.testing.assert_close(found[begin : begin + len(PROMPTS[1])], expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_float32_and_keeps_bfloat16_caches(
    pair: tuple[Any, Path], paged_loop: Callable[..., Any], device: str
) -> None:
    ids = list(range(20, 52))
    exact = paged_loop(load_model(pair[1], device=device)).forward({0: ids}, {0: 0})
    loop = paged_loop(load_model(pair[1], "bfloat16", device))

    half = torch.cat([loop.forward({0: ids[:-1]}, {0: 0}), loop.forward({0: ids[-1:]}, {0: len(ids) - 1})])

    assert loop.caches.dtype == torch.bfloat16
    assert half.dtype == torch.float32
    correlation = torch.corrcoef(torch.stack([half.flatten(), exact.flatten()]))[0, 1]
    assert correlation > 0.995


def test_weights_stored_in_bfloat16_load_in_either_dtype(
    tmp_path: Path, make_tiny: Callable[..., Any], paged_loop: Callable[..., Any]
) -> None:
    oracle = make_tiny("llama", tmp_path)
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)

    kept = load_model(tmp_path, "bfloat16").weights.layers[0].gate.weight
    widened = load_model(tmp_path, "float32").weights.layers[0].gate.weight

    assert kept.dtype == torch.bfloat16
    assert widened.dtype == torch.float32
    torch.testing.assert_close(widened, kept.float(), rtol=0, atol=0)


def test_the_sizes_of_what_transformers_writes_are_read_back(pair: tuple[Any, Path]) -> None:
    oracle, folder = pair
    config = load_config(folder)

    assert config.layers == oracle.config.num_hidden_layers
    assert config.kv_heads == oracle.config.num_key_value_heads
    assert config.tie_embeddings == oracle.config.tie_word_embeddings
    assert config.eos_ids == (2,)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_decode_step_reads_its_inputs_anew_each_time_so_that_a_graph_of_it_can_be_replayed(
    device: str, tmp_path: Path, make_tiny: Callable[..., Any]
) -> None:
    """On CUDA it is captured, which a synchronisation, or an allocation not by torch, would break."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: capture can only be tried on one")
    make_tiny("llama", tmp_path)
    model = load_model(tmp_path, "float32", device)
    sizes = model.config
    shape = (sizes.layers, 2, 4, sizes.kv_heads, 16, sizes.head_dim)
    caches = torch.zeros(shape, device=device)
    ids, positions, slots = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(3))
    new, lens = (torch.ones(2, dtype=torch.int32, device=device) for _ in range(2))
    tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    batch = AttentionBatch(new, lens, tables, slots)
    logits = torch.zeros(2, sizes.vocab_size, device=device)

    def step() -> None:
        logits.copy_(model.forward(ids, positions, caches, batch))

    replay = step
    if device == "cuda":
        from kernels_numba.report.gpu_checks import captured

        replay = captured(step)  # type: ignore[assignment]
    seen = []
    for position in range(3):
        inputs = {"dtype": torch.int64, "device": device}
        ids.copy_(torch.tensor([5 + position, 90 - position], **inputs))
        positions.fill_(position)
        slots.copy_(torch.tensor([32 + position, 48 + position], **inputs))
        lens.fill_(position + 1)
        fresh = AttentionBatch(new.clone(), lens.clone(), tables.clone(), slots.clone())
        want = model.forward(ids.clone(), positions.clone(), caches, fresh)
        written = caches[:, :, 2:4, :, position].clone()
        caches[:, :, 2:4, :, position] = torch.nan
        replay()
        assert torch.equal(logits, want)
        assert torch.equal(caches[:, :, 2:4, :, position], written)
        seen.append(logits.clone())
    assert not torch.equal(seen[0], seen[1])
