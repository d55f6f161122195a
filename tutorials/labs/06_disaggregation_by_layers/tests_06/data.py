"""The stores of a class, whose figures students draw: links of different speeds beside the same pass."""

from __future__ import annotations

import json


def made_stores(layers: int) -> list[dict[str, object]]:
    """Stores of 3 blocks over links of 1 to 12 ticks per layer, in groups of 2 and of 4 layers."""
    return [
        {
            "layers": layers, "blocks": 3, "layer_ticks": 5, "copy_ticks": 1, "send_ticks": ticks,
            "fails_after": None, "groups": [[first, first + size] for first in range(0, layers, size)],
        }
        for size in (2, 4)
        for ticks in range(1, 13)
    ]  # fmt: skip


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get."""
    made = made_stores(sizes["store_layers"])
    return {"stores.jsonl": b"".join(json.dumps(store).encode() + b"\n" for store in made)}
