"""Pages of allowed origins can call the server from a browser, and pages of other origins cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from mooncake_lite import messages as m
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import FakeCluster, GatewayProcess, first_token_only

PAGE = "http://localhost:3000"
STRANGER = "https://evil.example"
JSON = {"Content-Type": "application/json"}


def check_allowed(reply: httpx.Response, origin: str) -> None:
    assert reply.headers["access-control-allow-origin"] == origin
    assert "Origin" in reply.headers["vary"]


def check_not_allowed(reply: httpx.Response) -> None:
    assert "access-control-allow-origin" not in reply.headers
    assert "Origin" in reply.headers["vary"]


def test_a_preflight_is_answered_without_a_key(start: Start) -> None:
    gateway, _ = start(api_key="secret")
    wanted = "authorization, content-type, x-mooncake-lite-trace, x-stainless-os"
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
        "Access-Control-Request-Private-Network": "true",
    }
    for path in ("/v1/chat/completions", "/v1/models", "/health", "/metrics"):
        reply = gateway.http.options(path, headers=preflight)
        assert reply.status_code == 200
        check_allowed(reply, PAGE)
        assert reply.headers["access-control-allow-headers"] == wanted
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-private-network"] == "true"
        stranger = gateway.http.options(path, headers=preflight | {"Origin": STRANGER})
        assert stranger.status_code == 403
        assert stranger.json()["error"]["message"].startswith(f"pages of {STRANGER} may not call")
        check_not_allowed(stranger)
    refused = gateway.http.get("/v1/models", headers={"Origin": PAGE})

    assert refused.status_code == 401
    check_allowed(refused, PAGE)


def test_a_preflight_for_another_method_names_the_methods(http: httpx.Client) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "DELETE"}
    reply = http.options("/v1/completions", headers=preflight)
    assert reply.status_code == 400
    problem = "pages may not call this server with DELETE; use GET, HEAD, POST"
    assert reply.json()["error"]["message"] == problem
    check_allowed(reply, PAGE)


def test_answers_errors_and_streams_can_be_read_by_the_page_and_others_get_none(
    http: httpx.Client, cluster: FakeCluster
) -> None:
    def replies(origin: str) -> Iterator[tuple[int, httpx.Response]]:
        headers = {"Origin": origin}
        for path in ("/v1/models", "/health", "/metrics", "/version"):
            yield 200, http.get(path, headers=headers)
        for stream in (False, True):
            body = {"prompt": "hello", "stream": stream}
            yield 200, http.post("/v1/completions", json=body, headers=headers)
        yield 400, http.post("/v1/completions", json={}, headers=headers)
        yield 404, http.get("/v2/nothing", headers=headers)
        yield 405, http.delete("/v1/models", headers=headers)
        yield 413, http.post("/v1/completions", content=b" " * 9 * 2**20, headers=headers | JSON)

    for status, reply in replies(PAGE):
        assert reply.status_code == status
        check_allowed(reply, PAGE)
        assert reply.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"
    cluster.forget()
    for _, reply in replies(STRANGER):
        assert (reply.status_code, set(reply.json())) == (403, {"error"})
        check_not_allowed(reply)
    assert not cluster.all_of(m.Submit)
    assert "access-control-allow-origin" not in http.get("/health").headers


def test_refusals_for_lack_of_room_can_be_read_by_the_page(start: Start) -> None:
    gateway, cluster = start({"open_requests": 1, "connections": 2})
    cluster.behaviour = first_token_only
    ask = {"prompt": "x", "stream": True}
    with (
        httpx.Client(base_url=gateway.url, trust_env=False, headers={"Origin": PAGE}) as http,
        http.stream("POST", "/v1/completions", json=ask) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)  # kept: a stream whose iterator is gone is closed
        refused = http.post("/v1/completions", json=ask)
        crowded = gateway.http.get("/version", headers={"Origin": PAGE})

    assert (refused.status_code, crowded.status_code) == (429, 503)
    check_allowed(refused, PAGE)
    check_allowed(crowded, PAGE)


def test_an_answer_below_asgi_can_be_read_by_the_page(gateway: GatewayProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nOrigin: %s\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    page = gateway.said_to(head % PAGE.encode() + b"no number\r\n").lower()
    stranger = gateway.said_to(b"garbage\r\n" + head % STRANGER.encode()).lower()
    nonsense = gateway.said_to(b"garbage\r\n\r\n").lower()

    assert b"\r\naccess-control-allow-origin: http://localhost:3000\r\n" in page
    for said in (page, stranger, nonsense):
        assert said.startswith(b"http/1.1 400")
        assert b"\r\nvary: origin\r\n" in said
    assert b"access-control" not in stranger + nonsense


def test_a_star_allows_every_page(start: Start) -> None:
    gateway, _ = start(allowed_origins="*")
    reply = gateway.http.get("/health", headers={"Origin": STRANGER})
    check_allowed(reply, "*")
    assert b"access-control-allow-origin: *" in gateway.said_to(b"garbage\r\n\r\n").lower()


def test_a_list_of_origins_takes_the_place_of_those_of_this_machine(start: Start) -> None:
    gateway, _ = start(allowed_origins="https://app.example")
    check_allowed(
        gateway.http.get("/health", headers={"Origin": "https://app.example"}), "https://app.example"
    )
    refused = gateway.http.get("/health", headers={"Origin": PAGE})
    assert refused.status_code == 403
    check_not_allowed(refused)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions", "/metrics", "/health"])
def test_a_page_by_whose_name_the_server_is_called_is_no_page_of_the_server(
    gateway: GatewayProcess, cluster: FakeCluster, http: httpx.Client, path: str
) -> None:
    """DNS rebinding: for the browser the page and the server have the same origin."""
    host = f"evil.example:{gateway.port}"
    reply = http.request(
        "POST", path, json={"prompt": "x"}, headers={"Host": host, "Origin": f"http://{host}"}
    )
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        421,
        f"Host: '{host}' is no name of this server; `serve --allowed-hosts` allows names",
    )
    assert http.get(path, headers={"Host": host}).status_code == 421
    assert not cluster.all_of(m.Submit | m.PoolQuery)


def test_a_named_host_may_call_the_server_and_its_own_pages_too(start: Start) -> None:
    gateway, _ = start(allowed_hosts="llm.example", allowed_origins="")
    for origin, status in ((None, 200), ("https://llm.example", 200), (STRANGER, 403), ("null", 403)):
        headers = {"Host": "llm.example"} | ({"Origin": origin} if origin else {})
        assert gateway.http.get("/health", headers=headers).status_code == status
    assert gateway.http.get("/health", headers={"Host": socket.gethostname()}).status_code == 200


def test_beyond_loopback_any_host_may_call_but_is_not_trusted_with_its_pages(start: Start) -> None:
    gateway, _ = start(host="0.0.0.0")
    assert gateway.http.get("/health", headers={"Host": "any.example"}).status_code == 200
    own = {"Host": "any.example", "Origin": "http://any.example"}
    assert gateway.http.get("/health", headers=own).status_code == 403
