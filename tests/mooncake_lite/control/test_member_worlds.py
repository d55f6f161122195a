"""Worlds with instances whose ranks work in lockstep: whatever goes wrong, and a mistake is noticed.

test_faults.py draws some of them too. Here all of them have members. Their Leader, the messages between them,
and the parts of blocks that they move are the live ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace as changed

from mooncake_lite.control import Control
from mooncake_lite.control import events as ev
from mooncake_lite.control.losses import Losses
from mooncake_lite.engine import members
from mooncake_lite.engine.flights import Part
from mooncake_lite.engine.members import Leader, part_of
from mooncake_lite.engine.telling import orders_of
from mooncake_lite.messages.members import MemberStep
from mooncake_lite.simulator.shapes import Shape
from scheduler.instance import Pages, TransferEnded
from scheduler.instance.dealt_pages import DealtPages
from tests.mooncake_lite.control.test_pipeline_worlds import nothing_more
from tests.worlds import members as model
from tests.worlds.faults import Faults
from tests.worlds.planted import Mistake, assert_noticed
from tests.worlds.setting import DrawnSetting
from tests.worlds.world import FaultWorld

DEATHS, DAMAGE = Faults(rank_lost=1.0), Faults(flipped=1.0)
UNSEEN = Faults(rank_lost=1.0, unreachable=1.0)
REQUESTS = 40


def forms(shape: Shape) -> set[tuple[str, int, int]]:
    """The instances in lockstep: (role, members, of which share contexts)."""
    config = shape.config
    first = [rank for rank, role in enumerate(config.roles) if shape.in_lockstep(rank) and role != "member"]
    return {(config.roles[rank], len(config.instance_of(rank)), shape.turns_of(rank)) for rank in first}


def forms_of(seed: int) -> set[tuple[str, int, int]]:
    return forms(DrawnSetting.drawn(seed, REQUESTS).shape)


def seeds(count: int, *first: int) -> Iterator[int]:
    """The first seeds whose worlds have members, after those that are named."""
    yield from first
    number = 0
    for seed in range(100 * count):
        if forms_of(seed) and number < count:
            number += 1
            yield seed


def run_all(some: Iterable[int], faults: Faults | None = None, observe: Any = None) -> list[FaultWorld]:
    worlds = []
    for seed in some:
        worlds.append(
            FaultWorld.drawn(seed, num_requests=REQUESTS, check_every=25, faults=faults, observe=observe)
        )
        worlds[-1].run()
    return worlds


def test_a_fifth_of_the_worlds_has_members_of_every_form_and_no_pipeline() -> None:
    found, count = set[tuple[str, int, int]](), 0
    for seed in range(1000):
        shape = DrawnSetting.drawn(seed, REQUESTS).shape
        config, some = shape.config, forms(shape)
        found, count = found | some, count + bool(some)
        assert not some or "stage" not in config.roles
        assert len(config.nodes) == len(shape.segments) == len(config.roles)
        for rank, role in enumerate(config.roles):
            if role == "member":
                assert config.nodes[rank] == config.nodes[config.instance_of(rank)[0]]
                assert shape.segments[rank] == 0
    assert 160 < count < 240
    tensor = {(role, size, 1) for role in ("prefill", "decode", "compute") for size in (2, 3)}
    assert found == tensor | {("decode", 2, 2), ("decode", 3, 3)}


def test_an_instance_has_pages_for_as_many_tokens_as_its_members_hold() -> None:
    shapes = [DrawnSetting.drawn(seed, REQUESTS).shape for seed in seeds(40)]
    for shape in shapes:
        for rank, role in enumerate(shape.config.roles):
            if role not in ("prefill", "decode", "compute") or not shape.in_lockstep(rank):
                continue
            state, turns = shape.rank_state(rank, lambda *_: 0), shape.turns_of(rank)
            assert not state.limits.late
            assert not state.limits.layers
            if turns > 1:
                assert isinstance(state.pages, DealtPages)
                assert state.pages.num_pages == shape.pages
            else:  # four heads: two members have two each, and of three one has two
                assert state.pages.num_pages == 2 * shape.pages


def test_without_faults_members_answer_every_request_that_fits() -> None:
    worlds = run_all(seeds(8), Faults.none())
    ends = [end for world in worlds for one in world.requests.values() for end in one.ends]
    assert set(ends) <= {"finished", "rejected"}
    assert ends.count("finished") > REQUESTS


def test_every_request_to_members_ends_once_whatever_goes_wrong() -> None:
    run_all(seeds(8), Faults(poisoned=1.0))


def test_damage_is_noticed_by_members_as_by_one_rank() -> None:
    worlds = run_all(seeds(8), DAMAGE)
    assert sum(world.memory.flips for world in worlds) > 50


def test_no_client_of_members_gets_a_wrong_token_whichever_ranks_die() -> None:
    lost: list[ev.RankLost] = []

    def observe(event: Any, now: float, effects: Any) -> None:
        if isinstance(event, ev.RankLost):
            lost.append(event)

    deaths, terms = set[str](), 0
    for seed in seeds(20):
        lost.clear()
        (world,) = run_all([seed], DEATHS, observe)
        config, terms = world.shape.config, max(terms, world.term)
        gone = {event.rank for event in lost}
        for event in lost:
            deaths.add(config.roles[event.rank])
            if world.stopped is None:
                assert gone.issuperset(config.instance_of(event.rank)), "part of an instance lives on"
    assert deaths >= {"prefill", "member", "decode"}
    assert terms, "no conductor has died"


APPLY, JOINED = Losses.apply, Leader._joined


def seen_to_end(self: Losses, rank: int, reason: str, ended: bool, now: float) -> None:
    APPLY(self, rank, reason, ended or len(self._members._instance_of(rank)) > 1, now)


def first_part_ends_all(self: Leader, told: Any) -> Iterator[Any]:
    for report in told:
        moving = report.put, report.ended.number
        if self._parts.setdefault(moving, {}).setdefault(report.member, report.ended) is report.ended:
            if len(self._parts[moving]) == 1:
                yield moving, JOINED(self, [report.ended], *self._moves.get(moving, (False, ())))
            elif len(self._parts[moving]) == len(self._peers.ranks):
                del self._parts[moving]
                self._moves.pop(moving, None)


def problems_do_not_matter(self: Leader, parts: Any, reads: bool, places: Any) -> TransferEnded:
    return JOINED(self, [changed(part, problem="") for part in parts], reads, places)


def nothing_is_compared(self: Leader, parts: Any, reads: bool, places: Any) -> TransferEnded:
    return JOINED(self, parts, reads, [] if reads else places)


def late_bytes_of_the_first_part(self: Leader, parts: Any, reads: bool, places: Any) -> TransferEnded:
    first, *others = parts
    return JOINED(self, [first, *(changed(part, may_still_land=False) for part in others)], reads, places)


def without(**left_out: Any) -> Any:
    def told(step: Any) -> list[MemberStep]:
        return [changed(order, **left_out) for order in orders_of(step)]

    return told


def from_the_first_block(step: Any) -> list[MemberStep]:
    orders = orders_of(step)
    return [changed(one, reads=[changed(read, first=0) for read in one.reads]) for one in orders]


def next_heads(share: Any, layout: Any, unit_tokens: int) -> Part:
    """Move the ranges in another order than that of own blocks: values, then keys."""
    part = part_of(share, layout, unit_tokens)
    return Part(lambda ref: list(part.ranges(ref))[::-1], part.sums, part.owns)


def every_block(share: Any, layout: Any, unit_tokens: int) -> Part:
    part = part_of(share, layout, unit_tokens)
    return Part(part.ranges, part.sums)


def in_one_row(self: DealtPages, token: int) -> int:
    return Pages.index(self, token)


MISTAKES = {
    "a pass ends although a member has died": Mistake(model.LockstepRunner, "is_stuck", False, 5, DEATHS),
    "a member dies alone": Mistake(Control, "_end_others", nothing_more, 12, DEATHS),
    "a member that cannot be reached writes nothing": Mistake(Losses, "apply", seen_to_end, 12, UNSEEN),
    "a transfer ends with its first part": Mistake(Leader, "_whole", first_part_ends_all, 5),
    "a part that has failed does not matter": Mistake(Leader, "_joined", problems_do_not_matter, 12),
    "blocks that were read are not compared": Mistake(Leader, "_joined", nothing_is_compared, 5, DAMAGE),
    "late bytes of other members are forgotten": Mistake(Leader, "_joined", late_bytes_of_the_first_part, 12),
    "members are not told of copies": Mistake(members, "orders_of", without(copies=[]), 12),
    "members are not told what to put into pages": Mistake(members, "orders_of", without(lands=[]), 5),
    "members take all blocks for the first ones": Mistake(members, "orders_of", from_the_first_block, 25),
    "values and keys are swapped": Mistake(model, "part_of", next_heads, 5),
    "each member has all blocks": Mistake(model, "part_of", every_block, 66),
    "pages are those of one rank": Mistake(DealtPages, "index", in_one_row, 25),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_world_with_members_notices_a_mistake_about_them(
    mistake: str, monkeypatch: pytest.MonkeyPatch, soak: int
) -> None:
    planted = MISTAKES[mistake]

    def play(seed: int) -> None:
        if forms_of(seed):
            run_all([seed], planted.faults)

    assert_noticed(planted, play, soak, monkeypatch)
