"""Measures what --batch-invariant costs, and writes the table of docs/explain/batch-invariance.md.

    python docs/tools/measure_batch_invariance.py    a minute; needs the default model in the cache

Both sets of kernels run in one process and take turns, over the same pages and the same tokens.
"""

from __future__ import annotations

import datetime
import statistics
import time
from pathlib import Path

import torch
from fill_readme import filled

from mooncake_lite.config.machine import commit, machine, usable_cores
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.caches import new_caches
from mooncake_lite.engine.local import use_threads
from mooncake_lite.model.forward import AttentionBatch, Model, load_model
from mooncake_lite.model.resolve import resolve_model

PAGE = Path(__file__).parents[1] / "explain" / "batch-invariance.md"
ROWS, CONTEXT, RUNS = (1, 8, 16, 32), 512, 21
PROMPT, CHUNK, PROMPT_RUNS = 2048, 256, 3


class Steps:
    """One model, and pages for the longest batch."""

    def __init__(self, model: Model):
        self.model = model
        pages = (CONTEXT + PAGE_TOKENS) // PAGE_TOKENS
        self.tables = torch.arange(max(ROWS) * pages, dtype=torch.int32).reshape(max(ROWS), pages)
        self.caches = new_caches(model.config, self.tables.numel(), torch.float32, torch.device("cpu"))
        self.caches.normal_()

    def decode_s(self, rows: int) -> float:
        """Seconds of a decode step of so many sequences, each with CONTEXT tokens before it."""
        lens = torch.full((rows,), CONTEXT + 1, dtype=torch.int32)
        slots = self.tables[:rows, CONTEXT // PAGE_TOKENS].long() * PAGE_TOKENS + CONTEXT % PAGE_TOKENS
        batch = AttentionBatch(torch.ones_like(lens), lens, self.tables[:rows].contiguous(), slots)
        ids, positions = torch.arange(100, 100 + rows), torch.full((rows,), CONTEXT)
        return self._timed(ids, positions, batch, torch.arange(rows))

    def prompt_s(self) -> float:
        """Seconds for a prompt of PROMPT tokens, in chunks of CHUNK."""
        tables, total = self.tables.reshape(1, -1)[:, : PROMPT // PAGE_TOKENS].contiguous(), 0.0
        for start in range(0, PROMPT, CHUNK):
            positions = torch.arange(start, start + CHUNK)
            slots = tables[0, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
            new = torch.tensor([CHUNK], dtype=torch.int32)
            end = torch.tensor([start + CHUNK], dtype=torch.int32)
            last = torch.tensor([CHUNK - 1])
            total += self._timed(positions + 100, positions, AttentionBatch(new, end, tables, slots), last)
        return total

    def _timed(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, rows: torch.Tensor
    ) -> float:
        started = time.perf_counter()
        self.model.forward(ids, positions, self.caches, batch, rows)
        return time.perf_counter() - started


def table(off: Steps, on: Steps) -> list[str]:
    """Medians of both, and their ratio."""
    lines = ["| | off | on | on / off |", "|---|--:|--:|--:|"]
    for rows in ROWS:
        runs = [(off.decode_s(rows), on.decode_s(rows)) for _ in range(RUNS)][1:]
        name = f"decode step, {rows} sequence{'s' if rows > 1 else ''}"
        lines.append(row(name, *(statistics.median(each) for each in zip(*runs))))
    runs = [(off.prompt_s(), on.prompt_s()) for _ in range(PROMPT_RUNS)]
    lines.append(row(f"prompt of {PROMPT:,} tokens", *(statistics.median(each) for each in zip(*runs))))
    return lines


def row(name: str, off_s: float, on_s: float) -> str:
    """One line of the table."""
    return f"| {name} | {1e3 * off_s:.1f} ms | {1e3 * on_s:.1f} ms | {on_s / off_s:.2f} |"


def main() -> None:
    """Measure, and put the table in its place."""
    use_threads(usable_cores())
    folder = resolve_model("default")
    lines = table(Steps(load_model(folder)), Steps(load_model(folder, batch_invariant=True)))
    found = machine()
    seen = f"{found['cpu']}, threads: {usable_cores()}, processes that wanted a core: {found['load']}, "
    seen += f"{datetime.date.today()}, commit {commit()}"
    PAGE.write_text(filled(PAGE.read_text(), "measured", "\n".join([seen + ".", "", *lines])))


if __name__ == "__main__":
    main()
