"""A cluster for `bench simulator`, live and simulated: the same ranks, requests and figures."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.file import OverheadsSection, Profile
from mooncake_lite.simulator.cluster import Cluster as Simulated
from mooncake_lite.simulator.intervals import drawn, scaled
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.cluster import Ask, Reply, at_their_times, started
from mooncake_lite.tools.client import TRACED
from mooncake_lite.tools.profile.overheads import LEAST_S
from mooncake_lite.tools.streams import Prompt, process_of
from mooncake_lite.tools.streams import play as stream_all
from mooncake_lite.workloads.metrics import (
    COMPLETED,
    REJECTED,
    Record,
    longest_gap_s,
    spread_of,
    summary,
)
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace, TraceRequest

LAYERS = 2
"""Of the model of sleeping ranks. Blocks are a tenth of the default model's, so that the cores stay free."""

CONTEXT_TOKENS = 8192
KV_BYTES = 512 << 20
SLO_S = (30.0, 0.1)

STREAMS, STREAM_TOKENS, STREAM_ANSWER, KILLED_S = 8, 300, 128, 1.5
"""Streams that begin at once, tokens of their prompts and answers, and when a decode rank dies."""

THREADS = ("--threads", "1")
"""Of a rank that computes, live and in its profile. With as many as there are cores, prefill and decode share
them, and a decode step beside a prompt takes 33 ms in place of 15: no simulated rank competes for cores."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranks:
    """A cluster on this machine.

    nodes        ranks by role
    sleeps       its ranks sleep as the profile says; otherwise they compute
    pool_bytes   of each store rank
    """

    folder: Path
    profile: Profile
    nodes: dict[str, int]
    sleeps: bool
    block_tokens: int
    chunk_tokens: int
    sequences: int
    pool_bytes: int = 512 << 20

    @property
    def vocab_size(self) -> int:
        """Return the number of the model's tokens."""
        return load_config(self.folder).vocab_size

    def with_overheads(self, overheads: OverheadsSection) -> Ranks:
        """Return the same ranks, with what serving takes besides in their profile."""
        return replace(self, profile=self.profile.with_section("overheads", overheads))

    def serve(self, *more: str) -> AbstractContextManager[Cluster]:
        """Start it. more: further flags of `serve`. Raises ClusterError."""
        counts = [word for role, count in self.nodes.items() for word in (f"--{role}", str(count))]
        engine = ("--engine", "emulated") if self.sleeps else THREADS
        flags = [
            *(str(self.folder), *counts, *engine),
            *("--block-size", str(self.block_tokens), "--max-num-seqs", str(self.sequences)),
            *("--max-num-batched-tokens", str(self.chunk_tokens), "--kv-cache-bytes", str(KV_BYTES)),
            *("--pool-bytes", str(self.pool_bytes), "--max-model-len", str(CONTEXT_TOKENS)),
            *("--admission", "none", "--max-queue", "10000"),
            *more,
        ]
        return started(flags, self.profile)

    def live(self, port: int, trace: Trace, run: int, told: Callable[[], None]) -> Result:
        """Play a trace, and measure it as a simulation is. Runs with other numbers share no prefix with it.

        Raises ClusterError.
        """
        asks = [
            Ask(one.timestamp / 1000, self.tokens(one, run), one.output_length, TRACED)
            for one in trace.requests
        ]
        replies = asyncio.run(at_their_times(port, asks, told))
        records = [record_of(reply) for reply in replies]
        cached = sum(sum(reply.trace.get("cached_tokens", {}).values()) for reply in replies)
        total = sum(len(reply.ask.prompt) for reply in replies)
        second_s = spread_of(one.token_times_s[1] - one.arrived_s for one in records if one.tpot_s)
        hit_rate = {"all": cached / total}
        return {**summary(records, *SLO_S), "second_token_s": second_s, "hit_rate": hit_rate}

    def tokens(self, request: TraceRequest, run: int) -> list[int]:
        """Return a prompt: equal ids are equal tokens, in one run."""
        tokens, ids = list[int](), range(self.vocab_size // 8, self.vocab_size)
        for number in request.hash_ids:
            tokens += random.Random(f"{run} {number}").choices(ids, k=self.block_tokens)
        return tokens[: request.input_length]

    def simulated(self) -> Simulated:
        """Return the simulated cluster that is to be like this one."""
        return Simulated(
            profile=self.profile, nodes=self.nodes, together=True, block_tokens=self.block_tokens,
            node_bytes=self.pool_bytes, kv_bytes=KV_BYTES, batched_tokens=self.chunk_tokens,
            sequences=self.sequences, sharing="hash",
        )  # fmt: skip

    def simulate(self, trace: Trace, seed: int = 0, *, errs: bool = False) -> Result:
        """Play a trace on it. errs: its machines differ from the profile, as the errors of that allow."""
        cluster = drawn(self.simulated(), {}, seed) if errs else self.simulated()
        return play(cluster, TraceSource(trace), seed).to_dict(*SLO_S)

    def pause(self, cluster: Cluster) -> float:
        """Kill the first decode rank under STREAMS. Returns the mean pause of those that it decoded.

        Raises ClusterError.
        """
        ids, dice = range(self.vocab_size // 8, self.vocab_size), random.Random("pause")
        asks = [Prompt(dice.choices(ids, k=STREAM_TOKENS), STREAM_ANSWER) for _ in range(STREAMS)]
        victim = process_of(cluster.pid, str(1 + self.nodes["prefill"]))
        streams, moment = stream_all(cluster.base_url, asks, victim.kill, KILLED_S)
        if broken := [one.error for one in streams if one.error]:
            raise ClusterError(f"a stream broke off: {broken[0]}")
        return self._longest([one.longest_gap_s(moment, first=False) for one in streams])

    def simulated_pause(self, seed: int) -> float:
        """Return what `pause` measures, simulated."""
        blocks = -(-STREAM_TOKENS // self.block_tokens)
        named = [list(range(number * blocks, (number + 1) * blocks)) for number in range(STREAMS)]
        trace = Trace(
            [TraceRequest(0, STREAM_TOKENS, STREAM_ANSWER, ids) for ids in named], self.block_tokens
        )
        kills = [("decode", KILLED_S)]
        records = play(self.simulated(), TraceSource(trace), seed, kills=kills).records
        return self._longest([longest_gap_s(one, KILLED_S) for one in records])

    def _longest(self, gaps_s: Sequence[float]) -> float:
        """Return the mean of as many of the longest gaps as one rank decoded streams."""
        return fmean(sorted(gaps_s)[-STREAMS // self.nodes["decode"] :])

    def at(self, trace: Trace, load: float) -> Trace:
        """Return a trace at a speed at which prompts take this share of the time of prefill ranks."""
        busy_s = self.simulate(trace)["prefill_s_per_request"] * len(trace.requests)
        span_s = (trace.requests[-1].timestamp - trace.requests[0].timestamp) / 1000
        return sped(trace, load * self.nodes["prefill"] * span_s / busy_s)


def few_layers(model: Path, place: Path) -> Path:
    """Make a model without weights, and with few layers, from another one's folder. Returns its folder."""
    folder = place / model.name
    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}), encoding="utf-8")
    return folder


def record_of(reply: Reply) -> Record:
    """Return what became of a request. Raises ClusterError for what no simulated one becomes."""
    if reply.status == 429:
        return Record(reply.sent_s, (), REJECTED, "refused")
    if reply.status != 200 or not reply.times:
        raise ClusterError(f"the cluster answered a request with HTTP {reply.status}")
    count = reply.ask.new_tokens  # the event after the last token says why the answer ended
    times = [reply.sent_s + reply.ttft_s, *reply.times[1:count]]
    return Record(reply.sent_s, times, COMPLETED, tokens=count)


ROUNDS = 5
"""Of a calibration: queues are not linear in what is changed."""


def with_overheads_of(ranks: Ranks, trace: Trace, live: Result) -> Ranks:
    """Return ranks whose overheads are such that a simulation comes to what a live run came to.

    Overheads under load are larger than those of requests one at a time: processes wait for cores.
    """
    for _ in range(ROUNDS):
        before, wanted, found = ranks.simulated().overheads, _parts(live), _parts(ranks.simulate(trace))
        first_s, second_s, later_s = (one - other for one, other in zip(wanted, found))
        step_s = max(LEAST_S, before.step_s + later_s)
        message_s = max(LEAST_S, before.message_s + (second_s - later_s) / 2)
        request_s = max(LEAST_S, before.request_s + first_s / 2)
        ranks = ranks.with_overheads(OverheadsSection(step_s, message_s, request_s))
    return ranks


def _parts(result: Result) -> tuple[float, float, float]:
    """Return the mean time to the first token, from it to the second one, and of the later gaps."""
    first_s, second_s, last_s = (result[key]["mean"] for key in ("ttft_s", "second_token_s", "e2e_s"))
    gaps = result["output_tokens"] / result["completed"] - 2
    return first_s, second_s - first_s, (last_s - second_s) / gaps


HALVINGS, MOST_FACTOR = 14, 8.0
"""Of the search for the time of prefill passes, and how far from the profile's it may be."""


def with_times_of(ranks: Ranks, trace: Trace, lives: Sequence[Result]) -> Ranks:
    """Return ranks whose passes take so long that a simulation comes to what live runs came to.

    Where prompts queue, the time to the first token grows many times faster than that of a pass, so that no
    proportion finds it. It only grows, and halving does.
    """
    ttft_s, tpot_s = (fmean(live[key]["mean"] for live in lives) for key in ("ttft_s", "tpot_s"))
    decode, low, high = 1.0, 1 / MOST_FACTOR, MOST_FACTOR
    for _ in range(HALVINGS):
        prefill = sqrt(low * high)
        changed = replace(ranks, profile=scaled(ranks.profile, prefill, decode, 1.0))
        found = changed.simulate(trace)
        decode *= tpot_s / found["tpot_s"]["mean"]
        low, high = (prefill, high) if found["ttft_s"]["mean"] < ttft_s else (low, prefill)
    return changed
