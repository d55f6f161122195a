"""What the roles write to a trace, without a cluster."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.conductor.traced import TracedConductorRole
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.ranks.computing.machine import Order, Told
from mooncake_lite.ranks.computing.traced import ComputeTrace, TracedRunner
from mooncake_lite.ranks.store.traced import StoreTrace
from mooncake_lite.ranks.traced import keep_lines
from mooncake_lite.tracing.merge import merge
from mooncake_lite.tracing.tracer import PartFile, Tracer, part_path
from scheduler.instance import DECODE, PREFILL, Result, Step
from store.layout import BlockLayout
from tests.mooncake_lite.conductor import test_conductor_role
from tests.mooncake_lite.conductor.fake_hub import ROLES
from tests.mooncake_lite.ranks.computing.test_machine import Rank, prefill, serve
from tests.mooncake_lite.tracing.reading import Trace, read
from transport.bulk.batch import Batch, Transfer

pytestmark = pytest.mark.quick


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    """Of a rank 1."""
    return Tracer(1, "rank 1", PartFile(tmp_path / "out.json", 1))


def written(folder: Path) -> Trace:
    """The parts in a folder, as a viewer sees them."""
    merge(folder / "out.json")
    return read(folder / "out.json")


def names(trace: Trace, lane: str) -> list[str]:
    """Names of the slices on some lanes, in the order in which they began."""
    return [one.name for one in sorted(trace.of("rank", lane), key=lambda one: (one.began_s, one.depth))]


# ------------------------------------------------------------------------------ compute ranks


class TracedRank(Rank):
    """A rank without a model, whose messages and steps are traced."""

    def __init__(self, tracer: Tracer, *duties: str) -> None:
        super().__init__(*duties)
        self.trace = ComputeTrace(tracer, ROLES)
        self.runner = TracedRunner(self.runner, self.trace)

    def hear(self, *orders: Order) -> list[Any]:
        self.trace.received(orders, 0.0, self.trace.tracer.now_ns())
        return super().hear(*orders)

    def tell(self, told: Sequence[Told]) -> None:
        for message, *_ in told:
            self.trace.sent(message)
        super().tell(told)


def test_a_job_is_a_span_with_the_stages_of_its_steps(tmp_path: Path, tracer: Tracer) -> None:
    rank = TracedRank(tracer, PREFILL)
    rank.hear(prefill(list(range(3, 13)), [], 2))
    rank.until(m.PrefillEnded)
    rank.trace.close()
    trace = written(tmp_path)
    assert names(trace, "requests") == ["prefill a", "load", "compute", "store"]
    steps = [one for one in trace.of("rank", "steps") if one.name == "prefill"]
    assert [one.args["prompt tokens"] for one in steps] == [8, 2]
    assert {request for one in steps for request in one.args["requests"]} == {"a"}
    assert [one["args"]["way"] for one in trace.instants if one["name"] == "PrefillEnded"] == [
        "to the conductor"
    ]


def test_a_job_of_a_rank_with_both_duties_is_one_span(tmp_path: Path, tracer: Tracer) -> None:
    rank = TracedRank(tracer, PREFILL, DECODE)
    tokens = list(range(14))
    rank.hear(serve(tokens, rank.in_pool(tokens[:8])))
    rank.until(m.DecodeEnded)
    rank.trace.close()
    trace = written(tmp_path)
    assert names(trace, "requests") == ["serve a", "load", "compute", "decode"]
    steps = [one for one in trace.of("rank", "steps") if "decode" in one.name]
    assert sum(one.args["decode tokens"] for one in steps) == 3


def test_a_job_ends_with_the_last_of_its_branches(tmp_path: Path, tracer: Tracer) -> None:
    trace = ComputeTrace(tracer, ROLES)
    for name, answers in (("a", [m.BranchAnswer(0, [7]), m.BranchAnswer(1, [8])]), ("b", [])):
        order = m.StartDecode(1, name, 3, [], None, [0, 1])
        body = m.Body("gateway-0", [5], b"", m.Sampling(0.0), [], 9, 1, answers=answers)
        trace.received([m.Start(order, body)], 0.2, tracer.now_ns())
    trace.sent(m.DecodeLoaded(1, 0, "a", 3))
    trace.sent(m.DecodeEnded(1, 0, "a", 3, branch=1))
    trace.sent(m.DecodeEnded(1, 0, "b", 3))
    trace.sent(m.Report(m.Preempted(1, 0, "a", 3, 2, [], []), [[5, 7]]))
    trace.close()
    a, b = sorted(
        (one for one in written(tmp_path).of("rank", "requests") if not one.depth), key=lambda one: one.name
    )
    assert (a.name, a.args["end"]) == ("decode a", "Preempted")
    assert b.name == "decode b"
    assert "end" not in b.args
    assert b.ended_s < a.ended_s


class NoRunner:
    def run(self, step: Step, moved: Any = None) -> Result:
        return Result(step)


def batch_of(op: Any, ranks: Sequence[int]) -> Batch:
    moves = [Transfer(op, None, rank, 0, 100 * index, 16) for index, rank in enumerate(ranks)]
    batch = Batch(moves, lambda batch: None, lambda batch: None)
    batch.add_parts(1)
    return batch


def test_a_transfer_is_a_span_until_its_thread_ends_it_and_the_waits_for_it_are_one(
    tmp_path: Path, tracer: Tracer
) -> None:
    trace = ComputeTrace(tracer, ROLES)
    runner = TracedRunner(NoRunner(), trace)
    batch = batch_of("read", (3, 4))
    trace.submitted(batch, tracer.now_ns(), "load KV", "cmpl-1")
    for _ in range(3):
        runner.run(Step(0.0))
    batch.end_parts(1)
    runner.run(Step(0.0))
    unknown = batch_of("write", (2,))
    trace.submitted(unknown, tracer.now_ns())
    unknown.end_parts(1, {0: Exception("rank 2 is lost")})  # type: ignore[dict-item]
    trace.close()
    found = written(tmp_path)
    load, write = sorted(found.of("rank", "transfers"), key=lambda one: one.began_s)
    assert (load.name, load.args) == (
        "load KV",
        {
            "from": "rank 3 (store), rank 4 (store)",
            "to": "rank 1 (prefill)",
            "bytes": 32,
            "blocks": 2,
            "request": "cmpl-1",
        },
    )
    assert (write.name, write.args["to"], write.args["failed"]) == (
        "write",
        "rank 2 (decode)",
        "rank 2 is lost",
    )
    assert names(found, "steps") == ["wait for transfers", "wait for messages"]


# ------------------------------------------------------------------------------ store ranks


def test_an_order_to_a_store_rank_is_a_span_until_its_last_block_is_answered(
    tmp_path: Path, tracer: Tracer
) -> None:
    trace = StoreTrace(tracer, ROLES)
    refs = [m.BlockRef(n, 3, 16 * n, 16) for n in range(2)]
    orders = [m.SaveBlocks(3, refs, [8, 9], [0, 0], [[1], [1]]), m.LoadBlocks(3, 5, [8, 9], [0, 0], refs)]
    trace.received(orders, 0.2, tracer.now_ns())
    trace.received([], 0.2, tracer.now_ns())
    trace.sent(m.BlocksSaved(3, 0, [9], "written"))
    trace.sent(m.BlocksLoaded(3, 0, 5, [True, False], [[1], []], 0.1))
    trace.sent(m.BlocksSaved(3, 0, [8], "dropped"))
    trace.sent(m.BlocksSaved(3, 0, [9], "durable"))
    trace.close()
    found = written(tmp_path)
    load, save = sorted(found.of("rank", "orders"), key=lambda one: one.name)
    assert (load.name, load.args) == ("load from SSD", {"blocks": 2, "bytes": 32, "missing": 1})
    assert (save.name, save.args) == ("save to SSD", {"blocks": 2, "bytes": 32})
    assert load.ended_s < save.ended_s
    assert names(found, "steps") == ["wait for messages", "SaveBlocks, LoadBlocks", "wait for messages"]


# ------------------------------------------------------------------------------ the conductor


def test_the_stages_of_a_request_are_those_of_the_control_plane(
    tmp_path: Path, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_role(config: ServeConfig, layout: BlockLayout, hub: Any, clock: Any) -> TracedConductorRole:
        nodes = [0] * config.ranks
        return TracedConductorRole(tracer, config, hub, control_config(config, layout, nodes))

    monkeypatch.setattr(test_conductor_role, "new_role", new_role)
    cluster = test_conductor_role.Cluster(max_num_seqs=1, max_queue=1, trace=str(tmp_path / "out.json"))
    (job,) = cluster.submit("a", [5] * 70)
    for name in "bc":
        cluster.submit(name, [6] * 70)
    cluster.tell("gateway-0", m.RequestCancelled("b"))
    cluster.prefill_done(job)
    cluster.says(2, m.DecodeLoaded, "a")
    cluster.says(2, m.DecodeEnded, "a")
    cluster.tell("rank-3", m.TraceLines(3, b'{"ph":"M","pid":3,"tid":0,"name":"part"},\n'))
    cluster.role.close()
    tracer.close()
    assert part_path(tmp_path / "out.json", 3).exists(), "a rank of another host"
    trace = written(tmp_path)
    requests = [one for one in trace.of("rank", "requests") if one.depth == 0]
    assert {one.name: one.args for one in requests} == {
        "a": {"outcome": "finished"},
        "b": {"outcome": "cancelled"},
    }, "the third is refused, and never begins"
    assert names(trace, "requests") == ["a", "prefilling", "b", "held", "loading", "decoding"]
    assert "DecodeLoaded" in names(trace, "steps")
    (placed,) = [one for one in trace.instants if one["name"] == "placed"]
    assert (placed["args"]["prefill"], placed["args"]["decode"]) == (1, 2)
    assert placed["args"]["prefill_s"] == pytest.approx(70 * 0.005)


def test_lines_of_another_host_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    config = ServeConfig(trace=str(tmp_path / "out.json"))
    part = part_path(tmp_path / "out.json", 2)
    part.parent.mkdir()
    keep_lines(config, m.TraceLines(2, b'{"a":1},\n'))
    keep_lines(config, m.TraceLines(2, b'{"a":2},\n'))
    assert part.read_bytes() == b'{"a":1},\n{"a":2},\n'
    keep_lines(ServeConfig(trace=str(tmp_path / "gone" / "x")), m.TraceLines(2, b"late"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
    try:
        keep_lines(config, m.TraceLines(2, b'{"a":3},\n'))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert part.read_bytes() == b'{"a":1},\n{"a":2},\n'
