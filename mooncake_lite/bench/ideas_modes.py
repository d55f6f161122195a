"""Modes: the same requests through a colocated, a split and a pooled cluster, and without single ideas.

Run by `bench.ideas`. All ranks sleep for the times of the shipped profile. Two of them compute in each mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.bench.engine_sides import Prompts, random_prompts
from mooncake_lite.bench.ideas_cluster import EMULATED, Figures, at_intervals, started
from mooncake_lite.bench.result import Other, Row

COLOCATED = ["--mode", "colocated", "--compute", "2"]


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


def run(folder: Path, vocab: int, work: Workload) -> list[Row]:
    """Measure all modes. Raises ClusterError."""
    prompts = work.prompts(vocab)

    def measure(flags: list[str], *which: str) -> dict[str, Figures]:
        with started([str(folder), *EMULATED, *flags]) as port:
            return {name: at_intervals(port, prompts[name], work.new, work.every_s) for name in which}

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
