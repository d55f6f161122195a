"""With batch_invariant the logits of a sequence have the same bits whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.local import use_threads
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.forward import load_model
from mooncake_lite.ranks.plan import pool_fingerprint

SEQUENCES = 32
LENGTHS = [1 + 37 * i % 90 for i in range(SEQUENCES - 2)] + [300, 470]
KINDS: dict[str, dict[str, Any]] = {
    "wide inner layer": {"family": "llama", "intermediate_size": 1568},
    "sliding window, biases": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
    },
    "normed heads": {"family": "qwen3", "head_dim": 32},
}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = numba.get_num_threads()
    yield
    use_threads(before)


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: Any, tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder=folder, **KINDS[request.param])
    return load_model(folder, batch_invariant=True)


def prompt(sequence: int, length: int) -> list[int]:
    return [3 + (sequence * 31 + 7 * i + i * i) % 190 for i in range(length)]


def prefilled(loop_of: Callable[..., Any], model: Any, lengths: Sequence[int], seed: int = 7) -> Any:
    """A loop whose sequences hold their prompts but for the last token."""
    loop = loop_of(model, sequences=len(lengths), max_tokens=512, seed=seed)
    for s, length in enumerate(lengths):
        if length > 1:
            loop.forward({s: prompt(s, length)[:-1]}, {s: 0}, rows=torch.empty(0, dtype=torch.int64))
    return loop


def decoded(loop: Any, lengths: Sequence[int], together: Sequence[int]) -> dict[int, torch.Tensor]:
    """Logits of one decode step of some sequences, in this order."""
    last = {s: prompt(s, lengths[s])[-1:] for s in together}
    logits = loop.forward(last, {s: lengths[s] - 1 for s in together})
    return dict(zip(together, logits))


def assert_same_bits(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
    assert [s for s in found if not torch.equal(found[s], expected[s])] == []


def alone(loop: Any, lengths: Sequence[int]) -> dict[int, torch.Tensor]:
    return {s: decoded(loop, lengths, [s])[s] for s in range(len(lengths))}


def test_a_sequence_decodes_to_the_same_bits_in_any_company_order_pages_and_threads(
    model: Any, paged_loop: Callable[..., Any]
) -> None:
    use_threads(1)
    loop = prefilled(paged_loop, model, LENGTHS)
    expected = alone(loop, LENGTHS)

    for threads, seed in ((1, 7), (2, 7), (2, 8)):
        use_threads(threads)
        other = loop if seed == 7 else prefilled(paged_loop, model, LENGTHS, seed)
        for batch in (2, 3, 7, 16, 31, 32):
            assert_same_bits(decoded(other, LENGTHS, range(batch)), expected)
            assert_same_bits(
                decoded(other, LENGTHS, range(SEQUENCES - 1, SEQUENCES - 1 - batch, -1)), expected
            )


def test_a_prompt_beside_them_does_not_change_the_bits_of_sequences_that_decode(
    model: Any, paged_loop: Callable[..., Any]
) -> None:
    loop = prefilled(paged_loop, model, [*LENGTHS[-5:], 200])
    lengths = [*LENGTHS[-5:], 200]
    expected = alone(loop, lengths)
    chunk = prompt(5, 200)[20:170]

    last = {s: prompt(s, lengths[s])[-1:] for s in range(5)}
    starts = {s: lengths[s] - 1 for s in range(5)}
    logits = loop.forward(last | {5: chunk}, starts | {5: 20})

    assert_same_bits(dict(enumerate(logits[:5])), expected)


def test_a_prompt_is_computed_to_the_same_bits_beside_another_and_with_more_threads(
    model: Any, paged_loop: Callable[..., Any]
) -> None:
    chunks, starts = {0: prompt(0, 150), 1: prompt(1, 20), 2: prompt(2, 64)}, {0: 0, 1: 0, 2: 0}
    use_threads(1)
    loop = paged_loop(model, sequences=3)
    expected = torch.cat([loop.forward({s: chunks[s]}, {s: 0}) for s in chunks])
    use_threads(2)
    assert torch.equal(paged_loop(model, sequences=3, seed=8).forward(chunks, starts), expected)


@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_the_default_model_decodes_to_the_same_bits_in_any_company(
    weights: str, default_folder: Path, paged_loop: Callable[..., Any]
) -> None:
    model, lengths = load_model(default_folder, weights=weights, batch_invariant=True), [270, 5, 33, 2, 1]
    use_threads(1)
    loop = prefilled(paged_loop, model, lengths)
    expected = alone(loop, lengths)
    use_threads(2)
    assert_same_bits(
        decoded(prefilled(paged_loop, model, lengths, seed=8), lengths, [4, 1, 0, 3, 2]), expected
    )
    assert_same_bits(decoded(loop, lengths, [1, 0]), expected)


@pytest.mark.quick
def test_it_is_refused_where_there_are_no_such_kernels() -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs dtype float32 and device cpu, not bfloat16"):
        ServeConfig(dtype="bfloat16", batch_invariant=True)
    with pytest.raises(ConfigError, match="not float32 and cuda"):
        load_model(Path("anywhere"), device="cuda", batch_invariant=True)


def test_blocks_of_other_kernels_are_not_found_in_the_pool(
    tmp_path: Path, make_tiny: Callable[..., Any]
) -> None:
    make_tiny("llama", tmp_path)
    plain, invariant = ServeConfig(), ServeConfig(batch_invariant=True)
    assert pool_fingerprint(plain, tmp_path) != pool_fingerprint(invariant, tmp_path)
