"""The gateway's ZeroMQ sockets: one to the conductor, one or two that take tokens from ranks.

Used by `cluster`, inside the event loop of HTTP; hence zmq.asyncio and not transport.channel, which
wants a thread of its own. Same frames, same encoding. Knows no request. What is malformed is
dropped and counted; no send ever waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mooncake_lite.errors import ConfigError
from mooncake_lite.messages import TO_GATEWAY, TO_GATEWAY_TOKENS, Tokens
from transport.channel import IPC_PATH_BYTES
from transport.errors import WireError
from transport.messaging.curve import CurveKeys
from transport.wire import DEFAULT_MAX_BYTES, Decoder, encode

QUEUE_MESSAGES = 10_000
"""Messages that may wait per peer and direction, as in transport.channel."""

LINGER_MS = 300
"""Time in which a closing gateway still delivers sent messages, cancellations above all."""


class Sockets:
    """All sockets of one gateway.

        endpoints   where ranks may send tokens: ipc first, then tcp once a rank is on another host
        bytes       (channel, direction) -> bytes of encoded messages; channel "control" or "tokens"
        dropped     messages that could not be decoded, or came from no rank

    Raises ConfigError when an endpoint cannot be bound.
    """

    def __init__(self, name: str, control: str, tokens: str, curve: CurveKeys | None):
        self._context = zmq.asyncio.Context()
        self._curve = curve
        self._door: zmq.asyncio.Socket | None = None
        self.bytes = {(channel, way): 0 for channel in ("control", "tokens") for way in ("in", "out")}
        self.dropped = 0
        self.endpoints: list[str] = []
        self._control = self._socket(zmq.DEALER)
        self._control.setsockopt_string(zmq.IDENTITY, name)
        # Nothing waits for a conductor that is not there: the sender is told at once instead.
        self._control.setsockopt(zmq.IMMEDIATE, 1)
        self._control.setsockopt(zmq.RECONNECT_IVL, 50)
        self.routers: list[zmq.asyncio.Socket] = []
        try:
            self._control.connect(control)
            self._bind(self._socket(zmq.ROUTER), tokens)
        except (zmq.ZMQError, ConfigError) as error:
            self.close()
            raise ConfigError(f"{tokens} cannot be used: {error}") from None

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(QUEUE_MESSAGES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, DEFAULT_MAX_BYTES)
        return socket

    def _bind(self, router: zmq.asyncio.Socket, endpoint: str) -> None:
        path = endpoint.removeprefix("ipc://")
        if path != endpoint and len(os.fsencode(path)) > IPC_PATH_BYTES:
            raise ConfigError(f"its path has {len(os.fsencode(path))} bytes, Linux allows {IPC_PATH_BYTES}")
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that lost its connection keeps its name
        router.bind(endpoint)
        self.routers.append(router)
        self.endpoints.append(router.getsockopt_string(zmq.LAST_ENDPOINT))

    def open_tcp(self, host: str) -> zmq.asyncio.Socket:
        """Bind a TCP endpoint on `host` for ranks of other hosts, with CURVE.

        Raises ConfigError when there are no keys for it or the host cannot be bound.
        """
        if self._curve is None:
            raise ConfigError("ranks on other hosts need CURVE keys, and this gateway was given none")
        if self._door is None:
            self._door = self._socket(zmq.REP)
            self._door.bind("inproc://zeromq.zap.01")
        router = self._socket(zmq.ROUTER)
        try:
            # Only where it is needed: with it, the real endpoint of 10.0.0.1 reads [::ffff:10.0.0.1].
            router.setsockopt(zmq.IPV6, int(":" in host))
            self._curve.guard(router)
            self._bind(router, f"tcp://{f'[{host}]' if ':' in host else host}:*")
        except (zmq.ZMQError, ValueError) as error:
            router.close()
            raise ConfigError(f"tcp://{host}:* cannot be bound for tokens: {error}") from None
        return router

    async def answer_door(self) -> None:
        """Decide who may connect over TCP: holders of the cluster's client key alone."""
        assert self._door is not None
        assert self._curve is not None
        while True:
            _, answer = self._curve.answer_of_door(await self._door.recv_multipart())
            await self._door.send_multipart(answer)

    def send(self, message: msgspec.Struct) -> bool:
        """Send to the conductor; False when it is not there, its queue is full or the message too large."""
        try:
            data = encode(message)
        except WireError:
            return False
        # With NOBLOCK zmq.asyncio sends before it returns: the future is already done.
        sent: Any = self._control.send_multipart([data], zmq.NOBLOCK)
        if sent.exception() is not None:
            return False
        self.bytes["control", "out"] += len(data)
        return True

    async def read_control(self, deliver: Callable[[Any], None]) -> None:
        """Hand every message of the conductor to `deliver`, for ever."""
        decoder = Decoder(TO_GATEWAY)
        while True:
            frames = await self._control.recv_multipart()
            self._decode(decoder, frames[-1], "control", deliver)

    async def read_tokens(self, router: zmq.asyncio.Socket, deliver: Callable[[Tokens], None]) -> None:
        """Hand every Tokens message of a rank to `deliver`, for ever."""
        decoder = Decoder(TO_GATEWAY_TOKENS)
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 2 or not frames[0].startswith(b"rank-"):
                self.dropped += 1
                continue
            self._decode(decoder, frames[1], "tokens", deliver)

    def _decode(self, decoder: Decoder, data: bytes, channel: str, deliver: Callable[[Any], None]) -> None:
        self.bytes[channel, "in"] += len(data)
        try:
            message = decoder.decode(data)
        except WireError:
            self.dropped += 1
            return
        deliver(message)

    def close(self) -> None:
        """Close all sockets; what was sent is delivered for at most LINGER_MS."""
        self._context.destroy()
