"""The brain is pure: what decides reads no clock, no socket, no random source, no environment, and no file.

Checked on syntax trees, over the roots below and every file of ours that they import.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
OURS = ("kernels_numba", "transport", "scheduler", "store", "mooncake_lite")
PURE_ROOTS = ("mooncake_lite/control", "scheduler", "store/directory.py")

PURE_MODULES = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum"),
    *("functools", "hashlib", "heapq", "itertools", "math", "operator", "re", "string", "struct", "types"),
    *("typing", "zlib", "msgspec", "xxhash", "numpy", "ml_dtypes"),
}
"""What the files may import beside ours. Every module that is not listed is taken for impure."""

PURE_ATTRIBUTES = {"sys": {"byteorder"}}
"""module -> its only attributes that are constants of the machine; the module may then be imported."""

IMPURE_ATTRIBUTES = {
    "numpy": {"random", "load", "save", "savez", "fromfile", "memmap", "loadtxt", "savetxt", "datetime64"},
}
"""module -> attributes that read files, clocks or random sources although the module is listed as pure."""

IMPURE_CALLS = {
    "hash": "differs between processes for strings and bytes",
    "id": "differs between processes",
    **dict.fromkeys(("open", "print", "input", "breakpoint"), "does I/O"),
    **dict.fromkeys(("eval", "exec", "__import__"), "runs code that this test cannot see"),
}

NAMES_OF_TIME = {"time", "time_s", "now_s", "clock", "timer", "timestamp", "current_time", "monotonic"}
"""Names that an argument must not have: the present time is called `now` everywhere."""

LAZY = "loads a module when its name is first asked for; the brain asks for none of these names"
OWN_FILES = "loads files of its folder, which are checked as well"
USES_ID = f"uses id(), which {IMPURE_CALLS['id']}"
ALLOWED = {
    ("store/__init__.py", "imports importlib"): LAZY,
    ("kernels_numba/__init__.py", "imports importlib"): LAZY,
    ("mooncake_lite/__init__.py", "imports importlib"): LAZY,
    ("scheduler/__init__.py", "imports importlib"): OWN_FILES,
    ("scheduler/placement/__init__.py", "imports importlib"): OWN_FILES,
    ("mooncake_lite/control/__init__.py", "imports importlib"): OWN_FILES,
    ("store/ranking.py", USES_ID): "check() compares identities only",
    ("scheduler/prefix_index.py", USES_ID): "check() compares identities only",
    (
        "scheduler/prefix_index.py",
        "imports weakref",
    ): "what still uses a combination decides how long it lives",
}
"""(file, violation) -> why it is harmless."""


class Findings(ast.NodeVisitor):
    """Collect (line, violation) of one file. Code under `if TYPE_CHECKING` never runs and is skipped."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.imports: list[str] = []
        self.module_of: dict[str, str] = {}  # local name -> imported module

    def tell(self, node: ast.AST, what: str) -> None:
        self.found.append((getattr(node, "lineno", 0), what))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self.module_of[name.asname or name.name.split(".")[0]] = name.name.split(".")[0]
            self.imports.append(name.name)
            self.check_module(node, name.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self.imports += [module, *(f"{module}.{name.name}" for name in node.names)]
        if node.level:
            self.tell(node, "imports with dots")
        for name in node.names:
            if module in PURE_ATTRIBUTES and name.name in PURE_ATTRIBUTES[module]:
                continue
            self.check_module(node, f"{module}.{name.name}")
            if module in PURE_ATTRIBUTES:
                self.tell(node, f"uses {module}.{name.name}")

    def check_module(self, node: ast.AST, module: str) -> None:
        top, _, rest = module.partition(".")
        if top not in PURE_MODULES and top not in OURS and top not in PURE_ATTRIBUTES:
            self.tell(node, f"imports {top}")
        if rest.split(".")[0] in IMPURE_ATTRIBUTES.get(top, ()):
            self.tell(node, f"uses {top}.{rest}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            module = self.module_of.get(node.value.id, "")
            allowed = PURE_ATTRIBUTES.get(module)
            if node.attr in IMPURE_ATTRIBUTES.get(module, ()) or (
                allowed is not None and node.attr not in allowed
            ):
                self.tell(node, f"uses {module}.{node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in IMPURE_CALLS:
            self.tell(node, f"uses {node.id}(), which {IMPURE_CALLS[node.id]}")

    def visit_Global(self, node: ast.Global) -> None:
        self.tell(node, "keeps state in a global name")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.check_arguments(node.args)
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.tell(node, "is asynchronous")
        self.generic_visit(node)

    def check_arguments(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]
        with_default += [a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
        for argument in [*positional, *arguments.kwonlyargs]:
            if argument.arg in NAMES_OF_TIME:
                self.tell(argument, f"takes a time as {argument.arg}, not as now")
        for argument in with_default:
            if argument.arg == "now":
                self.tell(argument, "has a default for now")

    def visit_For(self, node: ast.For) -> None:
        self.check_iterated(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.check_iterated(node.iter)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("list", "tuple", "iter", "enumerate"):
            for argument in node.args:
                self.check_iterated(argument)
        self.generic_visit(node)

    def check_iterated(self, node: ast.expr) -> None:
        """Flag a set that is iterated where it is made. (The type of a name is not known here.)"""
        made = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")
        if made or isinstance(node, ast.Set | ast.SetComp):
            self.tell(node, "iterates over a set, whose order differs between processes")


def findings(source: str) -> Findings:
    """What one file imports and does."""
    visitor = Findings()
    visitor.visit(ast.parse(source))
    return visitor


def file_of(module: str) -> Path | None:
    """The file of a module of ours, or None."""
    if module.split(".")[0] not in OURS:
        return None
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def pure_files() -> list[tuple[Path, Findings]]:
    """(path, findings) of the roots, of all that they import, and of the packages that those lie in."""
    waiting = [path for root in PURE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    waiting += [ROOT / root for root in PURE_ROOTS if root.endswith(".py")]
    seen, files = set(waiting), []
    while waiting:
        path = waiting.pop()
        found = findings(path.read_text())
        files.append((path, found))
        parts = path.relative_to(ROOT).parts[:-1]
        packages = [".".join(parts[: length + 1]) for length in range(len(parts))]
        for module in [*packages, *found.imports]:
            imported = file_of(module)
            if imported is not None and imported not in seen:
                seen.add(imported)
                waiting.append(imported)
    return files


def test_what_decides_reads_no_clock_no_socket_no_random_source_and_no_environment() -> None:
    wrong, allowed = [], set()
    for path, found in pure_files():
        name = path.relative_to(ROOT).as_posix()
        for line, what in found.found:
            if (name, what) in ALLOWED:
                allowed.add((name, what))
            else:
                wrong.append(f"{name}:{line} {what}")
    assert wrong == []
    assert allowed == ALLOWED.keys(), "an exception that no file needs"


def test_the_check_follows_imports() -> None:
    names = {path.relative_to(ROOT).as_posix() for path, _ in pure_files()}
    assert names >= {
        *("scheduler/state.py", "scheduler/placement/kvcache_centric.py", "store/directory.py"),
        *("store/books/ledger.py", "store/policies/learned.py", "store/__init__.py"),
        "kernels_numba/codecs.py",
    }


IMPURE = """
import time
import os.path as p
from random import Random
from numpy.random import default_rng
import numpy as np
import sys
from sys import argv, byteorder
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import socket

def step(self, time_s, *, now=0.0):
    print(np.random.rand(), np.zeros(3), sys.byteorder, sys.argv)
    for name in {"a", "b"}:
        key = hash(name)
    order = sorted(self.rows, key=id)
    first = list(set(order)), [x for x in frozenset(order)], sorted(set(order))
    with open("f") as file:
        import zmq
    global counter
async def run(now):
    from datetime import datetime
"""


def test_the_check_finds_what_is_impure() -> None:
    found = sorted(findings(IMPURE).found)
    assert [(line, what.split(",")[0]) for line, what in found] == [
        (2, "imports time"),
        (3, "imports os"),
        (4, "imports random"),
        (5, "uses numpy.random.default_rng"),
        (8, "uses sys.argv"),
        (13, "has a default for now"),
        (13, "takes a time as time_s"),
        (14, "uses numpy.random"),
        (14, "uses print()"),
        (14, "uses sys.argv"),
        (15, "iterates over a set"),
        (16, "uses hash()"),
        (17, "uses id()"),
        (18, "iterates over a set"),
        (18, "iterates over a set"),
        (19, "uses open()"),
        (20, "imports zmq"),
        (21, "keeps state in a global name"),
        (22, "is asynchronous"),
        (23, "imports datetime"),
    ]
