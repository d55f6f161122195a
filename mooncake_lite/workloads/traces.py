"""Reads traces of requests: JSON lines as Mooncake publishes them.

Used by simulator/ and by tools that play, describe or make load. It knows the format and nothing of what is
done with it. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import TraceError

BLOCK_TOKENS = 512
"""Tokens of one block of the published traces."""

MOST_LINE_BYTES = 16 << 20
"""Of one request: enough for the ids of a prompt of a billion tokens. A longer line is no trace."""

MOST_TOKENS = 2**31 - 1
MOST_MS = 1e12
"""30 years: as milliseconds of a trace, not as a date."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One line.

    timestamp       ms since the trace began
    input_length    tokens of the prompt; output_length: of the answer
    hash_ids        one id per block of the prompt, the last and partial one included; an id names the whole
                    prefix that its block ends, so that equal ids mean equal prefixes
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their timestamps. Each has ceil(input_length / block_tokens) ids.

    answers   ids of the blocks that each answer filled, from the front; (): not known, as in traces
    """

    requests: Sequence[TraceRequest]
    block_tokens: int = BLOCK_TOKENS
    answers: Sequence[Sequence[int]] = ()

    def first(self, most: int | None) -> Trace:
        """Return the trace without requests after the first `most`; all of it for None."""
        return replace(self, requests=self.requests[:most], answers=self.answers[:most])


def read_trace(path: Path) -> Trace:
    """Return all requests of a file in Mooncake's form. For other forms see `forms.py`.

    Raises TraceError, which names the file and the line, for a file that cannot be read or holds no request,
    a line that is no JSON object of this form, a number of ids that does not fit the prompt's length, and a
    timestamp before that of an earlier line.
    """
    with opened(path) as file:
        return trace_of(path, lines_of(path, file))


def trace_of(path: Path, lines: Iterable[tuple[str, bytes]]) -> Trace:
    """Return the trace that has these lines of a file. Raises as `read_trace` does."""
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    for place, line in lines:
        with naming(place):
            request = decoder.decode(line)
        requests.append(checked(request, BLOCK_TOKENS, place, requests))
    if not requests:
        raise TraceError(f"{path}: there is no request in it; a trace has one JSON object per line")
    return Trace(requests)


def write_trace(trace: Trace) -> bytes:
    """Return the file of a trace: equal bytes for equal traces, with whole milliseconds as integers."""
    lines = []
    for request in trace.requests:
        fields = msgspec.structs.asdict(request)
        fields["timestamp"] = round(request.timestamp) if request.timestamp % 1 == 0 else request.timestamp
        lines.append(msgspec.json.encode(fields))
    return b"\n".join(lines) + b"\n"


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file to be read. Raises TraceError, also for what fails while it is open."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def lines_of(path: Path, file: BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Yield (file:line, text) of each line that is not blank, without a byte order mark.

    Raises TraceError for a line longer than MOST_LINE_BYTES and for UTF-16.
    """
    for number in count(1):
        line, place = file.readline(MOST_LINE_BYTES + 1), f"{path}:{number}"
        if not line:
            return
        if len(line) > MOST_LINE_BYTES:
            most = f"{MOST_LINE_BYTES >> 20} MiB"
            raise TraceError(f"{place}: more than {most}; put each request on a line of its own")
        if line.strip():
            with naming(place):
                text = plain_text(line)
            yield place, text


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Raise what is wrong with a line, or a whole file, as a TraceError that begins with its place."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = str(error)
        begin = words[:1] if words.startswith("JSON") else words[:1].lower()
        raise TraceError(f"{place}: {begin}{words[1:]}") from None


def checked(
    request: TraceRequest, block_tokens: int, place: str, before: Sequence[TraceRequest]
) -> TraceRequest:
    """Return a request whose ids fit its prompt, and which comes at or after the last one before it."""
    wanted = -(-request.input_length // block_tokens)
    if len(request.hash_ids) != wanted:
        raise TraceError(
            f"{place}: {len(request.hash_ids)} hash_ids, and a prompt of {request.input_length} tokens has "
            f"{wanted} blocks of {block_tokens}"
        )
    if before and request.timestamp < before[-1].timestamp:
        raise TraceError(
            f"{place}: timestamp {request.timestamp:g} is before {before[-1].timestamp:g}, that of an "
            "earlier line; sort the lines by timestamp"
        )
    return request
