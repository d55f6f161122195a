"""A client of an OpenAI-compatible server: one answer as a stream of events, with its times, or one error.

Used by `chat` and the demo; the benchmarks read their events with it. Knows HTTP and the trace header, and
nothing of what lies behind the port. See docs/reference/http.md.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_lite.errors import ClusterError, UserError

if TYPE_CHECKING:
    import httpx

Client = TypeVar("Client", "httpx.Client", "httpx.AsyncClient")

TRACED = {"x-mooncake-lite-trace": "1"}
"""The header with which an answer tells where its time went."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey: an answer must not move the cursor or set a title."""

WITH_KEY = "; give its API key with --api-key or MOONCAKE_LITE_API_KEY"
"""What to do when a server answers with HTTP 401."""

TOO_LONG = re.compile("context_length_exceeded|maximum context length")
"""OpenAI's code, or words of vLLM, which has no code."""

BROKE_OFF = "the server broke off in the middle of an answer"


class AnswerFailed(ClusterError):
    """The server refused a request, or its answer broke off."""


class TooLong(AnswerFailed):
    """The prompt, or the prompt and the longest answer together, do not fit into the context."""


@dataclass(slots=True)
class StreamedAnswer:
    """One answer, as far as it has come.

    usage      tokens, as the server counts them
    trace      of an answer that was asked for with TRACED: cached tokens by tier, and where the time went
    ttft_s     from sending the request to the first piece of text
    answer_s   to the last piece
    """

    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    ttft_s: float = 0.0
    answer_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        """Return the tokens of the answer."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def tpot_s(self) -> float:
        """Return the mean gap between tokens after the first one; 0 for an answer of one token."""
        gaps = self.completion_tokens - 1
        return (self.answer_s - self.ttft_s) / gaps if gaps > 0 else 0.0


def open_client(
    kind: type[Client], url: str, api_key: str | None, timeout: httpx.Timeout, **more: Any
) -> Client:
    """Make a client of the server at this URL, of httpx's kind. Raises UserError when it is no URL.

    A server on this machine is asked without the proxies of the environment: they do not see this loopback
    interface, and would get its prompts. Raises UserError for a proxy that httpx cannot use.

    more   options of the client
    """
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/metrics").removesuffix("/v1"))
        here = is_loopback(base.host)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise UserError(f"--url {url!r} is no URL: {error}") from None
    try:
        if base.scheme == "https":
            more["verify"] = httpx.create_ssl_context()  # of the environment, which may name certificates
        return kind(base_url=base, headers=headers, timeout=timeout, trust_env=not here, **more)
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        kind_of_name = "SSL_CERT_" if isinstance(error, OSError) else "_PROXY"
        found = ", ".join(sorted(name for name in os.environ if kind_of_name in name.upper()))
        raise UserError(
            f"{found} of the environment cannot be used for {url} ({one_line(error)}); unset what is wrong, "
            "or name the host in NO_PROXY"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether a connection to this host stays on this machine, as far as its name tells."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name if ":" in name else socket.inet_aton(name))
    except (OSError, ValueError):
        return name == "localhost" or name.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def stream_answer(
    client: httpx.Client,
    body: Mapping[str, Any],
    answer: StreamedAnswer,
    on_text: Callable[[str], None],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a conversation, and fill `answer` as pieces of text come. Raises AnswerFailed.

    on_text   called with each piece
    """
    import httpx

    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    sent = time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                refused = TooLong if TOO_LONG.search(response.text) else AnswerFailed
                raise refused(problem_of(response))
            read_answer(response.iter_lines(), answer, on_text, lambda: time.perf_counter() - sent)
    except httpx.ReadTimeout:
        raise AnswerFailed(f"the server was silent for {client.timeout.read:.0f} s") from None
    except httpx.HTTPError as error:
        raise AnswerFailed(f"the connection to the server broke: {one_line(error)}") from None


def read_answer(
    lines: Iterable[str], answer: StreamedAnswer, on_text: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Fill `answer` from the lines of an event stream. Raises AnswerFailed.

    clock   seconds since the request was sent
    """
    for event in events(lines):
        answer.usage = event.get("usage") or answer.usage
        answer.trace = event.get("mooncake_lite") or answer.trace
        for choice in event.get("choices", []):
            answer.finish = choice.get("finish_reason") or answer.finish
            if text := choice.get("delta", {}).get("content"):
                answer.answer_s = clock()
                answer.ttft_s = answer.ttft_s if answer.text else answer.answer_s
                answer.text += text
                on_text(text)


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the object of each event, until the end mark. Raises AnswerFailed with one line of reason."""
    for line in lines:
        if line.startswith("data:"):
            event = event_of(line)
            if event is None:
                return
            yield event
    raise AnswerFailed(BROKE_OFF)


def event_of(line: str) -> dict[str, Any] | None:
    """Return the object of a line that begins with "data:", None for the end mark. Raises AnswerFailed."""
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError:
        raise AnswerFailed(f"the server sent a line that is not JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise AnswerFailed(f"the server sent an event that is no object: {data[:60]!r}")
    if "error" in event:
        raise AnswerFailed(f"the server ended the answer: {_error_message(data) or event['error']}")
    return event


def problem_of(response: httpx.Response) -> str:
    """Return one line about an answer that is not a success: OpenAI's message if there is one."""
    message = _error_message(response.text) or response.text[:200] or "no reason given"
    words = CONTROL.sub(" ", " ".join(message.split()))
    return f"{words} (HTTP {response.status_code}){WITH_KEY if response.status_code == 401 else ''}"


def _error_message(body: str) -> str:
    """Return the message of an OpenAI error object, "" when the body is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def one_line(error: Exception) -> str:
    """Return what an error says, or its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
