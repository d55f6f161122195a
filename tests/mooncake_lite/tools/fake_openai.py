"""A server that speaks the OpenAI API as far as `replay` needs it, in a thread, from a script."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mooncake_lite.workloads.text import text_of_block
from tests.patience import wait_until


def refused(status: int, code: str | None) -> JSONResponse:
    return JSONResponse({"error": {"message": f"no {code}", "type": "t", "code": code}}, status)


@dataclass
class FakeServer:
    """Counts words as tokens, and answers max_tokens words.

    bodies    that came, without the probe for one token
    answers   body -> a response of its own, or None for the usual one
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answers: Callable[[dict[str, Any]], Response | None] = lambda body: None
    takes_ignore_eos: bool = True
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake"}]})
    stop: Callable[[], None] = lambda: None

    async def list_models(self, request: Request) -> Response:
        return JSONResponse(self.models)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return refused(400, "unknown_parameter")
        if body["prompt"] != text_of_block(0, 1):
            self.bodies.append(body)
        return self.answers(body) or StreamingResponse(words(body), media_type="text/event-stream")


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def words(body: dict[str, Any], pause_s: float = 0.0) -> AsyncIterator[str]:
    for _ in range(body["max_tokens"]):
        yield event({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        await asyncio.sleep(pause_s)
    yield event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    prompt, cached = len(body["prompt"].split()), {"cached_tokens": 1}
    usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
    yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": cached}})
    yield "data: [DONE]\n\n"


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Start it on a free port of the loopback interface."""
    routes = [
        Route("/v1/models", fake.list_models),
        Route("/v1/completions", fake.complete, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def stop() -> None:
            server.should_exit = server.force_exit = True

        fake.stop = stop
        try:
            assert wait_until(lambda: server.started, 30)
            yield fake
        finally:
            stop()
            thread.join()
