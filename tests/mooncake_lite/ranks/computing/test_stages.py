"""A rank of a pipeline: the parts of its segment, and the turns of one that is not the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import BlockRef
from mooncake_lite.messages.members import HiddenTaken, MemberMail, MemberMove, MemberStep, PartEnded
from mooncake_lite.model.shares import shares_of
from mooncake_lite.model.sizes import HIDDEN_SLOTS, block_layout, pool_bytes, segment_bytes
from mooncake_lite.ranks.computing.members import FollowerLoop, Links, RankMemory
from mooncake_lite.ranks.conductor_link import ConductorLink
from scheduler.instance import Result, Step, TransferEnded
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL
from tests.mooncake_lite.ranks.links import Signs, link_to

pytestmark = pytest.mark.quick

MODEL = replace(SMALL_MODEL.config, layers=7, windows=(None,) * 7)
BLOCK = block_layout(ServeConfig(), MODEL).nbytes
CONFIG = ServeConfig(
    prefill=4,
    pipeline_parallel_size=4,
    lend_bytes=3 * BLOCK,
    staging_bytes=21 * BLOCK,
    max_num_batched_tokens=9,
)


def memory(number: int) -> tuple[np.ndarray, RankMemory]:
    role = "stage" if number else "prefill"
    segment = np.zeros(segment_bytes(CONFIG, MODEL, role), np.uint8)
    return segment, RankMemory(CONFIG, MODEL, role, shares_of(MODEL, 4)[number], segment)


def test_the_parts_of_a_stages_segment_do_not_overlap_and_the_slots_lie_where_the_next_one_reads() -> None:
    for number in range(4):
        segment, parts = memory(number)
        assert parts.slots.shape == (HIDDEN_SLOTS, 9, MODEL.hidden_size * 4)
        parts.staging[:] += 1
        parts.slots[:] += 2
        lent = pool_bytes(CONFIG, MODEL, "stage" if number else "prefill")
        assert segment[:lent].max(initial=0) == 0
        assert segment.max() == 2
        assert (segment[parts.offset :] == 2).all()
        assert np.count_nonzero(segment == 1) == len(parts.staging)


def test_all_stages_have_halves_and_slots_for_as_many_blocks_of_their_layers() -> None:
    sizes = set()
    for number in range(4):
        _, parts = memory(number)
        assert parts.layout.layers == (2 if number < 3 else 1)
        layout = parts.layout
        engine: Any = SimpleNamespace(block_shape=layout.shape, block_dtype=np.float32)
        blocks = StagingBlocks(parts.staging, layout, engine)
        sizes.add((blocks.half_blocks, blocks.num_slots))
    assert len(sizes) == 1


class Near:
    """Has steps for a stage, and takes its reports."""

    number, can_begin = 2, True

    def __init__(self, *steps: MemberStep) -> None:
        self.steps, self.looks, self.told = list(steps), list[float](), list[Any]()

    def look(self, wait_s: float) -> None:
        self.looks.append(wait_s)

    def next_step(self) -> MemberStep | None:
        self.can_begin = len(self.steps) > 1
        return self.steps.pop(0) if self.steps else None

    def tell(self, stage: int, message: Any) -> None:
        self.told.append((stage, message))

    def leave(self) -> None:
        self.told.append("left")


class Own:
    """A runner whose transfers end in the step after that in which they began."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.flying: list[int] = []

    @property
    def is_moving(self) -> bool:
        return bool(self.flying)

    def run(self, step: Step, moved: Any) -> Result:
        self.steps.append(step)
        ends = [TransferEnded(half, sums=[[7]]) for half in self.flying]
        self.flying = [one.half for one in (*step.reads, *step.writes)]
        return Result(step, halves=ends)


