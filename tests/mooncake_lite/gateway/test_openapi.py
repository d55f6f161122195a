"""The description of the interface names every endpoint, and says what bodies and answers really are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import mooncake_lite
from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.gateway import answer_types as types
from mooncake_lite.gateway.bodies import ChatBody
from mooncake_lite.gateway.endpoints import ENDPOINTS
from mooncake_lite.gateway.fields import NEUTRAL, NEUTRAL_IN_CHATS
from mooncake_lite.gateway.openapi import describe
from mooncake_lite.model.tokenizer import Tokenizer
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import MAX_MODEL_LEN, SERVED_ID, FakeCluster, GatewayProcess

OWN = {
    "$models": [SERVED_ID, "default"], "$most_tokens": MAX_MODEL_LEN - 1, "$last_token_id": 99,
    "$most_choices": ServeConfig().max_num_seqs, "$most_prompts": ServeConfig().max_queue,
}  # fmt: skip
"""The limits of the gateways here, but for the vocabulary of their model."""

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
    found = operations(describe(ENDPOINTS, OWN, has_key=False))

    routes = {f"{method} {e.path}".replace(":path", "") for e in ENDPOINTS for method in e.methods}
    assert found.keys() == routes
    assert len({operation["operationId"] for operation in found.values()}) == len(found)


@pytest.mark.quick
@pytest.mark.parametrize("has_key", [False, True])
def test_the_document_has_the_shape_that_openapi_3_1_asks_for(has_key: bool) -> None:
    document = describe(ENDPOINTS, OWN, has_key=has_key)

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
    document = describe(ENDPOINTS, OWN, has_key=False)
    chat = document["paths"]["/v1/chat/completions"]["post"]

    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatBody"
    }
    fields = document["components"]["schemas"]["ChatBody"]["properties"].keys()
    assert fields == {*ChatBody.__struct_fields__, *NEUTRAL, *NEUTRAL_IN_CHATS}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    for status in ("400", "403", "404", "405", "408", "413", "415", "421", "429", "431", "500", "503"):
        schema = chat["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}


@pytest.mark.quick
def test_a_server_that_is_not_ready_answers_with_its_health_or_with_an_error_object() -> None:
    found = operations(describe(ENDPOINTS, OWN, has_key=False))
    either = found["GET /health"]["responses"]["503"]["content"]["application/json"]["schema"]
    names = [name.rpartition("/")[2] for name in references(either)]
    assert sorted(names) == ["ErrorAnswer", "Health"]
    assert "content" not in found["GET /ping"]["responses"]["503"]


@pytest.mark.quick
def test_guarded_endpoints_ask_for_the_key_if_there_is_one() -> None:
    document = describe(ENDPOINTS, OWN, has_key=True)

    assert document["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    guarded = {
        f"{method} {e.path}".replace(":path", "") for e in ENDPOINTS if e.guarded for method in e.methods
    }
    asking = {name for name, operation in operations(document).items() if "security" in operation}
    assert (
        asking == guarded == {name for name, op in operations(document).items() if "401" in op["responses"]}
    )
    open_to_all = describe(ENDPOINTS, OWN, has_key=False)
    assert "securitySchemes" not in open_to_all["components"]
    assert not [name for name, operation in operations(open_to_all).items() if "security" in operation]


def test_answers_are_of_the_types_that_the_document_names(
    gateway: GatewayProcess, cluster: FakeCluster, tokenizer: Tokenizer
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
        (types.HintAnswer, "POST", "/v1/kv/hints", {"verb": "pin", "session": "a"}),
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
    own = OWN | {"$last_token_id": tokenizer.vocab_size - 1}
    assert document == describe(ENDPOINTS, own, has_key=False)
    assert not re.search(r'"\$(?!ref")', msgspec.json.encode(document).decode()), "a name is left"


def test_the_document_needs_no_key(start: Start, tokenizer: Tokenizer) -> None:
    gateway, _ = start(api_key="secret")

    document = gateway.http.get("/openapi.json").json()

    own = OWN | {"$last_token_id": tokenizer.vocab_size - 1}
    assert document == describe(ENDPOINTS, own, has_key=True)


EXCLUDED = {"HintBody": ("session", "copies", "verb")}
"""Fields of a body that others exclude: test_hints.py has them."""


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield values at the limits of a field, and beyond them; with each whether it is allowed."""
    kind = schema.get("type")
    step = 1 if kind == "integer" else 1e-6
    for limit, sign in (("minimum", -1), ("maximum", 1)):
        if limit in schema:
            yield schema[limit], True
            yield schema[limit] + sign * step, False
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], False
    if "maxLength" in schema:
        yield from (("", False), ("x" * schema["maxLength"], True), ("x" * (schema["maxLength"] + 1), False))
    if "maxItems" in schema:
        items = list(edges(schema["items"]))
        inside = next(value for value, allowed in items if allowed)
        yield [inside] * schema["maxItems"], True
        yield [inside] * (schema["maxItems"] + 1), False
        yield from (([value], allowed) for value, allowed in items)
    if "propertyNames" in schema:
        yield from (({"0": value}, allowed) for value, allowed in edges(schema["additionalProperties"]))
        yield {"one": 0}, False
    if "enum" in schema:
        yield from ((value, True) for value in schema["enum"])
        yield "something else", False
    for other in schema.get("anyOf", ()):
        yield from edges(other)
    if kind == "null":
        yield None, True


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/kv/hints", "/tokenize", "/detokenize"]
)
def test_the_limits_in_the_document_are_those_that_are_checked(gateway: GatewayProcess, path: str) -> None:
    document = gateway.http.get("/openapi.json").json()
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = media["schema"]["$ref"].rpartition("/")[2]
    whole: dict[str, Any] = {
        "ChatBody": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "CompletionBody": {"prompt": [5], "max_tokens": 1},
        "HintBody": {"verb": "retain", "prompt": "a"},
        "TokenizeBody": {"prompt": "a"},
        "DetokenizeBody": {"tokens": [5]},
    }[name]
    beyond = {"max_tokens", "max_completion_tokens", "min_tokens"} if name == "ChatBody" else {"min_tokens"}
    seen: list[tuple[str, Any]] = []
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        if field in ("prompt", "messages", *EXCLUDED.get(name, ())):
            continue
        for value, allowed in edges(schema):
            if value == MAX_MODEL_LEN - 1 and field in beyond:
                continue  # the prompt of this test leaves fewer tokens
            body = {**whole, field: value}
            body |= (
                {"n": value} if field == "best_of" else {"logprobs": True} if field == "top_logprobs" else {}
            )
            if field == "max_completion_tokens":
                del body["max_tokens"]
            seen.append((field, value))
            reply = gateway.http.post(path, json=body)
            refusal = 404 if field == "model" else 400
            assert reply.status_code == (200 if allowed else refusal), (field, value, reply.text)
            if not allowed:
                named = reply.json()["error"]["param"].partition("[")[0]
                assert named in (field, {"best_of": "n", "max_completion_tokens": "max_tokens"}.get(field))
    assert len(seen) > {"DetokenizeBody": 3, "HintBody": 60}.get(name, 70)
