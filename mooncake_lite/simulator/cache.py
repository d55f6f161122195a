"""`mooncake-lite simulate cache`: a trace against eviction policies, as a table, JSON and a figure.

Mounted by `simulator/command.py`. It reads words into numbers and shows results; the replay is `replay.py`.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.machine import now
from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.errors import ConfigError
from mooncake_lite.simulator.figure import check_plot, draw
from mooncake_lite.simulator.replay import Workload, replay, workload_of
from mooncake_lite.workloads.options import form_options, known_trace
from store.errors import UnknownPolicy
from store.policies import NAMES, policy_factory
from store.policies.learned import Bound, Learned

BLOCKS = "1000,10000,30000,50000,100000,unbounded"
"""The columns of the table that everybody compares with."""

MOST_BLOCKS = 100_000_000
"""A hundred times the largest pool of KV blocks; what a policy keeps for as many still fits a machine."""

COMPLETE, ALL = "hit_rate_complete", "hit_rate"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one size of the pool. blocks None: unbounded; bound: of the learned policy alone."""

    policy: str
    blocks: int | None
    hit_rate: float
    hit_rate_complete: float
    wall_s: float
    bound: Bound | None = None

    @property
    def miss_ratio(self) -> float:
        """Share of all references that are no hits, with six decimals."""
        return round(1 - self.hit_rate, 6)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: shares of references with six decimals."""
        found = {
            "policy": self.policy,
            "blocks": self.blocks,
            "hit_rate": round(self.hit_rate, 6),
            "hit_rate_complete": round(self.hit_rate_complete, 6),
            "miss_ratio": self.miss_ratio,
            "wall_s": round(self.wall_s, 3),
        }
        return found if self.bound is None else {**found, "bound": self.bound._asdict()}


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy", "policies", default="lru", show_default=True, help=f"Any of {', '.join(NAMES)}, or all."
)
@click.option(
    "--blocks",
    "sizes",
    default=BLOCKS,
    show_default=True,
    help="Sizes of the pool, in blocks of the trace.",
)
@form_options
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
@click.option("--plot", "plot_file", type=OUT_FILE, help="Draw miss-ratio curves, .svg or .png.")
def cache(
    trace: Path, policies: str, sizes: str, json_file: Path | None, plot_file: Path | None, **words: Any
) -> None:
    """Replay TRACE against eviction policies: which share of its blocks would have been in the pool?

    TRACE is a file as Mooncake, Bailian, Azure, BurstGPT or ShareGPT publish them. One pool, requests in the
    order of the file; a block counts as a hit only while all before it in its request were hits. A name may
    be followed by filters: lru+second-hit, arc+size.
    """
    names = parse_policies(policies)
    blocks = parse_blocks(sizes)
    check_plot(plot_file)
    read = known_trace(trace, words)
    workloads = {ALL: workload_of(read), COMPLETE: workload_of(read, complete_only=True)}
    rows = _measure(workloads, names, blocks)
    _show(rows)
    whole = workloads[ALL]
    if json_file is not None:
        result = {
            "date": now(),
            "trace": trace.name,
            "requests": len(read.requests),
            "references": whole.references,
            "distinct_blocks": len(whole.facts),
            "rows": [row.to_dict() for row in rows],
        }
        write_out("--json", json_file, (json.dumps(result, indent=2) + "\n").encode())
    if plot_file is not None:
        points = [(row.policy, row.blocks or len(whole.facts), row.miss_ratio) for row in rows]
        write_out("--plot", plot_file, draw(points, plot_file.suffix))


def parse_policies(words: str) -> list[str]:
    """Names between commas, each once. Raises ConfigError for one that is none."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    names = [name for word in names for name in (NAMES if word == "all" else (word,))]
    try:
        for name in names:
            policy_factory(name, ())
    except UnknownPolicy as error:
        raise ConfigError(f"--policy {words}: {error}") from None
    if not names:
        raise ConfigError(f"--policy {words!r} names no policy; there are {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def parse_blocks(words: str) -> list[int | None]:
    """Numbers between commas, ascending; None for "unbounded", the last. Raises ConfigError."""
    sizes: set[int] = set()
    unbounded = False
    for word in filter(None, (word.strip() for word in words.split(","))):
        if word == "unbounded":
            unbounded = True
            continue
        digits = word.lstrip("0")
        if not (digits.isascii() and digits.isdigit()):
            raise ConfigError(f"--blocks {words}: {word!r} is no positive number of blocks, nor unbounded")
        if len(digits) > len(str(MOST_BLOCKS)) or int(digits) > MOST_BLOCKS:
            raise ConfigError(
                f"--blocks: {digits[:12]} is more than {MOST_BLOCKS:,} blocks; write unbounded for no limit"
            )
        sizes.add(int(digits))
    if not sizes and not unbounded:
        raise ConfigError(f"--blocks {words!r} names no size; write 1000,10000 or unbounded")
    return [*sorted(sizes), *([None] if unbounded else [])]


def _measure(workloads: dict[str, Workload], names: Sequence[str], blocks: Sequence[int | None]) -> list[Row]:
    """Every policy with every size, twice: all blocks, and complete ones only."""
    from mooncake_lite.config.progress import bar

    total = sum(workload.references for workload in workloads.values()) * len(names) * len(blocks)
    with bar("", total) as update:

        def one(name: str, size: int | None) -> Row:
            update(description=f"{name}, {_size(size)} blocks")
            return _row(workloads, name, size, lambda references: update(advance=references))

        return [one(name, size) for name in names for size in blocks]


def _row(workloads: dict[str, Workload], name: str, size: int | None, told: Callable[[int], None]) -> Row:
    rates, bound, started = {}, None, time.perf_counter()
    for kind, workload in workloads.items():
        capacity = size or max(1, len(workload.facts))
        policy = policy_factory(name, workload.order() if name == "belady" else None)(capacity)
        rates[kind] = replay(workload, policy, capacity, told).hit_rate
        if kind == ALL and isinstance(policy, Learned):
            bound = policy.bound()
    return Row(name, size, rates[ALL], rates[COMPLETE], time.perf_counter() - started, bound)


def _size(blocks: int | None) -> str:
    return "unbounded" if blocks is None else f"{blocks:,}"


def _show(rows: Sequence[Row]) -> None:
    """Two tables, one line per policy, and what the learned policy guarantees."""
    from mooncake_lite.config.progress import plain_table, wide_console

    console = wide_console()
    sizes = list(dict.fromkeys(row.blocks for row in rows))
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, []).append(row)
    first = "blocks of the pool"
    for title, rate in (("hits of all blocks", ALL), ("hits of complete blocks only", COMPLETE)):
        heads = [first, *map(_size, sizes), *(["seconds"] if rate == ALL else [])]
        table = plain_table(*heads, left={first}, title=title)
        for name, mine in by_policy.items():
            seconds = [f"{sum(row.wall_s for row in mine):.1f}"] if rate == ALL else []
            table.add_row(name, *(f"{getattr(row, rate):.4f}" for row in mine), *seconds)
        console.print(table)
    for row in rows:
        if row.bound is not None:
            misses, lru, predicted, most = row.bound
            console.print(
                f"{row.policy}, {_size(row.blocks)} blocks: {misses:,} blocks were missed; proven: at most "
                f"2 x min(LRU {lru:,}, BlindOracle {predicted:,}) = {most:,}",
                highlight=False,
            )
