"""Whatever goes wrong around it, the control plane ends every request once and gives the pool back.

`--fault-seed SEED` repeats one run, with every invariant checked after every event. `make soak` tries
200 times as many runs, with new seeds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import pytest

from mooncake_lite.conductor.machine import UNREACHABLE, Conductor
from mooncake_lite.conductor.recording import Digester, Recorder
from mooncake_lite.config.modes import MODES
from mooncake_lite.control import Control, dispatch
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.copies import Copies
from mooncake_lite.control.grants import Grants
from mooncake_lite.control.life import Step
from mooncake_lite.control.reports import Reports
from mooncake_lite.control.request import RequestRecord, Try, client_id_of
from mooncake_lite.control.requests import Requests
from mooncake_lite.control.room import Room
from mooncake_lite.control.succession import Succession
from mooncake_lite.simulator import world
from scheduler import State
from scheduler.admission import BoundedQueue
from scheduler.held_line import HeldLine
from scheduler.instance import faults, progress
from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE
from scheduler.placement.choose import Compared
from store.books.adoption import Adoption
from store.books.quarantine import Quarantine
from store.directory import Directory
from tests.python import printed_by
from tests.worlds.faults import Faults
from tests.worlds.planted import Mistake, assert_noticed
from tests.worlds.world import FaultWorld, WorldFailure

REQUESTS = 100
"""In one run."""

GROUPS, RUNS = 10, 5
"""Tests, and runs of each: 5,000 requests."""

SOAK_FACTOR = 4
"""`make soak` has 50 times the runs, times this: 1,000,000 requests."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeds of each test: the same ones each time, others in a soak, one when one is repeated."""
    if "seeds" not in metafunc.fixturenames:
        return
    single = metafunc.config.getoption("--fault-seed", default=None)
    soak = metafunc.config.getoption("--soak", default=0)
    groups = [range(start, start + RUNS) for start in range(0, GROUPS * RUNS, RUNS)]
    if soak:
        runs = RUNS * soak * SOAK_FACTOR
        groups = [
            range(start, start + runs) for start in (SystemRandom().getrandbits(40) for _ in range(GROUPS))
        ]
    if single is not None:
        groups = [range(single, single + 1)]
    metafunc.parametrize("seeds", groups, ids=[f"seeds {some[0]}-{some[-1]}" for some in groups])


@pytest.mark.usefixtures("soak")
def test_every_request_ends_once_and_the_pool_is_given_back_whatever_goes_wrong(
    seeds: range, request: pytest.FixtureRequest
) -> None:
    single = request.config.getoption("--fault-seed", default=None) is not None
    for seed in seeds:
        try:
            FaultWorld.drawn(seed, num_requests=REQUESTS, check_every=1 if single else 50).run()
        except WorldFailure as failure:
            again = f"pytest tests/mooncake_lite/control/test_faults.py --fault-seed {seed} -k whatever"
            pytest.fail(
                f"{failure}\n\nrepeat it, with a check after every event:\n    {again}", pytrace=False
            )


def test_hints_of_all_kinds_change_no_token_and_break_nothing() -> None:
    """Worlds assert that each request ends, with its own tokens, and every invariant of the pool."""
    said: Counter[tuple[str, str]] = Counter()
    for seed in range(8):
        world = FaultWorld.drawn(seed, num_requests=50, faults=Faults(hint=0.8), check_every=20)
        world.run()
        said += world.control.hints.counts

    assert {verb for verb, outcome in said if outcome == "accepted"} == {
        "share",
        "prefetch",
        "demote",
        "pin",
        "retain",
    }
    assert {outcome for _, outcome in said} == {"accepted", "clipped", "deferred", "rejected"}


def digest_of_run(seed: int) -> list[int]:
    """A digest for each event of a run."""
    digester, found = Digester(), []

    def observe(event: Any, now: float, effects: Any) -> None:
        found.append(digester.digest([event, now, *effects]))

    FaultWorld.drawn(seed, num_requests=30, observe=observe).run()
    return found


def test_a_seed_gives_the_same_run_each_time() -> None:
    first, second = digest_of_run(5), digest_of_run(5)

    assert len(first) > 100
    assert first == second
    assert first != digest_of_run(8)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_recorded_run_with_faults_replays_to_the_same_effects_in_another_process(
    seed: int, tmp_path: Path
) -> None:
    faults = Faults(conductor_lost=0.0, poisoned=1.0)  # a recording ends with its conductor
    world = FaultWorld.drawn(seed, faults=faults)
    recorder = Recorder(tmp_path / "run", world.shape.config)
    world = FaultWorld.drawn(seed, faults=faults, observe=recorder.record)
    world.run()
    recorder.close()

    for hash_seed in ("1", "2"):
        words = ["-m", "mooncake_lite", "replay-events", str(tmp_path / "run")]
        assert f"{world.num_events:,} events" in printed_by(*words, limit_s=120, PYTHONHASHSEED=hash_seed)


