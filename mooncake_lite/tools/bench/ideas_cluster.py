"""Ideas that need a cluster: preemption, loading instead of computing, modes, and the cost of a trace.

Run by `ideas`. Preemption runs on real compute ranks. All other ranks sleep for the times of the shipped
profile, so that few cores do not decide between clusters.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.sizes import page_nbytes
from mooncake_lite.tools.bench import cluster as clusters
from mooncake_lite.tools.bench.engine import longest_gap_s
from mooncake_lite.tools.bench.engine_sides import THREADS, Prompts, random_prompts
from mooncake_lite.tools.bench.result import Other, Row, medians
from mooncake_lite.tools.client import TRACED
from scheduler.costs.load_or_compute import PROBE_EVERY

EMULATED = ["--engine", "emulated"]
ONE_RANK = ["--mode", "colocated", "--compute", "1", "--store", "1"]
COLOCATED = ["--mode", "colocated", "--compute", "2"]

PREEMPTION_RUNS = 2
"""Of each cluster, with other prompts each time: the pool knows the last ones."""

SPEED_UP = 1000
"""As of a very small model whose KV is as large as the default model's."""

ROUNDS = 3
"""Of PROBE_EVERY + 1 requests on the fast engine: one of them loads."""

SLOW_REQUESTS = 5
TRACED_PROMPT = 64
"""Tokens of the prompt whose answer is traced."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Sequences that begin at once, tokens of each prompt and of each answer, and pages for all of them.

    All prompts fit into the pages, so that all sequences begin; not all answers do.
    """

    sequences: int
    tokens: int
    new: int
    pages: int

    @property
    def enough(self) -> int:
        """Return the pages with which no sequence is preempted."""
        return self.sequences * (-(-(self.tokens + self.new) // PAGE_TOKENS) + 1)


def preemption(folder: Path, vocab: int, crowd: Crowd) -> list[Row]:
    """More sequences than pages, by recompute and by swap, beside a rank with enough pages.

    A sequence that is recomputed loads the blocks that the pool has, and computes the rest; without prefix
    caching the pool has none. Raises ClusterError.
    """
    nbytes = page_nbytes(ServeConfig(), load_config(folder))
    common = [str(folder), *ONE_RANK, "--threads", str(THREADS), "--max-num-seqs", str(crowd.sequences)]
    common += ["--max-model-len", str(crowd.tokens + crowd.new)]

    def total_s(pages: int, *flags: str) -> float:
        """Seconds until the last of all answers is complete."""
        taken = []
        with clusters.started([*common, "--kv-cache-bytes", str(pages * nbytes), *flags]) as cluster:
            for seed in range(PREEMPTION_RUNS):
                prompts = random_prompts(crowd.sequences, crowd.tokens, vocab, seed)
                began = time.perf_counter()
                ends = [times[-1] for times in clusters.stream_times(cluster.port, prompts, crowd.new)]
                taken.append(max(ends) - began)
        return statistics.median(taken)

    enough = Other("enough pages", total_s(crowd.enough))
    what = f"{crowd.sequences} x {crowd.tokens} + {crowd.new} tokens, {crowd.pages} of {crowd.enough} pages"
    rows = []
    for caching, flags in (("", ()), (", no prefix caching", ("--no-enable-prefix-caching",))):
        swap = total_s(crowd.pages, "--preemption", "swap", *flags)
        recompute = Other("recompute", total_s(crowd.pages, *flags))
        name = f"preemption, swap{caching}: {what}"
        rows.append(Row(name, "s", swap, recompute, enough, PREEMPTION_RUNS))
    return rows


def loading(folder: Path, vocab: int, tokens: int, known: int) -> list[Row]:
    """Load or compute: prompts of `tokens` tokens, `known` of which are in the pool. Raises ClusterError.

    With the times of the shipped profile, loading is faster. With an engine that is SPEED_UP times as fast,
    computing is faster: the conductor finds that out, and then has the rank load once in a while only. The
    rank measures both stages: messages and HTTP take longer than a fast engine.
    """
    flags = [str(folder), *EMULATED, *ONE_RANK]
    flags += ["--prefix-sharing", "off"]  # the prefix is in the pool, not in the rank's own pages
    where = f"the KV of {tokens} tokens, {known} of them in the pool"
    with clusters.started(flags) as cluster:
        others = random_prompts(SLOW_REQUESTS, tokens, vocab, seed=1)
        computed = statistics.median(prefill_ms(cluster.port, prompt)[0] for prompt in others)
        again = after_the_first(cluster.port, SLOW_REQUESTS, tokens, known, vocab)
        loaded = statistics.median(taken for taken, _ in again)
    with clusters.started(flags, clusters.scaled_profile(folder, 1 / SPEED_UP)) as cluster:
        chosen, probes = on_a_fast_engine(cluster.port, vocab, tokens, known)
    fast_name = f"compute, engine {SPEED_UP:,} times as fast: {where}"
    return [
        Row(f"load: {where}", "ms", loaded, Other("compute", computed), None, SLOW_REQUESTS),
        Row(fast_name, "ms", chosen, Other("load", probes), None, ROUNDS),
    ]


def on_a_fast_engine(port: int, vocab: int, tokens: int, known: int) -> tuple[float, float]:
    """Return the medians of the requests that computed the prefix, and of those that loaded it."""
    found = after_the_first(port, ROUNDS * (PROBE_EVERY + 1), tokens, known, vocab)
    computed = [taken for taken, reused in found if not reused]
    loaded = [taken for taken, reused in found if reused >= known]
    if not computed or not loaded:
        raise ClusterError(
            f"of {len(found)} requests to a fast engine {len(loaded)} loaded their prefix; "
            "some should have loaded it, and some computed it"
        )
    return statistics.median(computed), statistics.median(loaded)


def after_the_first(port: int, count: int, tokens: int, known: int, vocab: int) -> list[tuple[float, int]]:
    """Measure `count` prompts one after the other that begin as a first one did."""
    (prefix,) = random_prompts(1, known, vocab)
    prompts = [prefix + tail for tail in random_prompts(count + 1, tokens - known, vocab)]
    return [prefill_ms(port, prompt) for prompt in prompts][1:]


def prefill_ms(port: int, prompt: list[int]) -> tuple[float, int]:
    """Ask for one token. Return the milliseconds of loading and computing on the rank, and the prompt tokens
    that were loaded."""
    (reply,) = clusters.answers(port, [clusters.Ask(0.0, prompt, 1, TRACED)])
    spans = {span["stage"]: span for span in reply.trace["spans"]}
    taken = sum(spans[stage]["seconds"] for stage in ("load", "compute") if stage in spans)
    return 1e3 * taken, len(prompt) - spans["compute"]["count"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at equal intervals. Their prompts have `shared` + `own` tokens.

    shared   first tokens of all prompts, where they share a prefix
    new      tokens of each answer
    """

    requests: int
    every_s: float
    shared: int
    own: int
    new: int

    def prompts(self, vocab: int) -> dict[str, Prompts]:
        """Make the prompts, without and with a shared prefix."""
        (prefix,) = random_prompts(1, self.shared, vocab)
        tails = random_prompts(self.requests, self.own, vocab)
        return {
            "no shared prefix": random_prompts(self.requests, self.shared + self.own, vocab, seed=1),
            "shared prefix": [prefix + tail for tail in tails],
        }


class Figures(NamedTuple):
    """What some requests came to, in ms: means, and the median of each answer's longest gap."""

    ttft_ms: float
    tpot_ms: float
    gap_ms: float


def figures(replies: Sequence[clusters.Reply]) -> Figures:
    """Return the figures of answers. A gap can be that of two tokens: so the median of gaps is taken."""
    return Figures(
        1e3 * statistics.fmean(reply.times[0] - reply.sent_s for reply in replies),
        1e3 * statistics.fmean(clusters.tpot_s([reply.times], reply.ask.new_tokens) for reply in replies),
        1e3 * statistics.median(longest_gap_s(reply.times) for reply in replies),
    )


def modes(folder: Path, vocab: int, work: Workload) -> list[Row]:
    """The same requests through a colocated, a split and a pooled cluster, and without single ideas.

    Two ranks compute in each mode. Raises ClusterError.
    """
    prompts = work.prompts(vocab)

    def measure(flags: list[str], *which: str) -> dict[str, Figures]:
        with clusters.started([str(folder), *EMULATED, *flags]) as cluster:
            found = {}
            for name in which:
                asks = [
                    clusters.Ask(at * work.every_s, each, work.new) for at, each in enumerate(prompts[name])
                ]
                found[name] = figures(clusters.answers(cluster.port, asks))
            return found

    colocated = measure(COLOCATED, *prompts)
    name = "shared prefix"
    with_pool = measure([*COLOCATED, "--store", "1"], name)[name]
    rows = _rows(f"colocated with a pool, {name}", with_pool, "no pool", colocated[name])
    for mode in ("split", "pooled"):
        found = measure(["--mode", mode], *prompts)
        for name in prompts:
            rows += _rows(f"{mode}, {name}", found[name], "colocated", colocated[name])
    for idea, flag, name in (
        ("prefix sharing", ["--prefix-sharing", "off"], "shared prefix"),
        ("chunked prefill", ["--no-enable-chunked-prefill"], "no shared prefix"),
    ):
        off = measure([*COLOCATED, *flag], name)
        rows += _rows(f"colocated with {idea}, {name}", colocated[name], "off", off[name])
    return rows


def _rows(what: str, ours: Figures, other: str, theirs: Figures) -> list[Row]:
    names = ("TTFT", "TPOT", "longest gap of an answer")
    return [
        Row(f"{what}: {name}", "ms", mine, Other(other, beside), None, 1)
        for name, mine, beside in zip(names, ours, theirs)
    ]


def tracing(folder: Path, vocab: int, new: int, runs: int) -> Row:
    """What `serve --trace` costs: TPOT of one stream of `new` tokens with and without it.

    Both clusters run at once and answer in turns. Raises ClusterError.
    """
    prompts, flags = random_prompts(1, TRACED_PROMPT, vocab), [str(folder), *EMULATED]

    def tpot_ms(port: int) -> float:
        return 1e3 * clusters.tpot_s(clusters.stream_times(port, prompts, new), new)

    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        trace = ["--trace", str(Path(place) / "run.json")]
        with clusters.started(flags) as plain, clusters.started([*flags, *trace]) as traced:
            off, on = medians(runs, partial(tpot_ms, plain.port), partial(tpot_ms, traced.port))
    name = f"TPOT with --trace, one stream of {TRACED_PROMPT} + {new} tokens"
    return Row(name, "ms", on, Other("no trace", off), None, runs)
