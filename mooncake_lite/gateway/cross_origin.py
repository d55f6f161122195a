"""Web pages: lets those of allowed origins call the server from a browser, and refuses all others.

Used by `__main__` around all other ASGI code, and by `connection` for answers made below ASGI. Knows no
request's meaning. Explained in docs/reference/http.md.
"""

from __future__ import annotations

from functools import partial

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_lite.config.origins import ANY, LOOPBACK_PATTERN, Hosts, Origins
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.plumbing import error_answer
from mooncake_lite.gateway.problems import SHOWN

METHODS = ("GET", "HEAD", "POST")

EXPOSED = ("X-Request-Id", "Retry-After")
"""Headers of answers that pages may read besides those that every page may."""


class CrossOrigin(CORSMiddleware):
    """starlette's CORS, which also refuses requests of other pages and by other names, before any work.

    CORS alone does not stop a page from sending requests: it only hides their answers.
    A preflight needs no API key, because browsers send none with it. Every request header is allowed.
    """

    def __init__(self, app: ASGIApp, origins: Origins, hosts: Hosts):
        super().__init__(
            app,
            allow_origins=(ANY,) if origins.every else origins.named,
            allow_origin_regex=LOOPBACK_PATTERN if origins.loopback else None,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side of the server."""
        headers = Headers(scope=scope)
        problem = self._problem(headers)
        if problem is None:
            await super().__call__(scope, receive, send)
        else:
            await error_answer(problem)(
                scope, receive, partial(self.send, send=send, request_headers=headers)
            )

    def _problem(self, headers: Headers) -> RequestError | None:
        """Return why a request is refused; None if it is not.

        One without `Host` is HTTP/1.0, and is let through: browsers always send that header, and programs
        that look after the health of servers may not.
        """
        host = headers.get("host")
        known = host is not None and self._hosts.knows(host)
        if self._hosts.checked and host is not None and not known:
            reason = f"Host: {host[:SHOWN]!r} is no name of this server; `serve --allowed-hosts` allows names"
            return RequestError(reason, status=421)
        for origin in headers.getlist("origin"):
            # A page of the server itself, behind a proxy perhaps, if it is known that the name is no other's.
            is_own = known and origin in (f"http://{host}", f"https://{host}")
            if not (is_own or self.is_allowed_origin(origin)):
                return RequestError(
                    f"pages of {origin[:SHOWN]} may not call this server; `serve --allowed-origins` allows "
                    "origins",
                    status=403,
                )
        return None

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight of an allowed page: 200, or 400 with an error object."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        method = request_headers["access-control-request-method"][:SHOWN]
        reason = f"pages may not call this server with {method}; use {', '.join(METHODS)}"
        others = ("content-length", "content-type")
        headers = {name: value for name, value in response.headers.items() if name not in others}
        return error_answer(RequestError(reason), headers)


def headers_for(origins: Origins, origin: str | None) -> dict[str, str]:
    """Return the CORS headers of an answer that does not pass `CrossOrigin`. origin: None if unknown."""
    headers = {"Vary": "Origin"}
    if origins.every:
        headers["Access-Control-Allow-Origin"] = ANY
    elif origin is not None and origins.allows(origin):
        headers["Access-Control-Allow-Origin"] = origin
    return headers