def test_without_faults_every_request_that_fits_is_answered_in_every_mode() -> None:
    outcomes: dict[str, set[str]] = {}
    for seed in range(8):
        world = FaultWorld.drawn(seed, faults=Faults.none())
        world.run()
        ends = outcomes.setdefault(world.shape.config.mode, set())
        ends.update(end for request in world.requests.values() for end in request.ends)

    assert outcomes == {mode: {"finished", "rejected"} for mode in MODES}


def test_admission_refuses_for_every_reason_in_these_worlds() -> None:
    """Without refusals, the worlds above would say nothing about them."""
    missing = {
        "requests are waiting",
        "time to first token",
        "time between tokens",
        "of the limits",
        "wasted",
        "moved",
    }

    def observe(event: Any, now: float, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, fx.Reject):
                missing.difference_update({words for words in missing if words in effect.reason})
                missing.difference_update({"wasted"} if isinstance(event, ev.PrefillEnded) else ())
            elif isinstance(effect, fx.Moved):
                missing.discard("moved")

    for seed in (13, 36, 43, 44, *range(60)):  # the first ones have them all, as worlds are drawn today
        FaultWorld.drawn(seed, observe=observe).run()
        if not missing:
            return
    raise AssertionError(f"no world had {missing}")


LOSSES, SEEDS_AT_ONCE = 200, 20
"""Runs in which ranks, conductors and gateways are lost, up to three of them, and runs of each test."""

DEATHS = Faults(rank_lost=1.0)


