"""Service classes and tenants, as flags and TOML files name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.config.service_classes import Tenant, parse_classes
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import mpirun_environment, rank_flags
from mooncake_lite.serve_command import build_config
from scheduler.classes import ServiceClass, check_classes, default_class

pytestmark = pytest.mark.quick

FILE = """
{serve}
port = 8001
[classes.gold]
weight = 8
cache_share = 0.25
slo_ttft_ms = 500
[classes.standard]
slo-tpot-ms = 80.0
[tenants.alice]
key = "a-key"
class = "standard"
"""


@pytest.mark.parametrize("serve", ["", "[serve]"])
def test_a_file_defines_classes_in_their_order_and_tenants(serve: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE.format(serve=serve))
    config = build_config(None, {}, file)

    gold, standard = config.service_classes
    assert gold == ServiceClass(name="gold", weight=8, cache_share=0.25, slo_ttft_s=0.5)
    assert standard == ServiceClass(name="standard", slo_tbt_s=0.08)
    assert config.known_tenants == [Tenant("alice", "a-key", 1)]
    assert config.port == 8001


def test_ranks_get_the_classes_as_a_flag_and_the_keys_in_their_environment() -> None:
    classes, tenants = '{"gold": {"cache_share": 0.25}}', '{"alice": {"key": "very-secret"}}'
    config = ServeConfig(classes=classes, tenants=tenants)

    assert rank_flags(config) == ["--classes", classes]
    assert mpirun_environment(config, Path("/run"), {})["MOONCAKE_LITE_TENANTS"] == tenants
    other = mpirun_environment(ServeConfig(), Path("/run"), {"MOONCAKE_LITE_TENANTS": tenants})
    assert "MOONCAKE_LITE_TENANTS" not in other


def test_three_classes_by_default_which_protect_nothing() -> None:
    classes = parse_classes("")
    assert [one.name for one in classes] == ["interactive", "standard", "batch"]
    assert not any(one.cache_share for one in classes)
    assert default_class(classes) == 1
    assert default_class(classes[:1]) == 0


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        (
            {"a": {"cache_share": 0.7}, "b": {"cache_share": 0.4}},
            "cache_share: 0.7 + 0.4 = 1.1 is more than 1; lower",
        ),
        ({"a": {"cache_share": -0.1}}, "class a: cache_share=-0.1 must be from 0"),
        ({"a": {"weight": 0}}, "class a: weight=0 must be above 0"),
        ({"a": {"weight": "4"}}, "[classes.a] weight='4' must be a number"),
        ({"a": {"wieght": 4}}, "[classes.a]: unknown key 'wieght'; did you mean weight?"),
        ({"a": {"slo_tpot_ms": 0}}, "class a: slo_tpot_ms=0 must be above 0; leave it out for no limit"),
        ({"a b": {}}, "class 'a b': a name has letters"),
        ({"a": 4}, "[classes.a] must be a table, not 4"),
        ({}, "there is no service class"),
        ([], 'classes must be a table by name; write {"interactive"'),
    ],
)
def test_a_wrong_class_is_refused_in_one_line(classes: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(classes=json.dumps(classes))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ({"a": {}}, '[tenants.a] needs its API key; write key = "..."'),
        ({"a": {"key": "k", "class": "gold"}}, "class='gold': the classes are interactive, standard, batch"),
        ({"a": {"key": "k"}, "b": {"key": "k"}}, "tenants: b has the key of a; give each its own"),
        ({"a": {"key": "server"}}, "tenants: a has the key of the server"),
        ({"a": {"key": "k", "klass": "batch"}}, "did you mean class?"),
    ],
)
def test_a_wrong_tenant_is_refused_in_one_line(tenants: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(tenants=json.dumps(tenants), api_key="server")
    assert problem in str(caught.value)


def test_names_are_given_once() -> None:
    with pytest.raises(ConfigError, match="'a' is named twice"):
        ServeConfig(classes='{"a": {}, "a": {}}')
    with pytest.raises(ValueError, match="two service classes are called a"):
        check_classes([ServiceClass(name="a"), ServiceClass(name="a")])


def test_a_misspelt_table_is_refused_with_the_right_one(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[clases.a]\nweight = 1\n")
    with pytest.raises(ConfigError, match=r"unknown table \[clases\]; did you mean \[classes.NAME\]\?"):
        build_config(None, {}, file)
