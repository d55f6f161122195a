"""The engine beside transformers and llama.cpp: decode, prefill, a cluster, and tables over batch sizes.

Run by `bench.command`. All sides answer the same prompts of random tokens with 2 threads and take turns, ours
in this process and each peer in its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.tools.bench import engine_limits
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, model_folder, started, stream_times, tpot_s
from mooncake_lite.tools.bench.engine_sides import THREADS, Answer, Ours, Peer, Peers, Prompts, start_peers
from mooncake_lite.tools.bench.result import Other, Row, Side, compare, in_turns, medians
from scheduler.instance import Limits

CHUNK_TOKENS = 256
"""Of one pass with chunked prefill, the running answer's token included."""

SHORT_TOKENS = 32
"""Of the prompt whose answer is running while a long prompt is computed."""

MOST_PROMPT_TOKENS = 4096
"""Of a batch that is measured several times; a larger one takes minutes, and is measured once."""


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ModelError.

    folder   of the model; the default model where it is None
    """
    runs, prompt = (1, 512) if quick else (3, 2048)
    # sequences, tokens of each prompt, tokens of each answer
    single, batch = ((1, 32, 17), (4, 32, 9)) if quick else ((1, 128, 128), (16, 128, 128))
    # numbers of streams at once, tokens of each prompt, tokens of each answer
    streams = ((1, 4), 64, 33) if quick else ((1, 16), 128, 128)
    # batch sizes and prompt lengths of the tables, tokens of each answer
    cells, new = (((1, 128), (4, 32)), 8) if quick else ((*product((1, 4, 16), (128, 512, 2048)),), 32)
    folder = model_folder(folder)
    ours = Ours(folder)
    through = cluster(ours, folder, *streams, runs)
    with start_peers(folder) as peers:
        rows = decode(ours, [peers.generate, peers.llama], *single, runs)
        rows += decode(ours, [peers.generate, peers.generate_batch], *batch, runs)
        rows += prefill(ours, [peers.generate, peers.llama], prompt, runs)
        rows.append(longest_gap(ours, prompt, runs))
        for sequences, tokens in cells:
            rows += table(ours, peers, sequences, tokens, new, runs)
    return rows + through


def cluster(ours: Ours, folder: Path, streams: Sequence[int], tokens: int, new: int, runs: int) -> list[Row]:
    """TPOT through a cluster of four ranks, beside the same in one process. Raises ClusterError.

    The cluster and its client share the cores with nothing else: the other sides wait. A decode step of the
    cluster passes a rank, the gateway and HTTP.
    """
    flags = [str(folder), *FOUR_RANKS, "--threads", str(THREADS), "--max-num-seqs", str(max(streams))]
    with started(flags) as running:
        return [through_row(ours, running.port, count, tokens, new, runs) for count in streams]


def through_row(ours: Ours, port: int, count: int, tokens: int, new: int, runs: int) -> Row:
    """Compare some streams at once through a cluster with the same in this process."""
    prompts = ours.prompts(count, tokens)
    stream_times(port, prompts, 2)  # from now on the pool has the prompts
    through_s, alone_s = medians(
        runs,
        lambda: tpot_s(stream_times(port, prompts, new), new),
        lambda: tpot_s(ours.token_times(prompts, new), new),
    )
    name = f"TPOT through 1+1+1+1 ranks, {count} stream{'s' * (count > 1)} of {tokens} + {new} tokens"
    return Row(name, "ms", 1e3 * through_s, None, Other("the same in one process", 1e3 * alone_s), runs)


def decode(ours: Ours, peers: Sequence[Peer], batch: int, tokens: int, new: int, runs: int) -> list[Row]:
    """Decode without the prefill: `batch` sequences of `tokens` tokens, each answered with `new` tokens.

    A decode step reads all weights once, whatever the number of sequences: that is its limit. The step is
    also compared with our own linear kernels, called in turn with nothing between.
    """
    prompts = ours.prompts(batch, tokens)
    words, layers = engine_limits.weight_words(ours.model), engine_limits.linear_inputs(ours.model, batch)
    nbytes = sum(each.nbytes for each in words)
    linears: list[float] = []

    def rate(answer: Answer) -> float:
        return batch * (new - 1) / decode_seconds(answer, prompts, new)

    def reading() -> float:
        linears.append(1e3 * engine_limits.in_turn_seconds(layers))  # in the same rounds as all else
        return batch / engine_limits.read_seconds(words)

    what = f"{batch} sequence{'s' * (batch > 1)} of {tokens} + {new} tokens"
    limit = Side(f"reading the weights once ({nbytes / 1e6:.0f} MB)", reading)
    sides = [peer.measured(rate) for peer in peers]
    found = compare(f"decode, {what}", "tokens/s", runs, partial(rate, ours.answer), sides, limit)
    step = Other("its linear layers in turn, our kernels", statistics.median(linears))
    return [*found, Row(f"decode step, {what}", "ms", 1e3 * batch / found[0].ours, None, step, runs)]


def decode_seconds(answer: Answer, prompts: Prompts, new: int) -> float:
    """Return the seconds of `new` - 1 decode steps: the whole run less a run with one new token."""
    whole = answer(prompts, new)
    return max(1e-9, whole - answer(prompts, 1))


def prefill(ours: Ours, peers: Sequence[Peer], tokens: int, runs: int) -> list[Row]:
    """The first token of one long prompt, beside the peers and torch's matrix products."""
    prompts = ours.prompts(1, tokens)

    def rate(answer: Answer) -> float:
        return tokens / answer(prompts, 1)

    products = engine_limits.prefill_limit(ours.model, tokens)
    limit = Side("the model's matrix products in torch, causal attention counted", products)
    sides, name = [peer.measured(rate) for peer in peers], f"prefill of {tokens:,} tokens, float32"
    return compare(name, "tokens/s", runs, partial(rate, ours.answer), sides, limit)


