"""runtime.HELPERS names every file whose code is compiled into kernels of another file, and no other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kernels_numba
from kernels_numba.runtime import HELPERS

pytestmark = pytest.mark.quick

FOLDER = Path(kernels_numba.__file__).parent
COMPILING = {"njit", "cfunc", "register_jitable", "intrinsic", "overload", "word"}
"""Decorators of functions that Numba compiles for the CPU."""


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imported(tree: ast.AST) -> dict[str, str]:
    """Name -> the file of this package that it comes from."""
    return {
        one.asname or one.name: f"{node.module.removeprefix('kernels_numba.')}.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kernels_numba.")
        for one in node.names
    }


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


def test_an_edit_of_any_file_that_is_compiled_into_another_one_starts_a_fresh_cache() -> None:
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}
    for_cpu = {name: tree for name, tree in trees.items() if "runtime.py" in set(imported(tree).values())}
    derived = set().union(*map(compiled_in, for_cpu.values()))
    derived |= set().union(*(compiled_in(trees[name]) for name in derived))  # what helpers are made of
    assert sorted(HELPERS) == sorted(derived)
