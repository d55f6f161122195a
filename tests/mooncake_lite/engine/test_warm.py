"""After a rank's warm-up no request waits for a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mooncake_lite.model.conftest import tiny_model

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from mooncake_lite.engine import Engine
from mooncake_lite.engine.sequence import Sequence
from mooncake_lite.engine.warm import warm_up
from mooncake_lite.messages import Sampling
from mooncake_lite.model import load_model


def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels_numba.")]
    jitted = {id(f): f for module in modules for f in vars(module).values() if hasattr(f, "signatures")}
    return sum(len(f.signatures) for f in jitted.values())


engine = Engine(load_model(Path(sys.argv[1]), sys.argv[2]), 64, 64, sys.argv[3])
warm_up(engine)
before = compiled()
sequences = []
for name, length in (("a", 150), ("b", 20), ("c", 64)):
    sequence = Sequence(name, list(range(length)), Sampling(0.7, 0.9, 5, 3), 8, frozenset(), 512)
    engine.reserve(sequence, length + 8)
    token = None
    while token is None:
        token = engine.prefill_chunk(sequence, 48)
    sequence.append(token)
    blocks = np.zeros((-(-length // 64), *engine.block_shape), engine.block_dtype)
    engine.store_blocks(sequence, 0, blocks)
    engine.load_blocks(sequence, 0, blocks)
    sequences.append(sequence)
for _ in range(3):
    for sequence, token in zip(sequences, engine.decode_step(sequences)):
        sequence.append(token)
print(before >= 5, compiled() - before)
"""


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "none"), ("bfloat16", "int8")])
def test_after_warming_up_requests_compile_nothing(dtype: str, codec: str, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), dtype, codec],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "True 0\n"), done.stderr
