"""The questions that the paper leaves open: pages are those of their results, and their words hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import make_questions as mq
import pytest
from click.testing import CliRunner
from questions.frame import HEADINGS, SEEDS, Rows, Seeds, table

MODULES = mq.modules()
ANSWERED = {number: one for number, one in MODULES.items() if (mq.RESULTS / f"{number:02}.json").exists()}
QUICK = (6, 13, 16)
"""Questions whose quick form `make test` plays."""

quick = pytest.mark.quick


def result(number: int) -> Any:
    """Return what was measured."""
    return json.loads((mq.RESULTS / f"{number:02}.json").read_text(encoding="utf-8"))


def numbers_of(module: ModuleType, number: int) -> dict[str, Any]:
    """Return the numbers of a page."""
    return module.numbers(mq.rows_of(result(number)))


@quick
def test_each_module_has_a_result_a_page_and_a_figure_and_nothing_else_is_there() -> None:
    assert list(ANSWERED) == list(MODULES)
    assert {file.name for file in mq.RESULTS.iterdir()} == {f"{number:02}.json" for number in MODULES}
    pages = {mq.page_name(module) for module in MODULES.values()} | {"README.md"}
    assert {file.name for file in mq.PAGES.iterdir()} == pages
    assert all((mq.FIGURES / f"question-{number:02}.svg").exists() for number in MODULES)


@quick
def test_pages_are_those_that_their_results_make() -> None:
    for path, text in mq.written().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run docs/tools/make_questions.py"


@quick
@pytest.mark.parametrize("number", ANSWERED)
def test_what_the_words_of_a_page_rest_on_holds(number: int) -> None:
    module = ANSWERED[number]
    claims = module.claims(numbers_of(module, number))

    assert len(claims) > 1
    assert [said for said, holds in claims.items() if not holds] == []


@quick
@pytest.mark.parametrize("number", MODULES)
def test_a_page_has_its_parts_and_no_number_of_its_own(number: int) -> None:
    module = MODULES[number]
    text = (mq.MODULES / f"{module.__name__.rpartition('.')[2]}.md").read_text(encoding="utf-8")
    title, source, *rest = text.split("\n\n")
    body = "\n\n".join(rest)

    assert title.startswith(f"# {number}. ")
    assert source.startswith("Source: ")
    assert tuple(re.findall(r"^## (.*)", body, re.MULTILINE)) == HEADINGS
    assert mq.ANSWER.search(text)
    assert body.count(f"](../figures/question-{number:02}.svg)") == body.count("![") == 1
    bare = re.sub(r"\{[^}]*\}|`[^`]*`|\]\([^)]*\)", "", body)
    assert re.findall(r".*\d.*", bare) == [], "a number that no result decides"


@quick
@pytest.mark.parametrize("number", ANSWERED)
def test_a_result_says_how_it_was_made_for_three_seeds(number: int) -> None:
    found, module = result(number), ANSWERED[number]
    points = [row["point"] for row in found["rows"]]

    assert found["command"] == f"python docs/tools/make_questions.py --only {number}"
    assert re.fullmatch(r"[0-9a-f]{12}\+?", found["commit"])
    assert points == json.loads(json.dumps(module.points(False))), "play it anew"
    seeds = {point["seed"] for point in points if "seed" in point}
    assert seeds >= set(SEEDS)


@pytest.mark.parametrize("number", QUICK)
def test_the_quick_form_of_a_question_is_played_and_summed_up(number: int) -> None:
    module = MODULES[number]
    points = module.points(True)

    assert 0 < len(points) < len(module.points(False))
    rows = Rows((point, mq.rounded(module.run(point))) for point in points)
    assert all(json.loads(json.dumps(found)) == found for _, found in rows)


@quick
def test_a_second_result_that_differs_is_told_apart() -> None:
    number, module = next(iter(ANSWERED.items()))
    found = result(number)
    other = json.loads(json.dumps(found))

    def doubled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: doubled(one) for name, one in value.items()}
        return value * 2 if isinstance(value, float) else value

    for row in other["rows"][1::2]:
        row["found"] = doubled(row["found"])
    assert mq.compared(module, found, found) == []
    assert mq.compared(module, found, other) != []


def test_a_question_without_its_published_trace_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_LITE_TRACES", raising=False)
    result = CliRunner().invoke(mq.main, ["--only", "12", "--quick", "--out", str(tmp_path), "--jobs", "1"])

    assert result.exit_code == 1
    said = "question 12: MOONCAKE_LITE_TRACES does not say in which folder conversation_trace.jsonl is"
    assert said in result.output
    assert "--quick needs --out" in CliRunner().invoke(mq.main, ["--quick"]).output
    assert "there is no question 99" in CliRunner().invoke(mq.main, ["--only", "99"]).output


@quick
def test_numbers_print_their_median_and_their_range() -> None:
    seeds = Seeds([1.0, 3.0, 2.0])

    assert f"{seeds:.1f} ({seeds.spread:.0f})" == "2.0 (1 to 3)"
    assert f"{Seeds([0.5]).spread:.1f}" == "0.5"
    assert seeds.over(Seeds([2.0, 1.0, 4.0])) == [0.5, 3.0, 0.5]
    assert 100 * seeds == seeds * 100 == [100.0, 300.0, 200.0]


@quick
def test_a_number_of_rows_is_that_of_one_row_for_each_seed() -> None:
    rows = Rows([({"a": 1, "seed": 2}, {"x": {"y": 5.0}}), ({"a": 1, "seed": 1}, {"x": {"y": 4.0}})])

    assert rows.seeds("x.y", a=1) == [4.0, 5.0]
    assert rows.values("a") == [1]
    with pytest.raises(LookupError, match="0 rows have"):
        rows.seeds("x.y", a=2)
    with pytest.raises(LookupError, match="4 rows have"):
        Rows([*rows, *rows]).seeds("x.y", a=1)


@quick
def test_a_table_has_numbers_to_the_right() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"


def test_runs_that_have_ended_are_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[int]()
    points = [{"n": n, "alone": True} for n in (1, 2)]
    module = SimpleNamespace(__name__="questions.q99_once", points=lambda quick: points)

    def timed(name: str, point: dict[str, Any]) -> tuple[dict[str, Any], float]:
        played.append(point["n"])
        if played == [1, 2]:
            raise KeyboardInterrupt
        return {"n": point["n"]}, 0.5

    monkeypatch.setattr(mq, "timed", timed)
    file = tmp_path / "99.json"
    with pytest.raises(KeyboardInterrupt):
        mq.played(module, file, None, quick=False)
    assert not file.exists()
    mq.played(module, file, None, quick=False)

    assert played == [1, 2, 2]
    assert [row["found"] for row in json.loads(file.read_text())["rows"]] == [{"n": 1}, {"n": 2}]
    assert list(tmp_path.iterdir()) == [file]
