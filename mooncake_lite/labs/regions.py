"""Regions: the bodies of functions that a lab takes away, and that a student writes.

Used by everything that reads, strips or fills in a student's work. Pure: text in, text out. A region is found
by the name of its function, as lab.toml gives it; the marks in the real modules show it to their readers.
Explained in docs/explain/labs.md, "Regions".
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
import threading
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_lite.errors import LabError

MOST_LINES = 40
"""Lines of a region."""

_MARK = re.compile(r"^\s*# labs:(begin|end) (\w+)\s*$")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_ONE_READER = threading.Lock()


def read(source: str, file: str = "<region>", flags: int = ast.PyCF_ONLY_AST) -> Any:
    """Return the syntax tree of a text, or with flags=0 its code. Raises what `compile` raises.

    Several submissions are graded at once. Python before 3.11.8 and 3.12.2 can make one tree at a time: of
    two threads that do, one gets SystemError (gh-106905). Filters of warnings are shared by all threads too.
    """
    with _ONE_READER, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "invalid escape sequence" and the like, in a student's text
        return compile(source, file, "exec", flags)


@dataclass(frozen=True, slots=True)
class Span:
    """Where the body of a function stands, without its docstring.

    begin, end   lines begin .. end-1, counted from 0
    indent       blanks before its statements
    """

    begin: int
    end: int
    indent: int


def stub(task: str) -> str:
    """Return the statement that stands in place of a region."""
    return f'raise NotImplementedError("lab task {task}")'


def find(source: str, function: str) -> Span:
    """Find the body of a function such as "Pages.grow".

    Also finds it in a file that Python cannot parse, by indentation. Raises LabError if it is not there.
    """
    lines = source.splitlines()
    try:
        node = _node(read(source), function)
    except (SyntaxError, ValueError):
        return _find_in_lines(lines, function)
    if node is None:
        raise LabError(f"{function} is not there; restore its first line as it was")
    indent = node.body[0].col_offset
    begin = node.body[0].lineno - 1
    if _is_text(node.body[0]):
        begin = node.body[0].end_lineno or begin + 1
    elif node.lineno - 1 == begin:
        raise LabError(f"{function} stands in one line; restore its first line as it was")
    return Span(begin, _with_comments(lines, node.end_lineno or begin, indent), indent)


def body(source: str, function: str) -> str:
    """Return the text of a region, without marks. Raises LabError if its function is not there."""
    span = find(source, function)
    kept = [line for line in source.splitlines()[span.begin : span.end] if not _MARK.match(line)]
    return "\n".join(kept).rstrip() + "\n" if any(line.strip() for line in kept) else ""


def replace(source: str, function: str, text: str) -> str:
    """Return the source with another body. Text of another indentation is moved to that of the function.

    Raises LabError if the function is not there.
    """
    span = find(source, function)
    lines = source.splitlines()
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first[: len(first) - len(first.lstrip())] != " " * span.indent:
        text = textwrap.indent(textwrap.dedent(text), " " * span.indent)
    return "\n".join([*lines[: span.begin], *text.rstrip().splitlines(), *lines[span.end :]]) + "\n"


def without_marks(source: str) -> str:
    """Return the source without the lines of marks."""
    return "".join(line for line in source.splitlines(keepends=True) if not _MARK.match(line))


def stripped(source: str, tasks: Mapping[str, str]) -> str:
    """Return the source with stubs for the regions of these tasks {function: task}, and without any marks."""
    for function, task in tasks.items():
        source = replace(source, function, stub(task))
    return without_marks(source)


def marked(source: str) -> dict[str, Span]:
    """Return {task: the lines between its marks}.

    Raises LabError for marks that do not pair, that are nested, or that occur twice.
    """
    found: dict[str, Span] = {}
    open_task, begin = "", 0
    for number, line in enumerate(source.splitlines()):
        match = _MARK.match(line)
        if match is None:
            continue
        verb, task = match.groups()
        if (verb == "begin") == bool(open_task) or (verb == "end" and task != open_task) or task in found:
            raise LabError(f"line {number + 1}: {line.strip()} does not pair with another mark")
        if verb == "begin":
            open_task, begin = task, number + 1
        else:
            found[task] = Span(begin, number, _indent(line))
            open_task = ""
    if open_task:
        raise LabError(f"# labs:begin {open_task} has no end")
    return found


def is_stub(text: str) -> bool:
    """Tell whether a region is not written yet: it is empty, or it raises NotImplementedError somewhere."""
    if all(line.strip().startswith("#") for line in text.splitlines() if line.strip()):
        return True
    tree = parsed(text)
    if tree is None:
        return False
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = (node for what in raised for node in ast.walk(what) if isinstance(node, ast.Name))
    if any(node.id == "NotImplementedError" for node in names):
        return True
    return all(isinstance(node, ast.Pass) or _is_text(node) for node in tree.body)


def parsed(text: str) -> FunctionNode | None:
    """Return a function with this body; None when Python cannot parse it, or when it leaves the function."""
    try:
        tree = read("def region():\n" + textwrap.indent(textwrap.dedent(text), "    "))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    only = tree.body[0]
    return only if len(tree.body) == 1 and isinstance(only, ast.FunctionDef) else None


def function_in(source: str, function: str) -> FunctionNode:
    """Return the syntax tree of a function, which `find` has found. Raises SyntaxError."""
    node = _node(read(source), function)
    assert node is not None
    return node


def outside(source: str, functions: Iterable[str]) -> str:
    """Return a digest of what a file is apart from these regions, comments and layout.

    Raises SyntaxError as Python does.
    """
    tree = read(source)
    for function in functions:
        if (node := _node(tree, function)) is not None:
            node.body = node.body[:1] if _is_text(node.body[0]) else []
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def runs_of_three(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each three consecutive lines of a text, without blanks around them and without empty lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return zip(lines, lines[1:], lines[2:])


def _node(tree: ast.Module, function: str) -> FunctionNode | None:
    """The last definition of a name is the one that Python uses."""
    scope: ast.Module | ast.ClassDef | FunctionNode = tree
    for name in function.split("."):
        named = [
            node for node in scope.body if isinstance(node, ast.ClassDef | FunctionNode) and node.name == name
        ]
        if not named:
            return None
        scope = named[-1]
    return scope if isinstance(scope, FunctionNode) else None


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str | type(...))
    )


def _indent(line: str) -> int:
    return len(line := line.expandtabs()) - len(line.lstrip())


def _with_comments(lines: list[str], end: int, indent: int) -> int:
    """A body ends after the comments that follow its last statement."""
    last = end
    for number in range(end, len(lines)):
        line = lines[number]
        if line.strip() and not (line.lstrip().startswith("#") and _indent(line) >= indent):
            break
        if line.strip():
            last = number + 1
    return last


def _find_in_lines(lines: list[str], function: str) -> Span:
    """Find a body in a file that Python cannot parse: the lines that are indented more than their `def`.

    Comments within it may stand anywhere.
    """
    *classes, name = function.split(".")
    start = 0
    for owner in classes:
        start = next((n for n, line in enumerate(lines) if re.match(rf"class {owner}\b", line)), len(lines))
    begin = next((n for n in range(start, len(lines)) if re.match(rf"\s*def {name}\(", lines[n])), None)
    if begin is None:
        raise LabError(f"{function} is not there; restore its first line as it was")
    outer = _indent(lines[begin])
    first = _after_docstring(lines, begin)
    end = first
    for number in range(first, len(lines)):
        if lines[number].strip():
            if _indent(lines[number]) <= outer:
                if lines[number].startswith("#"):
                    continue
                break
            end = number + 1
    return Span(first, end, outer + 4)


def _after_docstring(lines: list[str], begin: int) -> int:
    """The first line of the body of the function that begins here, after its docstring."""
    text = iter([line + "\n" for line in lines[begin:]])
    after, in_body = begin + 1, False
    try:
        for token in tokenize.generate_tokens(lambda: next(text, "")):
            if token.type == tokenize.NEWLINE and not in_body:
                in_body, after = True, begin + token.end[0]
            elif in_body and token.type == tokenize.STRING:
                return begin + token.end[0]
            elif in_body and token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT):
                return after
    except (tokenize.TokenError, SyntaxError):
        pass
    return after
