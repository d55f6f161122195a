"""A Markdown page as a list of steps to run. Pure: text in, steps and text out.

Called by `runner`. It knows fences and the marks in them, and nothing of processes. Explained in
docs/how-to/write-a-page.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r"^(`{3,})\s*([^`\s]*)[^`]*$")
_EXIT = re.compile(r"\s+# exit (\d+)$")
_FIGURE = re.compile(r"!\[[^\]]*\]\((figures/[^/)\s]+\.svg)\)")
ANYTHING = "..."


class PageSyntaxError(Exception):
    """A page cannot be read: the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block; its content is lines[start:stop] of the page."""

    kind: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to run.

    source       the Python block, or the command without `$ `, continuation lines joined
    line         1-based line of the page where it begins
    expected     (start, stop) of the lines that hold the expected output; None when the page says nothing
    exit_code    what a command must end with
    """

    kind: Literal["python", "command", "background"]
    source: str
    line: int
    expected: tuple[int, int] | None
    exit_code: int = 0


def fences(lines: list[str]) -> list[Fence]:
    """All fenced blocks of a page. Raises PageSyntaxError when one is not closed."""
    found: list[Fence] = []
    opened: tuple[str, str, int] | None = None
    for index, line in enumerate(lines):
        match = _FENCE.match(line)
        if opened is None:
            if match:
                opened = (match[1], match[2], index + 1)
        elif match and match[1] == opened[0] and not match[2]:
            found.append(Fence(opened[1], opened[2], index))
            opened = None
    if opened is not None:
        raise PageSyntaxError(f"line {opened[2]}: this fence is never closed")
    return found


def steps(text: str) -> list[Step]:
    """What a page runs, in its order.

    A `text` block right after a `python` or `console` block is what that block prints.
    Raises PageSyntaxError for an open fence, or a console block that does not begin with a command.
    """
    lines = text.split("\n")
    found: list[Step] = []
    for fence, following in _with_following(fences(lines)):
        printed = (following.start, following.stop) if following and following.kind == "text" else None
        if fence.kind == "python":
            source = "\n".join(lines[fence.start : fence.stop])
            found.append(Step("python", source, fence.start + 1, printed))
        elif fence.kind == "console":
            found += _console_steps(lines, fence, printed)
    return found


def figures(text: str) -> dict[str, int]:
    """The figures that a page's own code draws: what it shows from `figures/` beside it -> 1-based line."""
    lines = text.split("\n")
    shown_only = {index for fence in fences(lines) for index in range(fence.start, fence.stop)}
    return {
        target: index + 1
        for index, line in enumerate(lines)
        if index not in shown_only
        for target in _FIGURE.findall(line)
    }


def _with_following(found: list[Fence]) -> list[tuple[Fence, Fence | None]]:
    return list(zip(found, [*found[1:], None]))


def _console_steps(lines: list[str], fence: Fence, printed: tuple[int, int] | None) -> list[Step]:
    """The commands of one console block; what stands between two commands is what the first one prints."""
    found: list[Step] = []
    index = fence.start
    while index < fence.stop:
        if not lines[index].startswith("$ "):
            raise PageSyntaxError(f"line {index + 1}: a console block begins with a command, `$ ...`")
        line = index + 1
        command = lines[index][2:]
        while command.endswith("\\") and index + 1 < fence.stop:
            index += 1
            command = command[:-1] + lines[index].removeprefix("> ").lstrip()
        index += 1
        begin = index
        while index < fence.stop and not lines[index].startswith("$ "):
            index += 1
        expected = (begin, index) if index > begin else None
        if expected is None and index == fence.stop:
            expected = printed
        found.append(_command(command.strip(), line, expected))
    return found


def _command(command: str, line: int, expected: tuple[int, int] | None) -> Step:
    exit_code = 0
    if match := _EXIT.search(command):
        exit_code = int(match[1])
        command = command[: match.start()]
    if command.endswith("&") and not command.endswith("&&"):
        return Step("background", command[:-1].strip(), line, expected)
    return Step("command", command, line, expected, exit_code)


_COMPILING = re.compile(r"^(compiling kernels for this|compiled \d+ groups of kernels) .*\n", re.MULTILINE)


def matches(expected: str, output: str, *, beginning: bool = False) -> bool:
    """Whether an output is as expected: `...` stands for anything, blanks at line ends do not count, and
    neither do the lines about compiling, which come once on a machine.

    beginning   it is enough that the output begins as expected
    """
    parts = [re.escape(part) for part in _tidy(expected).split(ANYTHING)]
    pattern = re.compile("(?:.*?)".join(parts), re.DOTALL)
    tidy = _tidy(_COMPILING.sub("", output))
    return bool(pattern.match(tidy) if beginning else pattern.fullmatch(tidy))


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n")).rstrip()


def rewrite(text: str, replacements: dict[tuple[int, int], str]) -> str:
    """The page with some ranges of lines replaced by outputs."""
    lines = text.split("\n")
    for (start, stop), output in sorted(replacements.items(), reverse=True):
        lines[start:stop] = _tidy(output).split("\n") if output.strip() else []
    return "\n".join(lines)
