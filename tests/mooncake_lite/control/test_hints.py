"""What the control plane answers to hints, and does for them."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control import hints
from scheduler import CostConfig
from scheduler.classes import ServiceClass
from scheduler.costs import LoadCost, PrefillCost, TransferCost
from tests.mooncake_lite.control.plane import LAYOUT, SUMS, Plane, only

pytestmark = pytest.mark.quick

COSTS = CostConfig(
    prefill=PrefillCost(0.0, 0.01), transfer=TransferCost(1e9, 0.0), load=LoadCost(1e9, 1e9, 0.0)
)


class Hinted(Plane):
    """A plane, spoken to in hints as well."""

    def hint(self, verb: Any, keys: list[int], **more: Any) -> fx.HintAnswered:
        return only(fx.HintAnswered, self.hinted(verb, keys, **more))

    def hinted(self, verb: Any, keys: list[int], **more: Any) -> list[fx.Effect]:
        return self.on(ev.HintArrived("h", "gateway-0", verb, keys, keys, **more))

    def in_dram(self, keys: list[int]) -> list[int]:
        return [key for key in keys if self.control.directory.find(key) is not None]

    def save_all(self) -> None:
        """The tier has everything: it can be evicted."""
        keys = [obj.key or 0 for obj in self.control.directory.visible_objects()]
        self.on(ev.BlocksSaved(3, 0, keys, "durable"))

    def serve_session(self, name: str, keys: list[int], session: str, tenant: str) -> None:
        """Send a prompt of a session, and cancel it."""
        job = only(fx.StartPrefill, self.arrive(name, 64 * len(keys), keys, session=session, tenant=tenant))
        self.prefilled(job, finished=[0])

    def fill(self, name: str, blocks: int) -> None:
        """Serve a prompt of so many blocks that nobody asks for again."""
        self.serve(name, 64 * blocks)
        self.save_all()


def answer_of(answer: fx.HintAnswered) -> tuple[str, int, int]:
    return answer.outcome, answer.affected, answer.blocks


def filled(blocks: int = 40) -> Hinted:
    """A plane with blocks 1..4 in DRAM, on SSD as well."""
    plane = Hinted(blocks, costs=COSTS)
    plane.serve("a", 256, [1, 2, 3, 4])
    plane.save_all()
    return plane


def test_retained_blocks_outlive_others() -> None:
    plane = filled(12)
    assert answer_of(plane.hint("retain", [1, 2, 3, 4], seconds=100.0)) == ("accepted", 4, 4)
    plane.fill("b", 6)
    plane.fill("c", 6)
    assert plane.in_dram([1, 2, 3, 4]) == [1, 2, 3, 4]

    plane.now += 100.0
    plane.fill("d", 6)
    plane.fill("e", 6)
    assert plane.in_dram([1, 2, 3, 4]) == []


def test_only_leading_blocks_in_memory_are_retained() -> None:
    plane = filled()
    clipped = plane.hint("retain", [1, 2, 9, 4], seconds=5.0)
    assert answer_of(clipped) == ("clipped", 2, 4)
    assert clipped.reason == "2 of 4 blocks are in memory"
    assert clipped.lasts_s == 5.0
    assert answer_of(plane.hint("retain", [9], seconds=5.0)) == ("rejected", 0, 1)


def test_a_tenant_retains_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "HELD_SHARE", 0.05)
    plane = filled()
    assert answer_of(plane.hint("retain", [1, 2, 3, 4], seconds=5.0)) == ("clipped", 2, 4)
    assert answer_of(plane.hint("retain", [1, 2, 3, 4], seconds=5.0, tenant="b")) == ("clipped", 2, 4)


def test_a_share_that_is_refused_says_why() -> None:
    plane = filled()
    gone, many = plane.hint("share", [91, 92]), plane.hint("share", [1], copies=10**6)
    assert [gone.outcome, many.outcome] == ["rejected", "rejected"]
    assert gone.reason == "none of its blocks is in memory"
    assert many.reason.startswith("1000000 copies of a block are more than")


def test_a_share_of_blocks_that_have_their_copies_has_nothing_left_to_do() -> None:
    plane = Hinted(40, costs=COSTS, lend=40)
    plane.serve("a", 256, [1, 2, 3, 4])
    directory = plane.control.directory
    for key in (1, 2):
        found = directory.find(key)
        assert found is not None
        _, made = directory.replicate("me", key, key, rank=4 - found.rank, now=plane.now, until=plane.now)
        directory.put_end(made.object_id, SUMS, plane.now)
    directory.release("me", plane.now)
    assert answer_of(plane.hint("share", [1, 2])) == ("accepted", 2, 2)


def test_demoted_blocks_go_first() -> None:
    plane = filled(12)
    plane.fill("b", 6)
    plane.serve("c", 64 * 2)
    plane.save_all()
    plane.serve("again", 256, [1, 2, 3, 4])
    assert answer_of(plane.hint("demote", [1, 2, 3, 4])) == ("accepted", 4, 4)
    plane.fill("d", 4)
    assert plane.in_dram([1, 2, 3, 4]) == []


def test_a_session_is_the_latest_prompt_of_a_tenant() -> None:
    plane = filled()
    plane.serve_session("b", [1, 2], "agent", "t")
    assert answer_of(plane.hint("retain", [], seconds=5.0, session="agent", tenant="t")) == ("accepted", 2, 2)
    unknown = plane.hint("retain", [], seconds=5.0, session="agent")
    assert answer_of(unknown) == ("rejected", 0, 0)
    assert "has sent no prompt" in unknown.reason


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "MOST_SESSIONS", 2)
    plane = filled()
    for number in range(3):
        plane.serve_session(f"b{number}", [1, 2], f"s{number}", "t")
    outcomes = [
        plane.hint("retain", [], seconds=5.0, session=f"s{number}", tenant="t").outcome for number in range(3)
    ]
    assert outcomes == ["rejected", "accepted", "accepted"]


# ------------------------------------------------------------------------------ pins


def test_pinned_blocks_are_not_evicted_until_their_time() -> None:
    plane = filled(40)
    answer = plane.hint("pin", [1, 2, 3, 4], seconds=100.0)
    assert answer_of(answer) == ("accepted", 4, 4)
    for number in range(8):
        plane.fill(f"b{number}", 10)
    assert plane.in_dram([1, 2, 3, 4]) == [1, 2, 3, 4]

    plane.now += 100.0
    plane.on(ev.Tick())
    assert plane.control.directory.find(1).hard_pinned() is False  # type: ignore[union-attr]


def test_pins_are_limited_and_end_when_they_are_taken_off() -> None:
    plane = filled(20)
    assert answer_of(plane.hint("pin", [1, 2, 3, 4])) == ("clipped", 2, 4)
    assert answer_of(plane.hint("pin", [3, 4], tenant="b")) == ("rejected", 0, 2)
    assert answer_of(plane.hint("pin", [1, 2, 3, 4], seconds=0.0)) == ("accepted", 2, 4)
    assert answer_of(plane.hint("pin", [3, 4], tenant="b")) == ("accepted", 2, 2)
    assert plane.hint("demote", [3, 4], tenant="b").outcome == "accepted"
    assert not plane.control.directory.find(3).hard_pinned()  # type: ignore[union-attr]


def test_a_request_that_fits_into_the_pool_takes_pins_off() -> None:
    plane = filled(40)
    plane.hint("pin", [1, 2, 3, 4])
    effects = plane.arrive("large", 64 * 40)
    assert only(fx.StartPrefill, effects).request_id == "large"
    assert plane.in_dram([1, 2, 3, 4]) == []


def test_a_request_that_finds_no_space_does_not_wait_until_pins_of_hints_end() -> None:
    plane = filled(40)
    plane.hint("pin", [1, 2, 3, 4])
    plane.prefilled(only(fx.StartPrefill, plane.arrive("first", 64 * 20)))
    assert only(fx.StartPrefill, plane.arrive("second", 64 * 18)).request_id == "second"
    assert plane.in_dram([1, 2, 3, 4]) == [1, 2]


def test_pins_end_with_all_hints_of_a_tenant_that_has_cost_too_much() -> None:
    plane = filled(40)
    plane.hint("pin", [1, 2], tenant="a")
    plane.hint("pin", [3], tenant="b")
    trust = plane.control.directory.trust
    assert trust is not None
    trust._owe("a", trust._allowance)
    plane.fill("b", 10)
    found = [plane.control.directory.find(key) for key in (1, 2, 3)]
    assert [obj is not None and obj.hard_pinned() for obj in found] == [False, False, True]


def test_an_operator_takes_the_pins_of_hints_over() -> None:
    plane = filled(40)
    plane.hint("pin", [1, 2], seconds=1.0)
    plane.on(ev.PoolCommand(1, "pin", [1], hard=True))
    plane.now += 2.0
    plane.on(ev.Tick())
    assert [plane.control.directory.find(key).hard_pinned() for key in (1, 2)] == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("command", [{"keys": [1, 99], "hard": True}, {"keys": [1], "soft_s": 60.0}])
def test_a_command_that_changes_no_hard_pin_leaves_the_pins_of_hints(command: dict[str, Any]) -> None:
    plane = filled(40)
    plane.hint("pin", [1], seconds=1.0)
    plane.on(ev.PoolCommand(1, "pin", **command))
    plane.now += 2.0
    plane.on(ev.Tick())
    assert not plane.control.directory.find(1).hard_pinned()  # type: ignore[union-attr]


def test_a_session_ends_its_own_pins_and_holds_and_no_others() -> None:
    plane = filled(40)
    plane.hint("pin", [1, 2])
    plane.hint("pin", [1, 2, 3], session="x")
    assert answer_of(plane.hint("demote", [1, 2, 3, 4], session="x"))[:2] == ("clipped", 2)
    assert [plane.control.directory.find(key).hard_pinned() for key in (1, 2, 3)] == [True, True, False]  # type: ignore[union-attr]
    assert plane.control.directory.held[""] == 2
    assert answer_of(plane.hint("pin", [1, 2], seconds=0.0)) == ("accepted", 2, 2)
    assert plane.control.directory.held[""] == 0


def test_a_tenant_that_may_displace_no_more_may_still_give_back() -> None:
    plane = filled(40)
    plane.hint("retain", [1, 2], seconds=60.0)
    trust = plane.control.directory.trust
    assert trust is not None
    trust._owe("", 0.9 * trust._allowance)
    assert plane.hint("retain", [3], seconds=60.0).outcome == "rejected"
    answer = plane.hint("demote", [1, 2])
    assert answer_of(answer) == ("clipped", 0, 2)
    assert "displace no more" in answer.reason
    assert plane.control.directory.held[""] == 0
    assert plane.hint("demote", [1, 2]).outcome == "rejected", "nothing was left to end"


def test_holds_that_are_over_count_no_more_while_nothing_is_allocated() -> None:
    plane = filled(40)
    plane.hint("retain", [1, 2], session="x", seconds=1.0)
    plane.now += 10.0
    assert answer_of(plane.hint("demote", [1, 2])) == ("accepted", 2, 2)


def test_a_session_is_its_prompt_and_the_answer_that_its_hints_have_named() -> None:
    plane = Hinted(40)
    plane.serve_session("a", [1, 2], "x", "")
    plane.hint("retain", [1, 2, 3], session="x", seconds=1.0)
    assert plane.hint("retain", [], session="x", seconds=1.0).blocks == 3
    plane.hint("retain", [1], session="x", seconds=1.0)
    assert plane.hint("retain", [], session="x", seconds=1.0).blocks == 3, "[1] is not longer"


def test_pins_of_blocks_that_were_removed_count_no_more() -> None:
    plane = filled(20)
    assert plane.hint("pin", [1, 2]).outcome == "accepted"
    plane.on(ev.PoolCommand(1, "rm", [1], force=True))
    plane.on(ev.PoolCommand(2, "get", [2], "block"))
    assert answer_of(plane.hint("pin", [2, 3])) == ("accepted", 2, 2)
    assert answer_of(plane.hint("pin", [2, 3], seconds=0.0)) == ("accepted", 2, 2)
    assert not plane.control.directory.find(2).hard_pinned()  # type: ignore[union-attr]


def test_sessions_are_forgotten_by_tenant_and_by_the_keys_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "MOST_NOTED", 5)
    plane = Hinted(40)
    for name, keys, session, tenant in (
        ("a", [1, 2], "x", "t"), ("b", [1, 2], "x", "t"), ("c", [3, 4], "x", "u"), ("d", [5, 6], "y", "t"),
    ):  # fmt: skip
        plane.serve_session(name, keys, session, tenant)

    def known(session: str, tenant: str) -> bool:
        answer = plane.hint("retain", [], session=session, tenant=tenant, seconds=1.0)
        return "has sent no prompt yet" not in answer.reason

    assert not known("x", "u"), "this tenant was quiet longest"
    assert known("x", "t")
    assert known("y", "t")
    assert plane.control.hints._noted == 4


# ------------------------------------------------------------------------------ prefetch


def prefetching(**more: Any) -> tuple[Hinted, list[fx.Effect]]:
    plane = Hinted(40, [1, 2, 3], costs=COSTS)
    return plane, plane.hinted("prefetch", [1, 2, 3], **more)


def test_a_prefetch_reads_from_ssd_and_holds_the_blocks() -> None:
    plane, effects = prefetching()
    assert answer_of(only(fx.HintAnswered, effects)) == ("accepted", 3, 3)
    order = only(fx.LoadBlocks, effects)
    assert answer_of(plane.hint("prefetch", [1, 2, 3])) == ("accepted", 0, 3), "they are on their way"
    plane.on(ev.BlocksLoaded(3, 0, order.number, [True, True, False], [SUMS, SUMS, []], 0.1))
    assert plane.in_dram([1, 2, 3]) == [1, 2]
    assert plane.control.directory.held[""] == 2
    assert answer_of(plane.hint("prefetch", [1, 2])) == ("accepted", 0, 2)


def test_a_prefetch_that_comes_too_early_is_done_in_time() -> None:
    plane, effects = prefetching(seconds=60.0)
    answer = only(fx.HintAnswered, effects)
    assert answer.outcome == "deferred"
    assert 50.0 < answer.lasts_s < 60.0
    assert not any(isinstance(effect, fx.LoadBlocks) for effect in effects)
    assert only(fx.WakeAt, effects).time == pytest.approx(plane.now + answer.lasts_s)

    plane.now += answer.lasts_s
    assert only(fx.LoadBlocks, plane.on(ev.Tick())).keys == [1, 2, 3]


def test_a_prefetch_without_space_waits_for_it() -> None:
    plane = Hinted(4, [1, 2, 3], costs=COSTS)
    plane.arrive("busy", 64 * 4)
    assert plane.hint("prefetch", [1, 2, 3], seconds=1.0).outcome == "deferred"
    plane.on(ev.RequestCancelled("busy"))
    plane.on(ev.RequestFailed(1, 0, "busy", 1, "cancelled"))
    plane.now += 1.0 - hints.AGAIN_S
    assert only(fx.LoadBlocks, plane.on(ev.Tick())).keys == [1, 2, 3]


def test_a_prefetch_for_now_that_finds_no_space_is_tried_again() -> None:
    plane = Hinted(4, [1, 2, 3], costs=COSTS)
    plane.arrive("busy", 64 * 4)
    assert plane.hint("prefetch", [1, 2, 3]).outcome == "deferred"
    plane.now += 1.0
    assert not any(isinstance(effect, fx.LoadBlocks) for effect in plane.on(ev.Tick()))
    plane.on(ev.RequestCancelled("busy"))
    plane.on(ev.RequestFailed(1, 0, "busy", 1, "cancelled"))
    plane.now += 1.0
    assert only(fx.LoadBlocks, plane.on(ev.Tick())).keys == [1, 2, 3]


def test_a_prefetch_of_more_than_a_tenant_may_displace_reads_the_first_blocks() -> None:
    plane = Hinted(40, [1, 2, 3, 4, 5, 6], costs=COSTS)
    effects = plane.hinted("prefetch", [1, 2, 3, 4, 5, 6])
    assert answer_of(only(fx.HintAnswered, effects)) == ("clipped", 4, 6)
    assert only(fx.LoadBlocks, effects).keys == [1, 2, 3, 4]


def test_a_block_that_a_tier_has_damaged_is_not_asked_for_again() -> None:
    plane, effects = prefetching()
    order = only(fx.LoadBlocks, effects)
    plane.on(ev.BlocksLoaded(3, 0, order.number, [False, True, True], [[], SUMS, SUMS], 0.1))
    assert plane.in_dram([1, 2, 3]) == [2, 3]
    assert answer_of(plane.hint("prefetch", [1])) == ("accepted", 0, 1), "it is nowhere"
    assert plane.bytes_in("writing") == 0
    assert plane.control.directory.active_owners() == []


def test_late_bytes_of_a_prefetch_reach_no_other_block() -> None:
    plane, effects = prefetching()
    order = only(fx.LoadBlocks, effects)
    failed = [False, False, True], [[], [], SUMS], 0.1, "the disk does not answer", True
    plane.on(ev.BlocksLoaded(3, 0, order.number, *failed))
    assert plane.bytes_in("quarantined") == 2 * LAYOUT.nbytes
    assert plane.in_dram([1, 2, 3]) == [3]


def test_a_block_whose_prefetch_was_slow_can_be_prefetched_again() -> None:
    plane, effects = prefetching()
    order = only(fx.LoadBlocks, effects)
    plane.on(ev.BlocksLoaded(3, 0, order.number, [False] * 3, [[]] * 3, 0.1, "slow", may_still_write=True))
    assert not plane.control.directory.expected
    assert only(fx.LoadBlocks, plane.hinted("prefetch", [1, 2, 3])).keys == [1, 2, 3]


def test_a_prefetch_that_is_lost_frees_its_space() -> None:
    plane, effects = prefetching()
    plane.on(ev.Undelivered(only(fx.LoadBlocks, effects), "its queue is full"))
    assert plane.bytes_in("writing") == 0
    assert plane.control.mechanisms.counts["prefetches"] == {"tried": 3, "failed": 3}


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"seconds": -1.0}, "seconds=-1: must be 0 to 86400"),
        ({"seconds": float("nan")}, "seconds=nan: must be 0 to 86400"),
        ({"seconds": None}, "retain needs seconds above 0"),
        ({"seconds": 1.0, "class_id": 9}, "service class 9 is unknown"),
        ({"seconds": 1.0, "copies": 0}, "keys and digests differ in number, or copies is below 1"),
    ],
)
def test_a_hint_that_makes_no_sense_is_rejected(more: dict[str, Any], reason: str) -> None:
    answer = filled().hint("retain", [1], **more)
    assert (answer.outcome, answer.reason) == ("rejected", reason)


def test_hints_need_lru_without_shares_of_classes() -> None:
    for options in ({"eviction": "arc"}, {"classes": [ServiceClass(name="a", cache_share=0.5)]}):
        plane = Hinted(8, **options)
        answer = plane.hint("retain", [1], seconds=1.0)
        assert answer.reason == "only the eviction policy lru without shares of classes follows hints"


def test_hints_are_counted_by_verb_and_outcome() -> None:
    plane = filled()
    plane.hint("retain", [1], seconds=1.0)
    plane.hint("retain", [9], seconds=1.0)
    plane.hint("demote", [1])
    assert plane.control.hints.counts == {
        ("retain", "accepted"): 1, ("retain", "rejected"): 1, ("demote", "accepted"): 1,
    }  # fmt: skip


def test_a_hint_allocates_blocks_of_the_right_size() -> None:
    _, effects = prefetching()
    assert {ref.nbytes for ref in only(fx.LoadBlocks, effects).refs} == {LAYOUT.nbytes}
