"""Many ranks that sleep instead of computing: every answer is right, and the machine is hardly used.

`make test` runs 12 ranks, `make soak` 40 ranks with the block size of the default model. With `pytest -s` the
test prints the figures that docs/how-to/run-many-ranks.md quotes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mooncake_lite.launch.serve_child import Cluster
from tests import emulation
from tests.cluster import machine

START_LIMIT_S = 180.0
ANSWER_TOKENS = 24

RANK_BYTES = 90 * 2**20
"""Private memory of a rank that sleeps, besides what it lends to others."""

SESSION_BYTES = 8 * 2**30
CONDUCTOR_SHARE = 0.5

SMALL: list[str] = [*("--prefill", "5", "--decode", "5", "--store", "1"), *("--staging-bytes", "1MiB")]
LARGE = [
    *("--prefill", "18", "--decode", "18", "--store", "3", "--pool-bytes", "384MiB"),
    *("--staging-bytes", "32MiB", "--start-timeout-s", str(START_LIMIT_S)),
]


def prompts(count: int) -> list[list[int]]:
    """Of 100 to 600 tokens, in conversations of ten that share their first 64 to 320 tokens."""
    chosen = random.Random(11)
    found = []
    for number in range(count):
        if number % 10 == 0:
            prefix = [chosen.randrange(3, emulation.VOCABULARY) for _ in range(64 * chosen.randint(1, 5))]
        own = [chosen.randrange(3, emulation.VOCABULARY) for _ in range(chosen.randint(36, 280))]
        found.append(prefix + own)
    chosen.shuffle(found)
    return found


@contextmanager
def peak_bytes(processes: list[psutil.Process]) -> Iterator[list[int]]:
    """Yield a list whose one entry is the most memory that was seen until now; shared memory counts once."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(2.0):
            peak[0] = max(peak[0], machine.resident_bytes(processes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak[0] = max(peak[0], machine.resident_bytes(processes))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def ask_all(url: str, asked: list[list[int]]) -> list[tuple[list[int], int]]:
    """(token ids of the answer, cached tokens) by prompt."""

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        response = client.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
        assert response.status_code == 200, response.text
        answer = response.json()
        words = answer["choices"][0]["text"].replace("><", "> <").split()
        return [int(word[1:-1]) for word in words], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with httpx.Client(timeout=300.0, limits=machine.KEEP_ALL) as client, ThreadPoolExecutor(48) as pool:
        return list(pool.map(ask, asked))


def shown(tokens: list[int]) -> list[int]:
    """Those whose text a client sees: special tokens have none."""
    return [token for token in tokens if token not in (1, emulation.EOS)]


def assert_loads_no_heavy_library(process: psutil.Process) -> None:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert not any(name in maps for name in ("libtorch", "llvmlite", "kernels_numba", "numba")), maps


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_many_sleeping_ranks_give_the_answers_of_one_within_the_memory_of_a_laptop(
    tmp_path: Path, soak: int
) -> None:
    shape, flags, count = (emulation.TINY, SMALL, 200) if soak == 1 else (emulation.SMOL, LARGE, 2000)
    folder = emulation.model_folder(tmp_path / "model", shape, context=1024)
    profile = emulation.profile_file(folder)
    asked = prompts(count)
    flags = [str(folder), "--engine", "emulated", "--profile", str(profile), *flags]
    with Cluster([*flags, "--max-queue", "100", "--kv-cache-bytes", "256MiB"], tmp_path / "log") as cluster:
        start_s = cluster.wait_ready(START_LIMIT_S)
        processes = machine.family(cluster.pid)
        ranks = {name: one for one in processes if (name := machine.name_of(one))}
        for process in ranks.values():
            assert_loads_no_heavy_library(process)
        staging = int(flags[flags.index("--staging-bytes") + 1].removesuffix("MiB")) * 2**20
        private = ranks["1"].memory_full_info().uss
        assert private < RANK_BYTES + staging
        used_before, began = {name: cpu_s(one) for name, one in ranks.items()}, time.monotonic()
        with peak_bytes(processes) as peak:
            answers = ask_all(cluster.base_url, asked)
        took_s = time.monotonic() - began
        used = {name: cpu_s(one) - used_before[name] for name, one in ranks.items()}
    share = used["conductor"] / took_s
    cached = sum(tokens for _, tokens in answers) / sum(map(len, asked))
    print(
        f"\n{len(ranks) - 2} ranks on {len(os.sched_getaffinity(0))} cores: started in "
        f"{start_s:.1f} s; {count} requests in {took_s:.1f} s; {cached:.0%} of prompt tokens cached; peak "
        f"{peak[0] / 2**20:,.0f} MiB; rank 1 {private / 2**20:.0f} MiB private; cores used: all "
        f"{sum(used.values()) / took_s:.2f}, conductor {share:.2f}, gateway {used['gateway'] / took_s:.2f}"
    )
    expected = [shown(emulation.answer(prompt, ANSWER_TOKENS)) for prompt in asked]
    assert [tokens for tokens, _ in answers] == expected
    assert cached > 0.1
    assert peak[0] < SESSION_BYTES
    if soak > 1:
        assert share < CONDUCTOR_SHARE
