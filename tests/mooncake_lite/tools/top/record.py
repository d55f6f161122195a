"""Records what `/metrics` says during a busy run, for the tests of this folder, and draws the run.

    python -m tests.mooncake_lite.tools.top.record \\
        tests/mooncake_lite/tools/top/metrics.txt docs/explain/figures/top.svg

Starts a cluster of 2 prefill, 2 decode and 2 store ranks with an SSD tier, and keeps it busy with questions
about a few documents. The recording keeps what `mooncake-lite top` reads, of some scrapes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from mooncake_lite.cli import main as mooncake_lite
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.demo.document import document_text
from mooncake_lite.tools.top.sample import PREFIX, READ

FLAGS = [
    *("--prefill", "2", "--decode", "2", "--store", "2", "--ssd-bytes", "2GiB", "--max-num-seqs", "8"),
    *("--pool-bytes", "64MiB", "--lend-bytes", "24MiB", "--kv-cache-bytes", "192MiB"),
    *("--max-model-len", "2048"),
]
CLIENTS = 12
WARM_S = 60.0
"""Until the pool is full and its first blocks are on SSD."""

SCRAPES, PAUSE_S = 3, 4.0
MARK = "=== "
"""Before the seconds of each scrape."""


def keep_busy(url: str, seed: int, ended: threading.Event) -> None:
    """Ask about documents, some of them more often than others, until the end."""
    chance = random.Random(seed)
    words = document_text().split()
    documents = [" ".join(words[at : at + 100 + 30 * (at % 7)]) for at in range(0, 2400, 100)]
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        while not ended.is_set():
            document = documents[min(int(chance.expovariate(0.15)), len(documents) - 1)]
            body = {
                "prompt": f"{document}\n\nQuestion {chance.randrange(1000)}: what is it about?\nAnswer:",
                "max_tokens": chance.randrange(10, 40),
                "temperature": 0.8,
            }
            client.post("/v1/completions", json=body).raise_for_status()


def thinned(text: str) -> str:
    """The lines that `mooncake-lite top` reads, and one that it does not."""
    kept = (*READ, "num_requests_running")
    lines = (line for line in text.splitlines() if line.startswith(PREFIX))
    return "\n".join(line for line in lines if line[len(PREFIX) :].partition("{")[0].split()[0] in kept)


def record(url: str) -> str:
    """Some scrapes, each below a mark with the seconds since the first one."""
    parts, began = [], time.monotonic()
    for number in range(SCRAPES):
        time.sleep(max(0.0, began + number * PAUSE_S - time.monotonic()))
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10).text
        parts.append(f"{MARK}{time.monotonic() - began:.2f}\n{thinned(text)}\n")
    return "".join(parts)


def main(recording: Path, drawing: Path) -> None:
    """Record and draw one run."""
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-record-") as folder:
        log = Path(folder) / "log"
        with Cluster([*FLAGS, "--ssd-dir", f"{folder}/tier"], log) as cluster:
            cluster.wait_ready(240)
            ended = threading.Event()
            clients = [
                threading.Thread(target=keep_busy, args=(cluster.base_url, seed, ended))
                for seed in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            time.sleep(WARM_S)
            recording.write_text(record(cluster.base_url))
            mooncake_lite(
                ["top", "--url", cluster.base_url, "--interval", "5", "--once", "--svg", str(drawing)]
            )
            ended.set()
            for client in clients:
                client.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
