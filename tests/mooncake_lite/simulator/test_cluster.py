"""`simulate cluster`: closed forms of one request, formulas of queues, conservation, and bad input."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import factorial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest
from msgspec.structs import replace as changed

from mooncake_lite.cli import main
from mooncake_lite.control import effects as fx
from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.compute import ComputeCost, PassLoad, PassTerms
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import OverheadsSection, named_profile
from mooncake_lite.simulator.cluster import Cluster, parse_nodes
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.store_rank import StoreModel
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.workloads.metrics import COMPLETED
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from store.objects import BlockRef

PROFILE = named_profile("LLaMA3-70B-8xA800")
SECONDS = pass_seconds(PROFILE)
MESSAGES_S = 0.015
"""More than all but passes and moves of KV takes until a first token: a guessed 4 ms in the gateway, and
messages of at most 2 ms each."""


def one_each(**fields: Any) -> Cluster:
    return Cluster(profile=PROFILE, nodes={"prefill": 1, "decode": 1}, **fields)


def trace_of(*requests: tuple[float, int, int, list[int]]) -> Trace:
    """(seconds, prompt tokens, answer tokens, ids of the first blocks; the others get ids of their own)."""
    made, fresh = [], 10**6
    for at_s, prompt, answer, ids in requests:
        count = -(-prompt // 512)
        made.append(TraceRequest(at_s * 1000, prompt, answer, [*ids, *range(fresh, fresh + count)][:count]))
        fresh += count
    return Trace(made)


def played(cluster: Cluster, trace: Trace, seed: int = 1) -> Outcome:
    return play(cluster, TraceSource(trace), seed)


def prefill_s(tokens: int, cached: int = 0) -> float:
    new = tokens - cached
    return SECONDS(PassLoad(new, new * cached + new * (new + 1) // 2))


@pytest.mark.quick
def test_drafts_that_are_right_save_passes_and_change_no_token_count() -> None:
    passes = []
    for acceptance in (0.0, 0.6, 1.0):
        (record,) = played(one_each(acceptance=acceptance), trace_of((0, 8_000, 65, []))).records
        assert len(record.token_times_s) == 65
        passes.append(len(set(record.token_times_s[1:])))
    assert passes[0] == 64
    assert 20 < passes[1] < 50
    assert passes[2] <= 12


@pytest.mark.quick
def test_a_request_alone_takes_what_the_profile_says() -> None:
    prompt, answer = 8_000, 50
    (record,) = played(one_each(), trace_of((0, prompt, answer, []))).records
    assert prefill_s(prompt) <= record.ttft_s <= prefill_s(prompt) + MESSAGES_S
    steps_s = [SECONDS(PassLoad(0, 0, 1, prompt + n)) for n in range(1, answer)]
    *_, last_s = record.token_times_s
    assert len(record.token_times_s) == answer
    overheads_s = 9 * OverheadsSection().step_s
    assert last_s - record.token_times_s[-10] == pytest.approx(sum(steps_s[-9:]) + overheads_s, rel=1e-9)
    kv_s = 8_000 * 327_680 / 46e9  # the last blocks travel between the first token and the second one
    assert 0 < record.token_times_s[1] - record.token_times_s[0] - steps_s[0] <= 2.5 * kv_s + MESSAGES_S


@pytest.mark.quick
def test_a_client_waits_for_its_gateway_too() -> None:
    quick, slow = (
        PROFILE.with_section("overheads", OverheadsSection(request_s=request_s)) for request_s in (0.1, 0.6)
    )
    trace = trace_of((0, 8_000, 2, []))
    ttft_s = [played(one_each(machines=one), trace).mean_ttft_s for one in (quick, slow)]
    assert ttft_s[1] - ttft_s[0] == pytest.approx(0.5)


@pytest.mark.quick
def test_a_cached_prefix_comes_in_beside_the_pass_and_saves_its_computing() -> None:
    shared = list(range(10))
    outcome = played(one_each(), trace_of((0, 8_000, 2, shared), (60, 8_000, 2, shared)))
    first, second = outcome.records
    saved_s = prefill_s(8_000) - prefill_s(8_000, 5_120)
    assert second.ttft_s == pytest.approx(first.ttft_s - saved_s, abs=MESSAGES_S)
    assert outcome.reused["dram"] == 5_120
    assert outcome.prompt_tokens == 16_000
    assert outcome.to_dict(30, 0.1)["hit_rate"]["dram"] == pytest.approx(0.32)
    assert outcome.copies == {1: 20}, "ten shared full blocks, and five more of each prompt"


@pytest.mark.quick
def test_a_client_sees_its_first_token_once_the_cluster_will_not_refuse_it() -> None:
    """The KV has left by then (admission after-prefill), and the conductor has said so."""
    trace = trace_of((0, 8_000, 2, []))
    (at_once,), (released,) = (
        played(one_each(admission=admission), trace).records for admission in ("none", "after-prefill")
    )
    assert 0.002 < released.ttft_s - at_once.ttft_s < MESSAGES_S


@pytest.mark.quick
def test_shares_within_limits_on_tbt_count_no_answer_that_began_too_late() -> None:
    outcome = played(one_each(), trace_of((0, 2_000, 9, []), (60, 32_000, 9, [])))
    assert [one.ttft_s > 2.0 for one in outcome.records] == [False, True]
    assert outcome.to_dict(2.0, 0.3)["shares_within_tbt_ms"][300] == 0.5
    assert outcome.to_dict(9.0, 0.3)["shares_within_tbt_ms"][300] == 1.0


@pytest.mark.quick
def test_a_pass_of_a_whole_prompt_takes_what_whole_prompts_took() -> None:
    """FAST'25: 8k, 32k and 128k tokens in 1.00, 4.48 and 27.52 s; 95 % of them cached: 0.134, 0.406, 2.33."""
    for tokens, whole_s, cached_s in ((8_192, 1.00, 0.134), (32_768, 4.48, 0.406), (131_072, 27.52, 2.33)):
        assert prefill_s(tokens) == pytest.approx(whole_s, rel=0.03)
        assert prefill_s(tokens, round(0.95 * tokens)) == pytest.approx(cached_s, rel=0.12)
    assert SECONDS(PassLoad(100, 5_050, 4, 400)) == PROFILE.compute.seconds(PassLoad(100, 5_050, 4, 400))


