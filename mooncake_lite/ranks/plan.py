"""What all ranks must share at their start: the conductor's endpoints, and a fingerprint of blocks.

Used by `assemble.py` and `steward/assemble.py`. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.model.config import load_config
from mooncake_lite.model.fingerprint import weights_fingerprint
from transport.world import World


class StartPlan(msgspec.Struct, frozen=True):
    """Endpoints and keys that rank 0 broadcasts over MPI before any ZeroMQ connection exists.

    control, heart   endpoints of the conductor: over ipc, and over tcp ("" when all are on one host)
    ..._keys         of control, of heart and of the gateway, as CurveKeys.to_bytes
    refused          why the cluster does not start; all ranks then exit with code 2
    """

    control: list[str] = []
    heart: list[str] = []
    control_keys: bytes = b""
    heart_keys: bytes = b""
    gateway_keys: bytes = b""
    refused: str = ""


def pool_fingerprint(config: ServeConfig, folder: Path) -> bytes:
    """Return a fingerprint of everything that determines a block's bytes: the weights, the family of kernels,
    and a lossy codec.

    The base of every key's salt: a lossy codec taints what is computed on its blocks, so that they are never
    found by a request that asks for exact ones. Raises ModelError when the folder cannot be used.
    """
    if config.engine == "emulated":  # KV of its own kind: an SSD tier must not give it to a real engine
        kind = f"emulated 2 {config.dtype} {load_config(folder).kv_identity()}"
        return xxhash.xxh3_128_digest(kind.encode())
    weights = weights_fingerprint(folder, config.dtype, config.weights, config.device)
    if config.batch_invariant:
        weights = xxhash.xxh3_128_digest(weights + b"batch invariant")
    if config.kv_codec == "none":
        return weights
    return xxhash.xxh3_128_digest(weights + b"codec " + config.kv_codec.encode())


def pids_here(world: World) -> list[tuple[int, int]]:
    """Return (rank, pid) of every other rank on this host."""
    found = world.allgather_bytes(str(os.getpid()).encode())
    return [(rank, int(found[rank])) for rank in world.node_ranks if rank != world.rank]
