"""The sides of the engine's benchmark: ours in this process, and each peer in a process of its own.

Used by `engine` and `ideas`. The peers are transformers, and llama.cpp where it is installed. They have
processes of their own, because each library has its own pool of threads, and threads that have just computed
spin on the cores for a while when others begin.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.engine.local import generate_all, load_visibly
from mooncake_lite.errors import ClusterError
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model
from mooncake_lite.tools.bench.peers import Worker, interpreter_with
from mooncake_lite.tools.bench.result import Side
from scheduler.instance import Limits

THREADS = min(2, usable_cores())
"""Of each side, on every machine: figures of machines with more cores compare."""

PASS = Limits(tokens=2048, prefills=16)
"""Of one forward pass. The peers compute a whole prompt in one pass, or in passes of 512 tokens."""

LIMIT_S = 1800.0
"""For one answer: 16 prompts of 2,048 tokens on a slow machine with others at work."""

Prompts = list[list[int]]

WARM_UP: Prompts = [[1] * 32] * 2

Answer = Callable[[Prompts, int], float]
"""Answers each prompt with that many new tokens, none of which ends an answer; returns the seconds."""


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int = 0) -> Prompts:
    """Make prompts of random tokens, which no cache knows. The first eighth of the ids is left out: control
    tokens and single bytes are there."""
    chosen = random.Random(f"{seed} {count} {tokens}")
    return [[chosen.randrange(vocab_size // 8, vocab_size) for _ in range(tokens)] for _ in range(count)]


class Ours:
    """The model of a folder, warm: blocks as published for a few tokens, where the folder has them."""

    def __init__(self, folder: Path) -> None:
        self.model: Model = load_visibly(folder, "float32", "cpu", "auto", THREADS)
        self.answer(WARM_UP, 2)

    def prompts(self, count: int, tokens: int) -> Prompts:
        """Make prompts of random tokens for this model."""
        return random_prompts(count, tokens, self.model.config.vocab_size)

    def token_times(self, prompts: Prompts, new: int, limits: Limits = PASS) -> list[list[float]]:
        """Answer greedily; return when each token came, in seconds since the start, for each prompt."""
        times: list[list[float]] = [[] for _ in prompts]
        began = time.perf_counter()
        for number, _ in generate_all(self.model, prompts, Sampling(0.0), new, frozenset(), limits):
            times[number].append(time.perf_counter() - began)
        return times

    def answer(self, prompts: Prompts, new: int) -> float:
        """Answer greedily; return the seconds."""
        return max(times[-1] for times in self.token_times(prompts, new))


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to answer. answer: None where the peer is missing; `note` then says why."""

    name: str
    answer: Answer | None
    note: str = ""

    def measured(self, figure: Callable[[Answer], float]) -> Side:
        """Return the side that a figure of this peer is on."""
        return Side(self.name, None if self.answer is None else partial(figure, self.answer), self.note)


@dataclass(frozen=True, slots=True)
class Peers:
    """All ways to answer that are not ours."""

    generate: Peer
    generate_batch: Peer
    llama: Peer


@contextlib.contextmanager
def start_peers(folder: Path) -> Iterator[Peers]:
    """Load what is installed, and end its processes afterwards.

    folder   of the model: transformers loads its tensors, llama.cpp its GGUF file
    """
    with contextlib.ExitStack() as stack:
        worker = _start(stack, "transformers", "transformers", folder, "peers")
        files = sorted(folder.glob("*.gguf"))
        llama: Worker | str = f"llama.cpp needs a GGUF file, and {folder} has {len(files)}"
        if len(files) == 1:
            llama = _start(stack, "llama.cpp", "llama_cpp", files[0], "peers-llama")
        yield Peers(
            _peer("transformers generate, float32", worker, "generate"),
            _peer("transformers generate_batch, float32", worker, "generate_batch"),
            _peer("llama.cpp, GGUF as published", llama, "generate"),
        )


def _start(stack: contextlib.ExitStack, name: str, package: str, path: Path, extra: str) -> Worker | str:
    """Start a peer and wait until it has answered once; or say why it cannot be used."""
    python = interpreter_with(package)
    if python is None:
        return f"{name} is not installed: pip install 'mooncake-lite[{extra}]'"
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # a peer needs nothing of ours
    worker = Worker([name, str(path), str(THREADS)], python, environment, LIMIT_S)
    stack.callback(worker.close)
    try:
        worker.answer()
        worker.ask("answer", way="generate", prompts=WARM_UP, new=2)
    except ClusterError:
        return f"{name} is installed for {python} and cannot load {path}"
    return worker


def _peer(name: str, worker: Worker | str, way: str) -> Peer:
    if isinstance(worker, str):
        return Peer(name, None, worker)
    return Peer(name, lambda prompts, new: float(worker.ask("answer", way=way, prompts=prompts, new=new)))
