"""The autograder: unpacked as on Gradescope, it grades as root with and without CAP_SYS_ADMIN."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mooncake_lite.errors import LabError
from mooncake_lite.labs.autograder import packages, write_autograder
from mooncake_lite.labs.lab import Lab, labs_in
from mooncake_lite.labs.questions import as_toml, real_answers
from mooncake_lite.labs.variant import public_seed
from tests.mooncake_lite.labs.sample_class import reference, text
from tests.mooncake_lite.labs.trees import ROOT, edit

LABS = labs_in(ROOT)
LAB = LABS[2]
PLAIN = {number for number, lab in LABS.items() if lab.files} - {1}
"""Labs of regions without kernels."""
RIGHT = {task: reference(LAB)[task] for task in ("2b", "2d")}

CONTAINER = """
import os, sys
from pathlib import Path
from mooncake_lite.labs.confine import PR_CAPBSET_DROP, libc, must
from tests.mooncake_lite.labs.elsewhere import CAP_SYS_ADMIN, make_reachable
make_reachable({Path(sys.base_prefix)})
must(libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0), "drop CAP_SYS_ADMIN")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command as root as Docker's default profile does."""


def installed(wanted: list[str]) -> set[str]:
    """Return the names of the packages that pip installs for these requirements, with what they need."""
    found: set[str] = set()
    waiting = [
        (Requirement(name).name, extra) for name in wanted for extra in (Requirement(name).extras or {""})
    ]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                more = {(need.name, each) for each in (need.extras or {""})} - seen
                seen |= more
                waiting += more
    return found


@pytest.mark.quick
def test_setup_installs_pinned_packages_and_no_torch() -> None:
    names = {name.lower().replace("-", "_") for name in installed(packages(ROOT, LABS[1]))}
    pinned = {
        line.partition("==")[0].lower().replace("-", "_")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names - pinned == set()
    assert "torch" not in names


@pytest.mark.quick
def test_setup_makes_an_environment_beside_source_and_installs_from_the_release(tmp_path: Path) -> None:
    """As Gradescope does it, with a python3 that only notes what it is asked for."""
    (base := tmp_path / "autograder").mkdir()
    unpacked(base, LAB)
    note = f'#!/bin/bash\necho "$@" >> {tmp_path}/said\n'
    make = f'[ "$2" != venv ] || {{ mkdir -p "$3/bin"; cp {tmp_path}/pip "$3/bin/python"; }}\n'
    for name, script in (("pip", note), ("python3", note + make)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/bash", str(base / "source/setup.sh")], cwd="/", env=env, check=True, timeout=60)
    said = (tmp_path / "said").read_text().splitlines()
    assert f"-m venv {base}/venv" in said
    wanted = f"-c {base}/source/release/constraints.txt {' '.join(packages(ROOT, LAB))}"
    assert said[-1] == f"-m pip install --disable-pip-version-check {wanted}"
    assert (base / "source/release/constraints.txt").exists()


def environment_of(packages: set[str], folder: Path) -> None:
    """Make a virtual environment of these packages alone, out of the one that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    for name in packages:
        for file in importlib.metadata.files(name) or ():
            if file.suffix != ".pyc":
                target = Path(os.path.normpath(site / file))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)


@pytest.fixture(scope="module")
def machine() -> Iterator[Path]:
    """Gradescope's folder /autograder, in one below /tmp, with what setup.sh leaves there."""
    if os.geteuid() != 0:
        pytest.skip("an autograder runs as root")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        base = Path(folder) / "autograder"
        base.mkdir()
        base.parent.chmod(0o755)
        (base / "results").mkdir()
        environment_of(installed(packages(ROOT, LAB)), base / "venv")
        yield base


def unpacked(base: Path, lab: Lab, *, show_all: bool = False) -> None:
    """Replace the autograder of a machine by that of a lab."""
    shutil.rmtree(base / "source", ignore_errors=True)
    write_autograder(ROOT, lab, "Sample class", "a long secret", base / "autograder.zip", show_all=show_all)
    with zipfile.ZipFile(base / "autograder.zip") as archive:
        archive.extractall(base / "source")
    shutil.copy(base / "source" / "run_autograder", base)


@pytest.fixture
def autograder(machine: Path) -> Path:
    """The machine with lab 2, whose regions may use what a cheat needs."""
    unpacked(machine, LAB)
    names = '"__import__", "open", "OSError", "LookupError", '
    edit(machine / "source/release" / LAB.folder / "lab.toml", "names = [\n", f"names = [\n    {names}\n")
    return machine


def graded(base: Path, texts: dict[str, str], *, wrapped: list[str]) -> dict[str, dict[str, object]]:
    """Return the tests of results.json by name for a submission with these files."""
    shutil.rmtree(base / "submission", ignore_errors=True)
    (base / "submission" / "regions").mkdir(parents=True)
    for name, content in texts.items():
        (base / "submission" / name).write_text(content)
    command = [*wrapped, "/bin/bash", str(base / "run_autograder")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((base / "results" / "results.json").read_text())
    return {test["name"].split()[0] + test["name"].rpartition(":")[2]: test for test in result["tests"]}


@pytest.mark.parametrize("number", sorted(LABS.keys() - {LAB.number}))
def test_the_autograder_of_each_other_lab_grades_a_right_region(
    machine: Path, number: int, soak: int
) -> None:
    """Of its first task. A lab of questions has none, and says so. The next test is that of lab 2."""
    if soak == 1 and number in PLAIN:
        pytest.skip("another lab like lab 2; make soak grades it")
    lab = LABS[number]
    if not lab.tasks:
        with pytest.raises(LabError, match=f"lab {lab.number} is not graded"):
            write_autograder(ROOT, lab, "Sample class", "a long secret", machine / "autograder.zip")
        return
    unpacked(machine, lab, show_all=True)
    first = lab.tasks[0]
    if lab.questions:
        numbers = as_toml(real_answers(ROOT, lab, public_seed("a long secret")))
        tests = graded(machine, {"numbers.toml": numbers.partition("compute_s")[0]}, wrapped=[])
    else:
        tests = graded(machine, {f"regions/{first.id}.py": reference(lab)[first.id]}, wrapped=[])
    assert (total(tests), total(tests, first.id)) == (first.points.total, first.points.total), tests
    assert {test["visibility"] for test in tests.values()} == {"visible"}, "each upload is graded at once"


def total(tests: dict[str, dict[str, object]], task: str = "") -> int:
    return sum(int(str(test["score"])) for name, test in tests.items() if name.startswith(task))


def test_without_cap_sys_admin_a_cheat_finds_nothing_and_the_other_tasks_get_all_points(
    autograder: Path,
) -> None:
    base = str(autograder)
    secrets = [
        "source/seed",
        "source/release/store/keys.py",
        "source/release/tutorials/labs/02_blocks_and_prefixes/tests_02",
        "results",
    ]
    cheat = text(
        "os = __import__('os')",
        "try:",
        f"    open('{base}/results/results.json', 'w')",
        "except OSError:",
        "    pass",
        f"found = [each for each in {secrets} if os.access('{base}/' + each, 4)]",
        "found += [__import__('builtins').open('/proc/self/status').read().count('Uid:\\t0')]",
        "raise LookupError(f'found {found}')",
    )
    wrapped = [sys.executable, "-c", CONTAINER]
    texts = {f"regions/{task}.py": region for task, region in (RIGHT | {"2b": cheat}).items()}
    tests = graded(autograder, texts, wrapped=wrapped)
    assert "LookupError: found [0]" in str(tests["2b public"]["output"])
    assert (total(tests), total(tests, "2b")) == (15, 0)
