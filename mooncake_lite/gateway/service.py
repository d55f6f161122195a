"""Read the tenant, the service class and the latency limits of a request from its headers and API key.

Used by `endpoints`. Knows headers and the configuration, no body and no cluster.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from math import inf, isfinite

import msgspec

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.config.service_classes import Tenant
from mooncake_lite.errors import RequestError
from scheduler.classes import default_class

CLASS_HEADER = "x-service-class"
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"


class Service(msgspec.Struct, frozen=True):
    """The tenant, class and limits of a request. Fields as in messages.RequestArrived."""

    class_id: int
    tenant: str = ""
    slo_ttft_s: float = inf
    slo_tbt_s: float = inf


class Services:
    """The API keys and the service classes of a server."""

    def __init__(self, config: ServeConfig):
        self._api_key = config.api_key
        self._tenants = config.known_tenants
        self._names = [service.name for service in config.service_classes]
        self._default = default_class(config.service_classes)

    @property
    def has_key(self) -> bool:
        """Tell whether clients need a key."""
        return bool(self._api_key or self._tenants)

    def check_key(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant whose key a client has sent. Raises RequestError (401) unless it knows a key.

        None: it has the server's key, or needs none.
        """
        given = headers.get("authorization", "").encode("latin-1")
        # All keys are compared, so that the time tells nothing.
        known = [_is_key(given, tenant.key) for tenant in self._tenants]
        is_servers = bool(self._api_key) and _is_key(given, self._api_key)
        if self.has_key and not is_servers and True not in known:
            raise RequestError(
                "this server needs its API key: Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
        return self._tenants[known.index(True)] if True in known else None

    def of(self, headers: Mapping[str, str], tenant: Tenant | None) -> Service:
        """Return what a request wants. Raises RequestError."""
        return Service(
            self._class(headers.get(CLASS_HEADER), tenant),
            tenant.name if tenant else "",
            _seconds(headers, TTFT_HEADER),
            _seconds(headers, TPOT_HEADER),
        )

    def _class(self, name: str | None, tenant: Tenant | None) -> int:
        """The class of this name. A tenant with a class may choose that one or a lower one."""
        best = tenant.class_id if tenant else None
        if name is None:
            return self._default if best is None else best
        allowed = self._names[best or 0 :]
        if name not in self._names:
            raise RequestError(
                f"{CLASS_HEADER}: no service class is called {name!r}; there are {', '.join(allowed)}",
                param=CLASS_HEADER,
            )
        if name not in allowed:
            raise RequestError(
                f"{CLASS_HEADER}: this API key may not use class {name}; it may use {', '.join(allowed)}",
                param=CLASS_HEADER,
            )
        return self._names.index(name)


def _is_key(given: bytes, key: str) -> bool:
    return hmac.compare_digest(given, f"Bearer {key}".encode())


def _seconds(headers: Mapping[str, str], name: str) -> float:
    """The seconds of a header in milliseconds; inf without it. Raises RequestError."""
    text = headers.get(name)
    if text is None:
        return inf
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (isfinite(number) and number > 0):
        raise RequestError(
            f"{name}={text!r} must be a number of milliseconds above 0; leave it out for no limit", param=name
        )
    return number / 1000
