"""What a set of weights is called in KV keys: a digest of all that decides the values of KV.

Used by the gateway and the roles to start their key chains: two processes that load equal weights must
get equal bytes, whatever the folder is called. Knows nothing of keys. Explained in docs/explain/model.md.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import DType, load_config
from mooncake_lite.model.digest import file_digest
from mooncake_lite.model.weight_source import weight_source

_VERSION = b"mooncake-lite weights 1\0"


def weights_fingerprint(folder: Path, dtype: DType, weights: str = "auto", device: str = "cpu") -> bytes:
    """16 bytes that differ when the weights, their format, a setting that changes KV, or the dtype differ.

    weights, device   as in load_model: they decide which files are read, and it is those that are digested

    Published weights have the float32 ones' values to the bit, and only the order of sums differs; but it
    does differ, so the format is named: KV of one way of computing is not read by another. A choice of "auto"
    that comes to tensors alone is named as they are.

    The first call for a folder reads all weights (0.1 s for 540 MB in the page cache); later ones, in any
    process, take the remembered digests. Raises ModelError when the folder cannot be used.
    """
    state = xxhash.xxh3_128(_VERSION)
    state.update(load_config(folder).kv_identity().encode())
    state.update(dtype.encode())
    source = weight_source(folder, weights, dtype, device)
    if source.blocks is not None:
        state.update(b"published")
    for path in source.files:
        try:
            state.update(file_digest(path))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return state.digest()
