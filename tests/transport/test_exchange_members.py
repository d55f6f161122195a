"""Exchanges over shared memory that take longer: very many of them, and by processes that may die."""

from __future__ import annotations

import random
import secrets
import time

import numpy as np
import pytest

from tests.python import python
from tests.transport.test_exchange import members_of, together
from transport.exchange import SharedExchange

PROGRAM = "tests.transport.programs.members"


def test_many_random_exchanges_of_two_to_four_members(soak: int) -> None:
    seed = secrets.randbelow(10**9) if soak > 1 else 2026
    print("seed", seed)
    count = random.Random(seed).choice((2, 3, 4)) if soak > 1 else 2
    members = members_of(count, 64)

    def act(exchange: SharedExchange) -> str:
        plan, own = random.Random(seed), random.Random(seed + 1 + exchange.member)
        for turn in range(100_000 * soak):
            length, mark = plan.choice((0, 1, 3, 16, 17, 40)), turn % 4096
            if own.random() < 0.0005:
                time.sleep(own.random() * 0.001)
            if plan.random() < 0.7:
                x = np.full(length, mark + exchange.member, np.float32)
                exchange.sum(x)
                right = x.tolist() == [count * mark + count * (count - 1) // 2] * length
            else:
                found = exchange.gather(np.full(length * (exchange.member + turn) % 50, mark, np.uint16))
                right = all(
                    x.tolist() == [mark] * (length * (other + turn) % 50) for other, x in enumerate(found)
                )
            if not right:
                return f"exchange {turn} of {length} went wrong"
        return "right"

    assert together(members, act) == ["right"] * count


@pytest.mark.parametrize("count", [2, 3, 5])
def test_processes_get_the_same_bits(count: int) -> None:
    done = python("-m", PROGRAM, "sums", str(count))
    assert (done.returncode, done.stdout.count("right")) == (0, count), done.stdout + done.stderr


@pytest.mark.parametrize("how", ["limit", "waits", "lose"])
def test_a_killed_process_does_not_hold_up_the_others(how: str) -> None:
    done = python("-m", PROGRAM, how, "3")
    assert (done.returncode, done.stdout.count("ended")) == (0, 2), done.stdout + done.stderr