Prompts = list[tuple[float, int]]
"""When each prompt comes, in seconds, and its tokens."""


def prompts_of(seed: int, count: int, rate: float, length: Callable[[Random], int]) -> Prompts:
    """Draw prompts with exponential gaps."""
    dice, at, found = Random(seed), 0.0, []
    for _ in range(count):
        at += dice.expovariate(rate)
        found.append((at, length(dice)))
    return found


def simulated_wait_s(
    cluster: Cluster, prompts: Prompts, prompt_s: Callable[[int], float], seed: int
) -> float:
    """Return how long the prompts after the first hundred wait for a prefill node, in the mean."""
    requests = [(at, length, 1, []) for at, length in prompts]
    records = played(replace(cluster, policy="least-loaded"), trace_of(*requests), seed).records
    pairs = zip(records, prompts, strict=True)
    return mean([record.ttft_s - prompt_s(length) for record, (_, length) in pairs][100:])


def exact_wait_s(servers: int, prompts: Prompts, prompt_s: Callable[[int], float]) -> float:
    """Return how long they wait in one line before so many servers (Kiefer and Wolfowitz' recursion).

    Between two prompts of a server are 3 ms of messages.
    """
    free_at, waits = [0.0] * servers, []
    for at, length in prompts:
        begins = max(at, heappop(free_at))
        heappush(free_at, begins + prompt_s(length) + 0.003)
        waits.append(begins - at)
    return mean(waits[100:])


@pytest.mark.parametrize(
    ("lengths", "load"), [([4_000], 0.5), ([1_000, 2_000, 4_000, 16_000], 0.6)], ids=["M/D/1", "M/G/1"]
)
def test_prompts_wait_as_long_as_pollaczek_and_khinchin_say(
    lengths: list[int], load: float, soak: int
) -> None:
    services_s = [prefill_s(length) + 0.003 for length in lengths]
    rate = load / mean(services_s)
    for seed in range(2 if soak == 1 else 40):
        prompts = prompts_of(seed, 600, rate, lambda dice: dice.choice(lengths))
        exact_s = exact_wait_s(1, prompts, prefill_s)
        assert abs(simulated_wait_s(one_each(), prompts, prefill_s, seed) - exact_s) <= MESSAGES_S
    expected_s = rate * mean(s * s for s in services_s) / (2 * (1 - load))
    many = prompts_of(1, 200_000, rate, lambda dice: dice.choice(lengths))
    assert exact_wait_s(1, many, dict(zip(lengths, map(prefill_s, lengths))).__getitem__) == pytest.approx(
        expected_s, rel=0.03
    )


