"""Prefetches: blocks of a prompt come into pages before the job that needs them, and displace nothing."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, PREFETCH, Job, JobId, Step
from scheduler.instance.outcomes import BadBlocks, Ended, Loaded, Preempted, Prefetched, Token
from tests.scheduler.instance.model_runner import BLOCK, kv_of
from tests.scheduler.instance.rank import Rank, job, key_after
from tests.scheduler.instance.test_loads_and_stores import Line, in_pool

pytestmark = pytest.mark.quick

SHARING = ["hash", "radix"]


def prefetch(name: str, tokens: range, places: list[int], attempt: int = 0) -> Job:
    """Have the first blocks of these tokens loaded, as many as there are places."""
    ids = list(tokens)[: len(places) * BLOCK]
    return job(
        name, [PREFETCH], ids, load=places, salt=b"s", attempt=attempt, branch=-len(places),
        keys=keys_of(ids),
    )  # fmt: skip


def decode(name: str, tokens: range, places: list[int], **more: object) -> Job:
    """Have the tokens decoded on; all but the last one are in the pool."""
    ids = list(tokens)
    return job(name, [DECODE], ids, load=places, salt=b"s", answered=1, keys=keys_of(ids[:-1]), **more)


def keys_of(ids: list[int]) -> list[int]:
    """Keys of the full blocks."""
    keys: list[int] = []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        keys.append(key_after(b"s", keys[-1] if keys else None, ids[start : start + BLOCK]))
    return keys


def reads(steps: list[Step]) -> list[int]:
    """Places that these steps read."""
    return [place for step in steps for group in step.reads for place in group.places]


def steps_until_idle(rank: Rank) -> list[Step]:
    """Go on until nothing is left to do."""
    steps = []
    while rank.state.busy:
        steps.append(rank.step()[0])
        assert len(steps) < 200
    return steps


@pytest.mark.parametrize("sharing", SHARING)
def test_a_decode_loads_only_what_prefetches_have_not_brought(sharing: str) -> None:
    rank = Rank(DECODE, sharing=sharing)
    places = in_pool(rank, range(18))
    for count in (1, 2, 4):
        rank.arrive(prefetch("a", range(18), places[:count]))
        assert reads(steps_until_idle(rank)) == places[count // 2 : count]
    rank.arrive(decode("a", range(19), places))
    assert reads(steps_until_idle(rank)) == places[4:]
    assert [said for said in rank.said if isinstance(said, Prefetched)] == [
        Prefetched(JobId("a", 0, -1), 1),
        Prefetched(JobId("a", 0, -2), 1),
        Prefetched(JobId("a", 0, -4), 2),
    ]
    (loaded,) = [said for said in rank.said if isinstance(said, Loaded)]
    assert (loaded.shared, loaded.blocks) == (16, 1)
    plain = Rank(DECODE)
    plain.arrive(decode("a", range(19), in_pool(plain, range(18))))
    plain.settle()
    assert rank.said_tokens("a") == plain.said_tokens("a")
    rank.assert_idle()


def test_without_a_prefix_cache_a_prefetch_reads_nothing() -> None:
    rank = Rank(DECODE, sharing="off")
    assert rank.arrive(prefetch("a", range(8), in_pool(rank, range(8)))) == []
    assert not rank.state.busy


def test_a_prefetch_that_comes_twice_or_too_late_reads_nothing_again() -> None:
    rank = Rank(DECODE, sharing="hash")
    places = in_pool(rank, range(8))
    rank.arrive(decode("a", range(9), places))
    steps_until_idle(rank)
    for _ in range(2):
        rank.arrive(prefetch("a", range(8), places))
    assert reads(steps_until_idle(rank)) == []
    rank.assert_idle()


def test_a_prefetch_without_pages_ends_and_lets_the_next_job_begin() -> None:
    rank = Rank(DECODE, sharing="hash", num_pages=8)
    rank.arrive(decode("a", range(9), in_pool(rank, range(8)), max_tokens=40))
    rank.until(Token)
    rank.arrive(prefetch("b", range(32), in_pool(rank, range(32))))
    rank.arrive(prefetch("c", range(400), in_pool(rank, range(400))))
    rank.step()
    assert [said for said in rank.said if isinstance(said, Prefetched)] == [
        Prefetched(JobId("b", 0, -8), 0),
        Prefetched(JobId("c", 0, -100), 0),
    ]
    steps_until_idle(rank)
    rank.assert_idle()


def test_a_prefetch_that_loads_gives_its_pages_to_the_running_batch() -> None:
    line = Line()
    rank = line.rank(DECODE, sharing="hash", num_pages=8)
    line.open = True
    rank.arrive(decode("a", range(5), in_pool(rank, range(4)), max_tokens=10))
    rank.until(Token)
    line.open = False
    rank.arrive(prefetch("b", range(50, 58), in_pool(rank, range(50, 58))))
    rank.until(Prefetched)
    line.open = True
    steps_until_idle(rank)
    assert not [said for said in rank.said if isinstance(said, Preempted)]
    assert [said.finish for said in rank.said if isinstance(said, Ended)] == ["finished"]
    rank.assert_idle()


def test_a_prefetch_that_fails_or_finds_other_bytes_leaves_nothing_in_the_cache() -> None:
    line = Line()
    line.open = True
    rank = line.rank(DECODE, sharing="hash")
    line.problem = "gone"
    places = in_pool(rank, range(8))
    rank.arrive(prefetch("a", range(8), places))
    steps_until_idle(rank)
    assert rank.said == [Prefetched(JobId("a", 0, -2), 0)]
    assert not isinstance(rank.said[0], BadBlocks)
    line.problem = ""
    rank.arrive(decode("a", range(9), places))
    assert reads(steps_until_idle(rank)) == places
    assert kv_of(range(8)) == [*rank.pool[places[0]], *rank.pool[places[1]]]
    rank.assert_idle()


def test_the_end_of_a_request_ends_its_prefetches() -> None:
    line = Line()
    rank = line.rank(DECODE, sharing="hash")
    places = in_pool(rank, range(16))
    rank.arrive(prefetch("a", range(16), places[:2]))
    rank.step()
    rank.arrive(prefetch("a", range(16), places))
    assert rank.cancel("a") == [Prefetched(JobId("a", 0, -2), 0), Prefetched(JobId("a", 0, -4), 0)]
    line.open = True
    assert reads(steps_until_idle(rank)) == []
    rank.assert_idle()


def test_prefetches_wait_behind_all_others_and_the_longest_one_of_a_request_is_enough() -> None:
    line = Line()
    rank = line.rank(DECODE, sharing="hash")
    places = in_pool(rank, range(16))
    rank.arrive(prefetch("x", range(16), places))
    rank.step()
    for count in (1, 2, 3):
        rank.arrive(prefetch("a", range(50, 66), places[:count]))
    rank.arrive(prefetch("b", range(70, 78), places[:2]))
    rank.arrive(decode("c", range(80, 90), places[:3]))
    assert [task.id[::2] for task in rank.state.waiting] == [("c", 0), ("a", -3), ("b", -2)]
    assert rank.arrive(decode("a", range(50, 67), places)) == [Prefetched(JobId("a", 0, -3), 0)]
    assert [task.id[::2] for task in rank.state.waiting] == [("c", 0), ("a", 0), ("b", -2)]
    assert rank.state.num_waiting == 2
    line.open = True
    steps_until_idle(rank)
    rank.assert_idle()
