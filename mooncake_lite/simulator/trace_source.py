"""The requests of a trace, as lengths and keys: the workload of runs on recorded load.

Used by `experiment.py`. Equal ids of the trace are equal keys, and so equal prefixes. Explained in
docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_lite.simulator.sessions import opaque_request
from mooncake_lite.simulator.traces import BLOCK_TOKENS, TraceRequest
from mooncake_lite.simulator.workload import Block, Request, mixed


class TraceRequests:
    """The requests of a trace in the order of its file. See `Source`.

    Prompts of one block or more are as long as the trace says, and so are answers, but for empty ones, which
    get one token.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.num_requests = len(requests)
        self.lasts_s = requests[-1].timestamp / 1000
        self._requests = iter(enumerate(requests, 1))
        self._before_s = 0.0

    def next(self) -> Request:
        """Return one more request."""
        number, traced = next(self._requests)
        after_s, self._before_s = traced.timestamp / 1000 - self._before_s, traced.timestamp / 1000
        keys = [mixed(one, 3) for one in traced.hash_ids[: traced.full_blocks]]
        answer = max(1, traced.output_length)
        while len(keys) < (traced.input_length + answer) // BLOCK_TOKENS:
            keys.append(mixed(keys[-1] if keys else 0, number))
        return opaque_request(
            f"r{number}", keys, BLOCK_TOKENS, traced.input_length, answer, answer, max(0.0, after_s)
        )

    def ended(self, request: Request) -> None:
        """Change nothing: the next requests are in the trace."""

    def known_blocks(self) -> list[Block]:
        """Return none: every tier begins empty."""
        return []
