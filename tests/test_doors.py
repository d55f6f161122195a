"""Doors and rooms: each folder of parts has a note and a door, and README.md is two clicks away from them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.test_architecture import imported, parsed
from tests.test_links import links

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]

DOORS = {
    "store": "directory tier keys layout objects errors kv_events ranking allocator",
    "transport": "engine world errors channel membership threads wire",
    "kernels_numba": "arrays checks codecs errors runtime ahead gpu_report",
}
"""package -> modules in it that pages and programs of others import by these paths."""

ROOMS = {
    "store/ssd": "store/tier.py",
    "store/books": "store/directory.py",
    "store/mooncake_store": "store/__init__.py",
    "store/mooncake_store/master": "store/mooncake_store/__init__.py",
    "transport/bulk": "transport/engine.py",
    "transport/messaging": "transport/channel.py",
    "kernels_numba/attention": "kernels_numba/__init__.py",
    "kernels_numba/matmul": "kernels_numba/__init__.py",
    "kernels_numba/movers": "kernels_numba/__init__.py",
    "kernels_numba/layers": "kernels_numba/__init__.py",
    "kernels_numba/intrinsics": "kernels_numba/__init__.py",
    "kernels_numba/gpu": "kernels_numba/__init__.py",
    "kernels_numba/report": "kernels_numba/gpu_report.py",
    "mooncake_lite/tools/doctor": "mooncake_lite/tools/__init__.py",
}
"""folder of parts -> its door, or the note of the folder around it, which names it."""

WALKS = {
    "the Mooncake API": ("store/mooncake_store/api.py", "class MooncakeDistributedStore"),
    "the SSD tier": ("store/ssd/tier.py", "class HDF5Tier"),
    "the starter of clusters": ("mooncake_lite/launch/serve_child.py", "class Cluster"),
    "a lab's tests": ("tutorials/labs/02_blocks_and_prefixes/tests_02/test_2b_chained_keys.py", "def test_"),
    "the naive form of decode attention": ("kernels_numba/attention/attention_decode.py", "def decode_v0"),
}
"""what a newcomer looks for -> (its file, what is in it)."""
CLICKS = 2


def note(path: Path) -> str:
    return ast.get_docstring(parsed(path)) or ""


def clicks(path: Path) -> set[Path]:
    """Files that one click leads to: links of a page; imports of a module, and files that its note names."""
    if path.suffix == ".md":
        found = {(path.parent / link.partition("#")[0]).resolve() for link in links(path)}
    else:
        found = {ROOT / module.replace(".", "/") for module, _ in imported(parsed(path))}
        found = {file for base in found for file in (base.with_suffix(".py"), base / "__init__.py")}
        words = re.findall(r"\w+", note(path)) if path.name == "__init__.py" else []
        found |= {path.parent / name for word in words for name in (f"{word}.py", f"{word}/__init__.py")}
    return {file for file in found if file.is_file() and file.suffix in (".md", ".py")}


def reached(start: Path, most: int) -> set[Path]:
    seen = edge = {start}
    for _ in range(most):
        edge = set().union(*map(clicks, edge)) - seen
        seen = seen | edge
    return seen


def test_two_clicks_from_the_readme_lead_to_what_newcomers_look_for() -> None:
    found = reached(ROOT / "README.md", CLICKS)
    assert [what for what, (file, _) in WALKS.items() if ROOT / file not in found] == []
    assert [what for what, (file, text) in WALKS.items() if text not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("package", DOORS)
def test_paths_that_pages_and_programs_import_are_there(package: str) -> None:
    for name in DOORS[package].split():
        module = importlib.import_module(f"{package}.{name}")
        assert module.__file__ == str(ROOT / package / f"{name}.py"), "no other file may stand in for it"
        assert module.__doc__


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_opens_with_a_note_that_names_its_files_and_its_door_names_the_folder(room: str) -> None:
    (docstring,) = parsed(ROOT / room / "__init__.py").body  # and nothing else: importing it loads nothing
    names = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    names |= {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    said = {*re.findall(r"\w+", note(ROOT / room / "__init__.py"))}
    assert isinstance(docstring, ast.Expr)
    assert sorted(names - said) == []
    door = note(ROOT / ROOMS[room])
    assert re.search(rf"\b{Path(room).name}\b", door)


def test_the_list_of_rooms_is_whole() -> None:
    found = {path.parent for top in DOORS for path in (ROOT / top).rglob("*/__init__.py")}
    rooms = {folder.relative_to(ROOT).as_posix() for folder in found} - set(DOORS)
    assert rooms - ROOMS.keys() == {"store/policies"}, (
        "its door is its own __init__, with the policies by name"
    )
