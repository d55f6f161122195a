"""Sizes of segments: the pool's part in front, staging behind it, whole blocks everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.sizes import (
    block_layout,
    context_length,
    pool_bytes,
    scratch_bytes,
    segment_bytes,
    stage_bytes,
)
from store.allocator import RangeAllocator
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL

pytestmark = pytest.mark.quick

MODEL = SMALL_MODEL.config
BLOCK = 32768


def test_what_a_compute_rank_lends_lies_before_its_staging_and_is_whole_blocks() -> None:
    config = ServeConfig(lend_bytes=10 * BLOCK + 5, staging_bytes=20 * BLOCK)
    for role in ("prefill", "decode"):
        assert pool_bytes(config, MODEL, role) == 10 * BLOCK
        assert segment_bytes(config, MODEL, role) == 30 * BLOCK
    assert pool_bytes(config, MODEL, "store") == segment_bytes(config, MODEL, "store") == config.pool_bytes
    assert segment_bytes(config, MODEL, "steward") == 0


def test_by_default_nothing_is_lent_and_no_memory_is_kept_for_it() -> None:
    config = ServeConfig(ssd_dir="tier")
    assert pool_bytes(config, MODEL, "decode") == 0
    assert segment_bytes(config, MODEL, "decode") == config.staging_bytes
    assert scratch_bytes(config, MODEL, "store") == 0


def test_a_segment_holds_as_many_blocks_as_were_counted_also_when_blocks_are_no_round_number() -> None:
    config = ServeConfig(lend_bytes=2**20, kv_codec="int4", block_size=16)
    model = replace(MODEL, layers=3, kv_heads=1)
    nbytes = block_layout(config, model).nbytes
    allocator = RangeAllocator(pool_bytes(config, model, "prefill"))
    assert nbytes % allocator.alignment
    count = allocator.capacity // allocator.padded(nbytes)
    assert all(allocator.allocate(nbytes) is not None for _ in range(count))
    assert allocator.free_bytes == 0


def test_stages_of_a_pipeline_keep_room_for_the_hidden_states_of_two_passes() -> None:
    config = ServeConfig(prefill=2, pipeline_parallel_size=2, max_num_batched_tokens=100, dtype="bfloat16")
    assert stage_bytes(config, MODEL, "prefill") == stage_bytes(config, MODEL, "stage") == 2 * 100 * 64 * 2
    assert stage_bytes(config, MODEL, "decode") == stage_bytes(ServeConfig(), MODEL, "prefill") == 0


@pytest.mark.parametrize(
    ("wishes", "why"),
    [
        ({"prefill": 3, "pipeline_parallel_size": 3}, "the model has 2 layers"),
        ({"kv_codec": "int4"}, "kv_codec='int4' with head_dim=15"),
        ({"mode": "split", "lend_bytes": 5 * BLOCK}, f"holds 5 blocks .* raise lend_bytes to {17 * BLOCK}"),
    ],
)
def test_what_the_model_cannot_have_is_refused_with_its_figure(wishes: dict[str, Any], why: str) -> None:
    model = replace(MODEL, head_dim=15) if "kv_codec" in wishes else MODEL
    with pytest.raises(ConfigError, match=why):
        context_length(ServeConfig(**wishes), model)


def test_lent_dram_alone_may_hold_the_longest_request() -> None:
    assert context_length(ServeConfig(pool_bytes=0, lend_bytes=9 * BLOCK), MODEL) == 1024
