"""A peer of the engine, in a process of its own: answers prompts and says how long it took.

    python -c ENGINE_WORKER.PY transformers|llama.cpp MODEL THREADS

MODEL is a model folder for transformers, a GGUF file for llama.cpp. Started by `bench.engine_peers` as text:
beside its file lie modules named as ours are, and its interpreter may have nothing of ours.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

PAGE_TOKENS = 256
"""Of the KV cache of `generate_batch`, its own default."""


class Transformers:
    """transformers in float32: `generate`, and `generate_batch`, its continuous batching."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self._config = transformers.GenerationConfig
        self._cache = transformers.ContinuousBatchingConfig

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The answers' tokens. The prompts are of one length, so that nothing is padded."""
        ids = self._torch.tensor(prompts)
        everything = self._torch.ones_like(ids)
        with self._torch.inference_mode():
            found = self._model.generate(ids, attention_mask=everything, max_new_tokens=new, do_sample=False)
        return found[:, ids.shape[1] :].tolist()

    def generate_batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
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


class LlamaCpp:
    """llama.cpp over the weights as published."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            path, n_ctx=0, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The answers' tokens, one prompt after the other."""
        return [self._answer(prompt, new) for prompt in prompts]

    def _answer(self, prompt: list[int], new: int) -> list[int]:
        self._llama.reset()
        tokens: list[int] = []
        for token in self._llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            tokens.append(token)
            if len(tokens) == new:
                break
        return tokens


PEERS: dict[str, Callable[[str, int], Any]] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


def main() -> None:
    """Load a peer; then one JSON order a line, one JSON answer a line, until stdin ends."""
    name, path, threads = sys.argv[1:4]
    logging.disable(logging.WARNING)
    peer = PEERS[name](path, int(threads))
    answer(0)
    for line in sys.stdin:
        order = json.loads(line)
        way, prompts, new = getattr(peer, order["do"]), order["prompts"], order["new"]
        began = time.perf_counter()
        found = way(prompts, new)
        taken = time.perf_counter() - began
        if [len(tokens) for tokens in found] != [new] * len(prompts):
            raise RuntimeError(f"{name} gave {[len(tokens) for tokens in found]} tokens, not {new} each")
        answer(taken)
    os._exit(0)  # no destructor of a library of threads may delay or spoil the end


def answer(value: Any) -> None:
    """One line on stdout."""
    sys.stdout.write("ANSWER" + json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
