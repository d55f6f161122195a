"""Measures what an exchange takes between two ranks of this machine that compute together.

Called by `mooncake-lite profile`, and run by it as a process of its own: the second rank. Explained in
docs/explain/emulation.md.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from functools import partial

import numpy as np

from mooncake_lite.model.config import ModelConfig
from mooncake_lite.profiles.compute import CHUNK_TOKENS
from mooncake_lite.profiles.file import ExchangeSection
from mooncake_lite.tools.bench.result import timed
from transport.exchange import SharedExchange

MEMBERS, PIECE_BYTES, RUNS, LIMIT_S = 2, 1 << 20, 300, 60.0


def measure_exchange(model: ModelConfig) -> ExchangeSection:
    """Measure sums of the hidden states of one token, and of a chunk of a prompt."""
    row, piece = 4 * model.hidden_size, 4 * model.heads * (model.head_dim + 2)
    fd = os.memfd_create("exchange")
    try:
        os.ftruncate(fd, SharedExchange.nbytes(MEMBERS, PIECE_BYTES))
        with subprocess.Popen([sys.executable, "-m", __name__, str(fd), str(row)], pass_fds=[fd]):
            short_s, long_s = sums(fd, 0, row)
    finally:
        os.close(fd)
    each_s = max(1e-12, (long_s - short_s) / (row * (CHUNK_TOKENS - 1)))
    return ExchangeSection(max(1e-7, short_s - each_s * row), (MEMBERS - 1) / each_s, row, piece)


def sums(fd: int, member: int, row_bytes: int) -> list[float]:
    """Take part in sums of one row and of CHUNK_TOKENS, over memory that both processes have.

    Returns the seconds of the fastest ones. Raises MemberLost if the other process does not come.
    """
    exchange = SharedExchange(np.frombuffer(mmap.mmap(fd, 0), np.uint8), member, MEMBERS, LIMIT_S)
    rows = (np.zeros(count * row_bytes // 4, np.float32) for count in (1, CHUNK_TOKENS))
    timers = (timed(partial(exchange.sum, row)) for row in rows)
    return [min(seconds() for _ in range(RUNS)) for seconds in timers]


if __name__ == "__main__":
    sums(int(sys.argv[1]), 1, int(sys.argv[2]))
