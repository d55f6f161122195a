"""Writes the numbers and tables of docs/reference/equality.md from the matrix of the tests.

Run it when the matrix has changed:

    python docs/tools/make_equality.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from fill_readme import filled

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mooncake_lite.engine import exact, matrix  # noqa: E402

PAGE = Path(__file__).parents[1] / "reference" / "equality.md"
EXCUSES = """\
- a first difference is excused where the two best logits of float64 lie within {gap:g} of each other or,
  for a sampled token, where the draw lies within {border:g} of the border to another token;
- `top_k` and `top_p` draw tokens in the order of their logits: two tokens whose logits lie within {gap:g} of
  each other may have changed places;
- the comparison goes on from the token that float64 chose;
- more than {per_thousand:g} token in 1,000 fails. One excuse is allowed where fewer are compared."""
PAIRS = """
{impossible} of {all} combinations do not exist: `split` has no pool, so it has neither blocks
from DRAM or HDF5 nor swap; and without sharing no prefix comes from a rank's pages. {possible} cells are
left.

`make test` runs {chosen} of them, in one process: State, Runner and the real engine of each rank, with a
tiny model, few pages, and a pool of bytes in memory. They have every pair of values between them, but for
those with HDF5. `make soak` runs all {in_process} cells without HDF5 in one process, with other prompts
each time. It also starts {clusters} real clusters: each mode, chunk size, preemption and form of sharing.
Each answers from every source, HDF5 included, with every sampling.

Each entry of the table is the number of pairs of values that `make test` covers, out of those that exist.

"""
CELLS = """
## The cells of `make test`

"""


def pairs_of(cells: list[matrix.Cell], one: str, other: str) -> int:
    """Count the different pairs of values of two dimensions."""
    return len({(getattr(cell, one), getattr(cell, other)) for cell in cells})


def row(cells: list[str]) -> str:
    """Format a row of a table."""
    return "| " + " | ".join(cells) + " |\n"


def pair_table() -> str:
    """Count the covered pairs of each two dimensions."""
    names = list(matrix.DIMENSIONS)
    table = row(["", *names[1:]]) + "|---|" + "--:|" * (len(names) - 1) + "\n"
    for number, one in enumerate(names[:-1]):
        entries = [
            f"{pairs_of(matrix.CHOSEN, one, other)} of {pairs_of(matrix.cells(), one, other)}"
            for other in names[number + 1 :]
        ]
        table += row([one, *[""] * number, *entries])
    return table


def page() -> str:
    """The page with what holds today between its marks."""
    excuses = EXCUSES.format(gap=exact.GAP, border=exact.BORDER, per_thousand=exact.MOST_EXCUSED * 1000)
    text = row(["dimension", "values"]) + "|---|---|\n"
    text += "".join(row([name, ", ".join(values)]) for name, values in matrix.DIMENSIONS.items())
    all_cells = len(list(itertools.product(*matrix.DIMENSIONS.values())))
    possible = len(matrix.cells())
    text += PAIRS.format(
        all=all_cells,
        possible=possible,
        impossible=all_cells - possible,
        chosen=len(matrix.CHOSEN),
        in_process=len(matrix.IN_PROCESS),
        clusters=len(matrix.CLUSTERS),
    )
    text += pair_table() + CELLS + row(list(matrix.DIMENSIONS)) + "|---" * len(matrix.DIMENSIONS) + "|\n"
    text += "".join(row([getattr(cell, name) for name in matrix.DIMENSIONS]) for cell in matrix.CHOSEN)
    written = filled(PAGE.read_text(encoding="utf-8"), "excuses", excuses)
    return filled(written, "matrix", text.rstrip("\n"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
