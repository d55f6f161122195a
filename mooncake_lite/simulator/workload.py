"""Requests for a simulated cluster.

Made by `sessions.py` and `trace_source.py`, sent by `clients.py`. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xxhash import xxh3_64_intdigest

from mooncake_lite.simulator.hints import Said


def mixed(*numbers: int) -> int:
    """Return 64 bits that stand for these numbers."""
    return xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *numbers))


@dataclass(slots=True, eq=False)
class Request:
    """One request, as its client knows it.

    token_ids     the prompt
    keys, digests of its full blocks; empty when nothing may be reused
    max_tokens    of the answer, as the client says; most_tokens: as the rank is told
    after_s       when it is sent: seconds after the one before; sent_s: the time
    class_id      service class
    released      its client may have its tokens, where these are withheld at first; released_s: since when
    cause         why it was refused or failed, in a few words, or the code of its failure
    whole         branches of which all tokens have come
    fences        branch -> attempt of the last Recall: tokens of this one and earlier ones are dropped
    token_times_s when tokens left their ranks
    hints         what its client says once it is answered, from the time
    """

    request_id: str
    token_ids: Sequence[int]
    keys: list[int]
    digests: list[int]
    max_tokens: int
    most_tokens: int
    wait_limit_s: float = float("inf")
    after_s: float = 0.0
    class_id: int = 0
    sent_s: float = 0.0
    released: bool = False
    released_s: float = 0.0
    cause: str = ""
    whole: set[int] = field(default_factory=set)
    fences: dict[int, int] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)
    hints: Callable[[float], Sequence[Said]] | None = None


class Source(Protocol):
    """Where the requests of a run come from. num_requests: of the run."""

    num_requests: int

    def next(self) -> Request:
        """Return one more request."""
