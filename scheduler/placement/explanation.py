"""What is told of a decision: the instances that were compared, and what came of the request.

Made by `decisions.py` and `choose.py`; sent to `mooncake-lite explain`. Plain data. Explained in
docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from scheduler.requests import Terms

Verdict = Literal["waits", "placed", "refused"]


class Candidate(msgspec.Struct, frozen=True):
    """One prefill instance that could be chosen, the decode instance that would follow, and the terms.

    fetch   whether the prefix may come from other nodes and from SSD
    """

    prefill: int
    decode: int
    fetch: bool
    terms: Terms


class Explanation(msgspec.Struct, frozen=True):
    """The decision about a request, and the instances that were compared.

    policy       name of the placement policy
    reason       why it waits or was refused; "" when it was placed
    candidates   the instances, the best first; none when no instance was compared
    """

    request_id: str
    policy: str
    outcome: Verdict
    reason: str
    candidates: list[Candidate]