def erlang_wait_s(servers: int, rate: float, service_s: float) -> float:
    """Mean wait of M/M/c."""
    offered = rate * service_s
    full = offered**servers / factorial(servers) * servers / (servers - offered)
    waits = full / (sum(offered**n / factorial(n) for n in range(servers)) + full)
    return waits * service_s / (servers - offered)


def test_prompts_of_several_nodes_wait_as_long_as_erlang_says(soak: int) -> None:
    """Service times are exponential: a token takes 0.1 ms, and nothing else takes time."""
    servers, mean_tokens = 3, 8_000
    fit = ComputeCost(PassTerms(0.0, 1e-4, 0.0), PassTerms(1e-3, 0.0, 0.0))
    alone = changed(
        PROFILE, sections={name: raw for name, raw in PROFILE.sections.items() if name != "prefill"}
    )
    profile = alone.with_section("compute", changed(PROFILE.compute, fit=fit))
    cluster = Cluster(profile=profile, nodes={"prefill": servers, "decode": 1})
    rate = 0.7 * servers / (1e-4 * mean_tokens)

    def length(dice: Random) -> int:
        return 1 + int(dice.expovariate(1 / mean_tokens))

    def service_s(tokens: int) -> float:
        return 1e-4 * tokens

    for seed in range(2 if soak == 1 else 40):
        prompts = prompts_of(seed, 1_200, rate, length)
        exact_s = exact_wait_s(servers, prompts, service_s)
        assert abs(simulated_wait_s(cluster, prompts, service_s, seed) - exact_s) <= MESSAGES_S
    expected_s = erlang_wait_s(servers, rate, service_s(mean_tokens) + 0.003)
    many = prompts_of(1, 200_000, rate, length)
    assert exact_wait_s(servers, many, service_s) == pytest.approx(expected_s, rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "pooled", "nodes": {"prefill": 2, "decode": 2}},
        {"mode": "split", "nodes": {"prefill": 2, "decode": 1}},
        {"mode": "colocated", "nodes": {"compute": 2}, "node_bytes": 0, "batched_tokens": 2_048},
        {"mode": "pooled", "nodes": {"prefill": 2, "decode": 1}, "admission": "predictive"},
        {"mode": "pooled", "nodes": {"prefill": 1, "decode": 1}, "node_bytes": 10**10, "ssd_bytes": 10**12},
    ],
    ids=lambda fields: f"{fields['mode']} {fields.get('admission', '')}",
)
def test_every_request_ends_once_and_every_token_is_counted(fields: dict[str, Any]) -> None:
    dice = Random(3)
    wanted = [
        (n * 0.7, dice.randint(1, 12_000), dice.randint(1, 60), [0, 1, 2][: dice.randint(0, 3)])
        for n in range(80)
    ]
    outcome = played(Cluster(profile=PROFILE, **fields), trace_of(*wanted))
    assert len(outcome.records) == len(wanted)
    for record, (at, _, answer, _) in zip(outcome.records, wanted, strict=True):
        assert record.arrived_s >= at
        if record.outcome == COMPLETED:
            assert len(record.token_times_s) == answer
            assert list(record.token_times_s) == sorted(record.token_times_s)
    if fields.get("admission") is None:
        assert outcome.prompt_tokens == sum(prompt for _, prompt, *_ in wanted)


@pytest.mark.quick
@pytest.mark.parametrize("role", ["prefill", "decode", "store"])
def test_when_a_rank_dies_every_token_still_comes_and_answers_pause(role: str) -> None:
    requests = [(0.2 * n, 2_000, 200, []) for n in range(8)]
    cluster = Cluster(profile=PROFILE, nodes={"prefill": 2, "decode": 2})
    calm = played(cluster, trace_of(*requests))
    outcome = play(cluster, TraceSource(trace_of(*requests)), 1, kills=[(role, 3.0)])
    assert [len(one.token_times_s) for one in outcome.records] == [200] * 8
    assert len(outcome.gaps_s(3.0)) == 8
    usual_s = max(calm.gaps_s(3.0))
    paused = sum(gap_s > 1.5 * usual_s for gap_s in outcome.gaps_s(3.0))
    assert paused == (4 if role == "decode" else 0), "two decode ranks have four answers each"


