"""In which order waiting requests begin. The bounds are in test_queue_properties.py."""

from __future__ import annotations

import pytest

import scheduler as s
from scheduler.line import FIRST, Line
from scheduler.queues import QUEUES, QueueConfig, fair
from scheduler.queues.fair import FairShares
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick


def request(name: str, arrived_s: float = 0.0, **more: object) -> s.Request:
    return s.Request(name, 64, (), 64, 16, arrived_s=arrived_s, **more)  # type: ignore[arg-type]


def order(name: str, jobs: list[tuple[s.Request, float]]) -> str:
    """Names of jobs that all wait, in the order in which a queue begins them."""
    queue, line = QUEUES[name](QueueConfig()), Line()
    for wanted, prefill_s in jobs:
        line.add(wanted.request_id, queue.key(wanted, prefill_s, wanted.arrived_s))
    return "".join(line)


def test_each_queue_orders_the_same_requests_in_its_own_way() -> None:
    jobs = [
        (request("a", 0.0, slo_ttft_s=50.0), 9.0),
        (request("b", 5.0, slo_ttft_s=9.0), 3.0),
        (request("c", 30.0, slo_ttft_s=2.0), 6.5),
    ]
    assert order("fcfs", jobs) == "abc"
    assert order("srpt", jobs) == "bca"
    assert order("aged-srpt", jobs) == "bac"
    assert order("deadline", jobs) == "bca"


def test_a_request_without_a_limit_has_the_last_deadline() -> None:
    assert order("deadline", [(request("a"), 1.0), (request("b", 9.0, slo_ttft_s=1e6), 1.0)]) == "ba"


def served(queue: FairShares, jobs: list[tuple[int, str, float]]) -> list[tuple[int, str, float]]:
    """Serve jobs (class, tenant, seconds) that all wait from the start, on one server; in their order."""
    line, waiting = Line(), {}
    for number, (class_id, tenant, work_s) in enumerate(jobs):
        wanted = request(f"r{number}", class_id=class_id, tenant=tenant)
        line.add(wanted.request_id, queue.key(wanted, work_s, 0.0))
        waiting[wanted.request_id] = wanted, jobs[number]
    done = []
    while (name := line.head()) is not None:
        wanted, job = waiting[name]
        line.remove(name)
        queue.on_leave(wanted, started=True)
        done.append(job)
    return done


def test_tenants_that_come_and_go_are_forgotten_once_their_service_is_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair, "MOST_FLOWS", 4)
    queue = FairShares()
    served(queue, [(0, "heavy", 1000.0)])
    for number in range(20):
        served(queue, [(0, f"t{number}", 1.0), (0, f"t{number}", 1.0)])
    assert len(queue._flows) <= 5
    jobs = [(0, "heavy", 1.0), (0, "new", 1.0)]
    assert served(queue, jobs) == jobs[::-1], "the heavy one still has to make up for its service"


def test_tenants_of_a_class_share_what_the_class_gets() -> None:
    """Nine requests of one tenant do not keep the single one of another waiting."""
    jobs = [(1, "busy", 1.0)] * 9 + [(1, "rare", 1.0)]
    assert served(FairShares((4.0, 2.0)), jobs).index((1, "rare", 1.0)) <= 2


def test_a_class_that_was_idle_gets_no_credit_for_it() -> None:
    queue = FairShares((1.0, 1.0))
    served(queue, [(0, "", 1.0)] * 5)
    jobs = [(1, "", 1.0)] * 6 + [(0, "", 1.0)] * 6
    assert {job[0] for job in served(queue, jobs)[:3]} == {0, 1}


