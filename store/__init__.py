"""The KVCache pool: the keys of blocks, the places where they lie, and their eviction.

Used by the conductor (`store.directory`), by store ranks (`store.tier`, `store.ssd.tier_writer`), and by
every part that computes keys or ranges of blocks (`store.keys`, `store.layout`). Knows nothing of models,
requests' meaning, messages or scheduling. Importing it loads neither torch, MPI, numba nor h5py.

Programs written for Mooncake Store import `MooncakeDistributedStore`, `ReplicateConfig` and
`SoftPinAction` from here; they are loaded when they are first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.distributed.api import MooncakeDistributedStore
    from store.distributed.config import ReplicateConfig, SoftPinAction

__all__ = ["MooncakeDistributedStore", "ReplicateConfig", "SoftPinAction"]

_HOMES = {
    "MooncakeDistributedStore": "store.distributed.api",
    "ReplicateConfig": "store.distributed.config",
    "SoftPinAction": "store.distributed.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'store' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
