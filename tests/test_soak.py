"""A soak run really tries more, and other examples; a run without it repeats itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[1]

PROPERTIES = """
from conftest import examples
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

SEEN = []

@settings(max_examples=examples(7))
@given(st.integers(0, 2**60))
def test_numbers(number):
    SEEN.append(number)

class Machine(RuleBasedStateMachine):
    started = 0
    def __init__(self):
        super().__init__()
        Machine.started += 1
    @rule()
    def step(self):
        pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(5), stateful_step_count=2)

def test_plain():
    print("a plain test")

def test_repeats(soak):
    print("repeated", soak)

def teardown_module():
    print("numbers", len(SEEN), hash(tuple(SEEN)), "machines", Machine.started)
"""


def run(folder: Path, *options: str) -> tuple[int, int, int, str]:
    """(examples, a hash of them, machines, all output) of the properties above."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_properties.py").write_text(PROPERTIES)
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    done = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"numbers (\d+) (-?\d+) machines (\d+)", done.stdout)
    return int(found[1]), int(found[2]), int(found[3]), done.stdout


def test_a_soak_run_tries_more_and_other_examples_and_only_properties(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first[:3] == second[:3]
    assert "a plain test" in first[3]
    assert "repeated 1\n" in first[3]
    soaked, again = run(tmp_path, "--soak", "20"), run(tmp_path, "--soak", "20")
    assert soaked[0] >= 20 * 7
    assert soaked[2] >= 10 * first[2]
    assert soaked[1] != again[1]
    assert "a plain test" not in soaked[3]
    assert "repeated 20\n" in soaked[3]


@pytest.mark.quick
def test_the_files_that_are_begun_first_exist() -> None:
    assert [name for name in LONG if not (ROOT / name).exists()] == []
