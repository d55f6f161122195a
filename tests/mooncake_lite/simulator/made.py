"""Made traces, and clusters of the paper's machines to play them on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster, parse_nodes
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.rescale import sped, spread
from mooncake_lite.workloads.traces import Trace, TraceRequest, read_trace
from tests.mooncake_lite.simulator.test_replay import VARIABLE

PROFILE = named_profile("LLaMA3-70B-8xA800")
BLOCK = 160 * 2**20
"""Bytes of 512 tokens."""


def cluster(nodes: str = "1P1D", **fields: Any) -> Cluster:
    return Cluster(**{"profile": PROFILE, "nodes": parse_nodes(nodes), **fields})


def played(cluster: Cluster, trace: Trace, seed: int = 1) -> Outcome:
    return play(cluster, TraceSource(trace), seed)


def hits(outcome: Outcome) -> float:
    """Return the share of prompt tokens that was reused."""
    return sum(outcome.reused.values()) / outcome.prompt_tokens


def conversations(turns: int, users: int, gap_s: float = 3.0, blocks: int = 4) -> Trace:
    """Users take turns; each prompt repeats the user's last one, and has `blocks` blocks more."""
    made = []
    for number in range(turns * users):
        turn, user = divmod(number, users)
        ids = [user * 10_000 + block for block in range((turn + 1) * blocks)]
        made.append(TraceRequest(number * gap_s * 1000, 512 * len(ids) + 100, 2, [*ids, 10**7 + number]))
    return Trace(made)


def drawn_trace(seed: int, count: int, rate: float) -> Trace:
    """Draw conversations about documents that some of them share; requests come in ticks of 3 s."""
    dice, at_s, fresh, open_ones, made = Random(seed), 0.0, 10**6, list[list[int]](), list[TraceRequest]()
    for _ in range(count):
        at_s += dice.expovariate(rate)
        if open_ones and dice.random() < 0.6:
            ids = open_ones.pop(dice.randrange(len(open_ones)))
        else:
            document = int(dice.paretovariate(0.8))
            ids = [100 * document + block for block in range(dice.randint(1, 16))] * (document < 40)
        new = dice.randint(1, 8)
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        length = 512 * len(ids) - dice.randint(1, 511)
        made.append(TraceRequest(at_s // 3 * 3000, length, dice.randint(2, 80), ids))
        if len(ids) < 64:
            open_ones.append(ids)
    return Trace(made)


def traces(soak: int, count: int, rate: float) -> Sequence[Trace]:
    """Return a made trace, and for `make soak` the public one too, so slow that three nodes can serve it."""
    made = [drawn_trace(soak, count, rate)]
    if soak == 1:
        return made
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} does not say where conversation_trace.jsonl is")
    public = read_trace(Path(folder) / "conversation_trace.jsonl").first(500)
    return [*made, sped(spread(public, 1), 0.2)]