def test_a_request_cancelled_while_it_waits_is_no_service_to_its_tenant() -> None:
    """The second request of a tenant takes the place of its first one, which ends without a prefill."""
    state = s.State(10, queue=FairShares())
    state.add_instance(1, 0, ["prefill"], 1)
    state.add_instance(2, 0, ["decode"], 9)
    for name, tenant in (("running", "x"), ("long", "a"), ("a", "a"), ("b", "b"), ("b2", "b")):
        wanted = s.Request(name, 1000 if name == "long" else 10, (), 64, 16, tenant=tenant)
        state.place(wanted, s.Placement(name, 1, 2, False, 0, NO_TERMS), 0.0)
        if name == "running":
            state.start(name, 0.0)
    state.wait_in_line(s.Request("a2", 10, (), 64, 16, tenant="a"), 0.0)
    assert list(state.prefills[1].queue) == ["long", "b", "b2", "a"]
    state.forget("long", 0.0)
    assert list(state.prefills[1].queue) == ["a", "b", "b2"]
    held = state.held.leave("a2", 0.0)
    assert held is not None
    assert held.key < (1.0,), "also of a request without a place"
    state.check()


def test_a_resumed_request_begins_before_all_others() -> None:
    line = Line()
    line.add("a", (-5.0,))
    line.add("again", FIRST, front=True)
    line.add("first of all", FIRST, front=True)
    assert list(line) == ["first of all", "again", "a"]


def tags(queue: FairShares, class_id: int, tenant: str, prefix: str) -> list[float]:
    """Start tags of three requests of one second each that arrive now."""
    names = [f"{prefix}{number}" for number in range(3)]
    return [queue.key(request(name, class_id=class_id, tenant=tenant), 1.0, 0.0)[0] for name in names]


def test_tenants_that_have_gone_take_nothing_of_the_share_of_their_class() -> None:
    queue = FairShares((1.0, 1.0))
    for number in range(20):
        wanted = request(f"past{number}", class_id=0, tenant=f"t{number}")
        queue.key(wanted, 0.0, 0.0)
        queue.on_leave(wanted, started=number % 2 == 0)
    assert tags(queue, 0, "new", "a") == tags(queue, 1, "", "b") == [0.0, 1.0, 2.0]


def test_virtual_time_does_not_go_back_when_another_server_begins_an_earlier_request() -> None:
    queue = FairShares()
    early, late = request("early", tenant="a"), request("late", tenant="b")
    queue.key(early, 1.0, 0.0)
    queue.key(request("first", tenant="b"), 9.0, 0.0)
    assert queue.key(late, 1.0, 0.0)[0] > 9.0
    queue.on_leave(late, started=True)
    now = queue.key(request("one", tenant="c"), 1.0, 0.0)[0]
    queue.on_leave(early, started=True)
    assert queue.key(request("two", tenant="d"), 1.0, 0.0)[0] == now


def test_a_request_behind_a_cancelled_one_gets_no_tag_from_before_its_arrival() -> None:
    queue = FairShares()
    busy = [request(f"busy{number}", tenant="busy") for number in range(5)]
    for wanted in busy:
        queue.key(wanted, 1.0, 0.0)
        queue.on_leave(wanted, started=True)
    first, second = request("first", tenant="idle"), request("second", tenant="idle")
    begins = queue.key(first, 1.0, 0.0)[0]
    queue.key(second, 1.0, 0.0)
    assert begins > 0.0
    assert queue.on_leave(first, started=False) == {"second": (begins, 0.0)}


def test_a_deferred_request_is_passed_by_no_shorter_one() -> None:
    state = s.State(10, queue=QUEUES["srpt"](QueueConfig()))
    state.add_instance(1, 0, ["prefill"], 1)
    state.add_instance(2, 0, ["decode"], 9)
    for name, tokens in (("long", 1000), ("short", 10)):
        wanted = s.Request(name, tokens, (), 64, 16)
        state.place(wanted, s.Placement(name, 1, 2, False, 0, NO_TERMS), 0.0)
        if name == "long":
            state.start("long", 0.0)
            state.defer("long", 0.0)
    state.retry("long")
    assert state.startable() == "long"
