"""Mutants: a region with one small mistake in it. A test that fails for none of them tests nothing.

Used by `labs dev check`. Pure: text in, texts out. cosmic-ray has more kinds of mistakes, but none that
drops a statement, as students do. It would also bring a database and an HTTP client into every installation.
Explained in docs/explain/labs.md, "What labs dev check enforces".
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable, Iterator

from mooncake_lite.errors import LabError
from mooncake_lite.labs.regions import FunctionNode, parsed

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}

Change = Callable[[ast.AST], bool]
"""Changes one node in place; False when there is nothing to change in it."""


def mutants(text: str) -> list[str]:
    """Return the texts of all mutants of a region. Raises LabError if Python cannot parse it."""
    function = parsed(text)
    if function is None:
        raise LabError("the region cannot be parsed")
    made = [function, *_dropped_statements(function), *_changed_nodes(function)]
    texts = [textwrap.indent("\n".join(map(ast.unparse, each.body)), " " * 8) + "\n" for each in made]
    return list(dict.fromkeys(texts))[1:]  # without the original


def _dropped_statements(function: FunctionNode) -> Iterator[FunctionNode]:
    """One statement is replaced by `pass`."""
    for number, _ in enumerate(_blocks(function)):
        block = list(_blocks(function))[number]
        for place in range(len(block)):
            made = copy.deepcopy(function)
            list(_blocks(made))[number][place] = ast.Pass()
            yield ast.fix_missing_locations(made)


def _blocks(function: FunctionNode) -> Iterator[list[ast.stmt]]:
    """Each list of statements, in a fixed order."""
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _changed_nodes(function: FunctionNode) -> Iterator[FunctionNode]:
    """One node says something else."""
    for number, _ in enumerate(ast.walk(function)):
        for change in (_compare, _operate, _negate, _number, _leave, _drop_argument):
            made = copy.deepcopy(function)
            if change(list(ast.walk(made))[number]):
                yield ast.fix_missing_locations(made)


def _compare(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    return True


def _operate(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        node.op = _OPERATORS[type(node.op)]()
        return True
    if isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return True
    return False


def _negate(node: ast.AST) -> bool:
    if not isinstance(node, ast.If | ast.While | ast.IfExp):
        return False
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return True


def _number(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        return False
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    return True


def _leave(node: ast.AST) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    node.value = ast.Constant(None)
    return True


def _drop_argument(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    node.args = node.args[:-1]
    return True
