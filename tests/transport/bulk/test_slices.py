"""transport.bulk.slices: both sides cut the same ranges into the same messages, and lose no byte."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.bulk.slices import PACK_BYTES, SLICE_BYTES, WINDOW, Stream, plan

pytestmark = pytest.mark.quick
LENGTHS = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, PACK_BYTES), st.integers(SLICE_BYTES, 3 * SLICE_BYTES)),
    max_size=30,
)


@given(LENGTHS)
def test_every_byte_is_in_exactly_one_message_and_in_order(lengths: list[int]) -> None:
    reached = [0] * len(lengths)
    for parts in plan(lengths):
        assert parts
        for index, start, end in parts:
            assert start == reached[index] < end
            reached[index] = end
    assert reached == lengths


@given(LENGTHS)
def test_messages_are_bounded_and_only_short_ranges_share_one(lengths: list[int]) -> None:
    for parts in plan(lengths):
        nbytes = sum(end - start for _, start, end in parts)
        assert 0 < nbytes <= max(SLICE_BYTES, PACK_BYTES)
        if len(parts) > 1:
            assert all(4 * lengths[index] < PACK_BYTES for index, _, _ in parts)


def test_neighbouring_short_ranges_share_a_message() -> None:
    assert len(list(plan([12 * 1024] * 21))) == 1
    assert len(list(plan([12 * 1024] * 22))) == 2


class Link:
    """Stands in for a communicator: what is sent is received in order, a message per test."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()
        self.most = {True: 0, False: 0}
        self.posted = {True: 0, False: 0}

    class Pending:
        def __init__(self, link: "Link", buffer: np.ndarray, fill: bool):
            self.link, self.buffer, self.fill = link, buffer, fill
            link.posted[fill] += 1
            link.most[fill] = max(link.most[fill], link.posted[fill])

        def Test(self) -> bool:
            if self.fill:
                if not self.link.sent:
                    return False
                self.buffer[:] = np.frombuffer(self.link.sent.popleft(), np.uint8)
            else:
                self.link.sent.append(self.buffer.tobytes())
            self.link.posted[self.fill] -= 1
            return True

    def Isend(self, buffer: np.ndarray, rank: int, tag: int) -> Pending:
        return self.Pending(self, buffer, fill=False)

    def Irecv(self, buffer: np.ndarray, rank: int, tag: int) -> Pending:
        return self.Pending(self, buffer, fill=True)


@given(LENGTHS)
def test_a_stream_delivers_all_ranges_and_every_receive_is_posted_before_the_first_message(
    lengths: list[int],
) -> None:
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, length, np.uint8) for length in lengths]
    targets = [np.zeros(length, np.uint8) for length in lengths]
    link = Link()
    sender = Stream(link, 1, 2, sources, sending=True)
    receiver = Stream(link, 1, 2, targets, sending=False)
    receiver.advance()
    assert link.posted[True] == len(list(plan(lengths)))
    for _ in range(10_000):
        sender.advance()
        receiver.advance()
        if sender.finished and receiver.finished:
            break
    assert sender.finished
    assert receiver.finished
    assert link.most[False] <= WINDOW
    assert all(np.array_equal(source, target) for source, target in zip(sources, targets))
