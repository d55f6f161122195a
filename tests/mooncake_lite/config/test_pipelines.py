"""Pipelines of prefill ranks: which can be, which rank has which role, and what each needs of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mooncake_lite.config.instances import instance_of, leading_roles
from mooncake_lite.config.reading import config_from
from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import rank_flags
from mooncake_lite.launch.threads import threads_for
from mooncake_lite.model.shares import shares_of
from mooncake_lite.model.sizes import (
    block_layout,
    context_length,
    hidden_nbytes,
    num_pages,
    page_nbytes,
    segment_bytes,
)
from mooncake_lite.ranks.computing.build import GROUP_S, even_context, least_by_layers, limits_of
from scheduler.costs import LoadCost
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL

pytestmark = pytest.mark.quick

MODEL = replace(SMALL_MODEL.config, layers=7, windows=(None,) * 7)
FOUR = {"prefill": 4, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 4, "pipeline_parallel_size": 3}, "=3 does not divide prefill=4: use 1 or 2 or 4"),
        ({"prefill": 1, "pipeline_parallel_size": 2}, "=2 does not divide prefill=1: use 1"),
        ({"prefill": 3, "pipeline_parallel_size": 0}, "=0 does not divide prefill=3: use 1 or 3"),
        ({"prefill": 2, "pipeline_parallel_size": -2}, "=-2 does not divide prefill=2: use 1 or 2"),
        (
            {"mode": "colocated", "compute": 2, "pipeline_parallel_size": 2},
            "=2: mode=colocated has no prefill ranks; use --mode pooled or split",
        ),
        ({**FOUR, "enable_chunked_prefill": False}, "=2 needs chunks, on which its ranks work at once; "),
        ({**FOUR, "layerwise": "on"}, "=2 moves whole blocks; use layerwise=auto"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_the_fix_in_one_line(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**given)
    assert str(caught.value).startswith("pipeline_parallel_size" + words)
    assert "\n" not in str(caught.value)


def test_a_pipeline_has_no_more_stages_than_the_model_has_layers() -> None:
    config = ServeConfig(prefill=8, pipeline_parallel_size=8)
    with pytest.raises(ConfigError) as caught:
        context_length(config, MODEL)
    wanted = "pipeline_parallel_size=8, but the model has 7 layers; use at most so many"
    assert str(caught.value) == wanted
    assert context_length(ServeConfig(prefill=7, pipeline_parallel_size=7), MODEL) == MODEL.max_position


@pytest.mark.parametrize(
    ("given", "others"), [({"decode": 2}, ["decode", "decode", "store"]), ({"mode": "split"}, ["decode"])]
)
def test_the_ranks_of_a_pipeline_follow_each_other_and_the_first_has_the_role_that_is_known(
    given: dict[str, Any], others: list[str]
) -> None:
    config = ServeConfig(**FOUR, **given)
    assert config.roles == ["steward", "prefill", "stage", "prefill", "stage", *others]
    assert config.ranks == len(config.roles)
    assert (config.ranks_of("prefill"), config.ranks_of("stage")) == ([1, 3], [2, 4])
    pipelines = [instance_of(config.roles, rank) for rank in range(config.ranks)]
    assert pipelines[:6] == [[0], [1, 2], [1, 2], [3, 4], [3, 4], [5]]
    assert config_from(config.to_dict(), "test") == config


def test_a_rank_is_told_how_long_its_pipeline_is() -> None:
    flags = rank_flags(ServeConfig(**FOUR))
    assert flags == ["--prefill", "4", "--pipeline-parallel-size", "2"]


def test_all_stages_have_as_many_pages_as_the_first_one_which_has_the_most_layers() -> None:
    config = ServeConfig(**FOUR, kv_cache_bytes=2**20)
    first = replace(MODEL, layers=4, windows=(None,) * 4)
    pages = [num_pages(config, MODEL, share) for share in shares_of(MODEL, 2)]
    assert pages == [2**20 // page_nbytes(config, first)] * 2
    assert pages[0] > num_pages(config, MODEL) == 2**20 // page_nbytes(config, MODEL)
    assert page_nbytes(config, first) * 7 == page_nbytes(config, MODEL) * 4
    assert page_nbytes(config, MODEL) == 7 * 2 * MODEL.kv_heads * PAGE_TOKENS * MODEL.head_dim * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_segment_of_a_stage_ends_with_slots_for_the_hidden_states_of_two_passes(dtype: Any) -> None:
    config = ServeConfig(**FOUR, max_num_batched_tokens=100, dtype=dtype)
    whole = replace(config, pipeline_parallel_size=1)
    slots = 2 * 100 * MODEL.hidden_size * (4 if dtype == "float32" else 2)
    assert slots == 2 * 100 * hidden_nbytes(config, MODEL)
    for role in ("prefill", "stage"):
        assert segment_bytes(config, MODEL, role) == segment_bytes(whole, MODEL, "prefill") + slots
    for role in ("decode", "store", "steward"):
        assert segment_bytes(config, MODEL, role) == segment_bytes(whole, MODEL, role)


def test_a_stage_lends_nothing_to_the_pool() -> None:
    block = block_layout(ServeConfig(), MODEL).nbytes
    lending, alone = (ServeConfig(**FOUR, lend_bytes=size) for size in (4 * block, 0))
    assert segment_bytes(lending, MODEL, "prefill") == segment_bytes(alone, MODEL, "prefill") + 4 * block
    assert segment_bytes(lending, MODEL, "stage") == segment_bytes(alone, MODEL, "stage")


@pytest.mark.parametrize("cores", [2, 4, 6, 8, 40])
def test_a_stage_has_as_many_threads_as_a_prefill_rank_without_a_pipeline(cores: int) -> None:
    config = ServeConfig(**FOUR, decode=1)
    whole = replace(config, pipeline_parallel_size=1)
    assert leading_roles(config.roles) == whole.roles
    for role in ("prefill", "decode"):
        assert threads_for(config, cores, role) == threads_for(whole, cores, role)


def test_the_first_stage_plans_with_late_tokens_and_even_chunks_and_no_other_rank_does() -> None:
    config = ServeConfig(**FOUR)
    limits = limits_of(config, MODEL, prefills=True)
    assert (limits.late, limits.even, limits.layers) == (True, even_context(MODEL), 0)
    plain = limits_of(replace(config, pipeline_parallel_size=1), MODEL, prefills=True)
    assert (plain.late, plain.even, plain.layers) == (False, 0, 7)
    decodes = limits_of(config, MODEL, prefills=False)
    assert (decodes.late, decodes.even) == (False, 0)


def test_few_small_blocks_move_whole_and_large_ones_by_layers() -> None:
    load = LoadCost(10e9, 1e9, 1e-3)
    small, large = (ServeConfig(block_size=size) for size in (16, 512))
    nbytes, more = (block_layout(config, MODEL).nbytes for config in (small, large))
    one_s = load.seconds("dram", nbytes)
    least = least_by_layers(MODEL.layers, nbytes, load)
    assert least * one_s * 6 / 7 >= 7 * GROUP_S > (least - 1) * one_s * 6 / 7
    assert least > least_by_layers(MODEL.layers, more, load) >= 1
    assert limits_of(small, MODEL, True, load).least == least
    assert limits_of(replace(small, layerwise="on"), MODEL, True, load).least == 1


def test_attention_is_as_dear_as_all_else_at_the_even_context() -> None:
    """FLOPs of a token: 2 of each weight, and 4 of each number of a query for each token it attends to."""
    hidden, inner, query, key = 64, 64, 4 * 16, 2 * 16
    linear = 2 * (hidden * query + 2 * hidden * key + query * hidden + 3 * hidden * inner)
    assert 4 * query * even_context(MODEL) == linear
