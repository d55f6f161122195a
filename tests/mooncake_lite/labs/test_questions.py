"""Lab 0 has questions and no tasks: what each command does with it, and that a cluster gives its answers."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import msgspec
import pytest

from mooncake_lite.cli import main
from mooncake_lite.errors import LabError
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.questions import Answer, as_toml, real_answers
from mooncake_lite.labs.starting import RECORDED, data_module
from mooncake_lite.labs.variant import class_of, sizes
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.explain import from_recording
from tests import emulation
from tests.mooncake_lite.labs.trees import ROOT, labs
from tests.mooncake_lite.tracing.reading import read

LAB = lab_in(ROOT, 0)
PREDICTION = "prediction.toml"


@pytest.fixture
def folder(tree: Path) -> Path:
    """The folder of lab 0, which was started, in a tree in which the test works."""
    (tree / LAB.tests / RECORDED).write_bytes(recorded())
    return tree / LAB.folder


@cache
def recorded() -> bytes:
    """What `labs start 0` records, which takes a while."""
    labs("start", "0")
    return (Path.cwd() / LAB.tests / RECORDED).read_bytes()


def real() -> dict[str, Answer]:
    return real_answers(ROOT, LAB, class_of(ROOT).seed)


# ------------------------------------------------------------------------------------------- commands


def test_nothing_is_compared_before_every_question_is_predicted(folder: Path) -> None:
    (folder / LAB.answers_file).write_text(as_toml(real()))
    (folder / PREDICTION).write_text("first_rank = 1\n")
    result = labs("check", "0")
    assert result.return_value == 1
    assert "prediction.toml: predict last_rank, decode_rank, " in result.output
    assert "right" not in result.output


def test_right_answers_are_compared_with_the_prediction_and_wrong_ones_say_where_to_look(
    folder: Path,
) -> None:
    answers = real()
    (folder / "run.json").touch()
    (folder / PREDICTION).write_text(as_toml(answers | {"stored_bytes": 1, "orders": ["Decode"]}))
    (folder / LAB.answers_file).write_text(as_toml(answers))
    result = labs("check", "0")
    assert result.return_value == 0
    assert "answers 10/10 . not graded" in result.output
    assert "right; you predicted 1, not within 3x" in result.output
    assert "right; you predicted something else" in result.output
    assert isinstance(answers["loaded_blocks"], int)
    wrong = answers | {"loaded_blocks": answers["loaded_blocks"] + 1}
    del wrong["orders"]
    (folder / LAB.answers_file).write_text(as_toml(wrong))
    result = labs("check", "0")
    assert result.return_value == 1
    assert "not right. How many blocks does the prefill rank" in result.output
    assert "Look at this: the first span `load` of the last request" in result.output
    assert f" {answers['loaded_blocks']} " not in result.output.split("loaded_blocks")[1].split("\n")[0]
    assert "no answer yet. Which messages does the conductor send" in result.output
    assert "answers 8/10 . not graded" in labs("score", "0").output
    assert "answers 8/10 . not graded" in labs("list").output


def test_answers_that_are_copied_from_the_prediction_count_once_something_was_measured(folder: Path) -> None:
    for name in (PREDICTION, LAB.answers_file):
        (folder / name).write_text(as_toml(real()))
    said = labs("check", "0").output
    assert "answers 0/10 . not graded" in said
    assert said.count("what you predicted; it counts once you have measured") == 10
    (folder / "run.json").touch()
    assert "answers 10/10 . not graded" in labs("check", "0").output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loaded = 3\n", "loaded is no question; did you mean loaded_blocks?"),
        ("x = 3\n", "x is no question; there are first_rank, last_rank"),
        ('loaded_blocks = "7"\n', "loaded_blocks = '7'; write it as loaded_blocks = 12"),
        ("last_rank = -3\n", "last_rank = -3; write a number from 0 to 1,000,000,000,000"),
        ("orders = 3\n", "orders = '3'; write it as orders = ["),
        ("loaded_blocks 7\n", "write one line per question: first_rank = 12"),
        ("loaded_blocks = \xff\n", "write one line per question: first_rank = 12"),
    ],
)
def test_a_file_of_answers_that_says_something_else_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / PREDICTION).write_text(as_toml(real()))
    (folder / LAB.answers_file).write_bytes(text.encode("latin-1"))
    result = labs("check", "0")
    assert (result.return_value, says in result.output) == (1, True), result.output


def test_the_picture_comes_after_the_answers(folder: Path) -> None:
    with pytest.raises(LabError, match=r"answer first_rank, .* in .*answers.toml first"):
        labs("show", "0")
    (folder / LAB.answers_file).write_text(as_toml(real()))
    shown = labs("show", "0").output
    assert "\nrequest 1\ngateway         0 conductor     1 prefill" in shown
    assert f"KV, {real()['stored_blocks']} blocks" in shown
    assert shown.count("  Tokens\n") == 2
    assert f"KV, {real()['loaded_blocks']} blocks" in shown
    labs("show", "0", "--svg", "picture.svg")
    ElementTree.parse("picture.svg")
    with pytest.raises(LabError, match="cannot be written"):
        labs("show", "0", "--svg", "no/folder/picture.svg")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["check", "0", "0a"], "lab 0 has no task '0a'; it has questions, and no tasks"),
        (["hint", "0a"], "lab 0 has no task '0a'"),
        (["show", "0a"], "lab 0 has no task '0a'"),
        (["show", "2"], "lab 2 has tasks; name one: mooncake-lite labs show 2a"),
        (["pack", "0"], "lab 0 is not graded"),
        (["grade", ".", "--lab", "0", "--seed", "x"], "lab 0 is not graded"),
    ],
)
def test_what_a_lab_of_questions_does_not_have_is_an_error_of_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], says: str
) -> None:
    assert main(["labs", *command]) == 2
    assert says in capsys.readouterr().err


def test_a_release_has_the_requests_of_the_class_and_no_answers_of_the_teacher(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / LAB.answers_file).write_text(as_toml(real()))
    labs("release", "0", "--class", "Sample class", "--seed", "secret", "--out", str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path / "out")
    made = tmp_path / "out" / LAB.folder
    assert {path.name for path in made.iterdir()} == {"data", "lab.md", "lab.toml", "tests_00"}
    assert "nothing is graded" in (tmp_path / "out" / "README.md").read_text()
    assert "Do not answer the questions" in (tmp_path / "out" / "AGENTS.md").read_text()
    assert "| tokens per block | " in labs("start", "0").output
    body = msgspec.json.decode((made / "data" / "request_1.json").read_bytes())
    assert len(body["prompt"]) > 400


# ------------------------------------------------------------------------------------------- answers


def test_the_answers_are_those_that_one_works_out_on_paper(soak: int) -> None:
    """For every seventh class, for all in make soak: of its sizes, not of the model that `answers` asks."""
    names, answers = list(LAB.variant), data_module(ROOT, LAB).answers
    for values in itertools.islice(
        itertools.product(*LAB.variant.values()), None, None, 7 if soak == 1 else 1
    ):
        size = dict(zip(names, values, strict=True))
        full, rest = divmod(size["shared_tokens"] + size["question_tokens"], size["block_tokens"])
        reused = size["shared_tokens"] // size["block_tokens"]
        blocks = full + (rest > 0)
        assert answers(1, size) == {
            "first_rank": 1,
            "last_rank": 1 + (size["requests"] - 1) % size["prefill"],
            "decode_rank": size["prefill"] + 1,
            "pool_rank": size["prefill"] + 2,
            "stored_blocks": blocks,
            "stored_bytes": blocks * size["block_tokens"] * 30 * 2 * 3 * 64 * 4,
            "loaded_blocks": reused,
            "computed_tokens": size["shared_tokens"]
            + size["question_tokens"]
            - reused * size["block_tokens"],
            "decode_blocks": blocks,
            "orders": ["StartPrefill", "StartDecode"],
        }
        assert 0 < rest <= size["block_tokens"] - size["answer_tokens"], "an answer fills no block"


@pytest.mark.cluster
def test_a_cluster_of_the_sheet_gives_these_answers(tmp_path: Path) -> None:
    """The command of the sheet, with an emulated model of the same shape; what a student reads in spans."""
    seed = class_of(ROOT).seed
    size = sizes(LAB, seed)
    model = emulation.model_folder(tmp_path / "model", emulation.SMOL)
    profile = emulation.profile_file(model, emulation.WORTH_LOADING)
    flags = [str(model), "--engine", "emulated", "--profile", str(profile)]
    flags += ["--prefill", str(size.prefill), "--block-size", str(size.block_tokens)]
    flags += ["--policy", "round-robin", "--prefix-sharing", "off", "--record", str(tmp_path / "run.events")]
    flags += ["--trace", str(tmp_path / "run.json")]
    bodies = data_module(ROOT, LAB).data(seed, size)
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(120)
        said = [
            httpx.post(
                f"{cluster.base_url}/v1/completions",
                content=bodies[f"request_{number}.json"],
                headers={"x-mooncake-lite-trace": "1", "content-type": "application/json"},
                timeout=60,
                trust_env=False,
            ).json()
            for number in range(1, size.requests + 1)
        ]
    first, last = said[0], said[-1]
    answers = real()
    assert seen(first, "compute") == [(answers["first_rank"], 0, size.shared_tokens + size.question_tokens)]
    assert seen(first, "store") == [
        (answers["first_rank"], answers["stored_bytes"], answers["stored_blocks"])
    ]
    assert seen(last, "compute") == [(answers["last_rank"], 0, answers["computed_tokens"])]
    assert [(rank, count) for rank, _, count in seen(last, "load")] == [
        (answers["last_rank"], answers["loaded_blocks"]),
        (answers["decode_rank"], answers["decode_blocks"]),
    ]
    assert [rank for rank, _, _ in seen(last, "decode")] == [answers["decode_rank"]]
    chosen = from_recording(last["id"], tmp_path / "run.events").candidates[0]
    assert (chosen.prefill, chosen.decode) == (answers["last_rank"], answers["decode_rank"])
    instants = sorted(read(tmp_path / "run.json").instants, key=lambda instant: instant["ts"])
    sent = [each["name"] for each in instants if last["id"] in each.get("args", {}).values()]
    drawn = [each.text for each in data_module(ROOT, LAB).timeline(seed, size).messages]
    last_one = drawn[drawn.index("Submit", 1) + 1 :]
    without = [name for name in last_one if not name.startswith(("KV", "Tokens"))]
    assert [name for name in sent if name in without] == without
    assert [name for name in without if name in answers["orders"]] == answers["orders"]


def seen(answer: dict[str, Any], stage: str) -> list[tuple[int, int, int]]:
    """(rank, bytes, count) of each span of a stage."""
    spans = answer["mooncake_lite"]["spans"]
    return [(span["rank"], span["nbytes"], span["count"]) for span in spans if span["stage"] == stage]
