"""What `demo --faults` plays: eight streams, under which processes are killed one after the other.

Called by `demo.command`. The streams are in `mooncake_lite.tools.streams`. Explained in
docs/explain/failures.md.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.bench.faults import text_prompts
from mooncake_lite.tools.streams import Stream, play, process_of

RANKS = ("--prefill", "2", "--decode", "2", "--store", "2")
SIZES = (
    *("--pool-bytes", "400MiB", "--kv-cache-bytes", "256MiB"),
    *("--max-model-len", "4096", "--max-num-seqs", "8"),
)
"""The streams fit on the decode rank that is left."""

START_LIMIT_S = 120.0

KILLED = (
    ("decode rank", "3", 0.6),
    ("prefill rank", "1", 0.1),
    ("store rank", "5", 0.4),
    ("conductor", "conductor", 0.5),
)
"""What dies, its rank or process, and after which share of the time of an undisturbed run."""

Scene = tuple[str, list[Stream], float]
"""What dies, the streams, and when it dies, in seconds after their beginning."""


@dataclass(frozen=True, slots=True)
class Played:
    """All scenes; the first one is undisturbed."""

    scenes: list[Scene]

    @property
    def differing(self) -> list[str]:
        """Return the scenes with an answer that is not that of the undisturbed one."""
        texts = [stream.text for stream in self.scenes[0][1]]
        return [name for name, streams, _ in self.scenes if [one.text for one in streams] != texts]

    def table(self) -> Table:
        """Return the pauses: the longest gap of each stream, after its first token and after the death."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("killed", "longest gap, median\nms", "longest gap, worst stream\nms", "answers"):
            table.add_column(name, justify="left" if name == "killed" else "right")
        for name, streams, at_s in self.scenes:
            gaps = [1e3 * one.longest_gap_s(one.times[0] + at_s, first=False) for one in streams]
            same = "changed" if name in self.differing else "the same"
            table.add_row(name or "nothing", f"{statistics.median(gaps):.0f}", f"{max(gaps):.0f}", same)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: for each scene, when pieces came, in seconds after its beginning."""
        return {
            "scenes": [
                {
                    "killed": name,
                    "at_s": at_s,
                    "pieces_s": [[time - streams[0].times[0] for time in one.times] for one in streams],
                    "errors": [one.error for one in streams if one.error],
                }
                for name, streams, at_s in self.scenes
            ],
            "identical": not self.differing,
        }


def play_faults(console: Console, model_dir: Path, work_dir: Path) -> Played:
    """Play all scenes on one cluster. Raises ClusterError."""
    prompts, flags = text_prompts(), [str(model_dir), *RANKS, *SIZES]
    console.print(f"Starting a cluster of 7 ranks: {' '.join(RANKS)}", highlight=False)
    with Cluster([*flags, "--batch-invariant"], work_dir / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        console.print(f"Eight streams of {prompts[0].max_tokens} tokens, undisturbed", highlight=False)
        undisturbed, began = play(cluster.base_url, prompts, salt="undisturbed")
        lasts_s = max(stream.times[-1] for stream in undisturbed) - began
        scenes: list[Scene] = [("", undisturbed, 0.0)]
        for name, rank, share in KILLED:
            title = f"{name} {rank}" if rank.isdecimal() else name
            console.print(f"The same streams; after {share * lasts_s:.1f} s the {title} is killed")
            victim = process_of(cluster.pid, rank)
            streams, moment = play(cluster.base_url, prompts, victim.kill, share * lasts_s, name)
            scenes.append((name, streams, moment - streams[0].times[0]))
        console.print("Stopping it")
    return Played(scenes)
