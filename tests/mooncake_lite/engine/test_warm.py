"""After compiling ahead the warm-up of a rank compiles nothing, and after the warm-up no request does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mooncake_lite.model.conftest import tiny_model
from tests.python import printed_by

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from kernels_numba.ahead import compile_ahead, steps_of
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.compiling import kernel_use
from mooncake_lite.engine.warm import warm_up
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from scheduler.instance import JobId
from scheduler.instance.step import Chunk, Draw


def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels_numba.")]
    jitted = {id(f): f for module in modules for f in vars(module).values() if hasattr(f, "signatures")}
    return sum(len(f.signatures) for f in jitted.values())


compile_ahead(steps_of(kernel_use(Path(sys.argv[1]), sys.argv[2], "cpu", "auto", sys.argv[3])), print)
ahead = compiled()
engine = Engine(load_model(Path(sys.argv[1]), sys.argv[2]), 64, 64, sys.argv[3])
warm_up(engine)
before = compiled()
draw = Draw(Sampling(0.7, 0.9, 5, 3, 0.1, 1.1, 0.5, 0.5, {3: 1.0}, 2, 3), [1, 2, 3], 1, frozenset({0}))
ends, first = {}, 0
for name, length in (("a", 150), ("b", 20), ("c", 64)):
    pages = tuple(range(first, first + 11))
    first += 11
    for start in range(0, length, 48):
        ids = tuple(range(start, min(length, start + 48)))
        last = start + len(ids) == length
        engine.compute([Chunk(JobId(name, 0), ids, start, pages, (draw,) if last else (), True)])
    blocks = np.zeros((-(-length // 64), *engine.block_shape), engine.block_dtype)
    engine.store_blocks(pages[: -(-length // 16)], blocks)
    engine.load_blocks(pages[: -(-length // 16)], blocks)
    ends[name] = length, pages
for step in range(3):
    engine.compute(
        [Chunk(JobId(n, 0), (7,), e + step, pages, (draw,), False) for n, (e, pages) in ends.items()]
    )
print(ahead >= 5, before - ahead, compiled() - before)
"""


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "none"), ("bfloat16", "int8")])
def test_after_compiling_ahead_neither_the_warm_up_nor_a_request_compiles(
    dtype: str, codec: str, tmp_path: Path
) -> None:
    tiny_model("llama", tmp_path)
    lines = printed_by("-c", PROGRAM, str(tmp_path), dtype, codec, limit_s=240).splitlines()
    assert lines[-1] == "True 0 0"
