"""Load or compute: a prompt whose first blocks are in the pool, at two speeds of the engine.

Run by `bench.ideas`. With the times of the shipped profile, loading is faster. With an engine that is
SPEED_UP times as fast, computing is faster: the conductor finds that out, and then has the rank load once in
a while only. The rank measures both stages: messages and HTTP take longer than a fast engine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import urllib.request
from pathlib import Path

import msgspec

from mooncake_lite.bench.engine_sides import Prompts, random_prompts
from mooncake_lite.bench.ideas_cluster import EMULATED, started
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.config import ServeConfig
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.file import profile_of, write_profile
from scheduler.costs.load_or_compute import PROBE_EVERY

SPEED_UP = 1000
"""As of a very small model whose KV is as large as the default model's."""

ROUNDS = 3
"""Of PROBE_EVERY + 1 requests on the fast engine: one of them loads."""

SLOW_REQUESTS = 5


def run(folder: Path, vocab: int, tokens: int, known: int) -> list[Row]:
    """Measure prompts of `tokens` tokens, `known` of which are in the pool. Raises ClusterError."""
    flags = [str(folder), *EMULATED, "--mode", "colocated", "--compute", "1", "--store", "1"]
    flags += ["--prefix-sharing", "off"]  # the prefix is in the pool, not in the rank's own pages
    where = f"the KV of {tokens} tokens, {known} of them in the pool"
    with started(flags) as port:
        loaded, computed = _slow(port, vocab, tokens, known)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        fast = str(faster_profile(folder, Path(place) / "fast.json"))
        with started([*flags, "--profile", fast]) as port:
            chosen, probes = _fast(port, vocab, tokens, known)
    return [
        Row(f"load: {where}", "ms", loaded, Other("compute", computed), None, SLOW_REQUESTS),
        Row(
            f"compute, engine {SPEED_UP:,} times as fast: {where}",
            *("ms", chosen, Other("load", probes), None, ROUNDS),
        ),
    ]


def faster_profile(folder: Path, path: Path) -> Path:
    """Write the shipped profile with its times divided by SPEED_UP. Raises ConfigError when there is none."""
    profile = profile_of(ServeConfig(engine="emulated"), folder, load_config(folder))
    section = msgspec.structs.replace(profile.compute, time_scale=1 / SPEED_UP)
    write_profile(path, profile.with_section("compute", section))
    return path


def _slow(port: int, vocab: int, tokens: int, known: int) -> tuple[float, float]:
    """Return the medians with the known prefix, and with other tokens."""
    first, *others = _prompts(SLOW_REQUESTS, tokens, known, vocab)
    computed = [ask(port, prompt)[0] for prompt in random_prompts(SLOW_REQUESTS, tokens, vocab, seed=1)]
    ask(port, first)
    return statistics.median(ask(port, prompt)[0] for prompt in others), statistics.median(computed)


def _fast(port: int, vocab: int, tokens: int, known: int) -> tuple[float, float]:
    """Return the medians of the requests that computed the prefix, and of those that loaded it."""
    first, *others = _prompts(ROUNDS * (PROBE_EVERY + 1), tokens, known, vocab)
    ask(port, first)
    found = [ask(port, prompt) for prompt in others]
    computed = [taken for taken, reused in found if not reused]
    loaded = [taken for taken, reused in found if reused >= known]
    if not computed or not loaded:
        raise ClusterError(
            f"of {len(found)} requests to a fast engine {len(loaded)} loaded their prefix; "
            "some should have loaded it, and some computed it"
        )
    return statistics.median(computed), statistics.median(loaded)


def _prompts(count: int, tokens: int, known: int, vocab: int) -> Prompts:
    """Make a prompt, and `count` others with the same first tokens."""
    (prefix,) = random_prompts(1, known, vocab)
    return [prefix + tail for tail in random_prompts(count + 1, tokens - known, vocab)]


def ask(port: int, prompt: list[int]) -> tuple[float, int]:
    """Ask for one token. Return the milliseconds of loading and computing on the rank, and the prompt tokens
    that were loaded.
    """
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    request.add_header("x-mooncake-lite-trace", "1")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            answer = json.load(reply)
    except (OSError, ValueError) as error:
        raise ClusterError(f"an answer of the cluster broke off: {error}") from None
    spans = {span["stage"]: span for span in answer["mooncake_lite"]["spans"]}
    taken = sum(spans[stage]["seconds"] for stage in ("load", "compute") if stage in spans)
    return 1e3 * taken, len(prompt) - spans["compute"]["count"]
