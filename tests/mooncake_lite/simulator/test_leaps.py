"""A leap is the steps that it stands for: every event comes at the same time, with the same content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mooncake_lite import messages as m
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.workloads.traces import Trace, TraceRequest
from scheduler.instance import Result
from scheduler.instance.step import NO_TOKEN
from tests.mooncake_lite.simulator.made import cluster
from tests.worlds.faults import Faults
from tests.worlds.setting import LAYOUT, DrawnSetting
from tests.worlds.world import FaultWorld

TOKENS_S = 0.001
"""How long tokens take from a rank to their gateway."""


class SteadyWorld(FaultWorld):
    """A world in which how many messages bring the tokens changes nothing.

    dying   rank that dies at the end of its present pass -> how. In the middle of a leap, it would take the
            tokens of whole passes with it
    """

    def __init__(self, *parts: Any, **more: Any) -> None:
        self.dying: dict[int, dict[str, Any]] = {}
        super().__init__(*parts, **more)

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Send tokens from a rank to the gateway, always in the same time."""
        assert isinstance(message, m.Tokens)
        self.clock.after(TOKENS_S, lambda: self.clients.on_tokens(message, times_s))

    def kill(self, rank: int, **how: Any) -> None:
        """Kill a rank when it computes nothing."""
        model = self.ranks[rank]
        if isinstance(model, SimulatedRank) and model.step_s and rank not in self.dead:
            self.dying.setdefault(rank, how)
            model._wake()  # a leap under way ends with its present pass
        else:
            super().kill(rank, **how)

    def between_passes(self, rank: int) -> None:
        """Kill a rank that was to die."""
        if rank in self.dying:
            super().kill(rank, **self.dying.pop(rank))


def tight(seed: int) -> DrawnSetting:
    """A drawn run whose ranks have few pages, and a pool that takes what they swap out.

    Some requests cannot be computed: a leap ends where one of them has no token.
    """
    setting = DrawnSetting.drawn(seed, num_requests=60, faults=Faults(poisoned=1.0))
    shape = setting.shape
    has_pool = shape.config.has_pool
    pages = 17 * shape.layout.block_tokens // shape.page_tokens
    segments = [60 if role == "store" else lent for role, lent in zip(shape.config.roles, shape.segments)]
    shape = replace(
        shape, pages=pages, slots=8, segments=segments, preemption="swap" if has_pool else "recompute",
        new_drafter=None,
    )  # fmt: skip
    return replace(setting, shape=shape)


def without_tail(event: ev.Event) -> ev.Event:
    """An event without the checksums of a block that is partly filled: its last slots hold anything."""
    if not isinstance(event, ev.Swapped):
        return event
    full = msgspec.structs.replace(event, checksums=event.checksums[:-1])
    return full if (event.num_tokens - 1) % LAYOUT[2] else event


def played(
    setting: DrawnSetting, most_passes: int
) -> tuple[list[tuple[float, ev.Event]], FaultWorld, Counter[str]]:
    """Every event of a run with its time, the world, how many steps stand for several, and of these, how many
    end without a token."""
    events: list[tuple[float, ev.Event]] = []
    world = SteadyWorld(
        setting, most_passes=most_passes,
        observe=lambda event, now, effects: events.append((now, without_tail(event))),
    )  # fmt: skip
    counts: Counter[str] = Counter()

    for rank in world.ranks.values():
        machine = getattr(rank, "rank", None)
        if machine is not None:
            step, ended = machine.step, machine.ended

            def counted(now: float, most: int, step: Any = step, number: int = rank.number) -> Any:
                world.between_passes(number)
                chosen = step(now, most)
                counts["leaps"] += chosen.steps > 1
                return chosen

            def looked_at(result: Result, now: float, ended: Any = ended) -> Any:
                counts["faults"] += bool(result.passes) and NO_TOKEN in result.tokens
                return ended(result, now)

            machine.step, machine.ended = counted, looked_at
    world.run()
    return events, world, counts


def test_leaps_and_single_steps_are_equal_in_every_event_with_tight_pages_swaps_and_puts(
    soak: int,
) -> None:
    kinds: Counter[str] = Counter()
    for seed in (0, 1, 2, 3, 4, 6, 9, 11, 16, 34) if soak == 1 else range(120):  # some preempt, others swap
        single, slow, none = played(tight(seed), 1)
        leapt, fast, some = played(tight(seed), 64)
        assert not none["leaps"]
        kinds += some
        assert len(single) == len(leapt)
        for number, (one, other) in enumerate(zip(single, leapt)):
            assert one == other, f"seed {seed}, event {number}"
        for name, request in slow.requests.items():
            assert request.tokens == fast.requests[name].tokens
            assert sorted(request.token_times_s) == sorted(fast.requests[name].token_times_s)
        kinds.update(type(event).__name__ for _, event in single)
    assert kinds["leaps"] > 500
    assert kinds["faults"] >= 5, kinds
    for kind in (ev.Preempted, ev.SwapWanted, ev.Swapped, ev.PutsEnded, ev.PagesChanged, ev.RequestCancelled):
        assert kinds[kind.__name__] >= 5, kinds
    assert kinds["Recalled"] >= 5, kinds
    assert kinds["RankLost"] >= 1, kinds


@pytest.mark.parametrize("seed", [3, 7])
def test_a_leap_may_be_of_any_length(seed: int) -> None:
    runs = [played(tight(seed), most)[0] for most in (2, 5, 1000)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.quick
def test_each_pass_of_a_leap_attends_to_one_token_more_of_every_sequence() -> None:
    trace = Trace([TraceRequest(0.0, 2_000 * number, 300, [number]) for number in (1, 2, 3)])
    times_s = []
    for most in (1, 64):
        world = World(cluster("1P1D").setting(TraceSource(trace), 1), most_passes=most)
        world.run()
        times_s.append([at for one in world.records for at in one.token_times_s])
    assert len(times_s[0]) == 900
    assert times_s[0] == pytest.approx(times_s[1], rel=1e-9)
