"""Live runs for `simulator`: a cluster of ranks that sleep as a profile says, and a trace played on it."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mooncake_lite.config.machine import machine
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.compute import ComputeCost, PassLoad, Terms
from mooncake_lite.profiles.file import (
    VERSION,
    ComputeSection,
    EngineUsed,
    OverheadsSection,
    Profile,
    ProfiledModel,
    model_fingerprint,
)
from mooncake_lite.profiles.fit import MeasuredPass
from mooncake_lite.tools.bench.cluster import Ask, Reply, answers, at_their_times, in_a_file, started
from mooncake_lite.tools.client import TRACED
from mooncake_lite.tools.demo.cluster import Cluster
from mooncake_lite.workloads.metrics import COMPLETED, REJECTED, Record, summary
from mooncake_lite.workloads.traces import Trace, TraceRequest

LAYERS = 2
"""Of the served model: blocks of a tenth of the default model's, so that copies leave the cores free."""

CONTEXT_TOKENS = 8192
COST = ComputeCost(prefill=Terms(0.005, 4e-4, 8e-8), decode=Terms(0.025, 3e-4, 0.0))
"""A prompt of 752 tokens, the mean of the public trace over 16, takes 0.33 s. Steps of 25 ms leave two cores
time for all the processes."""

BEYOND = PassLoad(1 << 20, 1 << 40, 1 << 10, 1 << 30)
"""More than any pass. Sleeping ranks take what the cost says, whatever they are told to compute."""

IDLE_ASKS, IDLE_PROMPT, IDLE_ANSWER = 15, 32, 12
"""Requests one at a time, from which overheads follow."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a live cluster is started. pool_bytes: of each store rank."""

    folder: Path
    profile: Profile
    nodes: dict[str, int]
    block_tokens: int
    chunk_tokens: int
    sequences: int
    kv_bytes: int
    pool_bytes: int

    @contextmanager
    def serve(self) -> Iterator[Cluster]:
        """Start it. Raises ClusterError."""
        counts = [word for role, count in self.nodes.items() for word in (f"--{role}", str(count))]
        with in_a_file(self.profile) as file:
            flags = [
                *(str(self.folder), "--engine", "emulated", "--profile", file, *counts),
                *("--block-size", str(self.block_tokens), "--max-num-seqs", str(self.sequences)),
                *("--max-num-batched-tokens", str(self.chunk_tokens)),
                *("--kv-cache-bytes", str(self.kv_bytes), "--pool-bytes", str(self.pool_bytes)),
                *("--max-model-len", str(CONTEXT_TOKENS), "--admission", "none", "--max-queue", "10000"),
            ]
            with started(flags) as cluster:
                yield cluster


def few_layers(model: Path, place: Path) -> Path:
    """Make a model without weights, and with few layers, from another one's folder. Returns its folder."""
    folder = place / model.name
    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}), encoding="utf-8")
    return folder


def sleeping_profile(folder: Path) -> Profile:
    """Return the profile of ranks that sleep."""
    sizes = load_config(folder)
    kv = [sizes.layers, sizes.kv_heads, sizes.head_dim, 4]
    model = ProfiledModel(folder.name, model_fingerprint(sizes), kv)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    covers = [MeasuredPass(BEYOND, COST.seconds(BEYOND))]
    compute = ComputeSection(EngineUsed("float32", "cpu", "auto", 1), COST, {}, covers)
    return Profile(VERSION, model, machine(), date, {}).with_section("compute", compute)


def overheads_of(port: int) -> OverheadsSection:
    """Measure what serving takes besides passes: of requests one at a time, whose passes are known.

    A first token comes after the gateway, two messages, a pass and a step's overhead. The second one comes
    after two messages and a step more, and later ones after a step each. Raises ClusterError.
    """
    dice, replies = random.Random(1), list[Reply]()
    for _ in range(IDLE_ASKS):
        prompt = dice.choices(range(5_000, 40_000), k=IDLE_PROMPT)
        replies += answers(port, [Ask(0.0, prompt, IDLE_ANSWER)])
    prompt_s = COST.seconds(PassLoad(IDLE_PROMPT, IDLE_PROMPT * (IDLE_PROMPT + 1) // 2))
    pass_s = COST.seconds(PassLoad(0, 0, 1, IDLE_PROMPT))
    gaps = [b - a for reply in replies for a, b in zip(reply.times[1:], reply.times[2:])]
    second_s = median(reply.times[1] - reply.times[0] for reply in replies)
    step_s = max(1e-5, median(gaps) - pass_s)
    message_s = max(1e-5, (second_s - median(gaps)) / 2)
    first_s = median(reply.ttft_s for reply in replies)
    return OverheadsSection(step_s, message_s, max(1e-5, first_s - prompt_s - step_s - 2 * message_s))


def play_live(
    port: int, trace: Trace, run: int, told: Callable[[], None], slo_s: tuple[float, float]
) -> Result:
    """Play a trace, and measure it as a simulation is. Runs with other numbers share no prefix with this one.

    Raises ClusterError.
    """
    asks = [Ask(one.timestamp / 1000, tokens_of(one, trace.block_tokens, run), one.output_length, TRACED)
            for one in trace.requests]  # fmt: skip
    replies = asyncio.run(at_their_times(port, asks, told))
    cached = sum(sum(reply.trace.get("cached_tokens", {}).values()) for reply in replies)
    total = sum(len(reply.ask.prompt) for reply in replies)
    return {**summary([record_of(one) for one in replies], *slo_s), "hit_rate": {"all": cached / total}}


def tokens_of(request: TraceRequest, size: int, run: int) -> list[int]:
    """Return a prompt: equal ids are equal tokens, in one run."""
    tokens: list[int] = []
    for number in request.hash_ids:
        tokens += random.Random(f"{run} {number}").choices(range(5_000, 40_000), k=size)
    return tokens[: request.input_length]


def record_of(reply: Reply) -> Record:
    """Return what became of a request. Raises ClusterError for what no simulated one becomes."""
    if reply.status == 429:
        return Record(reply.sent_s, (), REJECTED, "refused")
    if reply.status != 200 or not reply.times:
        raise ClusterError(f"the cluster answered a request with HTTP {reply.status}")
    times = [reply.sent_s + reply.ttft_s, *reply.times[1:]]
    return Record(reply.sent_s, times, COMPLETED, tokens=reply.ask.new_tokens)
