"""A small copy of the tree to change in a test: the packages, lab 2 and its tests."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from mooncake_lite.cli import cli
from mooncake_lite.labs.sandbox import MARK

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("kernels_numba", "mooncake_lite", "scheduler", "store", "transport", "tutorials/labs")


def copy_of_tree(folder: Path) -> Path:
    """Copy what labs need into a folder. Numba's caches and compiled files stay behind."""
    without = shutil.ignore_patterns("__pycache__", "*.nb?", "attempts")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=without)
    shutil.copy(ROOT / ".gitignore", folder / ".gitignore")
    return folder


def restore(tree: Path, original: Path) -> None:
    """Make a copy of a tree like the original again."""
    there, wanted = (
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (tree, original)
    )
    for name in there - wanted:
        (tree / name).unlink()
    for name in wanted:
        if name not in there or not filecmp.cmp(original / name, tree / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original / name, tree / name)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text that occurs once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path}: {old!r} occurs {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def sandboxed() -> dict[str, str]:
    """Processes in sandboxes, with the folder of each."""
    found: dict[str, str] = {}
    wanted = f"{MARK}=".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            for word in path.read_bytes().split(b"\0"):
                if word.startswith(wanted):
                    found[path.parent.name] = os.fsdecode(word.removeprefix(wanted))
    return found


def labs_of(tree: Path, *arguments: str) -> str:
    """Return what `mooncake-lite labs` prints, run in a tree by the code of that tree."""
    command = [sys.executable, "-m", "mooncake_lite", "labs", *arguments]
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def command(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `mooncake-lite` in a folder, as it is installed in the environment of the tests."""
    line = [str(Path(sys.executable).with_name("mooncake-lite")), *arguments]
    return subprocess.run(
        line, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )


def labs(*arguments: str) -> Result:
    """Run `mooncake-lite labs` in the folder of the test; raises what the command raises."""
    result = CliRunner().invoke(cli, ["labs", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def git(tree: Path, *arguments: str) -> str:
    """What git prints about a repository, whose own settings say who commits."""
    done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout
