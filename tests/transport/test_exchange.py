"""Exchanges over shared memory, by threads as members: the same bits for all, and no wait without an end.

Used by test_exchange_members.py, which has more of them and processes. Those over MPI are in test_ranks.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.patience import patient, wait_until
from transport import exchange as exchange_module
from transport.bulk import futex
from transport.errors import ExchangeError, MemberLost
from transport.exchange import SUM, SharedExchange

pytestmark = pytest.mark.quick

PIECE = 256


def memory_of(count: int, piece_bytes: int = PIECE) -> np.ndarray:
    """Zeroed memory at a multiple of 64."""
    nbytes = SharedExchange.nbytes(count, piece_bytes)
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def members_of(count: int, piece_bytes: int = PIECE, **options: Any) -> list[SharedExchange]:
    memory = memory_of(count, piece_bytes)
    return [SharedExchange(memory, member, count, **{"limit_s": 60.0} | options) for member in range(count)]


def together(members: list[SharedExchange], act: Callable[[SharedExchange], Any]) -> list[Any]:
    """What act(member) returned or raised, each on a thread of its own."""

    def one(member: SharedExchange) -> Any:
        try:
            return act(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def data_of(count: int, length: int, seed: int) -> list[np.ndarray]:
    """Numbers of very different size, whose float32 sum depends on the order of adding."""
    generator = np.random.default_rng(seed)
    sizes = 10.0 ** generator.integers(-3, 4, (count, length))
    return list((generator.standard_normal((count, length)) * sizes).astype(np.float32))


def in_order(data: list[np.ndarray]) -> np.ndarray:
    total = data[0].copy()
    for x in data[1:]:
        total = total + x
    return total


def sums_of(members: list[SharedExchange], data: list[np.ndarray]) -> list[np.ndarray]:
    def act(exchange: SharedExchange) -> np.ndarray:
        mine = data[exchange.member].copy()
        assert exchange.sum(mine) is None
        return mine

    return together(members, act)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_member_gets_the_bits_of_the_sum_in_the_order_of_members(count: int) -> None:
    members = members_of(count)
    for length in (0, 1, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, PIECE // 2, 1000):
        data, turns = data_of(count, length, length), members[0]._put
        for order in (data, data[::-1]):
            expected = in_order(order).tobytes()
            assert [found.tobytes() for found in sums_of(members, order)] == [expected] * count
        assert members[0]._put - turns == 2 * max(1, -(-4 * length // PIECE))
    assert in_order(data).tobytes() != in_order(data[::-1]).tobytes() or count < 3, "any order would do"


def test_a_sum_is_in_place_and_keeps_the_shape() -> None:
    members = members_of(2)
    data = [np.full((7, 3, 5), member + 1, np.float32) for member in range(2)]
    assert together(members, lambda exchange: exchange.sum(data[exchange.member])) == [None, None]
    assert all(x.shape == (7, 3, 5) and (x == 3).all() for x in data)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, np.float16, np.dtype("V2")])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_gather_returns_what_each_member_gave_and_own_copies(count: int, dtype: Any) -> None:
    members = members_of(count)
    size = np.dtype(dtype).itemsize
    edges = (0, 1, PIECE // size, PIECE // size + 1, 3 * PIECE // size)
    for lengths in itertools.islice(itertools.product(edges, repeat=count), 0, None, 5 ** max(0, count - 2)):
        given = [np.arange(n * size).astype(np.uint8).view(dtype) for n in lengths]
        for found in together(members, lambda exchange, given=given: exchange.gather(given[exchange.member])):
            assert [x.tobytes() for x in found] == [x.tobytes() for x in given]
            assert {x.dtype for x in found} == {np.dtype(dtype)}
    found = together(members, lambda exchange: exchange.gather(np.ones(4, np.uint8)))
    kept = [[x.copy() for x in each] for each in found]
    together(members, lambda exchange: [exchange.gather(np.zeros(4, np.uint8)) for _ in range(2)])
    assert np.array_equal(found, kept), "a later exchange has changed them"


def test_a_sum_equals_the_sum_of_what_a_gather_returns() -> None:
    members, data = members_of(3), data_of(3, 333, 7)
    gathered = together(members, lambda exchange: exchange.gather(data[exchange.member]))
    assert {in_order(each).tobytes() for each in gathered} == {x.tobytes() for x in sums_of(members, data)}


def test_a_member_that_reads_slowly_does_not_see_the_next_data() -> None:
    """A release before all members have read."""
    fast, slow = members_of(2)
    x = [np.full(8, 10.0 + turn, np.float32) for turn in range(3)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [fast.sum(one) for one in x])
        reading = slow._turns(SUM, np.ones(8, np.float32))
        _, pieces, _ = next(reading)
        assert wait_until(lambda: fast._counters.value(0) == 2), "the other puts its next data"
        assert not wait_until(lambda: fast._counters.value(0) > 2, 0.1), "it is two turns ahead"
        assert [set(piece.view(np.float32)) for piece in pieces] == [{10.0}, {1.0}]
        assert list(reading) == []
        for _ in x[1:]:
            slow.sum(np.ones(8, np.float32))
        done.result(60)
    assert [set(one) for one in x] == [{11.0}, {12.0}, {13.0}]


def test_counters_run_over_their_end() -> None:
    memory = memory_of(2)
    memory[:].view(np.uint32)[[0, SharedExchange.HEAD_BYTES // 4]] = 2**32 - 3
    members = [SharedExchange(memory, member, 2, limit_s=60.0) for member in range(2)]
    for turn in range(8):
        data = data_of(2, 9, turn)
        assert {x.tobytes() for x in sums_of(members, data)} == {in_order(data).tobytes()}
    assert [members[0]._counters.value(member) for member in range(2)] == [5, 5]


def test_new_objects_go_on_where_the_old_ones_ended() -> None:
    memory = memory_of(2)
    for turn in range(3):
        members = [SharedExchange(memory, member, 2, limit_s=60.0) for member in range(2)]
        data = data_of(2, 9, turn)
        assert {x.tobytes() for x in sums_of(members, data)} == {in_order(data).tobytes()}
        for exchange in members:
            exchange.close()


@pytest.mark.parametrize(("name", "value"), [("FUTEX", None), ("IN_ORDER", False)])
def test_other_machines_exchange_too(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, name, value)
    members = members_of(3)
    for turn in range(50):
        data = data_of(3, 50, turn)
        assert {x.tobytes() for x in sums_of(members, data)} == {in_order(data).tobytes()}
    first, *_ = members
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.sum, np.ones(3, np.float32))
        assert wait_until(lambda: first._counters.value(0) == 51)
        first.lose("enough")
        assert isinstance(waiting.exception(60), MemberLost)


F32, F64, U8 = np.float32, np.float64, np.uint8


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            [("sum", 4, F32), ("sum", 5, F32)],
            "member 0 makes exchange 1, a sum of 16 B of <f4 in pieces of 256 B, "
            "member 1 exchange 1, a sum of 20 B of <f4 in pieces of 256 B",
        ),
        ([("gather", 4, F32), ("sum", 4, F32)], "a gather of 16 B of <f4 .* a sum of 16 B of <f4"),
        ([("gather", 4, F32), ("gather", 4, F64)], "a gather of 16 B of <f4 .* a gather of 32 B of <f8"),
        ([("sum", 4, F32), ("sum", 2, F64)], "a sum of 16 B of <f4 .* a sum of 16 B of <f8"),
        ([("sum", 4, F32), ("sum", 4, F32), ("sum", 900, F32)], "member 0 makes .* member 2 exchange 1"),
        ([("gather", 0, U8), ("gather", 900, U8), ("sum", 0, F32)], "member 0 makes .* member 2 exchange 1"),
        ([("sum", 4, F64), ("sum", 4, F64)], "all members make exchange 1, a sum of 32 B of <f8 .* float32"),
    ],
)
def test_a_disagreement_is_told_to_all_members_in_one_line(calls: list[Any], said: str) -> None:
    members = members_of(len(calls))

    def act(exchange: SharedExchange) -> None:
        kind, length, dtype = calls[exchange.member]
        getattr(exchange, kind)(np.ones(length, dtype))

    errors = together(members, act)
    assert len({str(error) for error in errors}) == 1
    assert all(type(error) is ExchangeError for error in errors)
    with pytest.raises(ExchangeError, match=said):
        raise errors[0]
    assert "\n" not in str(errors[0])
    for again in together(members, lambda exchange: exchange.sum(np.ones(4, F32))):
        assert isinstance(again, ExchangeError)
        assert "exchange 1 has failed" in str(again)


def test_members_that_count_differently_or_cut_differently_disagree() -> None:
    members = members_of(2)
    members[1]._begun = members[1]._ended = 4
    for error in sums_of(members, data_of(2, 4, 0)):
        assert isinstance(error, ExchangeError)
        assert "member 0 makes exchange 1, " in str(error)
        assert "member 1 exchange 5, " in str(error)
    memory = memory_of(2)
    cut = [SharedExchange(memory[: memory.nbytes - 256 * member], member, 2) for member in range(2)]
    assert ["in pieces of 192 B" in str(error) for error in sums_of(cut, data_of(2, 4, 0))] == [True, True]


def test_a_wrong_argument_is_refused_before_anybody_is_met() -> None:
    (alone,) = members_of(1)
    for x in (np.ones((4, 4), F32).T, np.ones(8, F32)[::2], np.frombuffer(bytes(16), F32)):
        with pytest.raises(ExchangeError, match="sum: x must be C-contiguous, aligned and writable"):
            alone.sum(x)
    with pytest.raises(ExchangeError, match="gather: x must be C-contiguous"):
        alone.gather(np.ones((4, 4), F32).T)
    for dtype in (object, [("a", "O")], "U12345678"):
        with pytest.raises(ExchangeError, match="cannot be exchanged: send their bytes"):
            alone.gather(np.zeros(3, dtype))
    x = np.ones(100, F32)
    alone.sum(x)
    assert (x == 1).all()


def test_memory_that_does_not_do_is_refused() -> None:
    memory = memory_of(2, 64)
    for wrong in (memory[:-1], memory[1:], np.zeros(0, np.uint8)):
        with pytest.raises(ExchangeError, match=f"of {wrong.nbytes} B for 2 members: must be 640 B or more"):
            SharedExchange(wrong, 0, 2)
    for member, count in ((-1, 2), (2, 2)):
        with pytest.raises(ExchangeError, match=f"member {member} of {count}: must be from 0 to 1"):
            SharedExchange(memory, member, count)
    assert SharedExchange.nbytes(3, 65) == SharedExchange.nbytes(3, 128) == 3 * (192 + 2 * 128)


@contextmanager
def one_that_waits() -> Iterator[tuple[SharedExchange, Any]]:
    """A member of two that waits for the other one, and the future of its call."""
    first, _ = members_of(2)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(first.sum, np.ones(4, F32))
        assert wait_until(lambda: first._counters.value(0) == 1)
        yield first, call
        first.close()


@pytest.fixture
def waiting() -> Iterator[tuple[SharedExchange, Any]]:
    with one_that_waits() as found:
        yield found


def test_lose_ends_a_wait_at_once_and_all_later_calls(waiting: tuple[SharedExchange, Any]) -> None:
    exchange, call = waiting
    began = time.monotonic()
    exchange.lose("member 1's process ended")
    error = call.exception(60)
    assert time.monotonic() - began < patient(0.1)
    exchange.lose("something else")
    exchange.close()
    for act in (lambda: exchange.sum(np.ones(4, F32)), lambda: exchange.gather(np.ones(4, F32))):
        with pytest.raises(MemberLost, match="member 0 of 2: member 1's process ended"):
            act()
    assert isinstance(error, MemberLost)
    assert str(error) == "member 0 of 2: member 1's process ended"


def test_lose_wakes_a_sleeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one try of some: lose() may also come before the waiter sleeps."""
    monkeypatch.setattr(exchange_module, "TICK_S", 2.0)

    def woken() -> bool:
        with one_that_waits() as (exchange, call):
            assert not wait_until(call.done, 0.1)
            began = time.monotonic()
            exchange.lose("its process ended")
            assert isinstance(call.exception(60), MemberLost)
            return time.monotonic() - began < 1.0

    assert any(woken() for _ in range(5))


