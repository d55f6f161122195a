"""The KVCache pool: the keys of blocks, the places where they lie, and their eviction.

Used by the conductor (`store.directory`), by store ranks (`store.tier`, `store.ssd.tier_writer`), and by
every part that computes keys or ranges of blocks (`store.keys`, `store.layout`). Knows nothing of models,
requests' meaning, messages or scheduling. Importing it loads neither torch, MPI, numba nor h5py.

    directory        where each object lies, and who may read it; its parts are in books/
    policies/        what is evicted first
    tier             the SSD tier of a store rank; its parts are in ssd/
    mooncake_store/  the same pool for programs without ranks: Mooncake's own API, and a master
    keys, layout, objects, errors, ranking, allocator, kv_events   what all of them share

Programs written for Mooncake Store import `MooncakeDistributedStore`, `ReplicateConfig` and
`SoftPinAction` from here; they are loaded when they are first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.mooncake_store.api import MooncakeDistributedStore
    from store.mooncake_store.config import ReplicateConfig, SoftPinAction

__all__ = ["MooncakeDistributedStore", "ReplicateConfig", "SoftPinAction"]

_HOMES = {
    "MooncakeDistributedStore": "store.mooncake_store.api",
    "ReplicateConfig": "store.mooncake_store.config",
    "SoftPinAction": "store.mooncake_store.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'store' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
