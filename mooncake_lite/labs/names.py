"""Names: what a region may use. Checked on the syntax tree, before anything of a student's runs.

Used by `labs check` and `grade`. It keeps honest students on the task; only the sandbox holds hostile code.
Explained in docs/explain/labs.md, "Names".
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.regions import FunctionNode, find

INNER = ("gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""How attributes of generators, coroutines, tracebacks, frames and code begin: they lead to all names."""
FORMATS = ("format", "format_map")
"""Methods of a text that read any attribute that the text names, however the text is put together."""
RUNS_TEXT = ("testing", "f2py", "ctypeslib")
"""Parts of NumPy that run a text or a library as code."""
TYPES = {name for name in vars(builtins) if isinstance(getattr(builtins, name), type)} | {"OrderedDict"}
"""Types that counting objects inherit from: `dict.get(books, key)` would read the books uncounted."""
BUILTINS = "__builtins__"
"""Python's own names, in every module; no lab can allow it."""


def forbidden(lab: Lab, task: LabTask, function: FunctionNode, source: str) -> list[str]:
    """Return what a region uses and may not, as messages with lines; empty when all is well.

    function   whose body is the region, in the file `source`
    """
    scopes = symtable.symtable(ast.unparse(function), "<region>", "exec").get_children()
    foreign = {
        name for scope in scopes if scope.get_name() == function.name for name in _outer(scope)
    }.difference(lab.names, task.names)
    begin = find(source, task.function).begin
    return [
        f"line {line - begin} of the region: {what}"
        for line, what in sorted(set(_uses(function.body, foreign, set(task.private))))
    ]


def _outer(scope: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a function and the scopes within it take from the module or from Python.

    The body of a class also takes a name from there before it has given it to something.
    """
    for symbol in scope.get_symbols():
        of_class = scope.get_type() == "class" and symbol.is_local()
        if symbol.is_referenced() and (symbol.is_global() or of_class):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _outer(inner)


def _uses(body: list[ast.stmt], foreign: set[str], private: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line of the file, what is wrong there). foreign: names from outside that are not listed."""
    for node in (node for statement in body for node in ast.walk(statement)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield line, "imports; a region uses only what the sheet lists for this task"
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield line, f"changes the outer name {', '.join(node.names)}"
        elif isinstance(node, ast.Name) and (node.id in foreign or node.id == BUILTINS):
            yield line, f"uses the name {node.id}, which the sheet does not list for this task"
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and _is_type(node.value):
            yield line, f"gives a type another name, {ast.unparse(node)}; use its own"
        for name in _attributes(node):
            if name.startswith("_") and name not in private - {BUILTINS}:
                why = "no name that begins with _ may follow a dot, unless the sheet lists it for this task"
                yield line, f"uses the private attribute {name}; {why}"
            elif name.startswith(INNER) and name not in private:
                yield line, f"uses {name}, an attribute of Python's own frames and code"
            elif name in FORMATS:
                yield line, f"uses {name}, which can read private attributes; write an f-string"
            elif name in RUNS_TEXT:
                yield line, f"uses {name}, a part of NumPy that can run any code"
            elif _is_of_type(node):
                yield line, f"uses {name} of a type; call it as a method of the object"


def _attributes(node: ast.AST) -> list[str]:
    """Return the attributes that a node reads: after a dot or in a pattern."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.MatchClass):
        return node.kwd_attrs
    return []


def _is_type(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Name) and node.id in TYPES


def _is_of_type(node: ast.AST) -> bool:
    """Tell whether a node is a method of a type, such as dict.get; dict.fromkeys makes a new object."""
    match node:
        case ast.Attribute(of, name):
            return _is_type(of) and not name.startswith("from")
    return False
