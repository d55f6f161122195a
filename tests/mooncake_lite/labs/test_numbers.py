"""Lab 9 asks for numbers: its answers are those of the planner and the simulator, and slips get no points."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs.grade_pages import page
from mooncake_lite.labs.grading import Grade, grade_folder
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.questions import as_toml, check_answers, judged, outcome_of, read_answers
from mooncake_lite.labs.scores import score
from mooncake_lite.labs.starting import RECORDED, Recorded, data_module, read_recorded, record, write_data
from mooncake_lite.labs.variant import class_of, public_seed, sizes
from mooncake_lite.planner import forms
from mooncake_lite.planner.jobs import compute_s, jobs_of, prompt_load
from mooncake_lite.planner.prices import Prices, cost_of
from mooncake_lite.profiles.costs import costs_of, pass_seconds
from mooncake_lite.workloads.traces import Trace
from tests.mooncake_lite.labs.sample_class import write_archive
from tests.mooncake_lite.labs.trees import ROOT, labs

LAB = lab_in(ROOT, 9)
DATA = data_module(ROOT, LAB)
NUMBERS = "numbers.toml"
SEED = class_of(ROOT).seed
PLAN = ("prefill_nodes", "decode_nodes", "dram_gb")
COMPANIES = LAB.variant["company"]

Size = SimpleNamespace


@pytest.fixture
def folder(tree: Path) -> Path:
    """The folder of lab 9, which was started, in a tree in which the test works."""
    write_data(tree, tree, LAB, SEED)
    return tree / LAB.folder


# ------------------------------------------------------------------------------------------- answers


@pytest.mark.quick
@pytest.mark.parametrize("company", COMPANIES)
def test_the_formulas_of_the_sheet_are_those_of_the_planner(company: int) -> None:
    firm = DATA.FIRMS[company]
    one, profile = firm.napkin, DATA.profile_of(firm.napkin)
    costs, seconds = costs_of(profile), pass_seconds(profile)
    tokens, new = firm.document + firm.question, firm.question
    assert seconds(prompt_load(tokens, 0)) == pytest.approx(one.prefill_s(tokens), rel=1e-3)
    assert seconds(prompt_load(tokens, tokens - new)) == pytest.approx(
        one.prefill_s(tokens, tokens - new), rel=1e-3
    )
    jobs = jobs_of(firm.trace())
    rate, by_hand = firm.rate / firm.given[1], DATA.hand(firm)
    step_s = forms.step_s(rate, jobs.tokens, jobs.answer + 1, costs.decode)
    assert 1e3 * step_s == pytest.approx(by_hand["step_ms"], rel=0.02)
    load = forms.load_of(firm.rate, compute_s(jobs, seconds), firm.given[0])
    assert load == pytest.approx(by_hand["prefill_load"], rel=0.02)
    plan, prices = DATA.trial.Plan(4, 3, 20), Prices(*firm.node, firm.dram_gb)
    assert plan.cost(prices) == pytest.approx(cost_of(prices, (4, 3), 20 * 10**9, jobs).per_hour)


@pytest.mark.quick
@pytest.mark.parametrize("company", COMPANIES)
def test_what_a_student_works_out_from_the_file_of_a_company_is_accepted(company: int) -> None:
    firm, stored = DATA.FIRMS[company], DATA.answers(0, some_sizes(0) | {"company": company})
    for name, number in DATA.hand(firm).items():
        assert number == pytest.approx(stored[name], rel=0.1), name


def test_the_stored_loads_and_plans_are_those_of_the_simulator(soak: int) -> None:
    """Of one company, of all in make soak, which also simulates the whole grid again."""
    stored = msgspec.json.decode(DATA.GRID.read_bytes())
    for company in COMPANIES if soak > 1 else COMPANIES[:1]:
        one = stored[str(company)]
        assert DATA.simulated(company) == pytest.approx(one["loads"])
        if soak > 1:
            best, rows = DATA.grid(company)
            assert (list(best), len(rows)) == (one["best"], len(one["rows"]))
    for one in stored.values():
        kept = [row for row in one["rows"] if min(row[4:]) >= 0.9]
        assert min(kept, key=lambda row: row[3])[:3] == one["best"]
        assert len(one["rows"]) >= 5


def some_sizes(seed: int) -> dict[str, int]:
    """The sizes of a class."""
    return dict(sizes(LAB, seed))


# ------------------------------------------------------------------------------------------- slips


def kv(size: Size) -> float:
    return size.layers * 2 * size.kv_heads * 128 * 2


def flops(size: Size, tokens: float, cached: float = 0) -> float:
    attention = 2 * size.layers * size.query_heads * 128 * (tokens**2 - cached**2)
    return 2e9 * size.parameters * (tokens - cached) + attention


def step_flops(size: Size) -> float:
    """Operations of one sequence in a step."""
    return 2e9 * size.parameters + 4 * size.layers * size.context * size.query_heads * 128


def reached(size: Size) -> float:
    return 1e10 * size.tflops * size.prefill_percent


def each_ms(size: Size, heads: int) -> float:
    """What a sequence adds, if these many heads were kept."""
    keys_s = size.context * kv(size) / size.kv_heads * heads / (1e7 * size.memory_rate * size.read_percent)
    return 1e3 * (2e9 * size.parameters / reached(size) + keys_s)


Slip = tuple[str, str, Callable[[Size], float]]
SLIPS: list[Slip] = [
    ("kv_token_bytes", "keys and values are both kept", lambda s: kv(s) / 2),
    ("kv_token_bytes", "several query heads share one key", lambda s: kv(s) / s.kv_heads * s.query_heads),
    ("kv_token_bytes", "the bytes of a number", lambda s: kv(s) * 2),
    ("kv_token_bytes", "each layer keeps", lambda s: kv(s) / s.layers),
    ("prompt_kv_gb", "your unit", lambda s: kv(s) * s.prompt_tokens / 2**30),
    ("prefill_tflop", "meets the tokens before it", lambda s: 2e-3 * s.parameters * s.prompt_tokens),
    ("prefill_tflop", "one multiplication and one addition",
     lambda s: flops(s, s.prompt_tokens) / 1e12 - 1e-3 * s.parameters * s.prompt_tokens),
    ("prefill_intensity", "reads the weights once for all tokens",
     lambda s: flops(s, s.prompt_tokens) / (2e9 * s.parameters * s.prompt_tokens)),
    ("step_intensity", "share one reading of the weights",
     lambda s: step_flops(s) / (2e9 * s.parameters + s.context * kv(s))),
    ("ridge", "which of the two is divided", lambda s: s.memory_rate / s.tflops / 1e3),
    ("compute_s", "no program reaches the peak", lambda s: flops(s, s.prompt_tokens) / (1e12 * s.tflops)),
    ("load_s", "a link is sold in bits", lambda s: kv(s) * s.prompt_tokens / (1e9 * s.link)),
    ("load_s", "slower than the memory", lambda s: kv(s) * s.prompt_tokens / (1e9 * s.memory_rate)),
    ("break_even_gbit", "a link is sold in bits",
     lambda s: kv(s) * s.prompt_tokens * reached(s) / flops(s, s.prompt_tokens) / 1e9),
    ("rest_s", "also attend to the tokens that were loaded",
     lambda s: flops(s, s.prompt_tokens - s.cached_tokens) / reached(s)),
    ("base_ms", "no program reaches the bandwidth", lambda s: 2e3 * s.parameters / s.memory_rate),
    ("base_ms", "your unit", lambda s: 200 * s.parameters / s.memory_rate / s.read_percent),
    ("sequence_ms", "query heads share", lambda s: each_ms(s, s.query_heads)),
    ("sequence_ms", "also reads the KV", lambda s: each_ms(s, 0)),
    ("most_sequences", "takes a part of the limit already", lambda s: s.tbt_limit / each_ms(s, s.kv_heads)),
    ("memory_sequences", "the weights take a part", lambda s: 1e9 * s.memory / kv(s) / s.context),
    ("requests_per_s", "tokens per second", lambda s: 1e3 * most(s) / s.tbt_limit),
]  # fmt: skip
"""Question, words of the message, and the number of a student who makes the slip, by hand."""


def most(size: Size) -> float:
    base_ms = 2e5 * size.parameters / size.memory_rate / size.read_percent
    return (size.tbt_limit - base_ms) / each_ms(size, size.kv_heads)


@cache
def recorded(seed: int) -> Recorded:
    """What answers of a class are compared with."""
    return record(ROOT, LAB, seed)


def verdicts_of(seed: int, answers: dict[str, Any]) -> dict[str, str]:
    """What a check says of these answers in a class."""
    asked = [each for each in LAB.questions if each.name in answers]
    return judged(ROOT, LAB, asked, recorded(seed), answers)


@pytest.mark.quick
@pytest.mark.parametrize("slip", SLIPS, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(SLIPS)])
def test_a_slip_gets_no_points_and_is_explained(slip: Slip) -> None:
    name, words, wrong = slip
    for seed in (SEED, 1, 2):
        said = verdicts_of(seed, {name: wrong(Size(**some_sizes(seed)))})[name]
        assert words in said, f"class {seed}: {said}"
        assert f"{recorded(seed).answers[name]:.3g}" not in said


@pytest.mark.quick
@pytest.mark.parametrize("company", COMPANIES)
def test_a_slip_in_the_loads_of_a_company_gets_no_points(company: int) -> None:
    seed = next(seed for seed in range(99) if some_sizes(seed)["company"] == company)
    firm = DATA.FIRMS[company]
    one, by_hand, (prefill, decode) = firm.napkin, DATA.hand(firm), firm.given
    tokens = firm.document + firm.question
    wrong = [
        ("prefill_load", by_hand["prefill_load"] * prefill, "all prefill nodes share"),
        ("prefill_load", firm.rate * one.prefill_s(tokens) / prefill, "most prompts find their document"),
        ("decode_load", by_hand["decode_load"] * decode, "all decode nodes share"),
        ("step_ms", 1e3 * one.base_s, "the sequences, which take their share"),
        ("pool_gb", firm.requests * tokens * one.kv / 1e9, "requests about one document share"),
    ]
    for name, number, words in wrong:
        assert words in verdicts_of(seed, {name: number})[name], name


@pytest.mark.quick
def test_a_number_is_right_within_its_tolerance_and_not_beyond() -> None:
    real = recorded(SEED).answers
    for each in LAB.questions:
        if each.played:
            continue
        number, within = real[each.name], {"9d": 0.15}.get(each.task, 0.05)
        assert isinstance(number, int | float)
        for sign in (-1, 1):
            near, far = (number * (1 + sign * within * by) for by in (0.98, 1.02))
            assert verdicts_of(SEED, {each.name: near})[each.name] == ""
            assert verdicts_of(SEED, {each.name: far})[each.name].startswith("not right. ")


# ------------------------------------------------------------------------------------------- plans


def plan_verdicts(**changed: float) -> dict[str, str]:
    """What the check says of the best plan of a class with these numbers in place of its own."""
    real = recorded(SEED).answers
    return verdicts_of(SEED, {name: real[name] for name in PLAN} | changed)


def plan_points(said: dict[str, str]) -> int:
    """The points of task 9e."""
    return score(LAB.task("9e"), outcome_of([each for each in LAB.questions if each.played], said), []).public


def test_a_plan_that_is_too_small_says_which_numbers_are_to_blame() -> None:
    best = recorded(SEED).answers
    nodes = {name: int(str(best[name])) - 1 for name in PLAN[:2]}
    said = plan_verdicts(**nodes)
    assert "of first tokens keep" in said["prefill_nodes"]
    assert "of answers keep" in said["decode_nodes"]
    assert plan_points(said) == 8
    said = plan_verdicts(**dict.fromkeys(PLAN, 1))
    assert "This cluster cannot serve: " in said["dram_gb"]
    assert plan_points(said) == 0
    small = DATA.trial.Plan(1, 1, 1)
    assert list(DATA.trial.fewer(small, DATA.trial.Plan(3, 2, 10))) == list(PLAN)
    assert DATA.trial.fewer(DATA.trial.Plan(4, 2, 8), DATA.trial.Plan(3, 2, 10)) == {}
    said = plan_verdicts(dram_gb=float(str(best["dram_gb"])) / 4)
    assert "The pool had" in said["dram_gb"]
    assert plan_points(said) == 16


@pytest.mark.quick
def test_a_plan_that_is_too_dear_says_what_most_of_the_money_is_for() -> None:
    best, prices = DATA.trial.Plan(3, 3, 30), DATA.trial.Prices(10, 8, 0.02)
    dear = {
        "prefill_nodes": DATA.trial.Plan(5, 3, 30),
        "decode_nodes": DATA.trial.Plan(3, 5, 30),
        "dram_gb": DATA.trial.Plan(3, 3, 400),
    }
    for name, plan in dear.items():
        said = DATA.trial.dear(plan, best, prices)
        assert list(said) == [name]
        assert "times the best one, and 1.25 times is allowed" in said[name]
    assert DATA.trial.dear(DATA.trial.Plan(4, 3, 30), best, prices) == {}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2.5, "Write a whole number of nodes"),
        (0, "Write a number from 1 to 64"),
        (10**9, "Write a number from 1 to 64"),
        (64, "more than 2 times the best one"),
    ],
)
def test_an_absurd_plan_is_not_played(number: float, words: str) -> None:
    assert words in plan_verdicts(decode_nodes=number)["decode_nodes"]


# ------------------------------------------------------------------------------------------- commands


def test_right_numbers_get_all_points_and_half_of_them_half(folder: Path) -> None:
    real = recorded(SEED).answers
    (folder / NUMBERS).write_text(as_toml(real))
    (folder / "prediction.toml").write_text(f"ridge = {real['ridge']}\nload_s = 1000\n")
    result = labs("check", "9")
    assert result.return_value == 0, result.output
    assert "answers 22/22 . public 75/75 . report not graded" in result.output
    assert result.output.count(": right") == 22
    assert "FLOPs per byte: right; you predicted it" in result.output
    assert "right; you predicted 1,000, not within 3x" in result.output
    assert "public 75/75" in labs("score", "9").output
    (folder / NUMBERS).write_text(as_toml({name: real[name] for name in list(real)[:6]}))
    result = labs("check", "9", "9a")
    assert (result.return_value, "9a  Bytes and intensity: 12/12" in result.output) == (0, True)
    assert "load_s" not in result.output
    result = labs("check", "9")
    assert (result.return_value, "answers 6/22 . public 12/75" in result.output) == (1, True)
    assert "load_s           -: no answer yet. How long does the KV" in result.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kv_token_byte = 3", "kv_token_byte is no question; did you mean kv_token_bytes?"),
        ("x = 3", "x is no question; there are kv_token_bytes, "),
        ("load_s = -3", "load_s = -3.0; write a number from 0 to 1,000,000,000,000"),
        ("load_s = nan", "load_s = nan; write a number from 0 to"),
        ("load_s = inf", "load_s = inf; write a number from 0 to"),
        ("load_s = true", "load_s = 'True'; write it as load_s = 12, in s"),
        ('load_s = "0.3"', "load_s = '0.3'; write it as load_s = 12, in s"),
        ("load_s = [1, 2]", "load_s = '[1, 2]'; write it as load_s = 12, in s"),
        ("load_s = 2026-01-01", "load_s = '2026-01-01'; write it as load_s = 12, in s"),
        (f"load_s = 1{'0' * 400}", "write it as load_s = 12, in s"),
        (f"load_s = 1{'0' * 9000}", "write one line per question: kv_token_bytes = 12"),
        (f"load_s = {'[' * 9000}", "write one line per question: kv_token_bytes = 12"),
        (f"[load_s{'.x' * 240}]\n{'x.' * 240}x = 1", "write it as load_s = 12, in s"),
        ("".join(f"x{number} = 1\n" for number in range(2000)), "x19 is no question"),
        ("load_s 3", "write one line per question: kv_token_bytes = 12"),
        ("load_s = 3\nload_s = 4", "write one line per question: kv_token_bytes = 12"),
        (
            "prefill_nodes = 3",
            "prefill_nodes    3 nodes: simulated once prefill_nodes, decode_nodes, dram_gb",
        ),
    ],
)
def test_an_absurd_line_gets_one_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / LAB.tests).mkdir(parents=True)
    write_data(ROOT, tmp_path, LAB, SEED)
    (tmp_path / LAB.folder / NUMBERS).write_text(f"{line}\n")
    said: list[str] = []
    try:
        assert not check_answers(tmp_path, LAB, LAB.tasks, said.append)
    except LabError as error:
        said.append(str(error))
    assert sum(says in one for one in said) == 1, "\n".join(said)
    assert all("\n" not in one for one in said)


# ------------------------------------------------------------------------------------------- grading


def graded(tmp_path: Path, archives: dict[str, dict[str, str]]) -> dict[str, Grade]:
    """The grades of archives with these files."""
    (tmp_path / "in").mkdir()
    for name, members in archives.items():
        files = {member: text.encode() for member, text in members.items()}
        write_archive(tmp_path / "in" / f"{name}.zip", {}, 9, **files)
    return {
        grade.name: grade for grade in grade_folder(ROOT, LAB, tmp_path / "in", "x", jobs=1, trusted=False)
    }


def test_a_class_is_graded_by_its_numbers_and_a_bad_archive_costs_only_itself(tmp_path: Path) -> None:
    real = recorded(public_seed("x")).answers
    first = {name: real[name] for name in list(real)[:10]}
    archives = {
        "ada": {NUMBERS: as_toml(real), "prediction.toml": "ridge = 1\nloads = 3\n", "report.md": "Text"},
        "ben": {NUMBERS: as_toml(first | {"ridge": 1, "rigde": 3}) + 'base_ms = "<b>"\n'},
        "cleo": {},
        "dan": {NUMBERS: "[" * 9000},
        "eve": {NUMBERS: as_toml(real).replace("prefill_nodes = ", "prefill_nodes = 0.0")},
    }
    grades = graded(tmp_path, archives)
    assert {name: grade.automatic for name, grade in grades.items()} == {
        "ada": 75, "ben": 10 + 12, "cleo": 0, "dan": 0, "eve": 75 - 24,
    }  # fmt: skip
    assert grades["ada"].predictions == ["ridge: you predicted 1, not within 3x"]
    assert "loads is no question" in grades["ada"].messages[0]
    assert "did you mean ridge?" in grades["ben"].messages[0]
    assert "write one line per question" in grades["dan"].messages[0]
    assert grades["cleo"].scores["9a"].state == "not handed in"
    shown = page(LAB, grades["ben"])
    assert "5 of 6 numbers are right." in shown
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown


def test_a_release_has_the_files_of_a_company_and_no_formulas(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = recorded(public_seed("secret")).answers
    (folder / NUMBERS).write_text("ridge = 1\n")
    labs("release", "9", "--class", "Sample class", "--seed", "secret", "--out", str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path / "out")
    made = tmp_path / "out" / LAB.folder
    assert {path.name for path in made.iterdir()} == {"data", "lab.md", "lab.toml", "tests_09"}
    assert {path.name for path in (made / "tests_09").iterdir()} == {"__init__.py", "trial.py", RECORDED}
    assert b"kv_token_bytes" not in (made / "tests_09" / RECORDED).read_bytes()
    assert read_recorded(tmp_path / "out", LAB).answers == real
    assert "you work out numbers" in (tmp_path / "out" / "README.md").read_text()
    assert "Do not answer the questions" in (tmp_path / "out" / "AGENTS.md").read_text()
    (made / NUMBERS).write_text(as_toml({name: real[name] for name in list(real)[:6]}))
    assert "public 12/75" in labs("check", "9").output
    assert "wrote lab-9.zip" in labs("pack", "9").output
    (tmp_path / "in").mkdir()
    Path("lab-9.zip").rename(tmp_path / "in" / "ada.zip")
    (grade,) = grade_folder(tmp_path / "out", LAB, tmp_path / "in", "secret", jobs=1, trusted=False)
    assert grade.automatic == 12


def test_every_class_has_numbers_that_make_sense() -> None:
    """No sizes of a variant make a limit that an empty step exceeds, or weights that do not fit."""
    draw = random.Random(9)
    for _ in range(300):
        size = {name: draw.choice(values) for name, values in LAB.variant.items()}
        found = DATA.napkin_answers(DATA.napkin_of(size), size)
        assert found["most_sequences"] > 10, size
        assert found["memory_sequences"] > 20, size
        assert found["ridge"] > found["step_intensity"], size
        assert np.isfinite(list(found.values())).all()
    assert isinstance(DATA.FIRMS[1].trace(), Trace)
    assert read_answers(ROOT, LAB, "none.toml") == ({}, {})
