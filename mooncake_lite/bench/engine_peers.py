"""The engine's peers, each in a process of its own: transformers, and llama.cpp where it is installed.

Used by the `engine_*` benchmarks. A process of its own, because each library has its own pool of threads, and
threads that have just computed spin on the cores for a while when others begin.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.bench.engine_sides import Answer, Prompts, Side
from mooncake_lite.bench.store_peer import VARIABLE
from mooncake_lite.bench.worker import Worker
from mooncake_lite.errors import ClusterError

LIMIT_S = 1800.0
"""For one answer: 16 prompts of 2,048 tokens on a slow machine with others at work."""

WARM_UP: Prompts = [[1] * 32] * 2

GENERATE = "transformers generate, float32"
GENERATE_BATCH = "transformers generate_batch, float32"
LLAMA = "llama.cpp, GGUF as published"


@dataclass(frozen=True, slots=True)
class Peers:
    """The sides beside ours. One whose package is missing says so in its note."""

    generate: Side
    generate_batch: Side
    llama: Side


@contextlib.contextmanager
def start_peers(folder: Path, threads: int) -> Iterator[Peers]:
    """Load what is installed, and end its processes afterwards.

    folder   of the model: transformers loads its tensors, llama.cpp its GGUF file
    """
    with contextlib.ExitStack() as stack:
        worker = _start(stack, "transformers", "transformers", folder, threads, "peers")
        files = sorted(folder.glob("*.gguf"))
        llama: Worker | str = f"llama.cpp needs a GGUF file, and {folder} has {len(files)}"
        if len(files) == 1:
            llama = _start(stack, "llama.cpp", "llama_cpp", files[0], threads, "peers-llama")
        yield Peers(
            _side(GENERATE, worker, "generate"),
            _side(GENERATE_BATCH, worker, "generate_batch"),
            _side(LLAMA, llama, "generate"),
        )


def interpreter_with(package: str) -> str | None:
    """Return a Python that has this package: this one, or that of $MOONCAKE_LITE_PEER_PYTHON."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    other = os.environ.get(VARIABLE)
    if not other:
        return None
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run([other, "-c", probe], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return other if done.returncode == 0 else None


def _start(
    stack: contextlib.ExitStack, name: str, package: str, path: Path, threads: int, extra: str
) -> Worker | str:
    """Start a peer and wait until it has answered once; or say why it cannot be used."""
    python = interpreter_with(package)
    if python is None:
        return f"{name} is not installed: pip install 'mooncake-lite[{extra}]'"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # a peer needs nothing of ours
    worker = Worker("engine_worker.py", [name, str(path), str(threads)], python, environment, LIMIT_S)
    stack.callback(worker.close)
    try:
        worker.answer()
        worker.ask("generate", prompts=WARM_UP, new=2)
    except ClusterError:
        return f"{name} is installed for {python} and cannot load {path}"
    return worker


def _side(name: str, worker: Worker | str, way: str) -> Side:
    if isinstance(worker, str):
        return Side(name, None, worker)
    return Side(name, _answer(worker, way))


def _answer(worker: Worker, way: str) -> Answer:
    def answer(prompts: Prompts, new: int) -> float:
        return float(worker.ask(way, prompts=prompts, new=new))

    return answer
