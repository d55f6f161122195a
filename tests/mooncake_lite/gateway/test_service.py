"""Service classes, limits of latency and tenants: what headers say, and what the cluster is told."""

from __future__ import annotations

import json
from math import inf

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.service import Service, Services
from tests.mooncake_lite.gateway.conftest import Start

TENANTS = json.dumps({"alice": {"key": "a-key", "class": "batch"}, "bob": {"key": "b-key"}})
INTERACTIVE, STANDARD, BATCH = range(3)

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def asked(services: Services, headers: dict[str, str]) -> Service:
    return services.of(headers, services.check_key(headers))


@pytest.mark.quick
def test_headers_choose_a_class_and_limits() -> None:
    services = Services(ServeConfig())
    assert not services.has_key
    assert asked(services, {}) == Service(STANDARD, "", inf, inf)
    headers = {"x-service-class": "interactive", "x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}
    assert asked(services, headers) == Service(INTERACTIVE, "", 0.25, 0.0125)


@pytest.mark.quick
def test_a_key_names_the_tenant_and_the_highest_class_that_it_may_use() -> None:
    services = Services(ServeConfig(tenants=TENANTS, api_key="server"))
    assert asked(services, bearer("server")) == Service(STANDARD)
    assert asked(services, bearer("a-key")) == Service(BATCH, "alice")
    assert asked(services, bearer("b-key") | {"x-service-class": "interactive"}) == Service(
        INTERACTIVE, "bob"
    )
    with pytest.raises(RequestError, match="may not use class interactive; it may use batch") as caught:
        asked(services, bearer("a-key") | {"x-service-class": "interactive"})
    assert caught.value.status == 400
    for wrong in ({}, bearer("c-key"), {"authorization": "a-key"}):
        with pytest.raises(RequestError) as caught:
            services.check_key(wrong)
        assert caught.value.status == 401


@pytest.mark.quick
@pytest.mark.parametrize("text", ["0", "-5", "fast", "inf", "nan", ""])
def test_a_limit_is_a_number_above_0(text: str) -> None:
    with pytest.raises(
        RequestError, match="must be a number of milliseconds above 0; leave it out"
    ) as caught:
        asked(Services(ServeConfig()), {"x-slo-ttft-ms": text})
    assert caught.value.param == "x-slo-ttft-ms"


def test_the_cluster_is_told_the_class_the_tenant_and_the_limits(start: Start) -> None:
    gateway, cluster = start(tenants=TENANTS)
    headers = bearer("a-key") | {"X-SLO-TTFT-ms": "250"}
    assert (
        gateway.http.post("/v1/completions", json={"prompt": ["x", "y"]}, headers=headers).status_code == 200
    )
    submits = cluster.all_of(m.Submit)
    assert len(submits) == 2
    for submit in submits:
        assert (submit.request.class_id, submit.request.tenant, submit.request.slo_ttft_s) == (
            BATCH,
            "alice",
            0.25,
        )
    refused = gateway.http.post(
        "/v1/completions", json={"prompt": "x"}, headers=bearer("b-key") | {"x-service-class": "gold"}
    )
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "no service class is called 'gold'; there are interactive, standard, batch" in error["message"]
    assert error["param"] == "x-service-class"
    for path, body in BODIES.items():
        refused = gateway.http.post(path, json=body, headers=bearer("b-key") | {"x-slo-tpot-ms": "0"})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error.pop("message").startswith("x-slo-tpot-ms='0' must be a number of milliseconds above 0")
        assert error == {"type": "invalid_request_error", "param": "x-slo-tpot-ms", "code": None}
    assert gateway.http.get("/v1/models").status_code == 401