@pytest.mark.quick
def test_a_rank_dies_once_the_cluster_is_ready_and_not_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = play(
        Cluster(profile=PROFILE, nodes={"prefill": 2, "decode": 2}),
        TraceSource(trace_of((0, 2_000, 20, []), (1, 2_000, 20, []))), 1, kills=[("decode", 0.0)],
    )  # fmt: skip
    assert list(outcome.killed) == [("decode", 0.0)]
    assert [len(one.token_times_s) for one in outcome.records] == [20, 20]
    file = tmp_path / "trace.jsonl"
    file.write_bytes(write_trace(trace_of((0, 600, 2, []))))
    kills = ["--kill", "decode@900", "--kill", "prefill@0.1"]
    assert main(["simulate", "cluster", str(file), "--nodes", "2P2D", *kills]) == 0
    said = capsys.readouterr()
    assert said.err.count("note:") == 1
    assert "note: the run had ended at 900 s, so no decode rank died then" in said.err
    assert "answers pause" not in said.out


@pytest.mark.quick
def test_loads_are_those_of_the_ranks_that_live() -> None:
    requests = [(0.2 * n, 2_000, 200, []) for n in range(4)]
    cluster = Cluster(profile=PROFILE, nodes={"prefill": 2, "decode": 2})
    outcome = play(cluster, TraceSource(trace_of(*requests, (60, 600, 2, []))), 1, kills=[("decode", 3.0)])
    late = [count for at, count in zip(outcome.loads.times_s, outcome.loads.decoding) if 30 < at < 55]
    assert late
    assert not any(late)


@pytest.mark.quick
def test_what_the_profile_does_not_cover_is_counted_by_passes_and_not_by_leaps() -> None:
    requests = [(0.3 * n, 1_500, 60, []) for n in range(8)]
    cluster = Cluster(profile=PROFILE, nodes={"prefill": 1, "decode": 1})
    found = []
    for passes in (1, 40):
        setting = cluster.setting(TraceSource(trace_of(*requests)), 1)
        world = World(setting, most_passes=passes)
        world.run()
        found.append(world.hardware.outside())
    assert found[0]["decode"] == pytest.approx(found[1]["decode"], abs=0.02)
    assert 0.05 < found[0]["decode"] < 0.95


