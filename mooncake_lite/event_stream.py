"""What an OpenAI-compatible server says to its clients: a stream of events, or one error object.

Used by `chat` and by the demo's client. Knows lines and JSON, no sockets. See docs/reference/http.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any


class BrokenStream(Exception):
    """A stream of events carries an error, is not JSON, or ends before its end mark."""


def chunks(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the object of each event, until the end mark. Raises BrokenStream with one line of reason."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise BrokenStream(f"the server sent a line that is not JSON: {data[:60]!r}") from None
        if not isinstance(chunk, dict):
            raise BrokenStream(f"the server sent an event that is no object: {data[:60]!r}")
        if "error" in chunk:
            raise BrokenStream(f"the server ended the answer: {error_message(data) or chunk['error']}")
        yield chunk
    raise BrokenStream("the server broke off in the middle of an answer")


def texts(chunk: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of text in one chunk of a chat completion."""
    for choice in chunk.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text


def finish_reason(chunk: dict[str, Any]) -> str:
    """Return why the answer ends with this chunk, "" when it does not."""
    reasons = (choice.get("finish_reason") for choice in chunk.get("choices", []))
    return next((reason for reason in reasons if reason), "")


def error_message(body: str) -> str:
    """Return the message of an OpenAI error object, "" when the body is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
