"""`labs check`, as a student meets it, in a copy of the tree."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.asking import in_words
from mooncake_lite.labs.checking import check, compared, prediction_of, unfinished
from mooncake_lite.labs.child import Raised
from mooncake_lite.labs.judging import Counted
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.scores import TaskScore
from tests.mooncake_lite.labs.trees import ROOT, edit, labs
from tests.patience import patient, wait_until

LAB = lab_in(ROOT, 2)
KEYS = "store/keys.py"


def test_a_check_names_the_files_it_tested_and_never_says_that_all_is_well_nor_costs_without_a_prediction(
    tree: Path,
) -> None:
    result = labs("check", "2", "2b")
    assert result.return_value == 0
    digest = hashlib.sha256((tree / KEYS).read_bytes()).hexdigest()[:12]
    assert f"tested     {KEYS} {digest}" in result.output
    assert "public 8/8 . private seeds not run . report not graded" in result.output
    assert "all passed" not in result.output
    assert "bytes were counted" not in result.output


def test_costs_are_shown_after_a_prediction(tree: Path) -> None:
    (tree / LAB.folder / "prediction.toml").write_text("bytes_hashed = 100\n")
    result = labs("check", "2", "2b")
    assert re.search(r"bytes_hashed: [\d,]+ bytes were counted", result.output)
    assert "You predicted 100, not within 3x of" in result.output
    (tree / LAB.folder / "prediction.toml").write_text("bytes = 100\n")
    assert "bytes is no cost; there are pages_copied, bytes_hashed" in labs("check", "2", "2b").output


@pytest.mark.quick
def test_a_prediction_is_held_against_what_is_needed_where_the_code_wastes() -> None:
    task = LAB.task("2b")

    def said(value: int, predicted: int, needed: int = 100) -> str:
        counted = Counted("2b", "public", value, max(400, needed), needed)
        return compared(task, counted, predicted).partition(": ")[2]

    counts = "1,000 bytes were counted; our solution has 100, and 400 are allowed. You predicted"
    assert said(1000, 90) == f"{counts} 90, within 3x of ours"
    assert said(1000, 1000) == f"{counts} 1,000, not within 3x of either"
    assert said(1000, 399).endswith("399, not within 3x of either")
    assert said(390, 390).endswith("390, within 3x of that count")
    assert said(100, 90) == "100 bytes were counted. You predicted 90, within 3x of that count"
    assert said(487, 2000, 640) == (
        "487 bytes were counted; our solution has 640 (fewer are as good). You predicted 2,000, "
        "not within 3x of either"
    )
    assert said(100, 900) == "100 bytes were counted. You predicted 900, not within 3x of that count"


@pytest.mark.quick
def test_the_cost_the_prediction_and_the_tidiness_that_are_open_are_named() -> None:
    task, predicted = LAB.task("2b"), {"bytes_hashed": 7.0}
    done = TaskScore("2b", "graded", public=8, cost=2, passed=9, tests=9)
    dear = TaskScore("2b", "graded", public=8, passed=9, tests=9, untidy=["long", "unused"])
    assert unfinished(task, done, predicted) == []
    assert unfinished(task, done, {}) == ["prediction of bytes_hashed"]
    assert unfinished(task, dear, predicted) == [
        "cost: bytes_hashed is above its limit",
        "tidiness: 2 findings",
    ]


@pytest.mark.quick
@pytest.mark.parametrize("number", ["1e308", "-3", "nan", "inf", "1_000_000_000_001"])
def test_a_prediction_that_no_count_can_be_is_refused(number: str) -> None:
    with pytest.raises(
        LabError, match=r"here: bytes_hashed = .*; write a number from 0 to 1,000,000,000,000"
    ):
        prediction_of(f"bytes_hashed = {number}\n".encode(), "here", LAB)


@pytest.mark.quick
def test_an_exception_names_the_innermost_line_of_the_student() -> None:
    frames = [
        ("tutorials/labs/01_paged_attention/drive_kernels.py", 50, "launch"),
        ("kernels_numba/attention/attention_cuda.py", 82, "attention_v1"),
        ("mooncake_lite/labs/race_checker.py", 260, "__getitem__"),
    ]
    assert (
        in_words(Raised("IndexError", "7", frames))
        == "IndexError: 7 in kernels_numba/attention/attention_cuda.py:82"
    )
    assert in_words(Raised("KeyError", "7", frames[:1])).endswith(" in " + frames[0][0] + ":50")
    assert len(in_words(Raised("TypingError", "long " * 1000, frames))) < 700


def test_a_reason_that_several_tests_share_is_shown_once(tree: Path) -> None:
    edit(
        tree / KEYS, "        keys = []\n", "        keys = []\n        assert len(tokens) < 9, len(tokens)\n"
    )
    result = labs("check", "2", "2b")
    assert result.output.count("raised     AssertionError") < result.output.count("  test       ")
    assert result.output.count(": fails like `") > 0


def test_a_failing_test_says_what_was_called_what_came_back_and_what_was_expected(tree: Path) -> None:
    printing = "        print(len(new), 'new')\n"
    edit(tree / "scheduler/instance/pages.py", "        self.used[last] -= 1\n", printing)
    result = labs("check", "2", "2a")
    assert result.return_value == 1
    for word in (
        "  called     ",
        "  came back  ",
        "  expected   ",
        "  breaks     ",
        "  printed    1 new\n",
        "mooncake-lite labs check 2 2a",
    ):
        assert word in result.output
    assert "the first writer of a shared page gets a copy of it" in result.output
    assert "page    0  " in labs("show", "2a").output
    labs("show", "2a", "--svg", "map.svg")
    assert (tree / "map.svg").read_text().startswith("<svg ")


BREAKS = {
    KEYS: ("        if keys:\n            self.last_key = keys[-1]\n", ""),
    "scheduler/instance/prefix_hash.py": ("            found += block.pages\n", ""),
    "store/policies/sieve.py": ("if not node.visited:", "if True:"),
}
"""What is wrong in 2b, 2c and 2e."""


def test_the_first_failing_test_of_2b_2c_and_2e_is_drawn_and_named(tree: Path) -> None:
    for file, (old, new) in BREAKS.items():
        edit(tree / file, old, new)
    check(tree, LAB, [LAB.task(task) for task in ("2b", "2c", "2e")], lambda line: None)
    for task, test, table in (
        ("2b", "each piece returns the keys of the blocks that it completes", "tokens  | ends a block of "),
        ("2c", "the longest leading run of cached blocks is found", "       came back            nothing"),
        ("2e", "an item that was hit survives one that was not", "from old to new"),
    ):
        assert f"{task}, test `{test}" in labs("show", task).output
        assert table in labs("show", task).output
    with pytest.raises(LabError, match="nothing to draw for 2a: "):
        labs("show", "2a")


COSTLY = {
    "2c": (
        "block = self._blocks.get(key)\n            if block is None or block.token_ids",
        "block = next((each for each in self._blocks.values() if each.key == key), None)\n"
        "            if block is None or block.token_ids",
    ),
    "2d": (
        "assert sorted([*self.free",
        "free = list(map(int, self.free))\n"
        "        assert not any(page in free for page in self.idle)\n"
        "        assert sorted([*self.free",
    ),
    "2e": (
        "newcomer = self._end.older if",
        "order = [node.item for node in self._nodes.values()]\n"
        "        newcomer = self._end.older if order and",
    ),
}
"""Right answers that scan: what they have in place of a part of the reference."""


def test_scans_of_what_the_region_is_given_cost_points(tree: Path) -> None:
    for task, (old, new) in COSTLY.items():
        edit(tree / LAB.task(task).file, old, new)
    only = ["each_key_is_looked_up_once", "a_check_is_cheap", "the_victims_on_a_trace"]
    outcome = run_tests(ROOT, LAB, list(COSTLY), tree, {"public": 7}, level="none", only=only)
    assert [case.message for case in outcome.cases if not case.passed] == []
    assert {cost.task: cost.value > cost.limit for cost in outcome.costs} == dict.fromkeys(COSTLY, True)


@pytest.mark.parametrize(
    "rows",
    [
        "np.take(cache, table[t // page_size], axis=0)[np.arange(end - first), :, t % page_size]",
        "np.asarray(cache)[table[t // page_size], :, t % page_size]",
        "cache.reshape(cache.shape).view(np.ndarray)[table[t // page_size], :, t % page_size]",
    ],
)
def test_a_function_of_numpy_that_copies_or_converts_the_cache_reads_all_of_it(rows: str, tree: Path) -> None:
    lab = lab_in(ROOT, 1)
    edit(tree / lab.task("1a").file, "cache[table[t // page_size], :, t % page_size]", rows)
    outcome = run_tests(ROOT, lab, ["1a"], tree, {"public": 7}, level="none", only=["read"])
    assert [(case.passed, case.message) for case in outcome.cases] == [(True, "")] * len(outcome.cases)
    assert [cost.value > cost.limit for cost in outcome.costs] == [True]


def test_a_forged_reply_is_told_in_one_line(tree: Path) -> None:
    forge = "import contextlib, os\n        for stream in range(3, 20):\n"
    forge += "            with contextlib.suppress(OSError):\n"
    forge += "                os.write(stream, b'{\"value\": []}' + bytes([10]))\n        "
    edit(tree / LAB.task("2d").file, "assert sorted([*self.free", forge + "assert sorted([*self.free")
    (case,) = run_tests(ROOT, LAB, ["2d"], tree, {"public": 7}, level="none", only=["a_check_is_cheap"]).cases
    assert case.message.splitlines() == [
        "stopped    the reply cannot be judged: IndexError: list index out of range",
        "repeat     mooncake-lite labs check 2 2d",
    ]


def test_a_stub_is_found_and_its_tests_are_not_run(tree: Path) -> None:
    for file, tasks in LAB.files.items():
        stubs = {function: task for function, task in tasks.items() if task != "2d"}
        (tree / file).write_text(regions.stripped((tree / file).read_text(), stubs))
    result = labs("check", "2")
    assert result.return_value == 1
    assert "2b  Chained keys: 0/8 public\n  gate       not written yet" in result.output
    assert "public 8/40 . private" in result.output
    assert "public 8/40 . private" in labs("score", "2").output
    assert "public 8/40 . private" in labs("list").output


def test_an_error_in_a_students_file_is_red_and_names_the_file(tree: Path) -> None:
    with (tree / KEYS).open("a") as file:
        file.write("1/0\n")
    result = labs("check", "2", "2b")
    assert result.return_value == 1
    assert f"ZeroDivisionError: division by zero in {KEYS}:" in result.output
    tests = re.search(r"all (\d+) tests of the task fail like this one", result.output)
    assert tests is not None
    assert len(re.findall(r"^  (?:key )?test  ", result.output, re.MULTILINE)) == 1
    said = f"{tests[1]} of {tests[1]} tests; cost and tidiness, which count after the tests"
    assert f"2b  open: {said}\n" in labs("score", "2").output
    assert f"not tested {KEYS}: it was not imported" in result.output


def test_wrong_python_is_red_and_names_the_file_and_the_line(tree: Path) -> None:
    edit(tree / KEYS, "        keys = []\n", "        keys = [\n")
    result = labs("check", "2", "2b")
    assert result.return_value == 1
    assert f"Python cannot read {KEYS}, line " in result.output


def test_a_region_that_python_cannot_read_costs_only_its_own_task(tree: Path) -> None:
    """The files of both tasks, and of all others, are imported by the same driver."""
    edit(tree / KEYS, "        keys = []\n", "        keys = [\n")
    result = labs("check", "2")
    assert f"2b  Chained keys: 0/8 public\n  gate       Python cannot read {KEYS}, line " in result.output
    assert f"tested     a copy of {KEYS}, without 2b" in result.output
    assert "public 32/40 . private" in result.output
    assert "differs outside" not in result.output
    assert len(result.output.splitlines()) < 20
    assert "2b  open: all of it\n" in labs("score", "2").output


def test_hints_come_one_after_the_other(tree: Path) -> None:
    task = LAB.task("2d")
    assert [task.hints[index] in labs("hint", "2d").output for index in (0, 1, 2, 2)] == [True] * 4


def test_watch_begins_to_test_within_two_seconds_of_a_save(tree: Path) -> None:
    command = [sys.executable, "-m", "mooncake_lite", "labs", "check", "2", "2d", "--watch"]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tree)}
    watching = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, bufsize=0)
    try:
        _read_until(watching, b"watching", 60)
        saved = time.monotonic()
        (tree / KEYS).touch()
        _read_until(watching, b"checking lab 2", patient(2.0))
        assert time.monotonic() - saved < patient(2.0)
    finally:
        watching.send_signal(signal.SIGINT)
        assert watching.wait(patient(10)) == 130
        watching.stdout.close()


def _read_until(process: subprocess.Popen[bytes], words: bytes, limit_s: float) -> None:
    seen, deadline = b"", time.monotonic() + limit_s
    while words not in seen and time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.05)[0]:
            seen += os.read(process.stdout.fileno(), 1 << 16)
    assert words in seen


def test_each_run_has_an_empty_numba_cache_so_a_changed_callee_is_seen(tree: Path) -> None:
    """Numba alone would not notice: it stamps the file of the caller, not that of the callee."""
    numba = "import numba\n\n\n@numba.njit(cache=True)\n"
    (tree / "callee.py").write_text(f"{numba}def one(x):\n    return x + 1\n")
    (tree / "caller.py").write_text(f"from callee import one\n{numba}def two(x):\n    return one(x)\n")
    (tree / LAB.folder / "drive.py").write_text(
        "from caller import two\nCALLS = {'two': lambda x: int(two(x))}\n"
    )
    for path in (tree / LAB.tests).glob("test_*"):
        path.unlink()
    (tree / LAB.tests / "test_2a_cache.py").write_text(
        "def test_one_is_added(lab):\n    lab.expect(lab.ask('two', 5, int), 6, 'two(5)', 'it adds 1')\n"
    )
    first = run_tests(tree, LAB, ["2a"], tree, {"public": 1}, level="none")
    edit(tree / "callee.py", "x + 1", "x + 2")
    second = run_tests(tree, LAB, ["2a"], tree, {"public": 1}, level="none")
    assert [case.passed for case in (*first.cases, *second.cases)] == [True, False]
    assert "came back  7" in second.cases[0].message
    assert not list(tree.rglob("*.nb[ci]"))


def test_runs_are_forked_from_one_process_and_no_module_of_a_run_is_there_in_the_next(tree: Path) -> None:
    for path in (tree / LAB.tests).glob("test_*"):
        path.unlink()
    (tree / LAB.tests / "test_2a_state.py").write_text(
        "import os, random, sys\n"
        "import mooncake_lite.labs.judging as judging\n"
        "def test_state(lab):\n"
        "    left = [each for each in (sys, random, judging) if hasattr(each, 'left')]\n"
        "    sys.left = random.left = judging.left = True\n"
        "    lab.expect((left, judging.__file__, os.getcwd()), (os.getpid(), os.getppid()), '', '')\n"
    )
    said = []
    for _ in range(3):
        (case,) = run_tests(tree, LAB, ["2a"], tree, {"public": 1}, level="none").cases
        came_back, expected = (line[11:] for line in case.message.splitlines()[1:3])
        assert came_back == repr(([], str(tree / "mooncake_lite/labs/judging.py"), str(tree)))
        said.append(ast.literal_eval(expected))
        if len(said) == 2:
            os.kill(said[1][1], signal.SIGKILL)
            assert wait_until(lambda: psutil.Process(said[1][1]).status() == psutil.STATUS_ZOMBIE)
    (first, parent), (second, again), (_, anew) = said
    assert first != second
    assert parent == again != os.getpid()
    assert anew not in (parent, os.getpid()), "a parent that was killed is replaced"


def test_a_run_whose_parent_is_killed_ends_and_says_that_nothing_was_tested(tree: Path) -> None:
    for path in (tree / LAB.tests).glob("test_*"):
        path.unlink()
    (tree / LAB.tests / "test_2a_killed.py").write_text(
        "import os, signal, time\n"
        "def test_killed(lab):\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    with pytest.raises(LabError, match="nothing was tested"):
        run_tests(tree, LAB, ["2a"], tree, {"public": 1}, level="none")
