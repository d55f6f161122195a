"""What storing and loading take when they are hidden behind the computation, and a prompt in a pipeline.

Run by `ideas`. Stores and pipelines are those of clusters on real engines. A load ahead of a pass is done in
this process, over transfers that are as slow as the pass. Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import BlockRef
from mooncake_lite.model.sizes import block_layout
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, Ask, Reply, answers, started
from mooncake_lite.tools.bench.engine_sides import Ours, random_prompts
from mooncake_lite.tools.bench.result import Other, Row
from mooncake_lite.tools.client import TRACED
from scheduler.instance import JobId, Step
from scheduler.instance.step import Chunk, LayerLoad
from transport.bulk.batch import Transfer

WHOLE = "after computing"

FORMS = {
    "by layers": ("--layerwise", "on"),
    "by chunks": ("--layerwise", "off"),
    WHOLE: ("--no-overlap-transfers",),
}
"""How a prompt's KV is stored, and loaded by its decode rank -> flags."""


def storing(folder: Path, vocab: int, tokens: int, runs: int) -> list[Row]:
    """Time from the first token of a prompt until its KV is in the pool, and until the second token.

    One cluster of each form, asked in turns. Raises ClusterError.
    """
    stores: dict[str, list[float]] = {form: [] for form in FORMS}
    gaps: dict[str, list[float]] = {form: [] for form in FORMS}
    for form, reply in _in_turns(FORMS, [str(folder), *FOUR_RANKS], vocab, tokens, runs, TRACED):
        spans = {span["stage"]: span["seconds"] for span in reply.trace["spans"]}
        stores[form].append(1e3 * spans["store"])
        gaps[form].append(1e3 * (reply.times[1] - reply.times[0]))
    rows = []
    for form in FORMS:
        if form != WHOLE:
            for what, found in (("until all is stored", stores), ("until the second token", gaps)):
                whole = Other(WHOLE, statistics.median(found[WHOLE]))
                name = f"from the first token {what}, {form}: {tokens:,} tokens"
                rows.append(Row(name, "ms", statistics.median(found[form]), whole, None, runs))
    return rows


def pipeline(folder: Path, vocab: int, tokens: int, runs: int) -> Row:
    """Time to the first token of a prompt on one rank of one thread, and on two in a pipeline.

    The limit is half the time of one rank. Raises ClusterError.
    """
    forms = {"one rank": (), "two ranks": ("--prefill", "2", "--pipeline-parallel-size", "2")}
    found: dict[str, list[float]] = {form: [] for form in forms}
    for form, reply in _in_turns(forms, [str(folder), "--threads", "1"], vocab, tokens, runs, {}):
        found[form].append(1e3 * reply.ttft_s)
    one, two = map(statistics.median, found.values())
    name = f"to the first token, two ranks in a pipeline: {tokens:,} tokens"
    return Row(name, "ms", two, Other("one rank", one), Other("half of it", one / 2), runs)


def _in_turns(
    forms: Mapping[str, Sequence[str]],
    common: Sequence[str],
    vocab: int,
    tokens: int,
    runs: int,
    headers: Mapping[str, str],
) -> Iterator[tuple[str, Reply]]:
    """Start one cluster with the flags of each form, and ask them in turns; yield (form, reply)."""
    common = [*common, "--max-model-len", str(tokens + 8)]
    with ExitStack() as stack:
        ports = {form: stack.enter_context(started([*common, *flags])).port for form, flags in forms.items()}
        for turn in range(-1, runs):
            for form, port in ports.items():
                (prompt,) = random_prompts(1, tokens, vocab, seed=turn)
                (reply,) = answers(port, [Ask(0.0, prompt, 2, headers)])
                if turn >= 0:  # the first prompt writes every page of memory for the first time
                    yield form, reply


class SlowTransfers:
    """Stands where a rank has its transfers: one thread copies, at so many bytes per second."""

    def __init__(self, memory: np.ndarray, bytes_per_s: float) -> None:
        self._memory, self._bytes_per_s = memory, bytes_per_s
        self._thread = ThreadPoolExecutor(1, "slow transfers")
        self._free_at = 0.0

    def submit(self, moves: Sequence[Transfer], label: tuple[str, str]) -> SlowBatch:
        """Begin to read."""
        return SlowBatch(self._thread.submit(self._copy, moves))

    def _copy(self, moves: Sequence[Transfer]) -> None:
        began = max(self._free_at, time.perf_counter())
        for move in moves:
            move.local[: move.nbytes] = self._memory[move.offset : move.offset + move.nbytes]
        self._free_at = began + sum(move.nbytes for move in moves) / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class SlowBatch:
    """Transfers of SlowTransfers."""

    may_still_land: frozenset[int] = frozenset()

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def poll(self) -> bool:
        """Tell whether they have ended."""
        return self._future.done()

    def wait(self, timeout_s: float) -> None:
        """Wait until they have ended."""
        self._future.result(timeout_s)


def ahead(ours: Ours, known: int, tokens: int, runs: int) -> Row:
    """Load the KV of `known` tokens beside the pass of the `tokens` after them, at the rate at which the load
    takes as long as the pass. The limit is the larger of both."""
    config = ServeConfig()
    layout = block_layout(config, ours.model.config)
    pages = range((known + tokens) // PAGE_TOKENS)
    engine = Engine(ours.model, len(pages), BLOCK_TOKENS)
    engine.caches.zero_()
    places = [
        BlockRef(number, 0, number * layout.nbytes, layout.nbytes) for number in range(known // BLOCK_TOKENS)
    ]
    memory = np.zeros(len(places) * layout.nbytes, np.uint8)
    staging = StagingBlocks(np.zeros(config.staging_bytes, np.uint8), layout, engine)
    (ids,) = ours.prompts(1, tokens)
    chunk = Chunk(JobId("bench", 0), ids, known, tuple(pages), (), prompt=True)
    load = LayerLoad((0, 1), places, pages[: known // PAGE_TOKENS], chunk.job)

    def seconds(step: Step, bytes_per_s: float) -> float:
        transfers: Any = SlowTransfers(memory, bytes_per_s)
        runner = Runner(engine, staging, transfers)
        began = time.perf_counter()
        assert runner.run(step).lost is None
        return time.perf_counter() - began

    alone, both = Step(0.0, chunks=(chunk,)), Step(0.0, ahead=load, chunks=(chunk,))
    seconds(alone, 1.0)
    found = []
    for _ in range(runs):
        pass_s = seconds(alone, 1.0)
        found.append((1e3 * seconds(both, len(memory) / pass_s), 1e3 * pass_s))
    taken, limit = (statistics.median(column) for column in zip(*found))
    rate = len(memory) / limit / 1e6
    name = f"prefix by layers beside a pass: {known:,} tokens before {tokens}, at {rate:.2f} GB/s"
    return Row(name, "ms", taken, Other("one after the other", 2 * limit), Other("load or pass", limit), runs)
