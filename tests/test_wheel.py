"""A wheel built from the sources holds every package and every file that is read at run time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels_numba", "mooncake_lite", "scheduler", "store", "transport")
DOCUMENT = "mooncake_lite/tools/demo/document.txt"
SOURCES = (*PACKAGES, "docs", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packed: a build writes beside its sources."""
    pytest.importorskip("setuptools", "77", reason="a wheel is built with setuptools 77 or later")
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=without)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def run(*arguments: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(sources: Path, folder: Path) -> set[str]:
    """The names of the files in the wheel."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run("-m", "pip", "wheel", ".", *options, "-w", str(folder), cwd=sources)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert file.read(DOCUMENT) == (ROOT / DOCUMENT).read_bytes()
        return set(file.namelist())


def test_the_wheel_holds_every_package_and_what_is_read_or_run_beside_them(
    sources: Path, tmp_path: Path
) -> None:
    names = build_wheel(sources, tmp_path)
    profile = "mooncake_lite/profiles/shipped/SmolLM2-135M-Instruct.json"
    assert {DOCUMENT, "mooncake_lite/launch/exec_child.py", profile} <= names
    modules = {str(path.relative_to(sources)) for name in PACKAGES for path in (sources / name).rglob("*.py")}
    assert modules <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_a_wheel_can_be_built_from_the_source_distribution(sources: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run("-c", build, cwd=sources)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later
        file.extractall(tmp_path / "unpacked", **safely)  # type: ignore[arg-type]
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert DOCUMENT in build_wheel(unpacked, tmp_path / "wheel")
