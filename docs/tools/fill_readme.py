"""Plays the demo and puts the end of its real output into README.md. Run by hand before a release.

python docs/tools/fill_readme.py            play the demo (two minutes), then write
python docs/tools/fill_readme.py FILE       take the output from FILE, as `make demo | tee FILE` wrote it
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- demo output -->\n", "<!-- end of demo output -->\n"
BEFORE = "Stopping it"
"""What the last line before the table begins with; the steps before it are worth seeing live only."""


def shown(output: str) -> str:
    """The part of a demo's output that the README shows. Raises ValueError when it is not a whole demo."""
    lines = [line.rstrip() for line in output.rstrip().split("\n")]
    stops = [index for index, line in enumerate(lines) if line.startswith(BEFORE)]
    if not stops or not lines[-1].startswith("tokens identical: "):
        raise ValueError(f"no line begins with {BEFORE!r}, or the last one not with 'tokens identical: '")
    return "\n".join(lines[stops[-1] + 1 :]).strip("\n")


def filled(readme: str, output: str) -> str:
    """The README with the output between its two marks. Raises ValueError when a mark is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} or no {END.strip()}")
    return f"{before}{BEGIN}```text\n{shown(output)}\n```\n{END}{after}"


def main() -> int:
    """Exit code 0 when the README was written."""
    if len(sys.argv) > 1:
        output = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        command = [sys.executable, "-m", "mooncake_lite", "demo"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
        if run.returncode:
            print(f"the demo ended with exit code {run.returncode}; README.md is as it was", file=sys.stderr)
            return 1
        output = run.stdout
    README.write_text(filled(README.read_text(encoding="utf-8"), output), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
