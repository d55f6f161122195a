"""A peer in a process of its own: takes one JSON order per line on stdin, and answers with a line on stdout.

    python -c PEER_PROGRAM.PY transformers MODEL_FOLDER THREADS
    python -c PEER_PROGRAM.PY llama.cpp GGUF_FILE THREADS
    python -c PEER_PROGRAM.PY store|mooncake.store MASTER_ADDRESS SEGMENT_BYTES

Started by `bench.peers` as text: beside its file lie modules named as ours are, and its interpreter may have
nothing of ours. The clients of both stores run the same program, so it needs the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

PAGE_TOKENS = 256
"""Of the KV cache of `generate_batch`, its own default."""

LOCAL_BUFFER_BYTES = 64 * 2**20

Tokens = list[list[int]]


class Engine:
    """A peer of the engine: each method but `answer` and `close` is a way to answer prompts."""

    def answer(self, way: str, prompts: Tokens, new: int) -> float:
        """Answer each prompt with `new` tokens; return the seconds."""
        began = time.perf_counter()
        found = getattr(self, way)(prompts, new)
        taken = time.perf_counter() - began
        if [len(tokens) for tokens in found] != [new] * len(prompts):
            raise RuntimeError(f"{way} gave {[len(tokens) for tokens in found]} tokens, not {new} each")
        return taken

    def close(self) -> None:
        """End with the process."""


class Transformers(Engine):
    """transformers in float32: `generate`, and `generate_batch`, its continuous batching."""

    def __init__(self, folder: str, threads: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(int(threads))
        transformers.utils.logging.set_verbosity_error()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self._config = transformers.GenerationConfig
        self._cache = transformers.ContinuousBatchingConfig

    def generate(self, prompts: Tokens, new: int) -> Tokens:
        """The answers' tokens. The prompts are of one length, so that nothing is padded."""
        ids = self._torch.tensor(prompts)
        everything = self._torch.ones_like(ids)
        with self._torch.inference_mode():
            found = self._model.generate(ids, attention_mask=everything, max_new_tokens=new, do_sample=False)
        return found[:, ids.shape[1] :].tolist()

    def generate_batch(self, prompts: Tokens, new: int) -> Tokens:
        """The same with continuous batching.

        Its KV cache has room for twice these prompts and answers. By default it takes most of the memory at
        each call, and the time to fill that with zeros is longer than the work.
        """
        config = self._config(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
        blocks = sum(-(-(len(prompt) + new) // PAGE_TOKENS) for prompt in prompts)
        cache = self._cache(page_size=PAGE_TOKENS, num_blocks=2 * blocks)
        with self._torch.inference_mode():
            found = self._model.generate_batch(
                prompts, config, continuous_batching_config=cache, warmup=False
            )
        return [each.generated_tokens for each in found.values()]


class LlamaCpp(Engine):
    """llama.cpp over the weights as published."""

    def __init__(self, path: str, threads: str) -> None:
        import llama_cpp

        each = int(threads)
        self._llama = llama_cpp.Llama(path, n_ctx=0, n_threads=each, n_threads_batch=each, verbose=False)

    def generate(self, prompts: Tokens, new: int) -> Tokens:
        """The answers' tokens, one prompt after the other."""
        return [self._tokens(prompt, new) for prompt in prompts]

    def _tokens(self, prompt: list[int], new: int) -> list[int]:
        self._llama.reset()
        tokens: list[int] = []
        for token in self._llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            tokens.append(token)
            if len(tokens) == new:
                break
        return tokens


class Store:
    """A client of our store, or of Mooncake's. It does what it is told, and answers with times."""

    def __init__(self, module: str, master: str, segment: str) -> None:
        self._store = importlib.import_module(module).MooncakeDistributedStore()
        values = ("127.0.0.1", "P2PHANDSHAKE", int(segment), LOCAL_BUFFER_BYTES, "tcp", "", master)
        if status := self._store.setup(*values):
            raise RuntimeError(f"the client could not be set up: {status}")

    def put(self, prefix: str, count: int, nbytes: int) -> list[float]:
        """Seconds of each put of a new object."""
        value = os.urandom(nbytes)
        return [self._timed(0, self._store.put, f"{prefix}{number}", value) for number in range(count)]

    def get(self, prefix: str, count: int, runs: int, nbytes: int) -> list[float]:
        """Seconds of each of `runs` gets, which go round `count` objects."""
        return [self._timed(nbytes, self._store.get, f"{prefix}{at % count}") for at in range(runs)]

    def _timed(self, expected: int, act: Callable[..., Any], *values: Any) -> float:
        """Seconds of one act, which must give this status, or so many bytes."""
        began = time.perf_counter()
        found = act(*values)
        taken = time.perf_counter() - began
        if (found if isinstance(found, int) else len(found)) != expected:
            raise RuntimeError(f"the store answered {found!r:.80}")
        return taken

    def together(
        self, prefix: str, first: int, count: int, runs: int, nbytes: int, start: float
    ) -> tuple[float, float]:
        """(start, end) of `runs` times getting `count` objects, begun at a time on the monotonic clock."""
        keys = [f"{prefix}{number}" for number in range(first, first + count)]
        return self._span(start, runs, count * nbytes, lambda: self._store.get_batch(keys))

    def copy(
        self, path: str, first: int, count: int, runs: int, nbytes: int, start: float
    ) -> tuple[float, float]:
        """(start, end) of copying as many bytes out of shared memory: what `together` cannot undercut."""
        with open(path, "r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0))
        ranges = [(number * nbytes, (number + 1) * nbytes) for number in range(first, first + count)]
        return self._span(start, runs, count * nbytes, lambda: [bytes(view[a:b]) for a, b in ranges])

    def _span(
        self, start: float, runs: int, nbytes: int, act: Callable[[], list[bytes]]
    ) -> tuple[float, float]:
        time.sleep(max(0.0, start - time.monotonic()))
        began = time.monotonic()
        for _ in range(runs):
            if sum(map(len, act())) != nbytes:
                raise RuntimeError("an object is missing or short")
        return began, time.monotonic()

    def close(self) -> None:
        """Leave the master."""
        self._store.close()


def main() -> None:
    """Start a peer; then one JSON order a line, one JSON answer a line, until stdin ends."""
    name, *values = sys.argv[1:]
    logging.disable(logging.WARNING)
    engines = {"transformers": Transformers, "llama.cpp": LlamaCpp}
    peer = engines[name](*values) if name in engines else Store(name, *values)
    answer(0)
    for line in sys.stdin:
        order = json.loads(line)
        answer(getattr(peer, order.pop("do"))(**order))
    peer.close()
    os._exit(0)  # no destructor of a library of threads may delay or spoil the end


def answer(value: Any) -> None:
    """One line on stdout."""
    sys.stdout.write("ANSWER" + json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