@pytest.mark.usefixtures("soak")
@pytest.mark.parametrize("group", range(LOSSES // SEEDS_AT_ONCE))
def test_no_client_gets_a_lost_a_doubled_or_a_wrong_token_whichever_ranks_die(
    group: int, request: pytest.FixtureRequest
) -> None:
    soak = request.config.getoption("--soak", default=0)
    start = SystemRandom().getrandbits(40) if soak else group * SEEDS_AT_ONCE
    for seed in range(start, start + SEEDS_AT_ONCE * max(1, soak)):
        FaultWorld.drawn(seed, num_requests=40, check_every=10, faults=DEATHS).run()


def test_a_pool_command_to_a_conductor_that_no_gateway_knows_yet_is_answered() -> None:
    for seed in (300192, 300313):
        FaultWorld.drawn(seed, num_requests=40, faults=DEATHS).run()


DAMAGE = Faults(rank_lost=0.3, flipped=1.0)


@pytest.mark.usefixtures("soak")
def test_damaged_blocks_are_never_attended_to(request: pytest.FixtureRequest) -> None:
    """A few hundred blocks get other bytes, ten thousand in `make soak`."""
    most = 10_000 if request.config.getoption("--soak", default=0) else 300
    flips = found = seed = 0
    while flips < most:
        world = FaultWorld.drawn(seed, num_requests=40, faults=DAMAGE)
        world.run()
        flips += world.memory.flips
        found += world.control.directory.counters["dram_bad_blocks"]
        seed += 1
    assert found > most / 30, "readers notice some of them; the others are never read"


def test_ranks_of_every_role_conductors_and_gateways_die_in_these_worlds() -> None:
    """Without deaths, the worlds above would say nothing about them."""
    missing = {"prefill", "decode", "compute", "store", "unseen", "gateway", "recalled", "no rank is left"}
    missing |= {"conductor", "taken over", "adopted"}

    def observe(event: Any, now: float, effects: Any) -> None:
        if isinstance(event, ev.RankLost):
            missing.difference_update({world.shape.config.roles[event.rank]})
            missing.difference_update(set() if event.ended else {"unseen"})
        elif isinstance(event, ev.GatewayLost):
            missing.discard("gateway")
        elif isinstance(event, ev.RequestArrived) and any(one.num_tokens > 3 for one in event.answers):
            missing.discard("taken over")
        elif isinstance(event, ev.Inventory) and event.blocks:
            missing.discard("adopted")
        elif isinstance(event, ev.Recalled) and any(one.num_tokens > 3 for one in event.answers):
            missing.discard("recalled")
        if any(isinstance(effect, fx.Reject) and "no rank is left" in effect.reason for effect in effects):
            missing.discard("no rank is left")

    for seed in (43, 7, 4, 8, 10, *range(200)):  # the first ones find all
        world = FaultWorld.drawn(seed, num_requests=40, faults=DEATHS, observe=observe)
        world.run()
        missing.difference_update({"conductor"} if world.term > 1 else ())
        if not missing:
            return
    raise AssertionError(f"no world had {missing}")


POISON = Faults(poisoned=1.0)
QUIET = replace(Faults.none(), poisoned=1.0)
"""Worlds in which some requests cannot be computed; in the second ones nothing else goes wrong."""


@pytest.mark.usefixtures("soak")
def test_a_request_that_cannot_be_computed_fails_alone_and_costs_no_rank(
    request: pytest.FixtureRequest,
) -> None:
    """World asserts that its client has every token before that, and all others their whole answers."""
    told: list[fx.Fail] = []

    def observe(event: Any, now: float, effects: Any) -> None:
        told.extend(effect for effect in effects if isinstance(effect, fx.Fail))

    for seed in range(12 * max(1, request.config.getoption("--soak", default=0))):
        told.clear()
        world = FaultWorld.drawn(seed, num_requests=60, faults=QUIET, observe=observe)
        world.run()
        assert (world.dead, world.control.members.lost) == (set(), {})
        failures = Counter((client_id_of(fail.request_id), fail.code) for fail in told)
        assert set(failures.values()) <= {1}, "a request fails twice"
        failed = {name for name, _ in failures}
        for name, one in world.requests.items():
            assert client_id_of(name) in failed or one.ends[0] in ("finished", "rejected"), (
                f"{name} {one.ends}"
            )
        for fail in told:
            assert fail.code or "pool full" in fail.reason, f"{fail} in a world without other faults"


def test_requests_of_every_mode_cannot_be_computed_in_every_stage_of_these_worlds() -> None:
    """Without these requests, the worlds above would say nothing about them."""
    missing = {
        *MODES,
        "prefill",
        "decode",
        "compute",
        ENGINE_ERROR,
        LOGITS_NOT_FINITE,
        "pipeline",
        "branches",
    }
    missing |= {"in the prompt", "at its end", "in the answer", "cancelled", "another try"}

    def observe(event: Any, now: float, effects: Any) -> None:
        if not (isinstance(event, ev.RequestFailed) and event.code):
            return
        config, one = world.shape.config, world.requests[client_id_of(event.request_id)]
        missing.difference_update((event.code, config.roles[event.rank], config.mode))
        missing.difference_update({"pipeline"} if len(config.instance_of(event.rank)) > 1 else ())
        missing.difference_update({"branches"} if one.n > 1 else ())
        missing.difference_update({"cancelled"} if one.cancelled else ())
        missing.difference_update({"another try"} if event.attempt > 1 else ())
        assert one.poison is not None
        answered = one.poison.answered
        missing.discard("in the answer" if answered > 0 else "in the prompt" if answered else "at its end")

    for seed in (13, 6, 41, *range(100)):  # the first ones find all
        world = FaultWorld.drawn(seed, num_requests=40, faults=POISON, observe=observe)
        world.run()
        if not missing:
            return
    raise AssertionError(f"no world had {missing}")


def skip(*_: Any, **__: Any) -> None:
    """Do nothing."""


def attempts_do_not_matter(self: Requests, event: Any, *steps: Any) -> RequestRecord | None:
    record = self._records.get(event.request_id)
    return record if record is not None and any(map(record.may, steps)) else None


def first_answer_ends_all(self: Reports, ended: Any, now: float) -> None:
    record = self._requests.current(ended, Step.ANSWERED, Step.DROP)
    if record is not None and record.present.worker == record.present.decode:
        self._requests.finish(record, now)


def begin_at_once(self: Succession, now: float) -> None:
    self.is_over = True
    self._dispatcher.open(now)


def place_is_free_at_once(self: Copies, grant: Any, reason: str, may_still_write: bool, now: float) -> None:
    self._directory.revoke_owner(f"copy/{grant.number}", now)


def carry_all(conductor: Conductor, sent: Any, send: Any, now: Any) -> None:
    for one in sent:
        if send(one) is not None:
            carry_all(conductor, conductor.unsent(one, UNREACHABLE, now()), send, now)


NOTE_TOKENS = progress._tokens


def noted_all_the_same(state: Any, result: Any, at_fault: Any, now: float) -> list[Any]:
    for chunk in result.step.chunks:
        if chunk.job[:2] in at_fault:
            state.note_computed(state.tasks[chunk.job], chunk.end + len(result.passes))
    return NOTE_TOKENS(state, result, at_fault, now)


def failed_while_blocks_fly(state: Any, fault: Any) -> list[Any]:
    for task in faults._tasks(state, fault.job):
        state.leave(task)
        for half in state.staging.of(task):
            use = state.staging.halves[half]
            state.pages.give_back(use.pages)
            use.kind, use.task, use.pages = "reading", None, ()
        state.remove(task)
    return faults.end_job(state, fault, False)


def of_job_alone(state: Any, job: Any) -> list[Any]:
    return [task for task in state.tasks.values() if task.id == job]


FAILED_COPIES = replace(Faults.none(), copy_fails=0.5, may_still_write=1.0)
KILLED_COMMANDS = replace(Faults.none(), command=0.5, killed=0.5)

MISTAKES = {
    "nothing is leased": Mistake(Directory, "lease", skip, 117),
    "every quarantine ends at once": Mistake(Quarantine, "ended", lambda self, now: list(self._entries), 77),
    "nothing is given up or checked": Mistake(Grants, "check", lambda self, now: [], 117),
    "a lost request is not tried again": Mistake(Requests, "lose", Requests.fail, 117),
    "epochs do not matter": Mistake(Control, "_is_of_this_epoch", lambda self, event: True, 0),
    "attempts do not matter": Mistake(Requests, "current", attempts_do_not_matter, 96),
    "ends are not told": Mistake(Requests, "fail_all", skip, 67),
    "the first answer ends its siblings": Mistake(Reports, "on_decode_ended", first_answer_ends_all, 117),
    "KV may go to any decode rank": Mistake(Room, "_only_segment", lambda self, record: None, 93),
    "withheld tokens are never released": Mistake(Reports, "_release", skip, 83),
    "the queue has no bound": Mistake(BoundedQueue, "on_arrival", skip, 117),
    "reports of pages are forgotten": Mistake(State, "note_pages", skip, 117),
    "any rank may decode": Mistake(Compared, "_decode_of", lambda self, row: self._fastest, 74),
    "prefill and decode ranks are confused": Mistake(
        dispatch, "Try", lambda prefill, decode, *more: Try(decode, prefill, *more), 117
    ),
    "full ranks get requests": Mistake(
        State, "open_prefills", lambda self, n=1: np.arange(len(self.prefills)), 117
    ),
    "the line for decode slots is not served": Mistake(HeldLine, "head", lambda self: None, 117),
    "a new conductor does not wait for ranks": Mistake(Succession, "look", begin_at_once, 9, DEATHS),
    "adopted blocks are not compared": Mistake(
        Adoption, "check_of", lambda self, object_id, now, always=False: 0, 3, DEATHS
    ),
    "a lost rank is thought to work on": Mistake(Grants, "rank_lost", skip, 50, DEATHS),
    "a request ends when its rank says so": Mistake(Requests, "end_answered", Requests.finish, 115, DEATHS),
    "a decode may read what was lost": Mistake(Requests, "is_sound", lambda self, record: True, 47, DEATHS),
    "a rank that cannot be reached writes nothing": Mistake(
        Quarantine,
        "hold",
        lambda self, writer: [self.remove(one) for one in self.of_writer(writer)],
        60,
        DEATHS,
    ),
    "blocks of a lost rank can be read": Mistake(
        Directory, "remove_segment", lambda self, rank: [], 27, DEATHS
    ),
    "a recall changes nothing": Mistake(RequestRecord, "go_on_from", skip, 47, DEATHS),
    "the place of a failed copy is used while its bytes may come": Mistake(
        Copies, "_lost", place_is_free_at_once, 52, FAILED_COPIES, "overlaps with"
    ),
    "a pool command that was killed is answered": Mistake(
        world, "carry", carry_all, 2, KILLED_COMMANDS, "which was gone before"
    ),
    "a missing token goes unnoticed": Mistake(progress, "faults_of", lambda result: {}, 0, POISON),
    "other branches of a job at fault go on": Mistake(faults, "_tasks", of_job_alone, 94, POISON),
    "what a pass at fault computed is noted": Mistake(progress, "_tokens", noted_all_the_same, 1, POISON),
    "every draft is accepted": Mistake(progress, "accepted", lambda chunk, drawn: len(drawn) - 1, 6),
    "a job fails while its blocks fly": Mistake(progress, "fail_job", failed_while_blocks_fly, 2, POISON),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_world_notices_a_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch, soak: int) -> None:
    planted = MISTAKES[mistake]
    assert_noticed(
        planted, lambda seed: FaultWorld.drawn(seed, faults=planted.faults).run(), soak, monkeypatch
    )
