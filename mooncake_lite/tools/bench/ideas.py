"""Each idea of the engine, on and off: what it gains on this machine.

Run by `bench.command`; the ideas are in the files whose names begin with `ideas_`. In a row, `ours` is the
figure with the idea and `peer` the figure without it. The pages of docs/explain/ show these figures.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_lite.tools.bench import ideas_cluster, ideas_drafts, ideas_members, ideas_overlap, ideas_rank
from mooncake_lite.tools.bench.cluster import model_folder
from mooncake_lite.tools.bench.engine_sides import Ours
from mooncake_lite.tools.bench.ideas_cluster import Crowd, Workload
from mooncake_lite.tools.bench.result import Row


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ConfigError, ModelError.

    folder   of the model; the default model where it is None
    """
    runs = 1 if quick else 3
    folder = model_folder(folder)
    ours = Ours(folder)
    vocab = ours.model.config.vocab_size
    tokens, cases = (192, (128, 120)) if quick else (576, (512, 500))  # leading ones that are in pages
    rows = [row for known in cases for row in ideas_rank.prefix_sharing(ours, tokens, known, runs)]
    prompt, answers, new = (100, 4, 8) if quick else (500, 4, 64)
    rows += ideas_rank.several_answers(ours, prompt, answers, new, runs)
    rows += ideas_drafts.drafts(ours, folder, 24 if quick else 160, runs)
    known, tokens = (256, 64) if quick else (4096, 512)  # in the pool, and of a pass
    rows.append(ideas_overlap.ahead(ours, known, tokens, runs))
    del ours  # the clusters need its memory
    crowd = Crowd(4, tokens=32, new=33, pages=16) if quick else Crowd(8, tokens=128, new=128, pages=80)
    rows += ideas_cluster.preemption(folder, vocab, crowd)
    tokens, known = (192, 128) if quick else (576, 512)  # leading ones that are in the pool
    rows += ideas_cluster.loading(folder, vocab, tokens, known)
    tokens, turns = (100, 1) if quick else (2048, 9)
    rows += ideas_overlap.storing(folder, vocab, tokens, turns)
    rows.append(ideas_overlap.pipeline(folder, vocab, tokens, turns))
    rows += ideas_members.tensor(folder, vocab, (64,) if quick else (256, 2048), 9 if quick else 97, runs)
    members, tokens = (2, 512) if quick else (4, 4096)
    rows.append(ideas_members.context(folder, vocab, members, tokens, 9 if quick else 65, runs))
    few, many = Workload(3, 0.1, shared=128, own=64, new=9), Workload(8, 1.2, shared=512, own=64, new=96)
    rows += ideas_cluster.modes(folder, vocab, few if quick else many)
    return [*rows, ideas_cluster.tracing(folder, vocab, 17 if quick else 129, runs)]
