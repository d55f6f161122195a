"""The description of the interface names every endpoint, and says what bodies and answers really are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import mooncake_lite
from mooncake_lite import messages as m
from mooncake_lite.gateway import answer_types as types
from mooncake_lite.gateway.bodies import ChatBody
from mooncake_lite.gateway.endpoints import ENDPOINTS
from mooncake_lite.gateway.openapi import describe
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import FakeCluster, GatewayProcess

OPERATION = {"operationId", "summary", "responses", "parameters", "requestBody", "security"}


def references(part: Any) -> Iterator[str]:
    """Every $ref below this part of a document."""
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for item in part:
            yield from references(item)


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


@pytest.mark.quick
def test_every_endpoint_is_described_and_no_other() -> None:
    found = operations(describe(ENDPOINTS, has_key=False))

    routes = {f"{method} {e.path}".replace(":path", "") for e in ENDPOINTS for method in e.methods}
    assert found.keys() == routes
    assert len({operation["operationId"] for operation in found.values()}) == len(found)


@pytest.mark.quick
@pytest.mark.parametrize("has_key", [False, True])
def test_the_document_has_the_shape_that_openapi_3_1_asks_for(has_key: bool) -> None:
    document = describe(ENDPOINTS, has_key=has_key)

    assert document.keys() == {"openapi", "info", "paths", "components"}
    assert (document["openapi"], document["info"]["version"]) == ("3.1.0", mooncake_lite.__version__)
    for name in references(document):
        assert name.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    for name, operation in operations(document).items():
        assert operation.keys() <= OPERATION
        assert "200" in operation["responses"]
        for status, response in operation["responses"].items():
            assert 200 <= int(status) < 600
            assert response["description"]
        needed = {part.strip("}") for part in name.split("{")[1:]}
        assert {parameter["name"] for parameter in operation.get("parameters", [])} == needed
        if "requestBody" in operation:
            assert name.startswith("POST ")


@pytest.mark.quick
def test_a_body_has_all_its_fields_and_an_error_is_an_error_object() -> None:
    document = describe(ENDPOINTS, has_key=False)
    chat = document["paths"]["/v1/chat/completions"]["post"]

    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatBody"
    }
    assert document["components"]["schemas"]["ChatBody"]["properties"].keys() == {*ChatBody.__struct_fields__}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    for status in ("400", "404", "413", "429", "500", "503"):
        schema = chat["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}


@pytest.mark.quick
def test_guarded_endpoints_ask_for_the_key_if_there_is_one() -> None:
    document = describe(ENDPOINTS, has_key=True)

    assert document["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    guarded = {
        f"{method} {e.path}".replace(":path", "") for e in ENDPOINTS if e.guarded for method in e.methods
    }
    asking = {name for name, operation in operations(document).items() if "security" in operation}
    assert (
        asking == guarded == {name for name, op in operations(document).items() if "401" in op["responses"]}
    )
    open_to_all = describe(ENDPOINTS, has_key=False)
    assert "securitySchemes" not in open_to_all["components"]
    assert not [name for name, operation in operations(open_to_all).items() if "security" in operation]


def test_answers_are_of_the_types_that_the_document_names(
    gateway: GatewayProcess, cluster: FakeCluster
) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    cluster.pool_answers = [m.PoolEnded(blocks=1)]
    replies: list[tuple[type, str, str, Any]] = [
        (types.ChatCompletion, "POST", "/v1/chat/completions", chat),
        (types.TextCompletion, "POST", "/v1/completions", {"prompt": "x"}),
        (types.ErrorAnswer, "POST", "/v1/completions", {}),
        (types.ModelList, "GET", "/v1/models", None),
        (types.ModelCard, "GET", "/v1/models/default", None),
        (types.TokenIds, "POST", "/tokenize", {"prompt": "x"}),
        (types.Text, "POST", "/detokenize", {"tokens": [5]}),
        (types.ResetAnswer, "POST", "/reset_prefix_cache", None),
        (types.Health, "GET", "/health", None),
        (types.Version, "GET", "/version", None),
    ]
    for kind, method, path, body in replies:
        reply = gateway.http.request(method, path, json=body).json()
        known = msgspec.to_builtins(msgspec.convert(reply, kind))
        assert reply.keys() == known.keys()
    document = gateway.http.get("/openapi.json").json()

    described = {kind for e in ENDPOINTS for kind in (e.answer, e.details) if kind not in (dict, None)}
    assert described - {kind for kind, *_ in replies} == {"text/plain"}
    assert document == describe(ENDPOINTS, has_key=False)


def test_the_document_needs_no_key(start: Start) -> None:
    gateway, _ = start(api_key="secret")

    document = gateway.http.get("/openapi.json").json()

    assert document == describe(ENDPOINTS, has_key=True)
