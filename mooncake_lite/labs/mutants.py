"""Mutants: a region with one small mistake in it. A test that fails for none of them tests nothing.

Used by `labs dev check` and `labs dev mutants`. Pure: text in, texts out. cosmic-ray has more kinds of
mistakes, but none that drops a statement, as students do. It would also bring a database and an HTTP client
into every installation.
Explained in docs/explain/labs.md, "What labs dev check enforces".
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from itertools import count
from typing import NamedTuple

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

_ANY_ORDER = {"min", "max"}
_CONDITIONAL = ast.If | ast.While | ast.IfExp

Change = Callable[[ast.AST, int], bool]
"""Makes a node's change of this number in place, from 0 on; False when there is none."""


class Mutant(NamedTuple):
    """A mistake: the line of the region that has changed and what it is now, and the text of the region."""

    what: str
    text: str


def mutants(text: str) -> list[Mutant]:
    """Return all mutants of a region. Raises LabError if Python cannot parse it."""
    function = parsed(text)
    if function is None:
        raise LabError("the region cannot be parsed")
    made = [*_dropped_statements(function), *_changed_nodes(function), *_more_conditions(function)]
    right = _text_of(function)
    texts = dict.fromkeys(map(_text_of, made))
    texts.pop(right, None)
    found, seen = list[Mutant](), Counter[str]()
    for each in texts:
        what = _difference(right, each)
        seen[what] += 1
        found.append(Mutant(f"{what} ({seen[what]})" if seen[what] > 1 else what, each))
    return found


def _text_of(function: FunctionNode) -> str:
    return textwrap.indent("\n".join(map(ast.unparse, function.body)), " " * 8) + "\n"


def _difference(right: str, wrong: str) -> str:
    """Return the first line that differs, and what stands there."""
    old, new = (text.splitlines() for text in (right, wrong))
    for _, begin, end, first, last in (
        one for one in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes() if one[0] != "equal"
    ):
        return " -> ".join((lines or ["nothing"])[0].strip() for lines in (old[begin:end], new[first:last]))
    return ""


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
    for number, node in enumerate(ast.walk(function)):
        for change in CHANGES:
            for variant in count():
                if not change(copy.deepcopy(node), variant):
                    break
                made = copy.deepcopy(function)
                change(list(ast.walk(made))[number], variant)
                yield ast.fix_missing_locations(made)


def _more_conditions(function: FunctionNode) -> Iterator[FunctionNode]:
    """What is done on one condition is done only if another one of the region holds too, or does not hold."""
    atoms = {ast.unparse(atom): atom for atom in _atoms(function)}
    for number, node in enumerate(ast.walk(function)):
        if not isinstance(node, _CONDITIONAL):
            continue
        for said, atom in atoms.items():
            for more in (atom, ast.UnaryOp(ast.Not(), atom)):
                made = copy.deepcopy(function)
                changed = list(ast.walk(made))[number]
                assert isinstance(changed, _CONDITIONAL)
                if said not in ast.unparse(changed.test):
                    changed.test = ast.BoolOp(ast.And(), [changed.test, copy.deepcopy(more)])
                    yield ast.fix_missing_locations(made)


def _atoms(function: FunctionNode) -> Iterator[ast.expr]:
    """Each name or attribute that a condition of the region tests by itself."""
    for node in ast.walk(function):
        parts: list[ast.expr] = []
        if isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, _CONDITIONAL):
            parts = [node.test]
        for part in parts:
            bare = part.operand if isinstance(part, ast.UnaryOp) else part
            if isinstance(bare, ast.Name | ast.Attribute):
                yield bare


def _compare(node: ast.AST, variant: int) -> bool:
    if not isinstance(node, ast.Compare) or variant:
        return False
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    return True


def _operate(node: ast.AST, variant: int) -> bool:
    if variant:
        return False
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        node.op = _OPERATORS[type(node.op)]()
        return True
    if isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return True
    return False


def _leave_out(node: ast.AST, variant: int) -> bool:
    """One part of `and` or `or` is missing."""
    if not isinstance(node, ast.BoolOp) or variant >= len(node.values):
        return False
    del node.values[variant]
    return True


def _negate(node: ast.AST, variant: int) -> bool:
    if not isinstance(node, _CONDITIONAL) or variant:
        return False
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return True


def _number(node: ast.AST, variant: int) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int) or variant:
        return False
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    return True


def _leave(node: ast.AST, variant: int) -> bool:
    if not isinstance(node, ast.Return) or node.value is None or variant:
        return False
    node.value = ast.Constant(None)
    return True


def _drop_argument(node: ast.AST, variant: int) -> bool:
    """The last argument is missing, or a keyword."""
    if not isinstance(node, ast.Call):
        return False
    if node.args and not variant:
        del node.args[-1]
        return True
    place = variant - bool(node.args)
    if place >= len(node.keywords):
        return False
    del node.keywords[place]
    return True


def _forget_argument(node: ast.AST, variant: int) -> bool:
    """One argument is None."""
    if not isinstance(node, ast.Call) or variant >= len(node.args) + len(node.keywords):
        return False
    if variant < len(node.args):
        node.args[variant] = ast.Constant(None)
    else:
        node.keywords[variant - len(node.args)].value = ast.Constant(None)
    return True


def _swap_arguments(node: ast.AST, variant: int) -> bool:
    """Two arguments have changed places."""
    if (
        not isinstance(node, ast.Call)
        or variant + 1 >= len(node.args)
        or ast.unparse(node.func) in _ANY_ORDER
    ):
        return False
    node.args[variant : variant + 2] = node.args[variant + 1], node.args[variant]
    return True


CHANGES: tuple[Change, ...] = (
    _compare, _operate, _leave_out, _negate, _number, _leave,
    _drop_argument, _forget_argument, _swap_arguments,
)  # fmt: skip