def longest_gap(ours: Ours, tokens: int, runs: int) -> Row:
    """The longest wait of a running answer while a prompt of `tokens` tokens is computed on the same rank:
    with chunked prefill, beside the whole prompt in one pass."""
    steps = -(-tokens // (CHUNK_TOKENS - 1)) + 2
    prompts = ours.prompts(1, SHORT_TOKENS) + ours.prompts(1, tokens)

    def gap_ms(chunked: bool) -> float:
        times = ours.token_times(prompts, steps, Limits(CHUNK_TOKENS, chunked=chunked))
        return 1e3 * longest_gap_s(times[0])

    cut, whole = medians(runs, partial(gap_ms, chunked=True), partial(gap_ms, chunked=False))
    name = f"longest gap of an answer beside a prompt of {tokens:,} tokens, chunks of {CHUNK_TOKENS}"
    return Row(name, "ms", cut, Other("the prompt in one pass", whole), None, runs)


def longest_gap_s(times: Sequence[float]) -> float:
    """Return the longest time between two tokens."""
    return max(after - before for before, after in pairwise(times))


class Figures(NamedTuple):
    """What one batch came to. The median of several is taken field by field."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


COLUMNS = (
    ("throughput", "tokens/s", "the arithmetic of the prompts, then the weights read once a step"),
    ("TTFT", "ms", "the arithmetic of the prompts, one after the other (mean)"),
    ("TPOT", "ms", "reading the weights once"),
)
"""Of `Figures`: name, unit and limit."""


def table(ours: Ours, peers: Peers, batch: int, tokens: int, new: int, runs: int) -> list[Row]:
    """One batch of whole requests: beside `generate` in all figures, beside the others in throughput.

    All requests are there at the start. Our TTFT and TPOT are means over the requests, as clients see them:
    our prompts are computed in passes of 2,048 tokens, so an early request has its first token soon and then
    waits for others' prompts. transformers computes all prompts of a batch at once.
    """
    runs = runs if batch * tokens <= MOST_PROMPT_TOKENS else 1
    prompts = ours.prompts(batch, tokens)
    sides = [peers.generate, peers.generate_batch, *([peers.llama] if batch == 1 else [])]
    actions = {
        side.name: partial(of_peer, side.answer, prompts, new, side is peers.generate)
        for side in sides
        if side.answer is not None
    }
    mine, *theirs = in_turns(runs, lambda: of_times(ours.token_times(prompts, new)), *actions.values())
    own, found = _median(mine), dict(zip(actions, map(_median, theirs)))
    rows, bounds = [], limits(ours, batch, tokens, new)
    for side in sides:
        peer = found.get(side.name, (0.0, 0.0, 0.0))
        columns = [*zip(COLUMNS, own, peer, bounds)]
        for (name, unit, limit), figure, beside, bound in columns[: 3 if side is peers.generate else 1]:
            other = Other(side.name, beside) if beside > 0 else None  # TPOT is a difference: noise at times
            what = f"{name}, {batch} x {tokens} + {new} tokens"
            rows.append(Row(what, unit, figure, other, Other(limit, bound), runs, side.note))
    return rows


def of_times(times: list[list[float]]) -> Figures:
    """Return the figures of a batch whose tokens came at these seconds; at least two tokens each."""
    total = max(each[-1] for each in times)
    ttft_s = statistics.fmean(each[0] for each in times)
    each_s = statistics.fmean((each[-1] - each[0]) / (len(each) - 1) for each in times)
    return Figures(sum(map(len, times)) / total, 1e3 * ttft_s, 1e3 * each_s)


def of_peer(answer: Answer, prompts: Prompts, new: int, gaps: bool) -> Figures:
    """Return the figures of a peer that says only when all is done.

    gaps   whether a second run, with one new token, tells its TTFT; else only the throughput is known
    """
    total = answer(prompts, new)
    first = answer(prompts, 1) if gaps else 0.0
    return Figures(len(prompts) * new / total, 1e3 * first, 1e3 * (total - first) / (new - 1))


def limits(ours: Ours, batch: int, tokens: int, new: int) -> Figures:
    """Measure what the machine allows for a batch."""
    prompt_s = tokens / engine_limits.prefill_limit(ours.model, tokens)()
    step_s = engine_limits.read_seconds(engine_limits.weight_words(ours.model))
    total = batch * prompt_s + (new - 1) * step_s
    return Figures(batch * new / total, 1e3 * prompt_s * (batch + 1) / 2, 1e3 * step_s)


def _median(figures: list[Figures]) -> Figures:
    return Figures(*map(statistics.median, zip(*figures)))
