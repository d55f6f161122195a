"""Reads traces of requests: JSON lines as Mooncake publishes them.

Used by simulator/ and by tools that play, describe or make load. It knows the format and nothing of what is
done with it. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Return all requests of a file.

    Raises TraceError, which names the file and the line, for a file that cannot be read or holds no request,
    a line that is no JSON object of this form, a number of ids that does not fit the prompt's length, and a
    timestamp before that of an earlier line.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    most = f"{MOST_LINE_BYTES >> 20} MiB"
                    raise TraceError(
                        f"{path}:{number}: more than {most}; put each request on a line of its own"
                    )
                if line.strip():
                    last_ms = requests[-1].timestamp if requests else 0.0
                    requests.append(_request(decoder, line, f"{path}:{number}", last_ms))
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
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


def _request(
    decoder: msgspec.json.Decoder[TraceRequest], line: bytes, place: str, last_ms: float
) -> TraceRequest:
    """Decode and check one line. place: named in errors; last_ms: timestamp of the line before."""
    try:
        request = decoder.decode(plain_text(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = str(error)
        begin = words[:1] if words.startswith("JSON") else words[:1].lower()
        raise TraceError(f"{place}: {begin}{words[1:]}") from None
    wanted = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != wanted:
        raise TraceError(
            f"{place}: {len(request.hash_ids)} hash_ids, and a prompt of {request.input_length} tokens has "
            f"{wanted} blocks of {BLOCK_TOKENS}"
        )
    if request.timestamp < last_ms:
        raise TraceError(
            f"{place}: timestamp {request.timestamp:g} is before {last_ms:g}, that of an earlier line; "
            "sort the lines by timestamp"
        )
    return request