class Conductor:
    """What a stage hears of the conductor and has told it. term: its number."""

    def __init__(self, *messages: Any, term: int = 0) -> None:
        self.sent: list[Any] = []
        self.messages, self.signs = list(messages), Signs(term)

    def renew(self) -> None:
        """Nothing waits."""

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, wait_s: float) -> Sequence[Any]:
        came, self.messages = self.messages, []
        return came


def loop(near: Any, own: Any, conductor: Conductor) -> tuple[FollowerLoop, ConductorLink, list[Any]]:
    marked: list[Any] = []
    names = ("counters", "moved_bytes", "served_bytes", "control_counters", "socket_counters")
    transfers: Any = SimpleNamespace(
        mark_lost=lambda rank, reason: marked.append((rank, reason)), serving_bytes=0,
        **{name: {} for name in names},
    )  # fmt: skip
    link = link_to(conductor, m.RankHello(3, "stage", 0), transfers, conductor.signs)
    link._reported_at = float("inf")  # statistics are not the matter here
    return FollowerLoop(near, own, own, link, None), link, marked


def test_a_stage_moves_what_it_is_told_and_reports_each_end_to_the_first_one() -> None:
    places = [BlockRef(1, 9, 1000, 70)]
    near, own = Near(MemberStep(writes=[MemberMove(1, 1, places, [3])])), Own()
    stage, _, _ = loop(near, own, Conductor())
    stage.turn()
    assert own.steps[0].writes[0].places == places
    assert near.told == []
    stage.turn()
    assert near.told == [(0, PartEnded(2, False, TransferEnded(1, sums=[[7]])))]
    stage.turn()
    assert len(own.steps) == 2, "with nothing to do, it does nothing"
    assert near.looks == [0.0, 0.0, 0.1], "it waits for messages only when nothing moves"


def test_a_stage_tells_a_new_conductor_of_itself_marks_lost_ranks_and_ends_when_told() -> None:
    conductor = Conductor(m.MarkLost(5, "died"), m.Stop("done", 0.0, False), term=2)
    stage, link, marked = loop(near := Near(), Own(), conductor)
    stage.run()
    assert near.told == ["left"], "the stage before waits for a slot"
    assert conductor.sent == [m.RankHello(3, "stage", 0, epoch=2)]
    assert marked == [(5, "died")]
    assert (link.stop, link.may_leave) == (m.Stop("done", 0.0, False), False)
    conductor.messages = [m.Stop("now", 0.0, False)]
    stage.turn()
    assert (link.stop, link.may_leave) == (m.Stop("done", 0.0, False), True)


def test_a_stage_joins_a_new_conductor_once_it_has_moved_what_it_was_told() -> None:
    write = MemberStep(writes=[MemberMove(1, 1, [BlockRef(1, 9, 1000, 70)], [3])])
    conductor = Conductor(term=2)
    stage, _, _ = loop(Near(write), Own(), conductor)
    stage.turn()
    stage.turn()
    assert conductor.sent == [], "its bytes are on their way to a place of the conductor before"
    stage.turn()
    assert conductor.sent == [m.RankHello(3, "stage", 0, epoch=2)]


def test_a_stage_reports_what_it_moves() -> None:
    conductor = Conductor()
    stage, link, _ = loop(Near(), Own(), conductor)
    link._reported_at = 0.0
    stage.turn()
    stage.turn()
    assert [(type(sent), sent.rank) for sent in conductor.sent] == [(m.RankStats, 3)]


def test_a_message_of_another_stage_that_is_lost_ends_the_rank() -> None:
    links: Any = Links.__new__(Links)
    mail = [[("member-1", MemberMail(0, HiddenTaken(0)))], [("member-1", MemberMail(2, HiddenTaken(1)))]]
    links._heard, links._hub = Counter(), SimpleNamespace(receive=lambda wait_s: mail.pop(0))
    assert links.receive(0.0) == [HiddenTaken(0)]
    with pytest.raises(RuntimeError, match="message 1 of member-1 of the instance is lost"):
        links.receive(0.0)
