"""What a set of weights is called in KV keys: a digest of all that decides the values of KV.

Used by the gateway and the roles to start their key chains: two processes that load equal weights must
get equal bytes, whatever the folder is called. Knows nothing of keys. Explained in docs/model.md.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import DType, load_config
from mooncake_lite.model.digest import file_digest
from mooncake_lite.model.weights import published_file, weight_files

_VERSION = b"mooncake-lite weights 1\0"


def weights_fingerprint(folder: Path, dtype: DType, weights: str = "float32") -> bytes:
    """16 bytes that differ when the weights, their format, a setting that changes KV, or the dtype differ.

    Published weights have the float32 ones' values to the bit, and only the order of sums differs; but they
    are other bytes, of another file, so it is that file which is digested, and the format is named.

    The first call for a folder reads all weights (0.1 s for 540 MB in the page cache); later ones, in any
    process, take the remembered digests. Raises ModelError when the folder cannot be used.
    """
    state = xxhash.xxh3_128(_VERSION)
    state.update(load_config(folder).kv_identity().encode())
    state.update(dtype.encode())
    if weights != "float32":
        state.update(weights.encode())
    for path in weight_files(folder) if weights == "float32" else [published_file(folder)]:
        try:
            state.update(file_digest(path))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return state.digest()
