"""Reads the bodies of requests, with limits on their type, their size, and their bytes in all.

Used by `endpoints`. Knows headers and limits; what a body says is read in `bodies`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.requests import Request

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.plumbing import ClientGone
from mooncake_lite.gateway.problems import SHOWN, Refused
from mooncake_lite.gateway.settings import Limits

SMALL_BYTES = 32 * 1024
"""Shorter bodies are not counted, so that they are never refused because of long ones. All 4096 connections
together can have 128 MiB of them."""


class BodyReader:
    """All bodies of a server that are being read or worked on.

    nbytes   of those that are counted: as long as they are announced, or have become so far

    Invariant: nbytes <= limits.bodies_bytes.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._held: dict[Request, int] = {}
        self.nbytes = 0

    @contextlib.asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the whole body of a request, which is counted until the end of the context.

        Raises ClientGone, or RequestError: 415 unless it is plain JSON, 413 when it is too long, 429 when all
        bodies together are, 408 when it takes too long. A body with an announced length is refused before any
        of it is read.
        """
        _check_type(request.headers)
        try:
            length = request.headers.get("content-length", "")
            self._count(request, int(length) if length.isdigit() else 0)
            yield await self._read(request)
        finally:
            self.nbytes -= self._held.pop(request, 0)

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        limit_s = self._limits.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    self._count(request, len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestError(f"the body did not come within {limit_s:g} s", status=408) from None

    def _count(self, request: Request, nbytes: int) -> None:
        """Count a body, of nbytes as far as is known. Raises RequestError.

        A body may have half of what the others leave. So a crowd of long bodies leaves room for shorter ones.
        """
        most, limit = self._limits.body_bytes, self._limits.bodies_bytes
        if nbytes > most:
            raise RequestError(f"the body is longer than {most} bytes", status=413, code="body_too_large")
        held = self._held.get(request, 0)
        if nbytes <= max(held, SMALL_BYTES):
            return
        others = self.nbytes - held
        if nbytes > (limit - others) // 2:
            raise Refused(
                f"other bodies have {others} of {limit} bytes, and this body of {nbytes} may have half of "
                "the rest; come back later",
                1.0,
            )
        self._held[request] = nbytes
        self.nbytes = others + nbytes


def _check_type(headers: Headers) -> None:
    """Raise RequestError (415) for bodies that are not marked as plain JSON.

    A page can send any other type without asking (CORS).
    """
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"Content-Type: {kind[:SHOWN]!r} must be application/json; with curl add -H "
            "'Content-Type: application/json'",
            status=415,
        )
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(
            f"Content-Encoding: {coding[:SHOWN]!r} is not supported; send the body as it is", status=415
        )
