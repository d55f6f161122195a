"""What a cluster records while it serves replays to the same effects in another process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake_lite.conductor.recording import Recording
from mooncake_lite.launch.serve_child import Cluster
from tests.cluster import machine
from tests.patience import wait_until

pytestmark = pytest.mark.cluster

QUESTION = "Tell me again, in your own words, what the sailor said about the lighthouse keeper. " * 8


def kinds(path: Path) -> Counter[str]:
    """How many events of each kind have reached the file."""
    recording = Recording(path)
    try:
        return Counter(type(entry.event).__name__ for entry in recording.entries())
    finally:
        recording.close()


def ask_for_all_that_can_happen(url: str) -> None:
    """A cold prompt, a hit, a client that leaves, and more requests than may wait."""
    keeps = machine.KEEP_ALL
    with httpx.Client(timeout=120, trust_env=False, limits=keeps) as http, ThreadPoolExecutor(31) as pool:

        def ask(prompt: str | list[int]) -> httpx.Response:
            return http.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 2})

        cold, hit = ask(QUESTION), ask(QUESTION)
        assert cold.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert hit.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        body = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        long = pool.submit(ask, list(range(3000, 4200)))
        assert wait_until(lambda: machine.open_requests(url) > 0, 20.0)
        codes = Counter(answer.status_code for answer in pool.map(ask, [f"Verse {n}:" for n in range(30)]))
        assert long.result().status_code == 200
    assert codes[429] > 0


def test_a_recorded_run_replays_to_the_same_effects_in_another_process(
    serving: Cluster, serving_record: Path
) -> None:
    ask_for_all_that_can_happen(serving.base_url)
    assert wait_until(lambda: kinds(serving_record)["RequestCancelled"] > 0, 10.0)

    for hash_seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_lite", "replay-events", str(serving_record)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " finished" in done.stdout
        assert " rejected" in done.stdout
    assert stat.S_IMODE(serving_record.stat().st_mode) == 0o600
    assert b"sailor" not in serving_record.read_bytes()
