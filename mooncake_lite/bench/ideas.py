"""Each idea of the engine, on and off: what it gains on this machine.

Run by `bench.command`; each idea is a module of its own. In a row, `ours` is the figure with the idea and
`peer` the figure without it. The pages of docs/explain/ show these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.bench import (
    ideas_answers,
    ideas_loading,
    ideas_modes,
    ideas_preemption,
    ideas_prefix,
    ideas_trace,
)
from mooncake_lite.bench.engine import THREADS, warm
from mooncake_lite.bench.result import Row
from mooncake_lite.launch.machine import usable_cores


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often.

    prefix       (tokens of the prompt, leading tokens that another prompt had, for each case)
    answers      (tokens of the prompt, answers to it, tokens of each)
    preemption   more sequences than pages
    loading      (tokens of the prompt, leading tokens that are in the pool)
    modes        one workload for all modes
    trace        tokens of an answer with and without --trace
    """

    runs: int
    prefix: tuple[int, tuple[int, ...]]
    answers: tuple[int, int, int]
    preemption: ideas_preemption.Shape
    loading: tuple[int, int]
    modes: ideas_modes.Workload
    trace: int


FULL = Plan(
    runs=3,
    prefix=(576, (512, 500)),
    answers=(500, 4, 64),
    preemption=ideas_preemption.Shape(sequences=8, tokens=128, new=128, pages=80),
    loading=(576, 512),
    modes=ideas_modes.Workload(requests=8, every_s=1.2, shared=512, own=64, new=96),
    trace=129,
)
QUICK = Plan(
    runs=1,
    prefix=(192, (128, 120)),
    answers=(100, 4, 8),
    preemption=ideas_preemption.Shape(sequences=4, tokens=32, new=33, pages=16),
    loading=(192, 128),
    modes=ideas_modes.Workload(requests=3, every_s=0.1, shared=128, own=64, new=9),
    trace=17,
)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ConfigError, ModelError.

    folder   of the model; the default model where it is None
    """
    plan, threads = QUICK if quick else FULL, min(THREADS, usable_cores())
    folder, ours = warm(folder, threads)
    vocab = ours.model.config.vocab_size
    rows = ideas_prefix.run(ours.model, *plan.prefix, plan.runs)
    rows += ideas_answers.run(ours.model, *plan.answers, plan.runs)
    del ours  # the clusters need its memory
    rows += ideas_preemption.run(folder, vocab, threads, plan.preemption)
    rows += ideas_loading.run(folder, vocab, *plan.loading)
    rows += ideas_modes.run(folder, vocab, plan.modes)
    return rows + ideas_trace.run(folder, vocab, plan.trace, plan.runs)
