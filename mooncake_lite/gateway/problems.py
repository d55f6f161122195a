"""Errors of a request that are not its own fault, and every error's form on the wire.

Used by `cluster` (raises) and `endpoints` (answers). The form is OpenAI's error object:
{"error": {"message", "type", "param", "code"}}. Knows no request and no socket.
"""

from __future__ import annotations

import math
import os
import sys
import traceback

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.answer_types import ErrorAnswer, ErrorDetails

LONGEST_RETRY_S = 3600.0
"""No client is sent away for longer, whatever an estimate says."""


SHOWN = 100
"""Characters of a wrong header that an error message shows."""


class Refused(RequestError):
    """Too many requests; the client may come again after retry_after_s."""

    def __init__(self, reason: str, retry_after_s: float):
        super().__init__(reason, status=429, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """The cluster cannot serve: it starts, stops, has no rank left for a duty, or its conductor is silent."""

    def __init__(self, reason: str, retry_after_s: float | None = None):
        super().__init__(reason, status=503, code="service_unavailable")
        self.retry_after_s = retry_after_s


class Broken(RequestError):
    """A request that had been accepted could not be finished."""

    def __init__(self, reason: str, code: str = ""):
        super().__init__(reason, status=500, code=code or "request_failed")


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> ErrorAnswer:
    """The body of an error answer."""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, fallback)
    return ErrorAnswer(ErrorDetails(error.message, kind, error.param, error.code))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that belong to an error answer."""
    if isinstance(error, Refused | Unavailable) and error.retry_after_s is not None:
        return {"Retry-After": str(math.ceil(min(max(1.0, error.retry_after_s), LONGEST_RETRY_S)))}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if error.status == 408:  # the rest of the body may still come, and would be taken for the next request
        return {"Connection": "close"}
    return {}


def surprise(error: Exception) -> RequestError:
    """Turn an unexpected exception into an error 500. Print its place on stderr, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    print(f"gateway: this is a bug: {type(error).__name__}: {error}{where}", file=sys.stderr, flush=True)
    if os.environ.get("MOONCAKE_LITE_DEBUG"):
        traceback.print_exception(error)
    return RequestError(f"internal error: {type(error).__name__}", status=500, code="internal_error")
