"""Processes over one shared memory, forked, that exchange as members.

Usage: members.py sums|limit|waits|lose COUNT. "sums": each checks the bits of all its results. Otherwise the
last one kills itself after three exchanges, and this ends the others.
"""

import mmap
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from tests.patience import patient
from transport.errors import MemberLost
from transport.exchange import SharedExchange

LENGTHS = (1, 576, 4096, 4097, 30_000)
PIECE_BYTES = 16 * 1024


def data_of(member: int, length: int, turn: int) -> np.ndarray:
    generator = np.random.default_rng((member, length, turn))
    return (generator.standard_normal(length) * 10.0 ** generator.integers(-3, 4, length)).astype(np.float32)


def sums(exchange: SharedExchange) -> None:
    for turn in range(60):
        for length in LENGTHS:
            everyone = [data_of(member, length, turn) for member in range(exchange.count)]
            x = everyone[exchange.member].copy()
            exchange.sum(x)
            total = everyone[0].copy()
            for other in everyone[1:]:
                total = total + other
            assert x.tobytes() == total.tobytes(), f"member {exchange.member}: turn {turn}, length {length}"
            short = np.arange(turn * exchange.member, dtype=np.int32)
            found = exchange.gather(short)
            assert [each.size for each in found] == [turn * member for member in range(exchange.count)]
    print("right", flush=True)


def ends(exchange: SharedExchange, how: str) -> None:
    x = np.ones(576, np.float32)
    for _ in range(3):
        exchange.sum(x)
    if exchange.member == exchange.count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lose":
        threading.Timer(0.2, exchange.lose, ["its process ended"]).start()
    began = time.monotonic()
    error, why = {
        "limit": (MemberLost, f"member {exchange.count - 1} did not come"),
        "waits": (InterruptedError, "enough"),
        "lose": (MemberLost, "its process ended"),
    }[how]
    with pytest.raises(error, match=why):
        exchange.sum(x)
    assert time.monotonic() - began < patient({"limit": 1.5, "waits": 0.3, "lose": 0.5}[how])
    print("ended", flush=True)


def interrupt() -> None:
    raise InterruptedError("enough")


def main() -> int:
    how, count = sys.argv[1], int(sys.argv[2])
    memory = np.frombuffer(mmap.mmap(-1, SharedExchange.nbytes(count, PIECE_BYTES)), np.uint8)
    children = []
    for member in range(count):
        if pid := os.fork():
            children.append(pid)
            continue
        limit_s = 1.0 if how == "limit" else 30.0
        exchange = SharedExchange(memory, member, count, limit_s, interrupt if how == "waits" else None)
        (sums(exchange) if how == "sums" else ends(exchange, how))
        return 0
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return int(codes != [0] * (count - 1) + [0 if how == "sums" else -signal.SIGKILL])


if __name__ == "__main__":
    sys.exit(main())
