"""Wrong options about scheduling are one line and exit code 2, from flags and from a file alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import ControlConfig
from mooncake_lite.serve_command import build_config
from scheduler.admission import ADMISSIONS, DEFAULT
from scheduler.placement.kvcache_centric import THRESHOLD, KVCacheCentric
from store.layout import BlockLayout

pytestmark = pytest.mark.quick

WRONG = [
    (
        "policy",
        "best",
        "policy='best': use one of kvcache-centric, global-cache, topology, local-cache, least-loaded, "
        "two-choices, round-robin, random, dynamo",
    ),
    ("slo-ttft-ms", "0", "slo_ttft_ms=0: a limit must be above 0; leave it out for no limit"),
    ("slo-tpot-ms", "0.0", "slo_tpot_ms=0: a limit must be above 0; leave it out for no limit"),
    ("balancing-threshold", "nan", "balancing_threshold=nan: give a number, 1 or more"),
    ("racks", "0,x", "racks='0,x': give the rack of each node as a number, as in 0,0,1,1"),
    ("classes", '{"a": {"weight": 1e999}}', "classes: class a: weight=inf must be above 0"),
    (
        "tenants",
        '{"bob": {"key": "k", "class": "gold"}}',
        "[tenants.bob] class='gold': the classes are interactive, standard, batch",
    ),
]


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a wrong command prints."""
    assert main(["serve", "--dry-run", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(("flag", "value", "says"), WRONG)
def test_a_wrong_flag_is_one_line_with_the_fix(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, f"--{flag}", value).endswith(f"{says}\n")


@pytest.mark.parametrize(("flag", "value", "says"), WRONG)
def test_a_wrong_key_of_a_file_is_the_same_line(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    is_number = value.replace(".", "").lstrip("-").isdigit() or value in ("nan", "inf")
    file.write_text(f"{flag} = {value if is_number else repr(value)}\n")
    assert complaint(capsys, "--config", str(file)).endswith(f"{says}\n")


def test_forms_of_admission_that_need_limits_are_refused_without_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for form in ("after-prefill", "early-rejection", "shed"):
        said = complaint(capsys, "--admission", form)
        assert "set slo_ttft_ms or slo_tpot_ms, or a limit of a service class" in said
    assert main(["serve", "--dry-run", "--admission", "shed", "--slo-ttft-ms", "500"]) == 0
    classes = '{"a": {"slo_tpot_ms": 50}}'
    assert main(["serve", "--dry-run", "--admission", "shed", "--classes", classes]) == 0


def test_live_and_simulated_clusters_have_the_same_default_and_it_needs_no_limit() -> None:
    live = control_config(ServeConfig(), BlockLayout(2, 1, 64, 8, 4), [0] * ServeConfig().ranks)
    simulated = ControlConfig(layout=(2, 1, 64, 8, 4, "none"), roles=live.roles, nodes=live.nodes)
    assert live.admission == simulated.admission == DEFAULT
    assert main(["serve", "--dry-run", "--mode", "colocated"]) == 0


def test_the_default_has_the_best_measured_goodput_of_the_forms_that_every_mode_can_have() -> None:
    """After-prefill withholds first tokens, and mode colocated cannot have it."""
    file = Path(__file__).parents[3] / "docs/reference/measured/goodput.json"
    rows = {row["name"]: row["ours"] for row in json.loads(file.read_text())["rows"]}
    total = {
        name: sum(rows[f"goodput at {load} x capacity, {name}"] for load in (1, 2, 10))
        for name, form in ADMISSIONS.items()
        if not form().withholds
    }
    assert max(total, key=lambda name: total[name]) == DEFAULT


def test_the_balancing_threshold_goes_from_flag_and_file_to_the_policy(tmp_path: Path) -> None:
    def policy(config: ServeConfig) -> KVCacheCentric:
        layout = BlockLayout(2, 1, 64, 8, 4)
        found = control_config(config, layout, [0] * config.ranks).placement
        assert isinstance(found, KVCacheCentric)
        return found

    file = tmp_path / "serve.toml"
    file.write_text("balancing-threshold = 3\n")
    assert policy(build_config(None, {}, None)).threshold == THRESHOLD
    assert policy(build_config(None, {}, file)).threshold == 3.0
    assert policy(build_config(None, {"balancing_threshold": 2.5}, file)).threshold == 2.5
