"""A configuration is right when it exists: whatever is wrong is refused, with the fix."""

from __future__ import annotations

import math
import typing
from pathlib import Path
from typing import Any

import pytest

from kernels_numba.codecs import CODECS
from mooncake_lite.cli import main
from mooncake_lite.config.reading import config_from, parse_bytes, read_toml
from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.config.serve import KVCodec, ServeConfig
from mooncake_lite.errors import ConfigError
from store.layout import PLAIN
from store.policies import POLICIES
from store.ssd.segment_file import PLAIN_NUMBER

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("1 GB", 10**9),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2G", 2 * 2**30),
        ("0", 0),
    ],
)
def test_sizes_are_read_in_bytes_decimal_and_binary_units(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "1e", "nan", "inf GB", True, "1_0 G B", "-1", -5])
def test_what_is_no_size_is_refused_by_name(text: Any) -> None:
    with pytest.raises(ConfigError, match="pool_bytes="):
        parse_bytes(text, "pool_bytes")


def test_ranks_play_their_roles_in_a_fixed_order() -> None:
    config = ServeConfig(prefill=2, decode=1, store=2)
    roles = [config.role_of(rank) for rank in range(config.ranks)]
    assert roles == ["steward", "prefill", "prefill", "decode", "store", "store"]
    assert (config.ranks_of("prefill"), config.ranks_of("store")) == ([1, 2], [4, 5])


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"prefill": 0}, "prefill=0: at least 1"),
        ({"decode": -2}, "decode=-2: at least 1"),
        ({"prefill": 10**11}, "are 100,000,000,003 ranks; at most 65,536"),
        ({"store": 0}, "store=0: at least 1"),
        ({"max_queue": 0}, "max_queue=0"),
        (
            {"admission": "early"},
            "use one of none, bounded-queue, after-prefill, early-rejection, predictive, shed",
        ),
        ({"queue": "lifo"}, "queue='lifo': use one of fcfs, srpt, aged-srpt, deadline, predicted, fair"),
        ({"slo_ttft_ms": -1.0}, "slo_ttft_ms=-1: give a number above 0, or leave it out"),
        ({"slo_tpot_ms": math.nan}, "slo_tpot_ms=nan: give a number above 0, or leave it out"),
        ({"slo_tpot_ms": math.inf}, "slo_tpot_ms=inf: give a number above 0, or leave it out"),
        ({"queue_ageing": math.inf}, "queue_ageing=inf: give a number above 0"),
        ({"queue_ageing": 0.0}, "queue_ageing=0: give a number above 0"),
        ({"balancing_threshold": 0.99}, "balancing_threshold=0.99: give a number, 1 or more"),
        ({"balancing_threshold": math.nan}, "balancing_threshold=nan: give a number, 1 or more"),
        ({"trust": 1.01}, "trust=1.01: give a part of the decode slots, 0 to 1"),
        ({"trust": -0.1}, "trust=-0.1: give a part of the decode slots, 0 to 1"),
        ({"trust": math.nan}, "trust=nan: give a part of the decode slots, 0 to 1"),
        ({"admission": "shed"}, "there are none; set slo_ttft_ms or slo_tpot_ms, or a limit of a "),
        (
            {"admission": "after-prefill", "slo_tpot_ms": 50.0, "mode": "colocated"},
            "in mode=colocated one rank does both without a pause; use admission=early",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"block_size": 8}, "block_size=8: it must divide 512 and be a multiple of 16"),
        ({"block_size": 48}, "block_size=48"),
        ({"block_size": 1024}, "block_size=1024"),
        ({"eviction": "mru"}, "eviction: no eviction policy is called 'mru'; there are lru, lfu, length"),
        ({"eviction": "belady"}, "belady needs the future"),
        ({"eviction": "lru+belady"}, "'lru+belady'"),
        ({"port": 0}, "port=0"),
        ({"port": 65536}, "port=65536"),
        ({"max_model_len": -1}, "max_model_len=-1"),
        ({"engine": "fake"}, "engine='fake': use real or emulated"),
        ({"profile": "fast"}, "is no file; to choose how ranks exchange bytes, use mpi_profile"),
        ({"engine": "emulated", "threads": 2}, "threads=2 has no meaning with engine=emulated"),
        ({"engine": "emulated", "kv_codec": "int8"}, "kv_codec='int8' has no meaning with engine=emulated"),
        ({"speculate": "ngram"}, "speculate='ngram': use off or prompt-lookup"),
        ({"speculate": ""}, "speculate='': use off or prompt-lookup"),
        ({"speculate": "0.5"}, "speculate='0.5': use off or prompt-lookup"),
        (
            {"engine": "emulated", "speculate": "prompt-lookup"},
            "emulated tokens repeat nothing; give the part",
        ),
        ({"engine": "emulated", "speculate": "0"}, "speculate='0': emulated tokens"),
        ({"engine": "emulated", "speculate": "1.01"}, "speculate='1.01': emulated tokens"),
        ({"engine": "emulated", "speculate": "nan"}, "speculate='nan': emulated tokens"),
        ({"mpi_profile": "quick"}, "mpi_profile='quick': use ft or fast"),
        ({"dtype": "float16"}, "dtype='float16': use float32 or bfloat16"),
        ({"dead_after_s": 1.0}, "dead_after_s=1.0: give a number of seconds, 2 or more"),
        ({"start_timeout_s": 1.0}, "start_timeout_s=1.0: give a number of seconds, 5 or more"),
        ({"dead_after_s": float("inf")}, "dead_after_s=inf: give a number of seconds"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s=nan: give a number of seconds"),
        ({"copy_cold_s": float("inf")}, "copy_cold_s=inf: give a number of seconds"),
        ({"copy_cold_s": -1.0}, "copy_cold_s=-1.0: give a number of seconds, 0 or more"),
        ({"threads": -1}, "threads=-1: give a number, or 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_would_be_right(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**wish)
    assert words in str(caught.value)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512])
