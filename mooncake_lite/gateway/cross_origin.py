"""CORS: lets pages of allowed origins call the server from a browser.

Used by `__main__` around all other ASGI code, and by `connection` for answers made below ASGI. Knows no
request's meaning. Explained in docs/reference/http.md.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.problems import error_object
from mooncake_lite.gateway.shapes import to_json
from mooncake_lite.origins import ANY, LOOPBACK_PATTERN, Origins

METHODS = ("GET", "HEAD", "POST")

EXPOSED = ("X-Request-Id", "Retry-After")
"""Headers of answers that pages may read besides those that every page may."""


class CrossOrigin(CORSMiddleware):
    """starlette's CORS, whose refusals of preflights are error objects.

    A preflight needs no API key, because browsers send none with it. Every request header is allowed.
    """

    def __init__(self, app: ASGIApp, origins: Origins):
        super().__init__(
            app,
            allow_origins=(ANY,) if origins.every else origins.named,
            allow_origin_regex=LOOPBACK_PATTERN if origins.loopback else None,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight: 200, or 400 with an error object."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        origin, method = (request_headers[name] for name in ("origin", "access-control-request-method"))
        reason = f"pages may not call this server with {method}; use {', '.join(METHODS)}"
        if not self.is_allowed_origin(origin):
            reason = f"pages of {origin} may not call this server; `serve --allowed-origins` allows origins"
        others = ("content-length", "content-type")
        headers = {name: value for name, value in response.headers.items() if name not in others}
        answer = error_object(RequestError(reason))
        return Response(to_json(answer), 400, headers, media_type="application/json")


def headers_for(origins: Origins, origin: str | None) -> dict[str, str]:
    """Return the CORS headers of an answer that does not pass `CrossOrigin`. origin: None if unknown."""
    headers = {"Vary": "Origin"}
    if origins.every:
        headers["Access-Control-Allow-Origin"] = ANY
    elif origin is not None and origins.allows(origin):
        headers["Access-Control-Allow-Origin"] = origin
    return headers