def test_closing_ends_a_wait_of_another_thread(waiting: tuple[SharedExchange, Any]) -> None:
    exchange, call = waiting
    exchange.close()
    exchange.close()
    assert str(call.exception(60)) == "member 0 of 2: the exchange is closed"


def test_a_loss_that_comes_between_two_looks_is_seen_too(
    waiting: tuple[SharedExchange, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """lose() may come when a waiter has looked and does not sleep yet: nobody wakes it then."""
    exchange, call = waiting
    monkeypatch.setattr(exchange._counters, "wake", lambda: None)
    exchange.lose("unheard")
    assert isinstance(call.exception(patient(5)), MemberLost)


@pytest.mark.parametrize("number", [futex.FUTEX, None])
def test_a_wait_has_a_limit_and_asks_meanwhile(number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "FUTEX", number)
    asked: list[float] = []
    first, _ = members_of(2, limit_s=0.3, waits=lambda: asked.append(time.monotonic()))
    began = time.monotonic()
    with pytest.raises(MemberLost, match=r"member 1 did not come to exchange 1 within 0\.3 s"):
        first.sum(np.ones(4, F32))
    assert 0.3 < time.monotonic() - began < patient(1.0)
    assert 1 <= len(asked) <= 6
    assert all(late - early >= 0.05 for early, late in itertools.pairwise(asked))
    with pytest.raises(MemberLost, match="did not come to exchange 1"):
        first.sum(np.ones(4, F32))


def test_what_is_asked_meanwhile_may_end_the_wait() -> None:
    def waits() -> None:
        raise InterruptedError("the run ends")

    first, _ = members_of(2, waits=waits)
    with pytest.raises(InterruptedError, match="the run ends"):
        first.sum(np.ones(4, F32))
    with pytest.raises(ExchangeError, match="exchange 1 has failed or has not ended"):
        first.sum(np.ones(4, F32))


@pytest.mark.parametrize(("number", "most_s"), [(futex.FUTEX, 0.025), (None, 0.25)])
def test_who_waits_uses_no_core(number: Any, most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "FUTEX", number)
    first, _ = members_of(2, limit_s=0.5)
    used = time.thread_time()
    with pytest.raises(MemberLost):
        first.sum(np.ones(4, F32))
    assert time.thread_time() - used < most_s


def test_a_member_on_two_threads_is_refused(waiting: tuple[SharedExchange, Any]) -> None:
    exchange, _ = waiting
    with pytest.raises(ExchangeError, match="exchange 1 has failed or has not ended"):
        exchange.sum(np.ones(4, F32))
