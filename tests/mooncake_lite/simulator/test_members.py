"""Simulated instances whose ranks work in lockstep: what a pass takes, what members move, and bad sizes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_lite.cli import main
from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import seconds_together
from mooncake_lite.profiles.file import ExchangeSection
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.runner import VirtualRunner
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.metrics import COMPLETED
from mooncake_lite.workloads.traces import write_trace
from scheduler.instance import JobId, Step
from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.step import ReadGroup, SaveBlock, WriteGroup, WritePut
from store.objects import BlockRef
from tests.mooncake_lite.simulator.made import PROFILE, cluster, conversations, played

EXCHANGE = ExchangeSection(latency_s=1e-5, bytes_per_s=1e9, row_bytes=1000, piece_bytes=500)
JOB = JobId("a", 1)


def in_members(**sizes: int) -> dict[str, Any]:
    return {"sizes": {f"{name}_size": size for name, size in sizes.items()}}


# ------------------------------------------------------------------------------ passes


@pytest.mark.quick
@pytest.mark.parametrize("members", [2, 3])
def test_members_with_some_heads_each_divide_a_pass_and_make_two_sums_a_layer(members: int) -> None:
    seconds = seconds_together(lambda load: 6.0, EXCHANGE, layers=10, members=members, turns=1)
    once_s = 1e-5 + (members - 1) * 7 * 1000 / 1e9
    assert seconds(PassLoad(5, 15, 2, 900)) == pytest.approx(6.0 / members + 20 * once_s)


@pytest.mark.quick
def test_members_that_share_contexts_divide_attention_alone_and_gather_once_a_layer() -> None:
    def alone(load: PassLoad) -> float:
        return 1.0 + load.sequences + load.context / 1024

    seconds = seconds_together(alone, EXCHANGE, layers=10, members=1, turns=4)
    pieces = 8192 // 4 // 256 + 3
    gather_s = 1e-5 + 3 * pieces * 500 / 1e9
    assert seconds(PassLoad(0, 0, 3, 8192)) == pytest.approx(1.0 + 3 + 2 + 10 * gather_s)


# ------------------------------------------------------------------------------ moves


def runner_of(heads: int, ranks: list[int], turns: int) -> tuple[VirtualRunner, list[Any], Clock]:
    """A runner, and what its ranks move: (kind, rank, object ids and bytes, what ends it)."""
    moved = list[Any]()

    def to(kind: str) -> Any:
        def move(rank: int, refs: Any, done: Any, least_s: float = 0.0) -> None:
            moved.append((kind, rank, [(ref.object_id, ref.nbytes) for ref in refs], done))

        return move

    clock = Clock()
    world: Any = SimpleNamespace(
        clock=clock, dead=set(), bytes=Bytes(2), skip=lambda draws: None,
        shape=SimpleNamespace(
            config=SimpleNamespace(instance_of=lambda rank: ranks), in_lockstep=lambda rank: True,
            turns_of=lambda rank: turns, unit_tokens=256,
            layout=SimpleNamespace(kv_heads=heads, block_tokens=128),
        ),
        hardware=SimpleNamespace(read=to("read"), write=to("write"), count=lambda load, passes: None),
    )  # fmt: skip
    return VirtualRunner(ranks[0], world, lambda: None, lambda time: None), moved, clock


def refs(*numbers: int) -> list[BlockRef]:
    return [BlockRef(number, 9, 600 * number, 600) for number in numbers]


@pytest.mark.quick
def test_each_member_moves_its_heads_of_each_block_and_a_transfer_ends_with_the_last_part() -> None:
    runner, moved, _ = runner_of(3, [4, 5], 1)
    runner.begin(Step(0.0, reads=(ReadGroup(1, refs(0, 1), JOB, 0),)))
    assert [one[:3] for one in moved] == [
        ("read", 4, [(0, 400), (1, 400)]), ("read", 5, [(0, 200), (1, 200)]),
    ]  # fmt: skip
    moved[1][3]()
    assert runner.end().halves == ()
    moved[0][3]()
    assert [one.number for one in runner.end().halves] == [1]


@pytest.mark.quick
def test_members_that_share_contexts_move_whole_blocks_of_their_units() -> None:
    runner, moved, _ = runner_of(3, [4, 5], 2)  # a unit is two blocks
    runner.begin(
        Step(
            0.0,
            reads=(ReadGroup(0, refs(0, 1, 2, 3, 4), JOB, 0),),
            writes=(WriteGroup(1, [], refs(11, 13), JOB, 0, numbers=(1, 3)),),
            saves=tuple(SaveBlock(JOB, 6, (), 0, None, (), slot) for slot in (0, 1)),
            puts=(WritePut(0, (0, 1), refs(20, 21)),),
        )
    )
    numbers = [(kind, rank, [number for number, _ in some]) for kind, rank, some, _ in moved]
    assert numbers == [
        ("read", 4, [0, 1, 4]), ("read", 5, [2, 3]), ("write", 4, [11]), ("write", 5, [13]),
        ("write", 5, [20, 21]),
    ]  # fmt: skip
    assert {nbytes for _, _, some, _ in moved for _, nbytes in some} == {600}


@pytest.mark.quick
def test_a_pass_cannot_end_and_nothing_is_told_once_a_member_has_died() -> None:
    runner, moved, _ = runner_of(2, [4, 5], 1)
    runner.begin(Step(0.0, reads=(ReadGroup(0, refs(0), JOB, 0),)))
    assert not runner.is_stuck
    runner._world.dead.add(5)
    for one in moved:
        one[3]()
    assert runner.is_stuck
    assert runner.end().halves == ()


# ------------------------------------------------------------------------------ clusters

TRACE = conversations(3, 6, blocks=8)


def test_nodes_of_an_instance_stand_side_by_side_and_every_node_that_prefills_has_a_store() -> None:
    one = cluster("4P2D", **in_members(tensor_parallel=2))
    shape = one.setting(TraceSource(TRACE), 1).shape
    roles = ["steward", *["prefill", "member"] * 2, "decode", "member"]
    assert shape.config.roles == [*roles, *["store"] * 4]
    assert shape.config.nodes == [0, *range(6), *range(4)]
    alone = cluster("4P2D").setting(TraceSource(TRACE), 1).shape
    for first in (1, 3, 5):
        pages = shape.rank_state(first, lambda *_: 0).pages.num_pages
        assert pages == 2 * alone.rank_state(1, lambda *_: 0).pages.num_pages


def test_a_decode_instance_that_shares_contexts_deals_its_pages() -> None:
    shape = cluster("1P4D", **in_members(decode_context_parallel=4)).setting(TraceSource(TRACE), 1).shape
    state = shape.rank_state(2, lambda *_: 0)
    assert isinstance(state.pages, DealtPages)
    assert (state.pages.turns, state.pages.unit_tokens, state.pages.num_pages) == (4, 512, shape.pages)
    assert state.new_drafter is None
    assert not shape.config.prefetches


def fast(nodes: str, **fields: Any) -> Cluster:
    """A cluster whose exchanges cost nothing."""
    free = PROFILE.with_section("exchange", replace(PROFILE.exchange, latency_s=1e-12, bytes_per_s=1e18))
    return cluster(nodes, **{"profile": free, **fields})


def test_members_halve_the_time_to_a_first_token_and_move_the_same_bytes() -> None:
    trace = conversations(1, 6, gap_s=60.0, blocks=32)
    alone = played(fast("1P1D"), trace)
    together = played(fast("2P2D", **in_members(tensor_parallel=2)), trace)
    for one in (alone, together):
        assert [record.outcome for record in one.records] == [COMPLETED] * 6
    assert together.prefill_s == pytest.approx(alone.prefill_s / 2, rel=1e-6)
    assert together.mean_ttft_s < 0.55 * alone.mean_ttft_s
    assert sum(together.bytes_moved.values()) == sum(alone.bytes_moved.values())


def test_a_member_that_shares_contexts_moves_only_its_blocks() -> None:
    trace = conversations(1, 6, gap_s=60.0, blocks=32)
    alone, together = (
        played(fast(nodes, **in_members(decode_context_parallel=size)), trace)
        for nodes, size in (("1P1D", 1), ("1P2D", 2))
    )
    assert sum(together.bytes_moved.values()) == sum(alone.bytes_moved.values())
    assert together.prefill_s == alone.prefill_s


def test_an_exchange_that_takes_longer_delays_every_token() -> None:
    slow = PROFILE.with_section("exchange", replace(PROFILE.exchange, latency_s=1e-3))
    sizes = in_members(decode_tensor_parallel=2)
    quick, late = (
        mean_gap_s(cluster("1P2D", profile=profile, **sizes)) for profile in (fast("1P2D").profile, slow)
    )
    assert late - quick == pytest.approx(160e-3, rel=0.01), "two exchanges in each of 80 layers"


def mean_gap_s(one: Cluster) -> float:
    records = played(one, conversations(1, 2, gap_s=60.0)).records
    gaps = [times[-1] - times[-2] for times in (record.token_times_s for record in records)]
    return sum(gaps) / len(gaps)


def test_an_instance_dies_as_a_whole_and_the_others_go_on() -> None:
    source = TraceSource(conversations(4, 8))
    one = cluster("2P4D", **in_members(decode_tensor_parallel=2))
    outcome = play(one, source, 1, kills=[("decode", 20.0)])
    assert outcome.killed == [("decode", 20.0)]
    assert {record.outcome for record in outcome.records} == {COMPLETED}


# ------------------------------------------------------------------------------ bad sizes


@pytest.mark.parametrize(
    ("nodes", "sizes", "says"),
    [
        ("3P2D", {"tensor_parallel": 2}, "tensor_parallel_size=2 does not divide prefill=3: use 1 or 3"),
        ("9P9D", {"tensor_parallel": 9}, "tensor parallel size 9: at most 8, one for each key/value head"),
        ("2P3D", {"decode_context_parallel": 2}, "does not divide decode=3: use 1 or 3"),
        ("2P4D", {"decode_context_parallel": 2, "decode_tensor_parallel": 2}, "leave one of them out"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_what_would_be_right(
    nodes: str, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        cluster(nodes, **in_members(**sizes))


def test_a_profile_without_exchanges_is_refused_for_members_alone() -> None:
    sections = {name: raw for name, raw in PROFILE.sections.items() if name != "exchange"}
    before = replace(PROFILE, sections=sections)
    played(cluster("1P1D", profile=before), conversations(1, 1))
    with pytest.raises(ConfigError, match=r"what an exchange between ranks takes.*measure it anew"):
        played(cluster("2P1D", profile=before, **in_members(prefill_tensor_parallel=2)), conversations(1, 1))


def test_the_command_has_the_options_of_serve_and_names_those_that_were_given(tmp_path: Path) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_bytes(write_trace(conversations(1, 2)))
    command = ["simulate", "cluster", str(trace), "--nodes", "2P2D", "--json", str(result)]
    assert main(command) == 0
    assert "tensor_parallel_size" not in result.read_text()
    assert main([*command, "--tensor-parallel-size", "2"]) == 0
    assert json.loads(result.read_text())["config"]["tensor_parallel_size"] == 2
    assert main([*command, "--tensor-parallel-size", "3"]) == 2
