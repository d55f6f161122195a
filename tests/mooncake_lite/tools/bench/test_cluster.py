"""The client of the benchmarks with clusters, against a server that says what a gateway says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from mooncake_lite.errors import ClusterError
from mooncake_lite.tools.bench.cluster import GIVEN_UP, Ask, Reply, answers, at_their_times, send, tpot_s

pytestmark = pytest.mark.quick

STREAM = b"HTTP/1.1 200 OK\r\nX-Request-Id: cmpl-7\r\n\r\n"
REFUSAL = b'HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n\r\n{"error": {}}'
PIECE = b'data: {"choices": []}\n\n'
TRACED = b'data: {"choices": [], "mooncake_lite": {"cached_tokens": {"dram": 64}}}\n\ndata: [DONE]\n\n'

Talk = Callable[[int], Awaitable[list[Reply]]]


def talk(answer: bytes, clients: Talk, *, hold: bool = False) -> tuple[list[Reply], list[dict[str, object]]]:
    """Run clients against a server that gives each request this answer; also return what it was asked.

    hold   the server never ends an answer
    """
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)) | {"head": head.decode()})
        writer.write(answer)
        if hold:
            await reader.read()
        writer.close()

    async def both() -> list[Reply]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await clients(server.sockets[0].getsockname()[1])

    return asyncio.run(both()), asked


def send_all(port: int, asks: Sequence[Ask]) -> Awaitable[list[Reply]]:
    return at_their_times(port, asks, lambda: None)


def test_an_answer_has_its_times_its_id_and_its_trace() -> None:
    ask = Ask(0.0, [5, 6], 9, {"x-mooncake-lite-trace": "1"})
    (reply,), (asked,) = talk(STREAM + PIECE + TRACED, lambda port: send_all(port, [ask]))
    assert (reply.status, reply.request_id) == (200, "cmpl-7")
    assert reply.trace == {"cached_tokens": {"dram": 64}}
    first, last = reply.times
    assert reply.sent_s < reply.sent_s + reply.ttft_s <= first <= last <= reply.sent_s + reply.whole_s
    assert reply.tpot_s == pytest.approx((reply.whole_s - reply.ttft_s) / 8)
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"]) == ([5, 6], 9, True)
    assert "x-mooncake-lite-trace: 1" in str(asked["head"])


def test_a_refusal_is_an_answer_with_the_time_that_it_took() -> None:
    (reply,), _ = talk(REFUSAL, lambda port: send_all(port, [Ask(0.0, [1], 2)]))
    assert reply.status == 429
    assert reply.ttft_s > 0


def test_a_client_leaves_when_its_patience_ends() -> None:
    async def clients(port: int) -> list[Reply]:
        return [await send(port, Ask(0.0, [1], 2), 0.05)]

    (reply,), _ = talk(STREAM, clients, hold=True)
    assert reply.status == GIVEN_UP


@pytest.mark.parametrize("end", [b"", PIECE, b'data: {"error": {"message": "x"}}\n\n'])
def test_a_stream_without_its_end_mark_is_an_error(end: bytes) -> None:
    with pytest.raises(ClusterError, match="broke off"):
        talk(STREAM + end, lambda port: send_all(port, [Ask(0.0, [1], 2)]))


def test_requests_are_sent_at_their_times_although_others_are_open() -> None:
    asks = [Ask(at_s, [1], 2) for at_s in (0.04, 0.0, 0.02)]
    told = []

    async def clients(port: int) -> list[Reply]:
        return await at_their_times(port, asks, lambda: told.append(1), patience_s=0.2)

    began = time.perf_counter()
    replies, _ = talk(STREAM, clients, hold=True)
    assert [reply.ask for reply in replies] == asks
    assert [reply.sent_s - began >= reply.ask.at_s for reply in replies] == [True] * 3
    assert len(told) == 3


@pytest.mark.parametrize(
    ("said", "why"), [(REFUSAL, "HTTP 429"), (STREAM + TRACED, "an answer of 2 tokens came in 1 pieces")]
)
def test_a_benchmark_without_a_limit_wants_every_answer(said: bytes, why: str) -> None:
    async def clients(port: int) -> list[Reply]:
        return await asyncio.to_thread(answers, port, [Ask(0.0, [1], 2)])

    with pytest.raises(ClusterError, match=why):
        talk(said, clients)


def test_tpot_of_streams_counts_only_while_all_are_decoded() -> None:
    early = [0.0, 5.0, 6.0, 7.0]  # waits for the other one's prompt
    late = [5.0, 6.0, 7.0, 8.0]
    assert tpot_s([early, late], 4) == pytest.approx(1.0)


def test_tpot_of_streams_that_never_met_is_that_of_each_alone() -> None:
    assert tpot_s([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 3) == pytest.approx(1.0)


def test_a_piece_of_several_tokens_is_not_taken_for_one() -> None:
    assert tpot_s([[0.0, 2.0, 4.0]], 5) == pytest.approx(1.0)
