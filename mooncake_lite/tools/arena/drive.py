"""The child's side of a race: asks a policy for the scores of prefill nodes. It knows no clock and no result.

Run by `labs.child` in a folder of its own, beside policy.py. Explained in docs/how-to/run-an-arena.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mooncake_lite.labs.child import load

policy = load("policy.py")


def score(nodes: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a policy for one request, and on which nodes it would fetch the longest prefix."""
    columns = {name: np.array(one) if isinstance(one, list) else one for name, one in nodes.items()}
    found = policy.score(SimpleNamespace(**columns))
    scores, fetch = found if isinstance(found, tuple) else (found, ())
    return {
        "scores": np.asarray(scores, float).ravel().tolist(),
        "fetch": np.asarray(fetch, bool).ravel().tolist(),
    }


CALLS = {"score": score}
