"""The engine beside transformers and llama.cpp: decode, prefill, a cluster, and tables over batch sizes.

Run by `bench.command`; each part is a module of its own. All sides answer the same prompts of random tokens
with 2 threads and take turns, ours in this process and each peer in its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.bench import engine_batches, engine_cluster, engine_decode, engine_gaps, engine_prefill
from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_peers import WARM_UP, start_peers
from mooncake_lite.bench.result import Row
from mooncake_lite.config import DEFAULT_MODEL
from mooncake_lite.launch.machine import usable_cores
from mooncake_lite.model import resolve_model
from mooncake_lite.model.progress import console_progress

THREADS = 2
"""Of each side, on every machine: figures of machines with more cores compare."""

Shape = tuple[int, int, int]
"""(sequences, tokens of each prompt, tokens of each answer)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often.

    cells       (batch size, prompt length) of the tables; `new` tokens each
    streams     numbers of streams at once through the cluster
    stream      tokens of the prompt and of the answer of each
    """

    runs: int
    single: Shape
    batch: Shape
    prompt: int
    streams: tuple[int, ...]
    stream: tuple[int, int]
    cells: tuple[tuple[int, int], ...]
    new: int


FULL = Plan(
    runs=3,
    single=(1, 128, 128),
    batch=(16, 128, 128),
    prompt=2048,
    streams=(1, 16),
    stream=(128, 128),
    cells=tuple((batch, tokens) for batch in (1, 4, 16) for tokens in (128, 512, 2048)),
    new=32,
)
QUICK = Plan(
    runs=1,
    single=(1, 32, 17),
    batch=(4, 32, 9),
    prompt=512,
    streams=(1, 4),
    stream=(64, 33),
    cells=((1, 128), (4, 32)),
    new=8,
)


def warm(folder: Path | None, threads: int) -> tuple[Path, Ours]:
    """Load a model, the default one where there is no folder, and let it answer once. Raises ModelError."""
    if folder is None:
        with console_progress() as progress:
            folder = resolve_model(DEFAULT_MODEL, progress=progress)
    ours = Ours(folder, threads)
    ours.answer(WARM_UP, 2)
    return folder, ours


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ModelError.

    folder   of the model; the default model where it is None
    """
    plan, threads = QUICK if quick else FULL, min(THREADS, usable_cores())
    folder, ours = warm(folder, threads)
    through = engine_cluster.run(ours, folder, threads, plan.streams, plan.stream, plan.runs)
    with start_peers(folder, threads) as peers:
        rows = engine_decode.run(ours, [peers.generate, peers.llama], *plan.single, plan.runs)
        rows += engine_decode.run(ours, [peers.generate, peers.generate_batch], *plan.batch, plan.runs)
        rows += engine_prefill.run(ours, [peers.generate, peers.llama], plan.prompt, plan.runs)
        rows += engine_gaps.run(ours, plan.prompt, plan.runs)
        rows += engine_batches.run(ours, peers, plan.cells, plan.new, plan.runs)
    return rows + through
