"""Lab 1 at work: a model answers with plain attention, and two kernels are compared with torch.

Run by `mooncake-lite labs run 1`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

`attend` of 1c computes the prompt and `add_tokens` of 1b the answer, in place of the server's tuned kernels.
The kernels of 1d and 1e run in Numba's simulator, on a small batch; their seconds mean nothing. Prints a list
of `Played` (mooncake_lite/labs/playing.py) as JSON.
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


def played(
    what: str, tokens: list[int], began: float, said: str = "", kind: str = "tokens"
) -> dict[str, Any]:
    """Return one part of the play."""
    seconds = time.perf_counter() - began
    return {"what": what, "tokens": tokens, "reused": 0, "seconds": seconds, "said": said, "kind": kind}


def answered(model: str) -> dict[str, Any]:
    """Let a model answer with the regions of 1b and 1c."""
    paged_pass.prefill_tiles = lambda *given: prefill_v1(*given[:9])  # type: ignore[attr-defined]
    paged_pass.decode_v3 = lambda *given: decode_v2(*given[:8])  # type: ignore[attr-defined]
    DecodePass.takes = lambda self, rows: False  # type: ignore[method-assign]
    llm = LLM(*([model] if model else []), kv_cache_bytes="256MiB")
    llm.generate("Good morning", SamplingParams(max_tokens=2))  # the first call compiles
    began = time.perf_counter()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    (output,) = llm.generate(QUESTION, params)
    (answer,) = output.outputs
    return played("an answer, with 1b and 1c", list(answer.token_ids), began, f"{QUESTION}{answer.text}")


def beside_torch() -> list[dict[str, Any]]:
    """Attend with 1d and 1e. Tells how many numbers are not close to those of torch."""
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
        began = time.perf_counter()
        arrays, out = [cuda.to_device(each) for each in given], cuda.to_device(np.zeros_like(query))
        launch(*arrays, SCALE, out, NO_WINDOW)
        wrong = int((~(np.abs(out.copy_to_host() - expected) < CLOSE)).sum())
        what = f"{name}: {wrong} of {out.size} numbers are not those of torch"
        seen.append(played(what, [wrong], began, kind="counts"))
    return seen


def main() -> None:
    """Play everything."""
    print(json.dumps([answered(sys.argv[1]), *beside_torch()]))


if __name__ == "__main__":
    main()
