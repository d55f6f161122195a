"""The description of the HTTP interface as OpenAPI 3.1: from the table of endpoints and the types of bodies.

Used by `endpoints`, which serves it at /openapi.json. Knows no cluster. Explained in docs/reference/http.md.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

import mooncake_lite
from mooncake_lite.gateway.answer_types import ErrorAnswer
from mooncake_lite.gateway.fields import NEUTRAL, NEUTRAL_IN_CHATS
from mooncake_lite.gateway.sampling import TokenId

ERRORS = {
    400: "The request is no HTTP/1.1 or no JSON, or a field is wrong; param names it",
    401: "The API key is missing or wrong",
    403: "A web page that is not allowed",
    404: "Another model",
    405: "Another method",
    408: "The body took too long",
    413: "The body is too long",
    415: "The body is no application/json, or is compressed",
    421: "The server is called by a name that it does not know",
    429: "Too many requests; Retry-After gives the seconds to wait",
    431: "The headers are too long",
    500: "The request could not be finished",
    503: "The cluster is not ready, has lost its last rank of a role, or is stopping",
}
"""Status of an error -> when it is answered."""

OF_ALL = (400, 403, 405, 421, 431, 500, 503)
OF_BODIES = (404, 408, 413, 415, 429)
"""Errors of every endpoint, and further ones of those that read a body."""

EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
"""A server-sent event. Its data is a chunk or an error object as JSON, or [DONE]."""


def _without(neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {"properties": {name: {"enum": list(values)} for name, values in neutral.items()}}


_TEXT = {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}}
_LIST = {"type": "array", "minItems": 1}
_CHAT = {"required": ["messages"], "properties": {"prompt": {"type": "null"}, "messages": _LIST}}
_FULL = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_GIVEN = {
    name: {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
    for name in ("prompt", "messages", "session")
}
_BOTH = {"not": {"allOf": [_GIVEN["prompt"], _GIVEN["messages"]]}}
BESIDES: dict[str, dict[str, Any]] = {
    "ContentPart": {"required": ["type", "text"]},
    "ChatMessage": {"anyOf": [_FULL, {"properties": {"role": {"const": "assistant"}}}]},
    "TokenizeBody": {"oneOf": [_TEXT, _CHAT], **_without(NEUTRAL)},
    "HintBody": {"anyOf": [*_GIVEN.values()], **_BOTH, **_without(NEUTRAL)},
    "DetokenizeBody": {"properties": {"tokens": msgspec.json.schema(list[TokenId])}},
    "CompletionBody": _without(NEUTRAL),
    "ChatBody": _without(NEUTRAL | NEUTRAL_IN_CHATS),
}
"""Name of a type -> what `bodies` checks besides it, as JSON schema."""

Schemas = dict[type, dict[str, Any]]
"""JSON schema of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The description of one path.

    handler   of the class that has all handlers
    guarded   whether it needs the API key, if there is one
    answer    the type of a success, as JSON; or the media type of a text; None: no body
    body      the type of the request's body; None: no body is read
    streams   the answer comes as server-sent events if the body says so
    errors    statuses of errors besides 401 and OF_ALL
    details   of the error 503, if that may be no error object; None: it may have no body
    """

    methods: tuple[str, ...]
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str
    guarded: bool
    answer: type | str | None
    body: type | None = None
    streams: bool = False
    errors: tuple[int, ...] = ()
    details: type | None = ErrorAnswer


def describe(endpoints: Iterable[Endpoint], own: Mapping[str, Any], *, has_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document.

    own       limits of this server: names that the types of bodies have for them -> values
    has_key   whether the guarded endpoints need a key
    """
    endpoints = list(endpoints)
    mentioned = [kind for e in endpoints for kind in (e.body, e.answer, e.details, ErrorAnswer)]
    types = list(dict.fromkeys(kind for kind in mentioned if isinstance(kind, type)))
    found, named = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas: Schemas = dict(zip(types, found))
    for name, more in BESIDES.items():
        named[name] |= more | {"properties": named[name]["properties"] | more.get("properties", {})}
    components: dict[str, Any] = {"schemas": _filled(named, own)}
    if has_key:
        components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas, has_key and endpoint.guarded)
        for method in endpoint.methods:
            name = f"{method.lower()}_{endpoint.handler.__name__}"
            item = paths.setdefault(_template(endpoint.path), {})
            item[method.lower()] = {"operationId": name, **operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mooncake-lite",
            "version": mooncake_lite.__version__,
            "description": "A KVCache-centric LLM server with OpenAI's interface. docs/reference/http.md "
            "explains each field.",
        },
        "paths": paths,
        "components": components,
    }


def _filled(part: Any, own: Mapping[str, Any]) -> Any:
    """Return a part of a schema with values in place of the names of a server's own limits."""
    if isinstance(part, dict):
        return {name: _filled(value, own) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, own) for value in part]
    return own.get(part, part) if isinstance(part, str) else part


def _template(path: str) -> str:
    """Write a path as OpenAPI does: without the types of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint: Endpoint, schemas: Schemas, needs_key: bool) -> dict[str, Any]:
    success = {"200": {"description": "Success", **_content(endpoint.answer, schemas)}}
    if endpoint.streams:
        success["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    statuses = sorted({*OF_ALL, *endpoint.errors, *([401] if needs_key else [])})
    errors = {
        str(status): {"description": ERRORS[status], **_content(ErrorAnswer, schemas)} for status in statuses
    }
    if endpoint.details is None:
        del errors["503"]["content"]
    elif endpoint.details is not ErrorAnswer:
        either = {"anyOf": [schemas[endpoint.details], schemas[ErrorAnswer]]}
        errors["503"]["content"]["application/json"]["schema"] = either
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": success | errors}
    names = re.findall(r"\{(\w+)", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, **_content(endpoint.body, schemas)}
    if needs_key:
        operation["security"] = [{"api_key": []}]
    return operation


def _content(kind: type | str | None, schemas: Schemas) -> dict[str, Any]:
    """The content of a body or a response: JSON of a type, or text of a media type."""
    if kind is None:
        return {}
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {"type": "string"}}}}
    return {"content": {"application/json": {"schema": schemas[kind]}}}
