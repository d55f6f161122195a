"""The runner in virtual time: when the stages of a pipeline have done a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.runner import VirtualRunner
from scheduler.instance import Step
from scheduler.instance.step import Chunk

pytestmark = pytest.mark.quick


def test_the_last_stage_does_a_short_pass_after_the_long_one_before_it() -> None:
    clock, passes_s = Clock(), [4.0, 1.0]
    world: Any = SimpleNamespace(
        clock=clock,
        dead=set(),
        shape=SimpleNamespace(
            config=SimpleNamespace(instance_of=lambda rank: [1, 2]), in_lockstep=lambda rank: False
        ),
        bytes=Bytes(2),
        hardware=SimpleNamespace(pass_s=lambda rank, load: passes_s.pop(0), step_s=0.0),
    )
    drawn = list[tuple[float, Any]]()

    def wake() -> None:
        drawn.extend((clock.now, late.job) for late in runner.moved()[1])

    runner = VirtualRunner(1, world, wake, lambda time: None)
    ended_at = runner.begin(pass_of("long", clock.now))
    clock.at(ended_at, lambda: runner.begin(pass_of("short", clock.now)))
    for _ in range(3):
        clock.step()
    assert ended_at == 2.0, "each of two stages takes half of the pass"
    assert drawn == [(4.0, "long"), (4.5, "short")]


def pass_of(name: str, now: float) -> Step:
    """One prompt token that draws one."""
    draw: Any = object()
    return Step(now, chunks=(Chunk(name, (1,), 0, (0,), (draw,), True),))  # type: ignore[arg-type]
