"""A benchmark's figures mean what they say: which way a ratio points, what a limit is, when not to quote."""

from __future__ import annotations

import pytest

from mooncake_lite.cli import main
from mooncake_lite.config.machine import machine
from mooncake_lite.tools.bench import result
from mooncake_lite.tools.bench.command import show
from mooncake_lite.tools.bench.result import Other, Row, Side, compare, timed

pytestmark = pytest.mark.quick

MACHINE = {"cpu": "c", "cores": 2, "load": 0.1}


def test_a_ratio_above_one_means_that_ours_is_better_whatever_the_unit() -> None:
    times = Row("t", "ms", 2.0, Other("peer", 4.0), Other("limit", 1.0), 3).to_dict()
    rates = Row("r", "GB/s", 4.0, Other("peer", 2.0), Other("limit", 8.0), 3).to_dict()
    for row in (times, rates):
        assert (row["ratio_to_peer"], row["ratio_to_limit"]) == (2.0, 0.5)


def test_a_row_without_a_peer_has_no_ratio_to_one() -> None:
    row = Row("t", "ms", 2.0, None, None, 3).to_dict()
    assert (row["peer"], row["limit"], row["ratio_to_peer"], row["ratio_to_limit"]) == (None,) * 4


def test_ours_and_the_peer_are_medians_and_the_limit_is_its_best_run() -> None:
    ours, peer, limit = iter([5.0, 1.0, 3.0]), iter([6.0, 2.0, 4.0]), iter([9.0, 0.5, 7.0])
    sides = Side("peer", lambda: next(peer)), Side("limit", lambda: next(limit))
    (row,) = compare("t", "ms", 3, lambda: next(ours), [sides[0]], sides[1])
    assert row == Row("t", "ms", 3.0, Other("peer", 4.0), Other("limit", 0.5), 3)


def test_actions_take_turns_after_a_first_run_that_does_not_count() -> None:
    done: list[str] = []
    result.medians(2, timed(lambda: done.append("a")), timed(lambda: done.append("b")))
    assert done == ["a", "b", "a", "b", "a", "b"]


def test_the_result_has_the_fields_that_readers_of_it_rely_on() -> None:
    found = result.report([Row("t", "ms", 2.0, Other("peer", 4.0), None, 3)], machine())
    assert set(found) == {"date", "machine", "commit", "rows"}
    assert set(found["rows"][0]) == {
        *("name", "unit", "ours", "peer", "limit", "ratio_to_peer", "ratio_to_limit", "runs"),
    }


@pytest.mark.parametrize(("load", "quotable"), [(0.2, True), (1.0, True), (6.6, False)])
def test_figures_of_a_busy_machine_come_with_a_warning(load: float, quotable: bool) -> None:
    warning = result.busy({"machine": MACHINE | {"load": load}})
    assert (warning == "") is quotable


def test_an_unknown_subject_and_a_missing_folder_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "everything"]) == 2
    assert main(["bench", "store", "--json", "/nonexistent/r.json"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "the folder /nonexistent does not exist" in said[1]


def test_the_table_names_limits_and_missing_peers_as_they_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = Row("get", "us", 5.0, None, Other("a [bold]copy", 4.0), 3, "pip install 'x[peers]'")
    show(result.report([row], MACHINE))
    said = capsys.readouterr().out
    assert "limit: a [bold]copy" in said
    assert "no peer: pip install 'x[peers]'" in said


def test_published_figures_stand_in_a_column_of_their_own_and_have_no_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = Row("store", "us", 5.0, None, None, 1, published=(Other("a [bold]tree", 1.25), Other("b", 7.0)))
    found = result.report([row, Row("walk", "us", 3.0, None, None, 1)], MACHINE)
    assert [*found["rows"][0]["published"]] == [
        {"name": "a [bold]tree", "value": 1.25},
        {"name": "b", "value": 7.0},
    ]
    assert (found["rows"][0]["ratio_to_peer"], found["rows"][0]["ratio_to_limit"]) == (None, None)
    assert "published" not in found["rows"][1]
    show(found)
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[-1] == "published"
    assert said[1].split() == ["store", "us", "5", "1.25"]
    assert said[2].split() == ["7"], "the row itself stands once"
    assert said[3].split() == ["walk", "us", "3"]
    assert "published, not measured here: 1.25 us, a [bold]tree" in said


def test_without_published_figures_the_table_has_no_column_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(result.report([Row("walk", "us", 3.0, None, None, 1)], MACHINE))
    assert "published" not in capsys.readouterr().out
