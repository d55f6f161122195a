"""Names: what a region may use. Checked on the syntax tree, before anything of a student's runs.

Used by `labs check` and `grade`. It keeps honest students on the task; only the sandbox holds hostile code.
Explained in docs/explain/labs.md, "Names".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.regions import FunctionNode, find

INNER = ("gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""How attributes of generators, coroutines, tracebacks, frames and code begin: they lead to all names."""


def forbidden(lab: Lab, task: LabTask, function: FunctionNode, source: str) -> list[str]:
    """Return what a region uses and may not, as messages with lines; empty when all is well.

    function   whose body is the region, in the file `source`
    """
    allowed = {*lab.names, *task.names, *_arguments(function), *_bound(function.body)}
    begin = find(source, task.function).begin
    return [
        f"line {line - begin} of the region: {what}"
        for line, what in sorted(set(_uses(function.body, allowed, set(task.private))))
    ]


def _uses(body: list[ast.stmt], allowed: set[str], private: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line of the file, what is wrong there)."""
    for node in (node for statement in body for node in ast.walk(statement)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield line, "imports; a region uses only what the sheet lists for this task"
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield line, f"changes the outer name {', '.join(node.names)}"
        elif isinstance(node, ast.Name) and node.id not in allowed:
            yield line, f"uses the name {node.id}, which the sheet does not list for this task"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr not in private:
            why = "no name that begins with _ may follow a dot, unless the sheet lists it for this task"
            yield line, f"uses the private attribute {node.attr}; {why}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith(INNER) and node.attr not in private:
            yield line, f"uses {node.attr}, an attribute of Python's own frames and code"


def _arguments(function: FunctionNode | ast.Lambda) -> Iterator[str]:
    given = function.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            yield argument.arg


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the region itself gives to something."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, FunctionNode):
            yield node.name
            yield from _arguments(node)
        elif isinstance(node, ast.Lambda):
            yield from _arguments(node)
        elif isinstance(node, ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
