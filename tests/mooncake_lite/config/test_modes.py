"""A mode is a row of a table: ranks, handover, and options that fit together before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.config.instances import FOLLOWERS
from mooncake_lite.config.modes import COMPUTE_ROLES, DUTIES, MODES, ROLES
from mooncake_lite.config.reading import config_from
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import rank_flags
from mooncake_lite.model.sizes import context_length, pool_bytes, segment_bytes
from mooncake_lite.serve_command import build_config
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL

pytestmark = pytest.mark.quick

MODEL = SMALL_MODEL.config
BLOCK = 32768


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        ({"mode": "pooled"}, ["prefill", "decode", "store"]),
        ({"mode": "split"}, ["prefill", "decode"]),
        ({"mode": "split", "prefill": 2}, ["prefill", "prefill", "decode"]),
        ({"mode": "colocated"}, ["compute", "compute"]),
        ({"mode": "colocated", "compute": 1, "store": 1}, ["compute", "store"]),
        ({"mode": "colocated", "prefill": 0}, ["compute", "compute"]),
    ],
)
def test_a_mode_has_its_own_roles_and_numbers_of_ranks(given: dict[str, Any], roles: list[str]) -> None:
    config = ServeConfig(**given)
    assert config.roles == ["steward", *roles]
    assert config.ranks == len(config.roles)
    assert config_from(config.to_dict(), "test") == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "colocated", "prefill": 2}, "mode=colocated has no prefill ranks; use --compute N"),
        ({"mode": "colocated", "compute": 0}, "compute=0: at least 1 is needed in mode=colocated"),
        ({"mode": "colocated", "store": -2}, "store=-2: 0 or more in mode=colocated"),
        ({"compute": 2}, "mode=pooled has no compute ranks; use --prefill N and --decode N"),
        ({"store": 0}, "store=0: at least 1 is needed in mode=pooled"),
        (
            {"mode": "split", "store": 1},
            "mode=split has no store ranks; leave --store out, or use --mode pooled or --mode colocated",
        ),
        (
            {"mode": "split", "ssd_dir": "/tier"},
            "ssd_dir='/tier': mode=split has no pool; leave --ssd-dir out, or use --mode pooled",
        ),
        (
            {"mode": "colocated", "eviction": "lfu"},
            "eviction='lfu': mode=colocated without store ranks has no pool; leave --eviction out, or add "
            "--store N",
        ),
        ({"mode": "colocated", "lend_bytes": 4096}, "lend_bytes=4096: mode=colocated without store ranks"),
        ({"mode": "colocated", "kv_codec": "int8"}, "kv_codec='int8': mode=colocated without store ranks"),
        (
            {"mode": "split", "kv_events_config": '{"enable_kv_cache_events": true}'},
            "leave --kv-events-config out",
        ),
        (
            {"mode": "split", "preemption": "swap"},
            "preemption='swap': mode=split has no pool; leave --preemption out, or use --mode pooled",
        ),
        (
            {"mode": "colocated", "preemption": "swap"},
            "preemption='swap': mode=colocated without store ranks has no pool; leave --preemption out, or "
            "add --store N",
        ),
        ({"preemption": "move"}, "preemption='move': use recompute or swap"),
        ({"mode": "both"}, "mode='both': use pooled, split or colocated"),
    ],
)
def test_options_that_contradict_the_mode_are_refused_with_the_fix(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_the_pool_are_welcome_where_store_ranks_are() -> None:
    config = ServeConfig(mode="colocated", store=1, ssd_dir="/tier", lend_bytes=4096, kv_codec="int8")
    assert config.has_pool
    assert not ServeConfig(mode="colocated").has_pool
    assert ServeConfig(mode="split", kv_codec="int8").kv_codec == "int8", "its KV travels encoded"


@pytest.mark.parametrize("mode", MODES)
def test_the_command_of_a_rank_names_only_what_differs_from_the_modes_defaults(mode: Any) -> None:
    expected = [] if mode == "pooled" else ["--mode", mode]
    assert rank_flags(ServeConfig(mode=mode)) == expected
    role = next(iter(MODES[mode].ranks))
    assert rank_flags(ServeConfig(mode=mode, **{role: 3})) == [*expected, f"--{role}", "3"]


def test_a_flag_may_give_the_mode_that_a_files_keys_are_for(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("compute = 3\n")
    assert build_config(None, {"mode": "colocated"}, file).compute == 3
    with pytest.raises(ConfigError, match="mode=pooled has no compute ranks"):
        build_config(None, {}, file)


def test_split_lends_memory_of_decode_ranks_alone_and_it_holds_the_longest_request() -> None:
    config = ServeConfig(mode="split")
    assert pool_bytes(config, MODEL, "prefill") == 0
    assert pool_bytes(config, MODEL, "decode") == config.lend_bytes == 512 * 2**20
    assert context_length(config, MODEL) == MODEL.max_position
    with pytest.raises(ConfigError, match="lend_bytes=65536 holds 2 blocks of 32768 B, a request of 1024"):
        context_length(ServeConfig(mode="split", lend_bytes=2 * BLOCK), MODEL)
    with pytest.raises(ConfigError, match="lend_bytes=0 holds 0 blocks"):
        context_length(ServeConfig(mode="split", lend_bytes=0), MODEL)


def test_a_colocated_rank_that_moves_no_kv_shares_next_to_no_memory() -> None:
    alone = ServeConfig(mode="colocated", staging_bytes=100 * BLOCK)
    assert context_length(alone, MODEL) == MODEL.max_position
    assert segment_bytes(alone, MODEL, "compute") == 6 * BLOCK
    with_pool = ServeConfig(mode="colocated", store=1, staging_bytes=100 * BLOCK)
    assert segment_bytes(with_pool, MODEL, "compute") == 100 * BLOCK


def test_every_role_has_duties_and_every_mode_can_prefill_and_decode() -> None:
    assert DUTIES.keys() == {*ROLES, *FOLLOWERS}
    for mode in MODES.values():
        duties = {duty for role in mode.ranks if role not in mode.optional for duty in DUTIES[role]}
        assert {"prefill", "decode"} <= duties
        assert mode.lenders <= set(COMPUTE_ROLES) & mode.ranks.keys()
