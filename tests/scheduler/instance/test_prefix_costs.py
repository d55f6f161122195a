"""What a step costs: as much as it takes, and nothing for what lies in the cache. Counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import scheduler.instance
from scheduler.instance import DECODE, PREFILL, Limits, next_step
from scheduler.instance.outcomes import Token
from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import PrefixCache
from tests.scheduler.instance.prefix_books import FORMS, PAGE, chain_of
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick

DUTIES = (PREFILL, DECODE)
HERE = str(Path(scheduler.instance.__file__).parent)


def operations(call: Callable[..., Any], *values: Any) -> int:
    """How many instructions of Python a call executes in the files of scheduler/instance."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*values)
    finally:
        sys.settrace(before)
    return count


class Cache:
    """A cache of one form, which is full of idle prefixes of 8 tokens each."""

    def __init__(self, name: str, prefixes: int) -> None:
        form, self.unit = FORMS[name]
        self.pages = Pages(prefixes * 4, PAGE)
        self.prefix: PrefixCache = form(self.pages)
        for number in range(prefixes):
            self.pages.give_back(self.compute([number] * 8))

    def compute(self, token_ids: list[int]) -> list[int]:
        """Compute a sequence that shares nothing; its pages."""
        pages = self.take(self.pages.needed(len(token_ids)))
        self.prefix.insert(chain_of(token_ids, self.unit), token_ids, pages, len(token_ids))
        return pages

    def take(self, count: int) -> list[int]:
        """Take pages, and evict for them."""
        draft = PageDraft(self.pages, self.prefix)
        chosen = draft.take(count)
        assert chosen is not None
        self.prefix.drop(draft.evicted)
        self.pages.take(chosen)
        return list(chosen)


@pytest.mark.parametrize("name", FORMS)
def test_a_step_that_needs_pages_costs_the_same_in_a_small_and_in_a_large_cache(name: str) -> None:
    counts = {operations(cache.compute, [-1] * 8) for cache in (Cache(name, 10), Cache(name, 1000))}
    assert len(counts) == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_match_costs_the_same_in_a_small_and_in_a_large_cache(name: str) -> None:
    caches = (Cache(name, 10), Cache(name, 1000))
    for tokens in ([5] * 8, [-1] * 8):
        assert (
            len({operations(cache.prefix.match, chain_of(tokens, cache.unit), tokens, 8) for cache in caches})
            == 1
        )


@pytest.mark.parametrize("sharing", ["hash", "radix"])
def test_a_job_that_waits_costs_a_step_the_same_after_a_short_and_after_a_long_prefix(sharing: str) -> None:
    counts = set()
    for length in (40, 800):
        rank = Rank(*DUTIES, num_pages=length // 2 + 12, limits=Limits(1000), sharing=sharing)
        rank.arrive(job("first", DUTIES, range(length), salt=b"s", max_tokens=9))
        rank.until(Token)
        rank.arrive(job("again", DUTIES, [*range(length), *range(24)], salt=b"s"))
        rank.step(unchanged=False)
        assert len(rank.state.waiting) == 1
        counts.add(operations(next_step, rank.state, 0.0))
    assert len(counts) == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_draft_passes_over_the_pages_that_it_keeps_and_over_no_others(name: str) -> None:
    counts = set()
    for prefixes in (10, 1000):
        cache = Cache(name, prefixes)
        oldest = cache.prefix.match(chain_of([0] * 8, cache.unit), [0] * 8, 8)
        draft = PageDraft(cache.pages, cache.prefix)
        counts.add(operations(draft.keep_and_take, oldest, 8))
        assert len(draft.evicted) == 4
        assert set(draft.evicted) == set(cache.prefix.match(chain_of([1] * 8, cache.unit), [1] * 8, 8))
    assert len(counts) == 1


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_fills_a_unit_costs_the_same_after_a_short_and_after_a_long_prompt(name: str) -> None:
    counts = set()
    for length in (8, 4000):
        cache = Cache(name, 1001)
        tokens = [-1] * length
        pages = cache.compute(tokens)
        tokens += [-2, -3, -4, -5]
        pages += cache.take(2)
        counts.add(operations(cache.prefix.insert, chain_of(tokens, cache.unit), tokens, pages, len(tokens)))
    assert len(counts) == 1


@pytest.mark.parametrize("name", FORMS)
def test_emptying_a_cache_page_by_page_costs_the_same_per_page_whatever_its_size(name: str) -> None:
    counts = []
    for prefixes in (10, 200):
        cache = Cache(name, prefixes)
        unit = FORMS[name][1] // PAGE
        steps = prefixes * 4 // unit
        counts.append(sum(operations(cache.take, unit) for _ in range(steps)) / steps)
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
