"""What the modules of the questions share: results, numbers with their spread, tables, simulated runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from mooncake_lite.errors import ConfigError
from mooncake_lite.simulator.cluster_command import cluster, cluster_of, result_of, source_of
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.replay import replay, workload_of
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.workload import Request
from mooncake_lite.tools.bench.cluster import model_folder
from mooncake_lite.tools.bench.simulator_ranks import Ranks, few_layers
from mooncake_lite.tools.profile.overheads import sleeping_profile
from mooncake_lite.workloads.metrics import Record, summary
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, read_trace
from store.policies import policy_factory

SEEDS = (1, 2, 3)

HEADINGS = ("Where the answer turns", "What was held fixed", "Live", "What is assumed")
"""Of every page, in this order, after the answer and the figure."""

Point = dict[str, Any]
Found = dict[str, Any]


class Seeds(list[float]):
    """One number by seed. It prints as its median; `spread` prints as its least and its most."""

    def __format__(self, form: str) -> str:
        """Format the median."""
        return format(median(self), form)

    @property
    def middle(self) -> float:
        """Return the median."""
        return median(self)

    @property
    def spread(self) -> Spread:
        """Return the range."""
        return Spread((min(self), max(self)))

    def __mul__(self, factor: Any) -> Seeds:
        """Return multiples, seed by seed."""
        return Seeds(factor * one for one in self)

    __rmul__ = __mul__

    def over(self, other: Seeds) -> Seeds:
        """Return the ratios to another number, seed by seed."""
        return Seeds(a / b for a, b in zip(self, other, strict=True))


class Spread(tuple[float, float]):
    """The least and the most of some numbers."""

    def __format__(self, form: str) -> str:
        """Format both; as one number where they print alike."""
        low, high = (format(one, form) for one in self)
        return low if low == high else f"{low} to {high}"


class Rows(list[tuple[Point, Found]]):
    """The points of a question with what they came to."""

    def of(self, **values: Any) -> Rows:
        """Return the rows whose points have these values."""
        return Rows(row for row in self if values.items() <= row[0].items())

    def seeds(self, number: str | Callable[[Found], float], **values: Any) -> Seeds:
        """Return a number of the rows with these values, by seed. number: as "ttft_s.p90", or a function.

        Raises LookupError when there is none, or more than one for a seed.
        """
        rows = sorted(self.of(**values), key=lambda row: row[0].get("seed", 0))
        if not rows or len({point.get("seed", 0) for point, _ in rows}) != len(rows):
            raise LookupError(f"{len(rows)} rows have {values}")
        return Seeds(number(found) if callable(number) else at(found, number) for _, found in rows)

    def values(self, name: str) -> list[Any]:
        """Return the different values of a parameter, in their order."""
        return list(dict.fromkeys(point[name] for point, _ in self if name in point))


def at(found: Found, path: str) -> Any:
    """Return what a path leads to: "ttft_s.p90"."""
    for name in path.split("."):
        found = found[name]
    return found


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown: the first column to the left, the others to the right."""
    rules = [" --- ", *[" --: "] * (len(heads) - 1)]
    rows = ["|" + "|".join(f" {cell} " for cell in line) + "|" for line in (heads, *lines)]
    return "\n".join([rows[0], "|" + "|".join(rules) + "|", *rows[1:]])


class Classed(TraceSource):
    """The requests of a trace, each of a service class."""

    def __init__(self, trace: Trace, classes: Sequence[int]) -> None:
        super().__init__(trace)
        self._classes = iter(classes)

    def next(self) -> Request:
        """Return one more request."""
        request = super().next()
        request.class_id = next(self._classes, 0)
        return request


def simulated(
    trace: Trace,
    seed: int,
    *,
    classes: Sequence[int] = (),
    groups: Sequence[str] = (),
    control: dict[str, Any] | None = None,
    **options: Any,
) -> Found:
    """Play a trace on a simulated cluster. Returns its JSON without the loads over time.

    classes   service class of each request; control has their ServiceClasses
    groups    a word for each request: found["groups"] then has the figures of the requests of each word
    control   further fields of ControlConfig
    options   those of `simulate cluster`, as nodes="4P4D", one_node=True, kill=["decode@30"]
    """
    words = [os.devnull, "--seed", str(seed)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    chosen = cluster.make_context("cluster", words).params
    shaped = cluster_of(trace, {**chosen, "nodes": chosen["nodes"] or "8P8D"})
    shaped = replace(shaped, control=control or {})
    source = Classed(trace, classes) if classes else source_of(trace, chosen)
    outcome = play(shaped, source, seed, kills=chosen["kills"])
    found = result_of(outcome, shaped)
    del found["loads"]
    if groups:
        if len({one.arrived_s for one in outcome.records}) != len(groups):
            raise ValueError("a group for each request, and no two may come at one time")
        found["groups"] = {
            name: summary(
                [one for one, word in zip(outcome.records, groups) if word == name],
                shaped.ttft_s,
                shaped.tbt_s,
            )
            for name in dict.fromkeys(groups)
        }
    return found


def grouped(records: Sequence[Record], groups: Sequence[str], limits: tuple[float, float]) -> Found:
    """Return the figures of the requests of each word. groups: a word for each record."""
    names = dict.fromkeys(groups)
    return {
        name: summary([one for one, word in zip(records, groups) if word == name], *limits) for name in names
    }


@contextmanager
def emulated(divide: int, **nodes: int) -> Iterator[Ranks]:
    """Give live ranks of this machine that sleep in place of computing, to be served with `ranks.serve()`.

    divide   lengths of their traces are divided by it, and so are blocks; use `divided` on the trace
    nodes    of each role: prefill=2, decode=2, store=1

    They need all cores: a point that uses them is "alone".
    """
    with TemporaryDirectory(prefix="mooncake-lite-question-") as place:
        folder = few_layers(model_folder(None), Path(place))
        yield Ranks(folder, sleeping_profile(folder), nodes, True, 512 // divide, 512, 64)


KV_BYTES = 3_072
"""Of a token on these ranks."""


def pooled_reuse(trace: Trace, eviction: str, blocks: int) -> Found:
    """Serve a divided trace live from one pool of so many blocks, and replay it with as many.

    Returns the shares of its prompt tokens that were there: served, and replayed. Ranks share no pages.
    """
    workload, size = workload_of(trace, complete_only=True), trace.block_tokens
    flags = ("--eviction", eviction, "--pool-bytes", str(blocks * size * KV_BYTES), "--prefix-sharing", "off")
    with (
        emulated(BLOCK_TOKENS // size, prefill=1, decode=1, store=1) as ranks,
        ranks.serve(*flags) as cluster,
    ):
        served = ranks.live(cluster.port, trace, 1, lambda: None)["hit_rate"]["all"]
    hits = replay(workload, policy_factory(eviction)(blocks), blocks).hits
    return {"served": served, "replayed": hits * size / sum(one.input_length for one in trace.requests)}


def public_trace(name: str) -> Trace:
    """Read a published trace of the folder that MOONCAKE_LITE_TRACES names. Raises ConfigError."""
    if not (folder := os.environ.get("MOONCAKE_LITE_TRACES")):
        raise ConfigError(f"MOONCAKE_LITE_TRACES does not say in which folder {name} is")
    return read_trace(Path(folder) / name)