@pytest.mark.quick
@pytest.mark.parametrize("divide", [16, 64, 512])
def test_blocks_may_be_as_small_as_a_token(divide: int) -> None:
    trace = divided(trace_of((0, 5_120, 40, []), (9, 5_120, 40, [])), divide)
    outcome = played(
        Cluster(profile=PROFILE, nodes={"prefill": 1, "decode": 1}, block_tokens=512 // divide), trace
    )
    assert [one.outcome for one in outcome.records] == [COMPLETED] * 2


@pytest.mark.quick
def test_a_save_lasts_as_long_as_its_bytes_take() -> None:
    """At 1 GB/s, a block of 160 MiB takes 0.17 s, and 40 of them, begun later, take 6.7 s."""
    setting = Cluster(
        profile=PROFILE, nodes={"prefill": 1, "decode": 1}, ssd_bytes=10**12, node_bytes=10**11
    ).setting(TraceSource(trace_of((0, 600, 1, []))), 1)
    world = World(setting)
    store, said = next(one for one in world.ranks.values() if isinstance(one, StoreModel)), list[Any]()
    world.answer = lambda event: said.append((world.clock.now, event))  # type: ignore[assignment, method-assign]
    world.hardware._bytes_per_s = (1e9,) * 4  # type: ignore[attr-defined]
    block = 160 * 2**20
    for first, count in ((0, 1), (1, 40)):
        refs = [BlockRef(n, store.number, 0, block) for n in range(first, first + count)]
        keys = [ref.object_id for ref in refs]
        store.on(fx.SaveBlocks(store.number, refs, keys, keys, [[0] * 80] * count))
    while world.clock.step() and world.clock.now < 60:
        pass
    assert {event.state for _, event in said} == {"written", "durable"}
    written = {len(event.keys): at for at, event in said if event.state == "written"}
    assert written[1] < 1
    assert 6 < written[40] < 8


@pytest.mark.quick
def test_the_command_tells_how_long_answers_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "trace.jsonl", tmp_path / "out"
    file.write_bytes(write_trace(trace_of(*((0.2 * n, 2_000, 100, []) for n in range(8)))))
    words = ["simulate", "cluster", str(file), "--nodes", "2P2D", "--kill", "decode@2.5", "--json", str(out)]
    assert main(words) == 0
    assert "decode dies at 2.5 s: answers pause for " in capsys.readouterr().out
    (found,) = json.loads(out.read_text())["kills"]
    assert (found["role"], found["at_s"]) == ("decode", 2.5)
    assert 0.05 < found["longest_gap_s"]["p99"] < 2


def test_equal_seeds_give_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(write_trace(trace_of(*((3.0 * n, 3_000 + n, 20, [0, 1]) for n in range(30)))))
    results = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        out = tmp_path / f"{name}.json"
        words = ["--nodes", "2P1D", "--spread", "--seed", str(seed), "--json", str(out)]
        assert main(["simulate", "cluster", str(file), *words]) == 0
        results.append(out.read_bytes())
    assert results[0] == results[1] != results[2]
    found = json.loads(results[0], parse_constant=pytest.fail)
    assert found["requests"] == found["completed"] == 30
    assert set(found["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert "30 completed, 0 refused" in capsys.readouterr().out


@pytest.mark.quick
def test_a_pool_that_admits_what_comes_twice_evicts_no_unique_prompt_and_the_control_plane_is_told() -> None:
    trace = trace_of(*((float(at), 2048, 2, []) for at in range(8)))
    small = one_each(node_bytes=10 * 167_772_160)
    kept, filtered = played(small, trace), played(replace(small, eviction="lru+second-hit"), trace)

    assert kept.pool["evictions"] > 0
    assert filtered.pool["evictions"] == 0
    assert filtered.pool["puts_not_admitted"] == 8 * 4
    with pytest.raises(ConfigError, match="--eviction: no eviction policy is called 'mru'"):
        replace(small, eviction="mru")
    told = replace(small, control={"balancing_threshold": 9.0})
    assert told.setting(TraceSource(trace), 1).shape.config.balancing_threshold == 9.0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "8P"], "name nodes that prefill and nodes that decode, or nC for both"),
        (["--nodes", "8X"], "write how many nodes prefill and decode, as 8P8D, or 16C"),
        (["--nodes", "0P1D"], "write how many nodes"),
        (["--nodes", "9999C"], "at most 4,096 nodes"),
        (["--nodes", "4C", "--mode", "pooled"], "mode pooled has nodes of the form nPnD"),
        (["--nodes", "4P4D", "--mode", "colocated"], "mode colocated has nodes of the form nC"),
        (["--policy", "fastest"], "'fastest' is not one of"),
        (["--profile", "none"], "is neither a file nor a profile of this package; those are"),
        (["--node-dram", "1MB"], "a block has 167,772,160 bytes"),
        (["--kv-cache-bytes", "1MB"], "a block has 167,772,160 bytes"),
        (["--node-dram", "much"], "is not a size; write bytes or 512MiB"),
        (["--speed", "0"], "0.0 is not in the range"),
        (["--slo-tbt-ms", "nan"], "nan is not in the range"),
        (["--divide-lengths", "7"], "take a divisor of 512"),
        (["--kill", "decode"], "write prefill, decode, compute, store and a time, as decode@30"),
        (["--kill", "steward@3"], "and a time, as decode@30"),
        (["--nodes", "1P1D", "--kill", "decode@3"], "there are 1, and one must be left"),
        (["--runs", "2"], "2 runs give no interval: take 3 or more, or 1"),
        (["--nodes", "2P2D3S", "--mode", "split"], "mode split has none"),
        (["--nodes", "2C2S", "--node-dram", "0"], "mode colocated has stores only with --node-dram"),
        (["--one-node", "--link-gbps", "10"], "leave out --link-gbps"),
        (
            ["--nodes", "2P2D", "--mode", "split", "--ssd", "1TB"],
            "this cluster has no stores",
        ),
        (["--ssd", "1TB", "--ssd-gbps", "0"], "0.0 is not in the range"),
        (["--nodes", "2P2D", "--racks", "0,1"], "are those of 2 nodes, and the ranks are on 4"),
        (["--nodes", "2P2D", "--racks", "a,b,a,b"], "give the rack of each node as a number"),
        (["--site-gbps", "0"], "0.0 is not in the range"),
        (["--ssd", "1MB"], "--ssd 1000000: a block has 167,772,160 bytes"),
        (["--eviction", "mru"], "--eviction: no eviction policy is called 'mru'; there are lru, lfu"),
        (["--eviction", "belady"], "--eviction: belady needs the future"),
        (["--site-gbps", "10"], "--site-gbps is about sites: name the site of each node with --racks"),
        (["--site-price", "1"], "--site-price is about sites: name the site of each node with --racks"),
        (["--hint-error", "0.5"], "--hint-error is about the hints of clients: name them with --hints"),
    ],
)
def test_bad_words_are_refused_with_the_fix(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(write_trace(trace_of((0, 600, 2, []))))
    assert main(["simulate", "cluster", str(file), *words]) == 2
    assert message in capsys.readouterr().err


def two_sites(*words: str, folder: Path) -> dict[str, Any]:
    """Play ten prompts without a common prefix. Sites have a node of each role; equal rows are apart."""
    trace, out = folder / "trace.jsonl", folder / f"{len(words)}{words[-1]}.json"
    trace.write_bytes(write_trace(trace_of(*((2.0 * n, 4_096, 20, []) for n in range(10)))))
    sites = ["--nodes", "2P2D", "--racks", "0,1,1,0", "--site-price", "0.5", *words, "--json", str(out)]
    assert main(["simulate", "cluster", str(trace), *sites]) == 0
    return json.loads(out.read_bytes())  # type: ignore[no-any-return]


@pytest.mark.quick
def test_a_policy_that_knows_sites_keeps_kv_on_them_and_one_that_does_not_pays(tmp_path: Path) -> None:
    blind, knowing = (
        two_sites("--site-gbps", "2", "--policy", policy, folder=tmp_path)
        for policy in ("global-cache", "topology")
    )
    assert knowing["bytes_moved"]["sites"] == knowing["site_price"] == 0
    prompt_gb = 4_096 * 327_680 / 1e9
    assert blind["bytes_moved"]["sites"] >= 2 * 1e9 * prompt_gb
    assert blind["site_price"] == pytest.approx(blind["bytes_moved"]["sites"] / 1e9 * 0.5)
    assert blind["second_token_s"]["p90"] > knowing["second_token_s"]["p90"] + 8 * prompt_gb / 2 - 0.5


@pytest.mark.quick
def test_latency_between_sites_delays_messages_and_transfers(tmp_path: Path) -> None:
    """Of the nodes that prefill, one is on the conductor's site. Orders and tokens of the other are late."""
    near, far = (
        two_sites("--policy", "round-robin", "--site-ms", ms, folder=tmp_path) for ms in ("0", "500")
    )
    assert far["ttft_s"]["mean"] - near["ttft_s"]["mean"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.quick
def test_a_profile_that_does_not_say_how_large_its_kv_is_is_refused() -> None:
    old = changed(PROFILE, model=changed(PROFILE.model, kv=[]))
    with pytest.raises(ConfigError, match="measure it anew"):
        Cluster(profile=old, nodes=parse_nodes("1P1D"))


@pytest.mark.quick
def test_a_run_makes_no_cycles_of_objects() -> None:
    """The garbage collector is off while a run is played: objects in a cycle would stay until the end."""
    trace = trace_of(*[(0.3 * number, 3_000, 100, [number % 7]) for number in range(20)])
    found: list[int] = []

    def tracked() -> int:  # it stops to track tuples and dictionaries of numbers, which it has looked at
        return sum(type(one) not in (tuple, dict) for one in gc.get_objects())

    def look(ended: int) -> None:
        before = tracked()
        gc.collect()
        found.append(before - tracked())

    gc.freeze()  # what other tests have left is not looked at
    try:
        play(one_each(), TraceSource(trace), 1, told=look)
    finally:
        gc.unfreeze()
    assert len(found) > 5
    assert max(found[1:]) <= 0, "the first look finds what was made before the run"
