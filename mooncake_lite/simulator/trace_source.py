"""The requests of a trace, for a simulated cluster: lengths and keys, as the trace has them.

Used by `cluster_command.py`. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

from functools import partial

from mooncake_lite.simulator.hints import Hints
from mooncake_lite.simulator.sessions import opaque_request
from mooncake_lite.simulator.workload import Request, mixed
from mooncake_lite.workloads.traces import Trace

PROMPT, ANSWER = 1, 2
"""What a key is mixed with: an id of the trace names a block of a prompt, and no block of an answer."""


class TraceSource:
    """The requests of a trace at their times. See `workload.Source`.

    An answer has at least one token. Its blocks have keys of their own where the trace does not name them: of
    later prompts it then tells only which blocks they share with earlier prompts.
    """

    def __init__(self, trace: Trace, hints: Hints | None = None) -> None:
        self._trace, self._hints = trace, hints
        self._next, self._now = 0, 0.0
        self.num_requests = len(trace.requests)

    def next(self) -> Request:
        """Return one more request."""
        request, self._next = self._trace.requests[self._next], self._next + 1
        now, size = request.timestamp / 1000, self._trace.block_tokens
        answer = max(1, request.output_length)
        full = request.input_length // size
        keys = [mixed(one, PROMPT) for one in request.hash_ids[:full]]
        blocks = (request.input_length + answer) // size
        if self._trace.answers:
            keys += [mixed(one, PROMPT) for one in self._trace.answers[self._next - 1]][: blocks - full]
        keys += [mixed(self._next, position, ANSWER) for position in range(len(keys), blocks)]
        after_s, self._now = now - self._now, now
        made = opaque_request(f"r{self._next}", keys, size, request.input_length, answer, answer, after_s)
        if self._hints is not None:
            made.hints = partial(self._hints.after, self._next - 1)
        return made
