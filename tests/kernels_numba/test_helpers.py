"""Two lists of files whose change makes something on disk stale: runtime.HELPERS for compiled kernels, and
path_table.kernel_files for the measured paths of linear layers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kernels_numba
from kernels_numba.runtime import HELPERS
from mooncake_lite.model.path_table import kernel_files

pytestmark = pytest.mark.quick

FOLDER = Path(kernels_numba.__file__).parent
COMPILING = {"njit", "cfunc", "register_jitable", "intrinsic", "overload", "word"}
"""Decorators of functions that Numba compiles for the CPU."""


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imported(tree: ast.AST) -> dict[str, str]:
    """Name -> the file of this package that it comes from, or that it is, as a path in the package."""
    return {
        one.asname or one.name: file_of(node.module.split(".")[1:], one.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kernels_numba"
        for one in node.names
    }


def file_of(folders: list[str], name: str) -> str:
    """words.py for `from kernels_numba import words`, and for an import of what that file defines."""
    inner = "/".join([*folders, f"{name}.py"])
    return inner if (FOLDER / inner).is_file() else f"{'/'.join(folders) or '__init__'}.py"


def compiled_in(tree: ast.Module) -> set[str]:
    """Files whose functions or constants are used in functions of this file that Numba compiles, or by what
    makes their decorators."""
    origin = imported(tree)
    compiled = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(names(one) & COMPILING for one in node.decorator_list)
    )
    makers = (node for node in tree.body if isinstance(node, ast.Assign) and names(node) & COMPILING)
    used = set().union(*map(names, [*compiled, *makers]))
    return {origin[name] for name in used & set(origin)}


def parsed() -> dict[str, ast.Module]:
    """{path of a file in this package: its syntax tree}"""
    paths = sorted(FOLDER.rglob("*.py"))
    return {
        path.relative_to(FOLDER).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths
    }


def test_an_edit_of_any_file_that_is_compiled_into_another_one_starts_a_fresh_cache() -> None:
    trees = parsed()
    for_cpu = {name: tree for name, tree in trees.items() if "runtime.py" in set(imported(tree).values())}
    derived = set().union(*map(compiled_in, for_cpu.values()))
    derived |= set().union(*(compiled_in(trees[name]) for name in derived))  # what helpers are made of
    assert len(for_cpu) > 15
    assert sorted(HELPERS) == sorted(derived)


def test_an_edit_of_any_file_that_linear_layers_are_compiled_from_measures_their_paths_anew() -> None:
    trees = parsed()
    found = {name for name in trees if Path(name).name.startswith("linear_")}
    assert len(found) == 6
    while new := set().union(*(compiled_in(trees[name]) for name in found)) - found:
        found |= new
    assert {path.relative_to(FOLDER).as_posix() for path in kernel_files()} == found | {"runtime.py"}
