"""A conductor or gateway that ends by itself is followed by the next one, unless it ends again and again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.ranks.steward import children
from mooncake_lite.ranks.steward.children import MOST_STARTS, WITHIN_S, Child

pytestmark = pytest.mark.quick


SLEEP = "import time; time.sleep(60)"


class Machine:
    """Starts sleepers in place of conductors, and has a clock.

    program    what is run instead of sleeping
    settings   that each was started with; started: the processes; now: seconds
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.program = folder, 1000.0, SLEEP
        self.settings: list[dict[str, Any]] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def start_child(self, command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        """Start a process that does nothing."""
        assert command[1:] == ["-m", "mooncake_lite.conductor", str(self.folder)]
        self.settings.append(json.loads((self.folder / "conductor.json").read_text()))
        self.started.append(subprocess.Popen([sys.executable, "-c", self.program, str(self.folder)]))
        return self.started[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(children, "start_child", machine.start_child)
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: machine.now))
    yield machine
    for process in machine.started:
        process.kill()
        process.wait()


@pytest.fixture
def child(machine: Machine) -> Child:
    run_dir: Any = SimpleNamespace(path=machine.folder)
    child = Child("conductor", run_dir, {"host": "here"})
    child.start(term=0)
    return child


def test_a_child_has_its_settings_and_a_new_name_with_each_start(machine: Machine, child: Child) -> None:
    pid = child.pid
    assert child.runs
    machine.started[0].kill()
    assert (
        child.end_of("its process ended") == f"the conductor process {pid} was killed by signal 9 (SIGKILL)"
    )
    assert not child.runs
    child.start(term=1)
    assert (child.name, child.number, child.pid) == ("conductor-1", 1, machine.started[1].pid)
    first, second = machine.settings
    assert (first["name"], first["term"], second["name"], second["term"]) == (
        "conductor-0",
        0,
        "conductor-1",
        1,
    )
    assert first["host"] == second["host"] == "here"
    assert ((machine.folder / "conductor.json").stat().st_mode & 0o777) == 0o600


def test_a_child_that_was_killed_for_its_silence_is_said_to_have_been_silent(child: Child) -> None:
    said = child.end_of("no sign of life for 6.1 s")
    assert said == f"the conductor process {child.pid} gave no sign of life for 6.1 s"


@pytest.mark.parametrize(
    ("program", "said", "refusal"),
    [
        ("raise UserError('x.json is\\nmissing')", "x.json is missing", "x.json is missing"),
        ("raise KeyError(5)", "the conductor process {} ended with exit code 1: conductor: KeyError: 5", ""),
        (
            "end_child('heart', 'gone')",
            "the conductor process {} ended with exit code 1: thread heart died: gone",
            "",
        ),
    ],
)
def test_the_own_words_of_a_child_are_why_it_ended(
    machine: Machine, child: Child, program: str, said: str, refusal: str
) -> None:
    machine.started[0].kill()
    machine.program = (
        "from mooncake_lite.launch.child import *\n"
        f"def run(run_dir):\n    {program}\n"
        "run_child('mooncake_lite.conductor', run)"
    )
    child.start(term=1)
    machine.started[1].wait(30)
    assert (child.end_of("its process ended"), child.refusal) == (said.format(child.pid), refusal)
    assert child.may_start_again == (not refusal)


def test_a_child_that_ends_too_often_may_not_start_again(machine: Machine, child: Child) -> None:
    for number in range(MOST_STARTS):
        assert child.may_start_again, number
        child.start(term=0)
    assert not child.may_start_again


def test_a_child_that_ends_now_and_then_may_start_again_for_ever(machine: Machine, child: Child) -> None:
    for _ in range(3 * MOST_STARTS):
        machine.now += WITHIN_S / MOST_STARTS
        assert child.may_start_again
        child.start(term=0)
