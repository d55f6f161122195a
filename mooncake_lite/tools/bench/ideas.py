"""Each idea of the engine, on and off: what it gains on this machine.

Run by `bench.command`; the ideas are in `ideas_rank` and `ideas_cluster`. In a row, `ours` is the figure with
the idea and `peer` the figure without it. The pages of docs/explain/ show these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.tools.bench import ideas_cluster, ideas_overlap, ideas_rank
from mooncake_lite.tools.bench.cluster import model_folder
from mooncake_lite.tools.bench.engine_sides import Ours
from mooncake_lite.tools.bench.ideas_cluster import Crowd, Workload
from mooncake_lite.tools.bench.result import Row


@dataclass(frozen=True, slots=True)
class IdeasPlan:
    """What is measured, and how often.

    prefix       (tokens of the prompt, leading tokens that another prompt had, for each case)
    answers      (tokens of the prompt, answers to it, tokens of each)
    preemption   more sequences than pages
    loading      (tokens of the prompt, leading tokens that are in the pool)
    storing      (tokens of the prompt, runs), as in a pipeline
    ahead        (tokens in the pool, tokens of a pass)
    modes        one workload for all modes
    trace        tokens of an answer with and without --trace
    """

    runs: int
    prefix: tuple[int, tuple[int, ...]]
    answers: tuple[int, int, int]
    preemption: Crowd
    loading: tuple[int, int]
    storing: tuple[int, int]
    ahead: tuple[int, int]
    modes: Workload
    trace: int


FULL = IdeasPlan(
    runs=3,
    prefix=(576, (512, 500)),
    answers=(500, 4, 64),
    preemption=Crowd(sequences=8, tokens=128, new=128, pages=80),
    loading=(576, 512),
    storing=(2048, 9),
    ahead=(4096, 512),
    modes=Workload(requests=8, every_s=1.2, shared=512, own=64, new=96),
    trace=129,
)
QUICK = IdeasPlan(
    runs=1,
    prefix=(192, (128, 120)),
    answers=(100, 4, 8),
    preemption=Crowd(sequences=4, tokens=32, new=33, pages=16),
    loading=(192, 128),
    storing=(100, 1),
    ahead=(256, 64),
    modes=Workload(requests=3, every_s=0.1, shared=128, own=64, new=9),
    trace=17,
)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ConfigError, ModelError.

    folder   of the model; the default model where it is None
    """
    plan = QUICK if quick else FULL
    folder = model_folder(folder)
    ours = Ours(folder)
    vocab = ours.model.config.vocab_size
    tokens, cases = plan.prefix
    rows = [row for known in cases for row in ideas_rank.prefix_sharing(ours, tokens, known, plan.runs)]
    rows += ideas_rank.several_answers(ours, *plan.answers, plan.runs)
    rows.append(ideas_overlap.ahead(ours, *plan.ahead, plan.runs))
    del ours  # the clusters need its memory
    rows += ideas_cluster.preemption(folder, vocab, plan.preemption)
    rows += ideas_cluster.loading(folder, vocab, *plan.loading)
    rows += ideas_overlap.storing(folder, vocab, *plan.storing)
    rows.append(ideas_overlap.pipeline(folder, vocab, *plan.storing))
    rows += ideas_cluster.modes(folder, vocab, plan.modes)
    return [*rows, ideas_cluster.tracing(folder, vocab, plan.trace, plan.runs)]
