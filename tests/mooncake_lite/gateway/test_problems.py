"""Errors have one form, and a client is sent away for a time that makes sense."""

from __future__ import annotations

import math

import msgspec
import pytest

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.problems import Broken, Refused, Unavailable, error_headers, error_object

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("seconds", "header"),
    [(0.0, "1"), (-5.0, "1"), (1.2, "2"), (30.0, "30"), (math.inf, "3600"), (math.nan, "1")],
)
def test_retry_after_is_whole_seconds_from_one_to_an_hour(seconds: float, header: str) -> None:
    for error in (Refused("full", seconds), Unavailable("no rank is left", seconds)):
        assert error_headers(error) == {"Retry-After": header}
    assert error_headers(Unavailable("stopping")) == {}


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RequestError("x", param="n"), "invalid_request_error", None),
        (RequestError("x", status=404, code="model_not_found"), "not_found_error", "model_not_found"),
        (Refused("x", 1), "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("x"), "server_error", "service_unavailable"),
        (Broken("x"), "server_error", "request_failed"),
    ],
)
def test_every_error_has_openais_four_fields(error: RequestError, kind: str, code: str | None) -> None:
    expected = {"message": "x", "type": kind, "param": error.param, "code": code}

    assert msgspec.to_builtins(error_object(error)) == {"error": expected}
