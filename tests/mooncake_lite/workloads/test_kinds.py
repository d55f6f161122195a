"""Kinds of workloads: what a trace of each kind shares, judged from the trace alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import mean, median

import pytest

from mooncake_lite.workloads.kinds import KINDS, Agents, Code, Singles, made
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from tests.python import printed_by

pytestmark = pytest.mark.quick

PRINT_DIGESTS = """
import hashlib
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.traces import write_trace
for kind in KINDS.values():
    print(hashlib.sha256(write_trace(made(kind, 50, 2.0, 7))).hexdigest())
"""


@cache
def trace_of(kind: str, requests: int = 2000, rate: float = 1.0, seed: int = 1) -> Trace:
    return made(KINDS[kind], requests, rate, seed)


def reuse(trace: Trace, blocks: int | None = None) -> float:
    return sum(cached_tokens(trace, blocks)) / sum(one.input_length for one in trace.requests)


def sessions_of(trace: Trace, shared: int) -> list[list[TraceRequest]]:
    """Requests by the first block after those that all sessions share."""
    found: dict[int, list[TraceRequest]] = {}
    for one in trace.requests:
        found.setdefault(one.hash_ids[shared], []).append(one)
    return list(found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_one_and_an_id_names_a_whole_prefix(kind: str) -> None:
    trace, parents = trace_of(kind, 300), dict[int, int]()
    for one in trace.requests:
        assert len(one.hash_ids) == -(-one.input_length // 512)
        for parent, block in pairwise([-1, *one.hash_ids]):
            assert parents.setdefault(block, parent) == parent
    assert sorted(parents) == list(range(len(parents)))
    partial = [one.hash_ids[-1] for one in trace.requests if one.input_length % 512]
    counts = Counter(block for one in trace.requests for block in one.hash_ids)
    assert all(counts[block] == 1 for block in partial)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_can_be_divided_and_then_share_as_much(kind: str) -> None:
    trace = trace_of(kind, 300)
    for by in (1, 2, 4):
        assert reuse(divided(trace, by)) == pytest.approx(reuse(trace), abs=0.02)


@pytest.mark.parametrize("rate", [0.25, 5.0, 400.0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "batch"])
def test_requests_come_at_the_rate_that_was_asked_for(kind: str, rate: float) -> None:
    requests = trace_of(kind, 300, rate).requests
    assert 299 / (requests[-1].timestamp / 1e3) == pytest.approx(rate, rel=0.03)
    assert [one.timestamp for one in requests] == sorted(one.timestamp for one in requests)


def test_a_batch_is_there_at_once_unless_it_is_asked_to_come_otherwise() -> None:
    assert {one.timestamp for one in trace_of("batch").requests} == {0}
    later = made(KINDS["batch"], 100, 1.0, 1, "poisson")
    assert later.requests[-1].timestamp > 80_000


def test_every_process_makes_the_same_traces_and_another_seed_others() -> None:
    here = [hashlib.sha256(write_trace(made(kind, 50, 2.0, 7))).hexdigest() for kind in KINDS.values()]
    assert printed_by("-c", PRINT_DIGESTS, PYTHONHASHSEED="12345").split() == here
    assert all(made(kind, 50, 2.0, 7) != made(kind, 50, 2.0, 8) for kind in KINDS.values())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rate", [1.0, 20.0])
def test_agents_have_the_turns_the_lengths_and_the_reuse_that_the_page_says(rate: float, seed: int) -> None:
    trace, kind = trace_of("agents", rate=rate, seed=seed), KINDS["agents"]
    assert isinstance(kind, Agents)
    turns = [len(one) for one in sessions_of(trace, kind.instructions_tokens // 512)]
    assert 36 <= median(turns) <= 50
    assert mean(one.input_length for one in trace.requests) == pytest.approx(142_000, rel=0.1)
    assert mean(one.output_length for one in trace.requests) == pytest.approx(444, rel=0.08)
    assert 0.96 < reuse(trace) < 0.985


def test_an_agents_prompt_continues_an_earlier_one_with_its_answer_and_subagents_fork_off() -> None:
    kind = KINDS["agents"]
    assert isinstance(kind, Agents)
    turns, continued, returned = 0, 0, 0
    for session in sessions_of(trace_of("agents"), kind.instructions_tokens // 512):
        ends = [one.hash_ids[one.input_length // 512 - 1] for one in session]
        for place, one in enumerate(session[1:], 1):
            blocks = set(one.hash_ids)
            begins = [number for number, end in enumerate(ends[:place]) if end in blocks]
            before = session[begins[-1]] if begins else one
            turns += 1
            continued += one.input_length > before.input_length + before.output_length
            returned += bool(begins) and begins[-1] < place - 1
    assert continued / turns > 0.97
    assert returned > 25


def test_most_of_a_completions_prompt_is_that_of_the_one_before_it() -> None:
    trace, kind = trace_of("code"), KINDS["code"]
    assert isinstance(kind, Code)
    assert reuse(trace) > 0.75
    assert mean(one.input_length for one in trace.requests) == pytest.approx(2048, rel=0.1)
    assert mean(one.output_length for one in trace.requests) == pytest.approx(28, rel=0.1)
    cached = [have / one.input_length for have, one in zip(cached_tokens(trace), trace.requests)]
    assert median(cached) > 0.8


def test_rag_has_a_template_hot_documents_and_unique_ones() -> None:
    trace = trace_of("rag")
    documents = Counter(one.hash_ids[2] for one in trace.requests)
    assert len({tuple(one.hash_ids[:2]) for one in trace.requests if len(one.hash_ids) > 2}) == 1
    hot = sum(count for count in documents.values() if count > 1)
    assert hot / 2000 == pytest.approx(0.6, abs=0.04)
    assert 0.45 < reuse(trace) < 0.6


@pytest.mark.parametrize("kind", ["unique", "batch", "reasoning"])
def test_nothing_is_reused_where_prompts_are_unique(kind: str) -> None:
    assert set(cached_tokens(trace_of(kind))) == {0}


def test_reasoning_is_short_questions_and_long_answers() -> None:
    requests = trace_of("reasoning").requests
    assert mean(one.input_length for one in requests) == pytest.approx(100, rel=0.1)
    assert mean(one.output_length for one in requests) == pytest.approx(32_000, rel=0.05)


def test_a_template_goes_viral_in_the_middle() -> None:
    requests = trace_of("viral").requests
    ((block, count),) = Counter(one.hash_ids[0] for one in requests).most_common(1)
    assert not [one for one in requests[:1000] if one.hash_ids[0] == block]
    assert count / 1000 == pytest.approx(0.8, abs=0.05)


def test_a_flood_evicts_what_would_be_reused() -> None:
    trace = trace_of("flood")
    asked = sum(min(one.input_length, 80_000) for one in trace.requests if one.input_length < 50_000)
    unlimited, paper_node = (sum(cached_tokens(trace, blocks)) for blocks in (None, 3_000_000 // 512))
    assert unlimited / asked > 0.3
    assert paper_node < unlimited / 5


def test_parameters_of_a_kind_can_be_others() -> None:
    kind = KINDS["rag"]
    assert isinstance(kind, Singles)
    assert reuse(made(replace(kind, hot_share=0.0), 500, 1.0, 1)) < 0.3
    assert reuse(made(replace(kind, hot_share=1.0), 500, 1.0, 1)) > 0.6
