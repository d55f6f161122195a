"""Tidiness: short lines, no more of them than a region may have, no left-overs. ruff finds the latter.

Used by `labs check` and `grade`. Explained in docs/explain/labs.md, "Points".
"""

from __future__ import annotations

import subprocess

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.regions import MOST_LINES, body, find

LINE_LENGTH = 110
RULES = "E,F,W,T20,ERA"
"""pycodestyle, pyflakes (unused names), prints that were left, and code in comments."""


class _Place(msgspec.Struct):
    row: int


class _Finding(msgspec.Struct):
    code: str | None
    message: str
    location: _Place


_FINDINGS = msgspec.json.Decoder(list[_Finding])


def untidy(source: str, function: str) -> list[str]:
    """Return what a teacher would strike out in a region, as messages with lines of the region.

    Raises LabError when ruff is not installed.
    """
    span = find(source, function)
    said = []
    if (lines := len(body(source, function).splitlines())) > MOST_LINES:
        said.append(f"the region has {lines} lines, and {MOST_LINES} are enough")
    options = ["--isolated", "--no-cache", "--output-format", "json", "--select", RULES]
    options += ["--line-length", str(LINE_LENGTH), "-"]
    why = ""
    try:
        from ruff import find_ruff_bin  # the program itself: `python -m ruff` starts an interpreter first

        command = [find_ruff_bin(), "check", *options]
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
        why = done.stderr.strip()[:200]
        findings = _FINDINGS.decode(done.stdout)
    except (ImportError, FileNotFoundError, msgspec.MsgspecError) as error:
        raise LabError(f"ruff does not run ({why or error}); pip install 'mooncake-lite[test]'") from None
    return said + [
        f"line {finding.location.row - span.begin} of the region: {finding.message}"
        for finding in findings
        if span.begin < finding.location.row <= span.end
    ]
