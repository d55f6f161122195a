"""Asks a server for its `/metrics` over HTTP, with limits on the time and the size of the answer.

Used by `command.py` and `status.py`. Knows no metric; `sample.py` reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import httpx

from mooncake_lite.errors import UserError
from mooncake_lite.tools.client import WITH_KEY
from mooncake_lite.tools.top.sample import NoAnswer, Sample, harmless, read_samples

CONNECT_LIMIT_S = 3.0
ANSWER_LIMIT_S = 5.0
"""From the request to the last byte of the answer."""

MOST_BYTES = 4 * 2**20
"""Of one answer: about five times what a cluster of 128 ranks sends."""


async def scrape(client: httpx.AsyncClient) -> Sample:
    """Ask the server of this client for its metrics. Raises NoAnswer; UserError if it wants a key."""
    came = Sample(time.monotonic(), read_samples(await fetch(client, "/metrics")))
    return replace(came, at_s=came.at_s - (came.total("cluster_metrics_age_seconds") or 0.0))


async def fetch(client: httpx.AsyncClient, path: str, statuses: Sequence[int] = (200,)) -> str:
    """Return the body at a path. Raises as scrape does, also for a status that is not one of these."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await _text_of(client, path, statuses)
    except TimeoutError:
        raise NoAnswer(f"no answer within {ANSWER_LIMIT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise NoAnswer(harmless(str(error)) or type(error).__name__) from None


async def _text_of(client: httpx.AsyncClient, path: str, statuses: Sequence[int]) -> str:
    """The body, as long as it is small. It is not decompressed: few bytes may become many."""
    async with client.stream("GET", path, headers={"Accept-Encoding": "identity"}) as reply:
        if reply.status_code == 401:
            raise UserError(f"the server at {harmless(str(client.base_url))} refuses (HTTP 401){WITH_KEY}")
        if reply.status_code not in statuses:
            raise NoAnswer(f"HTTP {reply.status_code}")
        if reply.headers.get("content-encoding", "identity") != "identity":
            raise NoAnswer("the answer is compressed")
        body = bytearray()
        async for piece in reply.aiter_raw():
            body += piece
            if len(body) > MOST_BYTES:
                raise NoAnswer(f"the answer is larger than {MOST_BYTES // 2**20} MiB")
        return body.decode("utf-8", "replace")
