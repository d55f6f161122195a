"""Reads traces of requests: JSON lines as Mooncake publishes them.

Used by simulator/ and by whatever replays load. It knows the format and nothing of what is done with it.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mooncake_lite.errors import TraceError

BLOCK_TOKENS = 512
"""Tokens of one block of the published traces."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One line.

    timestamp       ms since the trace began
    input_length    tokens of the prompt; output_length: of the answer
    hash_ids        one id per block of the prompt, the last and partial one included; an id names the whole
                    prefix that its block ends, so that equal ids mean equal prefixes
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def full_blocks(self) -> int:
        """Blocks of the prompt without a partial last one."""
        return self.input_length // BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file, in its order.

    Raises TraceError, which names the file and the line, for a file that cannot be read or holds no request,
    a line that is no JSON object of this form, and a number of ids that does not fit the prompt's length.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_request(decoder, line, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not requests:
        raise TraceError(f"{path}: there is no request in it")
    return requests


def _request(decoder: msgspec.json.Decoder[TraceRequest], line: bytes, place: str) -> TraceRequest:
    """One line, checked; `place` is named in errors."""
    try:
        request = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{place}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    if request.timestamp < 0 or request.input_length < 1 or request.output_length < 0:
        raise TraceError(
            f"{place}: timestamp {request.timestamp}, input_length {request.input_length} and output_length "
            f"{request.output_length} must not be negative, and a prompt has at least 1 token"
        )
    wanted = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != wanted:
        raise TraceError(
            f"{place}: {len(request.hash_ids)} hash_ids, and a prompt of {request.input_length} tokens has "
            f"{wanted} blocks of {BLOCK_TOKENS}"
        )
    return request
