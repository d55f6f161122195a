"""The sampling that a model's authors name in generation_config.json: the defaults of its requests.

Used by the gateway. The end tokens of the same file are read by config.py. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import read_json

FILE = "generation_config.json"

ABOVE_0 = 5e-324
"""The smallest number above 0."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (ABOVE_0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}
"""name -> smallest and largest value, as for a request. -1 and 0 switch top_k off.

Logits are divided by a repetition penalty in float32: a smaller one makes some of them infinite. The others
may be as small as they like, even 0 in float32: the sampler takes temperatures below 1e-30 as 1e-30, top_p
then keeps the best token, and min_p all.
"""


def range_of(name: str) -> str:
    """Return in words what values a parameter may have."""
    low, high = RANGES[name]
    return f"above 0 and at most {high:g}" if low == ABOVE_0 else f"from {low:g} to {high:.10g}"


def default_sampling(folder: Path) -> dict[str, Any]:
    """The values among `RANGES` that the model folder names; empty when it has no such file.

    Raises ModelError for a value that is no number, or out of its range.
    """
    path = folder / FILE
    named = read_json(path) if path.exists() else {}
    found = {name: named[name] for name in RANGES if named.get(name) is not None}
    for name, value in found.items():
        low, high = RANGES[name]
        kinds = (int,) if name == "top_k" else (int, float)
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            found[name] = value = int(value)  # as in a request: in JSON 50.0 is 50
        if type(value) not in kinds or not low <= value <= high:
            raise ModelError(f"{path}: {name}={value!r} must be a number {range_of(name)}")
    return found
