"""The HTTP endpoints: what a client can ask, and the answer to each question.

Built by `__main__` over a `ClusterView` and `Prompts`. Every answer that is not a success is an OpenAI error
object; every request is counted by path and status. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mooncake_lite
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway import answer_types as types
from mooncake_lite.gateway import bodies
from mooncake_lite.gateway.answer import Answers, Piece, pieces_of
from mooncake_lite.gateway.body_reader import BodyReader
from mooncake_lite.gateway.cluster_view import ClusterState, ClusterView
from mooncake_lite.gateway.exposition import GatewayMetrics
from mooncake_lite.gateway.hints import ANSWER_LIMIT_S, give_hint
from mooncake_lite.gateway.open_request import OpenRequest
from mooncake_lite.gateway.openapi import OF_BODIES, Endpoint, describe
from mooncake_lite.gateway.plumbing import ClientGone, EventStream, error_answer, in_pieces, while_connected
from mooncake_lite.gateway.prefix_reset import reset_prefix_cache
from mooncake_lite.gateway.problems import Unavailable, error_object, surprise
from mooncake_lite.gateway.prompt_work import Prepared, check_model, served_as
from mooncake_lite.gateway.prompts import Prompts
from mooncake_lite.gateway.service import Services
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.gateway.shapes import LAST_EVENT, Shaper, Tally, Whole, event
from mooncake_lite.model.generation_config import default_sampling

TRACE_HEADER = "x-mooncake-lite-trace"
"""With the value 1: the answer also says where cached tokens came from and where the time went."""

CLIENT_LEFT = 499
"""Counted, never seen: the status that nginx gave to clients that close before the answer."""

Handler = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """All endpoints over one cluster; ENDPOINTS lists them."""

    def __init__(self, settings: Settings, cluster: ClusterView, prompts: Prompts):
        self._settings = settings
        self._limits = settings.limits
        self._cluster = cluster
        self._prompts = prompts
        self._services = Services(settings.config)
        self._bodies = BodyReader(settings.limits)
        self._created = int(time.time())
        self._default_sampling = default_sampling(settings.model_folder)
        self._fingerprint = f"mooncake-lite-{settings.fingerprint.hex()[:12]}"
        self.metrics = GatewayMetrics()
        self.metrics.attach(cluster, settings.served_id)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route(e.path, self._answered(e.path, partial(e.handler, self), e.guarded), methods=e.methods)
            for e in ENDPOINTS
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})

    # ------------------------------------------------------------------ generating

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions: an answer, whole or as events. Raises RequestError."""
        return await self._generate(request, "chat")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: likewise, without a chat template. Raises RequestError."""
        return await self._generate(request, "completion")

    async def _generate(self, request: Request, kind: Literal["chat", "completion"]) -> Response:
        began = time.monotonic()
        service = self._services.of(request.headers, request.state.tenant)
        request_id = ("chatcmpl-" if kind == "chat" else "cmpl-") + uuid.uuid4().hex
        with contextlib.ExitStack() as undo:
            async with self._bodies.body_of(request) as raw:
                opened = self._cluster.admit(request_id)
                undo.callback(self._cluster.close, opened)
                work = self._prompts.prepare(kind, request_id, raw)
                del raw  # up to 8 MiB, which the answer does not need
                prepared = served_as(await while_connected(request.receive, work), service)
            self._cluster.admit_prompts(
                opened, [submit.request.request_id for submit in prepared.submits[1:]]
            )
            response = await self._answer(request, opened, prepared, kind == "chat", began)
            undo.pop_all()
            return response

    async def _answer(
        self, request: Request, opened: OpenRequest, prepared: Prepared, chat: bool, began: float
    ) -> Response:
        """The answer of the cluster to a request that is admitted and prepared."""
        request_id = opened.request_id
        shaper = Shaper(
            request_id=request_id,
            model=self._settings.served_id,
            fingerprint=self._fingerprint,
            chat=chat,
            include_usage=prepared.include_usage,
            trace=request.headers.get(TRACE_HEADER) == "1",
        )
        tally = Tally(sum(submit.request.num_tokens for submit in prepared.submits))
        answers = Answers(self._prompts.tokenizer, prepared, tally)
        pieces = pieces_of(
            self._cluster, opened, answers, self.metrics,
            began=began, token_timeout_s=self._limits.token_timeout_s,
        )  # fmt: skip
        headers = {"X-Request-Id": request_id}
        count = len(answers.texts)
        if not prepared.stream:
            wholes = await while_connected(request.receive, _all_of(pieces, count))
            whole = partial(_whole, shaper, wholes, tally, headers)
            # In a thread if it may take long: others wait for the event loop.
            scored = prepared.submits[0].body.sampling.prompt_logprobs >= 0
            return await asyncio.to_thread(whole) if scored else whole()
        # The status is decided by the first piece: a refusal must not become a stream.
        first = await while_connected(request.receive, anext(pieces))
        events = _events(first, pieces, count, shaper, tally)
        return EventStream(events, headers, lambda whole: self._count(request, 200 if whole else CLIENT_LEFT))

    # ------------------------------------------------------------------ hints

    async def kv_hints(self, request: Request) -> Response:
        """POST /v1/kv/hints: a hint about a prefix, or a session. Raises RequestError."""
        service = self._services.of(request.headers, request.state.tenant)
        async with self._bodies.body_of(request) as raw:
            work = self._prompts.hint(f"hint-{uuid.uuid4().hex}", raw)
            hint = await while_connected(request.receive, work)
        hint = replace(hint, tenant=service.tenant, class_id=service.class_id)
        given = give_hint(self._cluster, hint, ANSWER_LIMIT_S)
        return _json(await while_connected(request.receive, given))

    # ------------------------------------------------------------------ tokens and models

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the token ids of a text or a chat, also of one that is too long."""
        return await self._converted(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids. Raises RequestError for an id that there is not."""
        return await self._converted(request, "detokenize")

    async def _converted(self, request: Request, kind: Literal["tokenize", "detokenize"]) -> Response:
        async with self._bodies.body_of(request) as raw:
            pieces = await while_connected(request.receive, self._prompts.answer(kind, raw))
        return in_pieces(pieces)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: a list of the one model."""
        return _json(types.ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/ID: its card. Raises RequestError (404) for another id."""
        check_model(request.path_params["model"], self._settings.served_id)
        return _json(self._card())

    def _card(self) -> types.ModelCard:
        return types.ModelCard(
            id=self._settings.served_id,
            created=self._created,
            owned_by="mooncake-lite",
            max_model_len=self._settings.max_model_len,
            default_sampling=self._default_sampling,
        )

    # ------------------------------------------------------------------ about the service

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while requests that come now will be served, else 503 and what is missing.

        It also tells what the cluster computes on, and what does not work as it should though it serves.
        """
        cluster, weights = self._cluster, self._settings.weights
        ready = cluster.state is ClusterState.READY
        status: Any = "ok" if ready else cluster.state.value
        answer = types.Health(status, cluster.detail, weights, cluster.degraded)
        return _json(answer, status=200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        """GET and POST /ping: the status of /health, without a body."""
        return Response(status_code=200 if self._cluster.state is ClusterState.READY else 503)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: remove all blocks of the pool. Raises RequestError."""
        return _json(await reset_prefix_cache(self._cluster))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: Prometheus text, of the whole cluster."""
        await self._cluster.renew_metrics()
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """GET /version: of mooncake-lite."""
        return _json(types.Version(mooncake_lite.__version__))

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: the description of all endpoints, with the limits that this server has."""
        own = {
            "$models": [self._settings.served_id, "default"],
            "$most_tokens": self._settings.max_model_len - 1,
            "$most_choices": self._settings.config.max_num_seqs,
            "$most_prompts": self._settings.config.max_queue,
            "$last_token_id": self._prompts.tokenizer.vocab_size - 1,
        }
        return _json(describe(ENDPOINTS, own, has_key=self._services.has_key))

    # ------------------------------------------------------------------ around every endpoint

    def _answered(self, path: str, handler: Handler, guarded: bool) -> Handler:
        """The handler, with errors turned into error objects, and counted."""

        async def answer(request: Request) -> Response:
            request.state.path = path
            try:
                if guarded:
                    request.state.tenant = self._services.check_key(request.headers)
                response = await handler(request)
            except RequestError as error:
                response = error_answer(error)
            except ClientGone:
                response = Response(status_code=CLIENT_LEFT)
            except asyncio.CancelledError:  # at the end of the gateway, when its time for goodbyes is over
                response = error_answer(Unavailable(self._cluster.detail))
            except Exception as error:
                response = error_answer(surprise(error))
            if not isinstance(response, EventStream):
                self._count(request, response.status_code)
            return response

        return answer

    def _count(self, request: Request, status: int) -> None:
        self.metrics.observe_http(request.state.path, status)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """404 and 405 of the router."""
        assert isinstance(error, HTTPException)
        self.metrics.observe_http("other", error.status_code)
        what = (
            "is not a path of this server" if error.status_code == 404 else f"does not take {request.method}"
        )
        problem = RequestError(f"{request.url.path} {what}", status=error.status_code)
        return error_answer(problem, dict(error.headers or {}))


ENDPOINTS = (
    Endpoint(
        methods=("POST",), path="/v1/chat/completions", handler=Endpoints.chat_completions, guarded=True,
        summary="A chat completion, whole or as events",
        body=bodies.ChatBody, answer=types.ChatCompletion, streams=True, errors=OF_BODIES,
    ),
    Endpoint(
        methods=("POST",), path="/v1/completions", handler=Endpoints.completions, guarded=True,
        summary="A text completion, whole or as events",
        body=bodies.CompletionBody, answer=types.TextCompletion, streams=True, errors=OF_BODIES,
    ),
    Endpoint(
        methods=("POST",), path="/v1/kv/hints", handler=Endpoints.kv_hints, guarded=True,
        summary="A hint about the use that a prefix, or a session, will have",
        body=bodies.HintBody, answer=types.HintAnswer, errors=OF_BODIES,
    ),
    Endpoint(
        methods=("GET",), path="/v1/models", handler=Endpoints.models, guarded=True,
        summary="A list of the one model that is served", answer=types.ModelList,
    ),
    Endpoint(
        methods=("GET",), path="/v1/models/{model:path}", handler=Endpoints.model, guarded=True,
        summary="The served model", answer=types.ModelCard, errors=(404,),
    ),
    Endpoint(
        methods=("POST",), path="/tokenize", handler=Endpoints.tokenize, guarded=True,
        summary="The token ids of a text or a chat",
        body=bodies.TokenizeBody, answer=types.TokenIds, errors=OF_BODIES,
    ),
    Endpoint(
        methods=("POST",), path="/detokenize", handler=Endpoints.detokenize, guarded=True,
        summary="The text of token ids",
        body=bodies.DetokenizeBody, answer=types.Text, errors=OF_BODIES,
    ),
    Endpoint(
        methods=("POST",), path="/reset_prefix_cache", handler=Endpoints.reset_prefix_cache, guarded=True,
        summary="Remove every block of the pool, in DRAM and on SSD",
        answer=types.ResetAnswer,
    ),
    Endpoint(
        methods=("GET",), path="/health", handler=Endpoints.health, guarded=False,
        summary="Whether every rank is ready, and what does not work as it should",
        answer=types.Health, details=types.Health,
    ),
    Endpoint(
        methods=("GET", "POST"), path="/ping", handler=Endpoints.ping, guarded=False,
        summary="The status of /health, without a body", answer=None, details=None,
    ),
    Endpoint(
        methods=("GET",), path="/metrics", handler=Endpoints.show_metrics, guarded=True,
        summary="Metrics of the whole cluster, for Prometheus", answer="text/plain",
    ),
    Endpoint(
        methods=("GET",), path="/version", handler=Endpoints.version, guarded=False,
        summary="The version of mooncake-lite", answer=types.Version,
    ),
    Endpoint(
        methods=("GET",), path="/openapi.json", handler=Endpoints.openapi, guarded=False,
        summary="This description", answer=dict,
    ),
)  # fmt: skip
"""Every path of the server."""


async def _all_of(pieces: AsyncGenerator[Piece, None], count: int) -> list[Whole]:
    """The `count` whole answers to a request."""
    wholes = [Whole() for _ in range(count)]
    texts: list[list[str]] = [[] for _ in range(count)]
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            whole = wholes[piece.index]
            texts[piece.index].append(piece.text)
            whole.finish = piece.finish or whole.finish
            whole.logprobs += piece.logprobs
    for whole, parts in zip(wholes, texts):
        whole.text = "".join(parts)
    return wholes


def _whole(shaper: Shaper, wholes: list[Whole], tally: Tally, headers: dict[str, str]) -> Response:
    return _json(shaper.whole(wholes, tally), headers=headers)


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], count: int, shaper: Shaper, tally: Tally
) -> AsyncGenerator[bytes, None]:
    """`count` answers as server-sent events. A failure in their middle is the last event, an error object."""
    async with contextlib.aclosing(pieces):
        for opening in shaper.opening(count):
            yield event(opening)
        piece, going_on = first, count
        try:
            while True:
                if piece.text or piece.logprobs:
                    yield event(shaper.piece(piece.index, piece.text, piece.logprobs))
                if piece.finish is not None:
                    ending = shaper.ending(piece.index, piece.finish)
                    going_on -= 1
                    if not going_on:
                        break
                    yield event(ending)
                piece = await anext(pieces)
            await anext(pieces, None)  # the request is counted and closed before its last event
        except RequestError as error:
            yield event(error_object(error))
            return
        except Exception as error:
            yield event(error_object(surprise(error)))
            return
        for chunk in shaper.closing(ending, tally):
            yield event(chunk)
        yield LAST_EVENT


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")
