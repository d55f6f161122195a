"""Lab 1 at work: a model answers with plain attention, and two kernels are compared with torch.

Run by `mooncake-lite labs run 1`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

A model answers with the server's tuned kernels, and then with `attend` of 1c for the prompt and `add_tokens`
of 1b for the answer. The kernels of 1d and 1e run in Numba's simulator, on a small batch, so their seconds
would mean nothing. Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # Numba reads it when it is imported

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels_numba.attention import attention_cuda
from kernels_numba.attention.attention_decode import decode_v2
from kernels_numba.attention.attention_prefill import prefill_v1
from kernels_numba.checks import NO_WINDOW
from kernels_numba.gpu.backend_cuda import cuda
from kernels_numba.layers import paged_pass
from mooncake_lite import LLM, SamplingParams
from mooncake_lite.model.decode_pass import DecodePass

QUESTION = "Why do the keys and values of a sequence lie in pages? Because"
ANSWER_TOKENS = 32
CLOSE = 2e-4
NEW, TOKENS, PAGES, PAGE_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 3, 14, 4, 4, 2, 1, 8
"""Of a small batch, in which one sequence has new tokens."""
SCALE = HEAD_DIM**-0.5
LAUNCHES = {"1d": attention_cuda.launch_plain, "1e": attention_cuda.launch_shared}


def answered(model: str) -> list[dict[str, Any]]:
    """Let a model answer with the tuned kernels, and with the regions of 1b and 1c."""
    llm = LLM(*([model] if model else []), kv_cache_bytes="256MiB", enable_prefix_caching=False)
    tuned = answer(llm, "an answer, with the server's kernels")
    paged_pass.prefill_tiles = lambda *given: prefill_v1(*given[:9])  # type: ignore[attr-defined]
    paged_pass.decode_v3 = lambda *given: decode_v2(*given[:8])  # type: ignore[attr-defined]
    DecodePass.takes = lambda self, rows: False  # type: ignore[method-assign]
    mine = answer(llm, "an answer, with 1b and 1c")
    same = sum(one == other for one, other in zip(mine["tokens"], tuned["tokens"]))
    times = mine["seconds"] / tuned["seconds"]
    mine["gain"] = (
        f"with 1b and 1c, {same} of {ANSWER_TOKENS} tokens are those of the server's kernels, in {times:.2f} "
        "times their seconds"
    )
    return [mine, tuned]


def answer(llm: LLM, what: str) -> dict[str, Any]:
    """Ask the question."""
    llm.generate("Good morning", SamplingParams(max_tokens=2))  # the first call compiles
    began = time.perf_counter()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    (output,) = llm.generate(QUESTION, params)
    (found,) = output.outputs
    seconds, said = time.perf_counter() - began, f"{QUESTION}{found.text}"
    return {"what": what, "tokens": list(found.token_ids), "reused": 0, "seconds": seconds, "said": said}


def beside_torch() -> list[dict[str, Any]]:
    """Attend with 1d and 1e. Says how many numbers are not close to those of torch."""
    draw = np.random.default_rng(1)
    query = draw.standard_normal((NEW, HEADS, HEAD_DIM), np.float32)
    caches = draw.standard_normal((2, PAGES, KV_HEADS, PAGE_TOKENS, HEAD_DIM), np.float32)
    table = draw.permutation(PAGES).astype(np.int32)
    given = [query, *caches, table[None], np.array([NEW], np.int32), np.array([TOKENS], np.int32)]
    pages = torch.from_numpy(caches[:, table]).transpose(1, 2)  # keys and values, kv heads, pages, ...
    keys, values = pages.reshape(2, KV_HEADS, -1, HEAD_DIM)[:, :, :TOKENS]
    sees, mine = torch.ones(NEW, TOKENS).tril(TOKENS - NEW).bool(), torch.from_numpy(query).transpose(0, 1)
    expected = scaled_dot_product_attention(mine, keys, values, sees, enable_gqa=True).transpose(0, 1).numpy()
    seen = []
    for name, launch in LAUNCHES.items():
        arrays, out = [cuda.to_device(each) for each in given], cuda.to_device(np.zeros_like(query))
        launch(*arrays, SCALE, out, NO_WINDOW)
        wrong = int((~(np.abs(out.copy_to_host() - expected) < CLOSE)).sum())
        seen.append(
            {
                "what": f"{name} beside torch", "tokens": [wrong], "reused": 0, "seconds": None, "said": "",
                "kind": "counts", "how": "counted",
                "gain": f"{wrong} of {out.size} numbers of {name} are not those of torch",
            }
        )  # fmt: skip
    return seen


def main() -> None:
    """Play everything."""
    model = sys.argv[1]
    print(json.dumps([*beside_torch(), *(answered(model) if model != "-" else [])]))


if __name__ == "__main__":
    main()