def test_every_block_of_whole_pages_that_divides_512_is_accepted(block_size: int) -> None:
    assert ServeConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize("name", [*POLICIES, "lru+second-hit", "arc+size+second-hit"])
def test_every_policy_that_can_run_live_is_accepted(name: str) -> None:
    assert ServeConfig(eviction=name).eviction == name
    assert ServeConfig().eviction == "lru"


@pytest.mark.parametrize(
    ("command", "value", "words"),
    [
        (["serve"], "ngram", "speculate='ngram': use off or prompt-lookup"),
        (["serve", "--engine", "emulated"], "2", "speculate='2': emulated tokens"),
        (["generate", "hello"], "0.5", "speculate='0.5': use off or prompt-lookup"),
        (["simulate", "cluster", __file__, "1P1D"], "nan", "nan is not in the range 0<=x<=1"),
    ],
)
def test_drafts_that_there_cannot_be_end_a_command_with_one_line(
    command: list[str], value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--speculate", value]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_drafts_of_both_engines_are_accepted() -> None:
    for engine, values in (("real", ("off", "prompt-lookup")), ("emulated", ("off", "0.01", "1"))):
        for value in values:
            assert ServeConfig(engine=engine, speculate=value).speculate == value  # type: ignore[arg-type]


def test_a_configuration_survives_the_way_through_plain_values() -> None:
    config = ServeConfig(mpi_arg=("--mca", "x"), pool_bytes=1 << 28, enable_prefix_caching=False)
    assert config_from(config.to_dict(), "test") == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prot": 1}, "file: unknown key 'prot'; did you mean port?"),
        (
            {"colour": 1},
            "file: unknown key 'colour'; known are admission, allowed_hosts, allowed_origins, api_key, ",
        ),
        ({"port": "8000"}, "file: port='8000' must be of type int"),
        ({"port": True}, "file: port=True must be of type int"),
        ({"enable-prefix-caching": 1}, "enable_prefix_caching=1 must be of type bool"),
        ({"mpi-arg": "--mca"}, "mpi_arg must be a list of strings"),
        ({"pool-bytes": "much"}, "pool_bytes='much' is not a size"),
        ({"decode": -1}, "file: decode=-1: give a number of ranks, or leave it out"),
    ],
)
def test_a_wrong_key_or_type_names_its_source(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(values, "file")
    assert words in str(caught.value)


def test_whole_numbers_will_do_for_seconds() -> None:
    assert config_from({"dead-after-s": 8}, "file").dead_after_s == 8.0


@pytest.mark.parametrize("text", ["port = 9000\n", "[serve]\nport = 9000\n"])
def test_a_file_may_be_flat_or_have_a_section(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert read_toml(file) == {"port": 9000}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve = 3\n", "serve=3 must be a table; write [serve]"),
        ("port = 9000\nhost = 'a'\n[serve]\nstore = 2\n", "key 'port', key 'host' beside the table [serve]"),
    ],
)
def test_a_file_in_which_keys_would_be_ignored_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("device", ["foo", "cuda:", "cuda:x", "CPU", "cpu:0"])
def test_a_device_of_no_known_kind_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="use cpu or cuda"):
        ServeConfig(device=device)
    assert ServeConfig(device="cuda:1").device == "cuda:1"


def test_a_file_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"port = \xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(broken)


def test_the_codecs_of_the_configuration_are_those_of_the_kernels() -> None:
    assert list(typing.get_args(KVCodec)) == list(CODECS)
    assert CODECS[PLAIN].number == PLAIN_NUMBER


def test_racks_are_one_number_for_each_node() -> None:
    assert ServeConfig(racks="0, 0,1").racks == "0, 0,1"
    assert parse_racks("0, 0,1", 3) == [0, 0, 1]
    assert parse_racks("", 3) == []
    for wrong in ("a,b", "0,,1", "-1,0", "0;1"):
        with pytest.raises(ConfigError, match="give the rack of each node as a number, as in 0,0,1,1"):
            ServeConfig(racks=wrong)
    with pytest.raises(ConfigError, match=r"of 2 nodes, and the ranks are on 3; .* as in 0,0,0"):
        parse_racks("0,1", 3)
