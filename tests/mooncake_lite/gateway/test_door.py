"""A crowd of connections: the gateway keeps those that it has, and refuses the others in one short answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from typing import Any

import psutil
import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.origins import parse_origins
from mooncake_lite.gateway import door
from mooncake_lite.gateway.door import Door
from tests.descriptors import no_descriptor_left
from tests.mooncake_lite.gateway.conftest import Spawn
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, GatewayProcess, echo, first_token_only, rest_of
from tests.patience import wait_until


def check_refusal(said: bytes) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 1\r\n" in head
    assert f"\r\ncontent-length: {len(body)}\r\n".encode() in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")


def check_waits(client: socket.socket) -> None:
    """Assert that a connection is open, and has had no answer."""
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)


def crowd_of(gateway: GatewayProcess, count: int, stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(gateway.connect()) for _ in range(count)]


@pytest.mark.parametrize("descriptors", [128, 256])
def test_connections_beyond_the_descriptors_are_refused_in_one_line_and_the_others_go_on(
    spawn: Spawn, descriptors: int
) -> None:
    gateway, cluster = spawn(descriptors=descriptors)
    room = descriptors - door.OTHER_DESCRIPTORS + door.UNASKED
    cluster.behaviour = first_token_only
    ask = {"prompt": "hello", "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=ask) as stream, ExitStack() as stack:
        lines = stream.iter_lines()
        next(lines)
        crowd = crowd_of(gateway, 700, stack)
        for client in crowd[room - 1 :]:  # the stream has one place
            check_refusal(rest_of(client))
        for client in crowd[: room - 1]:
            check_waits(client)
        assert room < psutil.Process(gateway.process.pid).num_fds() < descriptors

        begun = cluster.wait_for(m.Submit)
        rest = m.Tokens(begun.request.request_id, 1, begun.body.token_ids[1:], "stop")
        cluster.do(lambda: cluster.tokens(2, rest))
        assert "data: [DONE]" in lines
    cluster.behaviour = echo
    assert wait_until(lambda: gateway.http.get("/version").status_code == 200)
    assert gateway.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
    gateway.process.terminate()
    code, written = gateway.finish()
    assert code == 0
    assert written == f"gateway: {room} connections are open, and more are refused (see ulimit -n)\n"


def test_a_client_that_sends_a_body_reads_why_it_is_refused(spawn: Spawn) -> None:
    """urllib reads no answer before it has sent all: a reset would hide the answer."""
    gateway, _ = spawn({"connections": 1})
    with ExitStack() as stack:
        crowd_of(gateway, 1 + door.UNASKED, stack)
        request = urllib.request.Request(
            f"{gateway.url}/v1/completions", b" " * 64 * 1024, {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(2 * door.LINGERING):
            with pytest.raises(urllib.error.HTTPError) as refused:
                opener.open(request, timeout=LIMIT_S)
            with closing(refused.value) as answer:
                assert (answer.code, answer.headers["Retry-After"]) == (503, "1")
    gateway.process.terminate()
    assert gateway.finish()[1].count("\n") == 1


class Guest(asyncio.Protocol):
    """A connection that asks nothing."""

    def __init__(self, inside: set[Guest]):
        self._inside = inside

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._inside.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inside.discard(self)


def at_a_door(limit: int, scenario: Callable[[Door, set[Guest]], Awaitable[None]]) -> None:
    """Run a scenario with asyncio's server at a door, and the guests that are inside."""

    async def run() -> None:
        inside: set[Guest] = set()
        opened = Door(socket.create_server(("127.0.0.1", 0)), limit - door.UNASKED, parse_origins("loopback"))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Guest(inside), sock=opened, backlog=2048)
        await asyncio.wait_for(scenario(opened, inside), LIMIT_S)
        for guest in inside:
            guest.transport.abort()
        server.close()

    asyncio.run(run())


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.mark.quick
@pytest.mark.parametrize("limit", [17, 20, 100])
def test_a_door_lets_in_as_many_as_its_limit_however_many_come_at_once(
    limit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(opened: Door, inside: set[Guest]) -> None:
        with ExitStack() as stack:
            crowd = [stack.enter_context(socket.create_connection(opened.getsockname())) for _ in range(120)]
            for refused in crowd[limit:]:
                check_refusal(await asyncio.to_thread(rest_of, refused))
            assert len(inside) == limit
            crowd[0].close()
            await until(lambda: len(inside) == limit - 1)
            with socket.create_connection(opened.getsockname()):
                await until(lambda: len(inside) == limit)

    at_a_door(limit, scenario)
    said = f"gateway: {limit} connections are open, and more are refused (that is the limit)\n"
    assert capfd.readouterr().err == said


@pytest.mark.quick
def test_a_door_without_descriptors_rests_and_opens_again(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(opened: Door, inside: set[Guest]) -> None:
        tries: list[int] = []
        opened.accept = lambda: (tries.append(1), Door.accept(opened))[1]  # type: ignore[method-assign]
        with socket.create_connection(opened.getsockname()) as client:
            with no_descriptor_left():
                began_s = time.perf_counter()
                await until(lambda: len(tries) > 20)
                assert time.perf_counter() - began_s >= 20 * door.PAUSE_S
            await until(lambda: inside)
            check_waits(client)

    at_a_door(20, scenario)
    assert capfd.readouterr().err == ""
