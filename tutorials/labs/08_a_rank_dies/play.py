"""Lab 8 at work: ranks of a live cluster are killed under streams, with the four functions of a tree.

Run by `mooncake-lite labs run 8`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON. The ranks sleep for as long as the model
would compute, and invent its tokens: so a small machine plays a cluster of ten processes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import load_config
from mooncake_lite.tools.bench.cluster import model_folder, scaled_profile, started
from mooncake_lite.tools.streams import Prompt, Stream, play, process_of

RANKS = ("--prefill", "2", "--decode", "3", "--store", "2")
SIZES = ("--pool-bytes", "400MiB", "--max-model-len", "4096", "--max-num-seqs", "8", "--dead-after-s", "2")
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 4, 300, 64

SCENES = (
    ("decode rank 3 killed", "3", "kill", False),
    ("decode rank 4 suspended", "4", "suspend", False),
    ("prefill rank 1 killed", "1", "kill", True),
    ("store rank 6 killed", "6", "kill", False),
)
"""What happens, to which rank, how, and whether before the first tokens or while answers are under way."""


def reused(cluster: Cluster) -> int:
    """How many blocks of prompts and answers were found in the pool so far."""
    text = httpx.get(f"{cluster.base_url}/metrics", timeout=10, trust_env=False).text
    name = "mooncake_lite_pool_hits_dram_total"
    return int(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)))


def played(cluster: Cluster, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Play the streams undisturbed, and then each scene. Its seconds are the longest pause of a stream."""
    calm, _ = play(cluster.base_url, prompts, salt="calm")
    begin_s = max(one.times[1] - one.times[0] for one in calm)
    end_s = min(one.times[-1] - one.times[0] for one in calm)
    seen = [
        row("nothing: longest pause", calm, calm, 0, max(one.longest_gap_s(first=False) for one in calm)),
        row("nothing: first token", calm, calm, 0, begin_s),
    ]
    for what, rank, how, is_early in SCENES:
        before = reused(cluster)
        act = getattr(process_of(cluster.pid, rank), how)
        at_s = begin_s / 2 if is_early else (begin_s + end_s) / 2
        streams, moment = play(cluster.base_url, prompts, act, at_s, salt=what)
        pause_s = max(one.longest_gap_s(moment, first=is_early) for one in streams)
        title = f"{what}: {'first token' if is_early else 'longest pause'}"
        seen.append(row(title, streams, calm, reused(cluster) - before, pause_s))
    wrong, pause_s = sum(one["tokens"][0] for one in seen), max(one["seconds"] for one in seen)
    seen[-1]["gain"] = (
        f"{len(SCENES)} ranks fail, each under {STREAMS} streams: {wrong} texts are wrong, and the longest "
        f"pause is {pause_s:.1f} s"
    )
    return seen


def row(what: str, streams: list[Stream], calm: list[Stream], blocks: int, seconds: float) -> dict[str, Any]:
    """One line of the table. Its tokens: how many texts are not those of the calm streams."""
    wrong = sum(one.text != other.text or bool(one.error) for one, other in zip(streams, calm))
    return {
        "what": what, "tokens": [wrong], "reused": blocks, "seconds": seconds, "said": "", "kind": "counts",
    }  # fmt: skip


def main() -> None:
    """Play everything."""
    folder = model_folder(Path(sys.argv[1]) if sys.argv[1] not in ("", "-") else None)  # for its tokens
    draw, ids = random.Random("lab 8"), range(1000, load_config(folder).vocab_size)
    prompts = [
        Prompt(draw.choices(ids, k=PROMPT_TOKENS), NEW_TOKENS, number % 2, number)
        for number in range(STREAMS)
    ]
    flags = [str(folder), "--engine", "emulated", *RANKS, *SIZES]
    with started(flags, scaled_profile(folder, 1.0)) as cluster:
        print(json.dumps(played(cluster, prompts)))


if __name__ == "__main__":
    main()
