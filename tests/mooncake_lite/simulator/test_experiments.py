"""Policies differ where they should: sentences of the paper, on modelled machines of the paper.

`make test` plays one seed of short runs. `make soak` plays the whole experiments of
docs/explain/experiments.md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from mooncake_lite.cli import main
from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator import compare_admission, compare_policies
from mooncake_lite.simulator.compare import Comparison, Row
from mooncake_lite.simulator.experiment_commands import PROFILE, finite

DOCS = Path(__file__).resolve().parents[3] / "docs"

NEEDED = 0.9
"""Share of the seeds for which a statement must hold."""


def seeds_of(soak: int) -> range:
    return range(1, 11) if soak > 1 else range(1, 2)


def test_mean_ttft_falls_from_random_over_load_balancing_and_local_cache_to_global_cache(soak: int) -> None:
    """ "KVCache-centric scheduling reduces the average TTFT ... compared to random and load-balancing
    scheduling" (FAST'25, figure 5). `make test` takes the rate that the whole experiment finds.
    """
    seeds = seeds_of(soak)
    experiment = compare_policies.experiment_of(named_profile(PROFILE), 4, 4, 1_000 if soak > 1 else 300)
    rate = None if soak > 1 else 3.5
    result = compare_policies.compare(experiment, compare_policies.SLOWEST_FIRST, seeds, rate, lambda: None)
    *pairs, last = compare_policies.pairs(result)
    assert (last["slower"], last["faster"]) == ("global-cache", "kvcache-centric"), (
        "nearly equal: see the page"
    )
    for pair in pairs:
        assert pair["seeds"] >= NEEDED * len(seeds), pair


def test_early_rejection_lets_the_loads_swing_against_each_other_and_prediction_calms_decode(
    soak: int,
) -> None:
    """ "a significant anti-phase fluctuation between prefill and decoding machines"; prediction is there
    to "mitigate load fluctuation" (arXiv 2407.00079, 7.3 and 7.4).
    """
    seeds = seeds_of(soak)
    experiment = compare_admission.experiment_of(
        named_profile(PROFILE), 16, 1, 1_000 if soak > 1 else 350, compare_admission.RATE
    )
    result = compare_admission.compare(experiment, compare_admission.FORMS[1:], seeds, lambda: None)
    rows = {row.name: row.numbers for row in result.rows}
    opposed = sum(each < 0 for each in rows["early-rejection"]["correlation"])
    assert opposed >= NEEDED * len(seeds)
    calmer = result.less("decode_swing", "predictive", "early-rejection")
    assert calmer is not None
    assert calmer >= NEEDED * len(seeds)
    # The baseline alone computes prompts that it refuses afterwards.
    assert mean(rows["after-prefill"]["wasted"]) > 0.2
    assert rows["early-rejection"]["wasted"] == rows["predictive"]["wasted"] == [0.0] * len(seeds)


def test_the_commands_print_a_table_and_write_json_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    few = ["--seeds", "2", "--requests", "40", "--prefills", "2", "--decodes", "1"]
    for what, names in (
        (["policies", "--policy", "random,global-cache", "--rate", "2"], ["random", "global-cache"]),
        (["admission", "--admission", "early-rejection,predictive"], ["early-rejection", "predictive"]),
    ):
        json_file, figure = tmp_path / "result.json", tmp_path / "figure.svg"
        assert main(["simulate", *what, *few, "--json", str(json_file), "--plot", str(figure)]) == 0
        result = json.loads(json_file.read_text())
        assert (result["seeds"], result["requests"], result["prefills"]) == ([1, 2], 40, 2)
        out = capsys.readouterr().out
        assert "capacity" not in out, "a column without a number"
        assert all(name in out and name.encode() in figure.read_bytes() for name in names)


def test_a_run_ends_however_much_is_offered_and_its_json_has_numbers_alone(tmp_path: Path) -> None:
    file, tiny = tmp_path / "result.json", ["--seeds", "1", "--requests", "20", "--policy", "random"]
    words = ["simulate", "policies", *tiny, "--prefills", "8", "--decodes", "8", "--json", str(file)]
    assert main(words) == 0
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["rate"] > 100
    assert finite({"a": [float("nan"), 1.5, float("inf")], "b": "c"}) == {"a": [None, 1.5, None], "b": "c"}


@pytest.mark.quick
def test_the_page_has_the_tables_of_the_results_that_lie_beside_it() -> None:
    page = (DOCS / "explain" / "experiments.md").read_text(encoding="utf-8")
    printed = {tuple(line.split()) for line in page.splitlines()}
    for varied, columns, facts in (
        ("policy", compare_policies.COLUMNS, ["capacity"]),
        ("admission", compare_admission.COLUMNS, []),
    ):
        name = {"policy": "policies"}.get(varied, varied)
        found = json.loads((DOCS / "reference" / "measured" / f"{name}.json").read_text())
        rows = [Row(row.pop(varied), row, {fact: row.pop(fact) for fact in facts}) for row in found["rows"]]
        for line in Comparison(varied, found["rate"], found["seeds"], rows).table(columns):
            assert tuple(" ".join(line).split()) in printed


@pytest.mark.quick
def test_equal_seeds_give_equal_results() -> None:
    experiment = compare_policies.experiment_of(named_profile(PROFILE), 2, 1, 60)
    first, second = experiment.run(3), experiment.run(3)
    assert [(one.ttft_s, one.tbt_s) for one in first.records] == [
        (one.ttft_s, one.tbt_s) for one in second.records
    ]
    assert first.loads == second.loads


def test_capacity_is_the_highest_rate_that_serves_enough_requests_in_time() -> None:
    experiment = compare_policies.experiment_of(named_profile(PROFILE), 1, 1, 40)
    found = compare_policies.capacity(experiment, 0, 0.9, lambda: None)

    def share(rate: float) -> float:
        return experiment.share_within(replace(experiment, rate=rate).run(0))

    assert share(found) >= 0.9 > share(1.05 * found)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policies", "--policy", "fastest"], "there is no 'fastest'; choose from kvcache-centric, "),
        (["policies", "--policy", ","], "names none; choose from"),
        (["policies", "--rate", "0"], "0.0 is not in the range 0<x"),
        (["policies", "--requests", "3"], "3 is not in the range 20<=x"),
        (["admission", "--admission", "early"], "there is no 'early'; choose from none, bounded-queue"),
        (
            ["admission", "--requests", "20", "--rate", "100", "--seeds", "1", "--admission", "predictive"],
            "the requests of a run come within 1 s; raise --requests or lower --rate",
        ),
        (["admission", "--plot", "loads.pdf"], "the name must end with .svg or .png"),
    ],
)
def test_bad_words_are_refused_with_the_fix(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err
