"""How the CPU kernels are compiled: where Numba keeps its cache, which float rules hold, who may run.

Imported by every module with CPU kernels, and the only place that imports numba for them. Knows nothing of
the kernels. The cache is set up before numba is imported, because a read-only package with a read-only home
would otherwise fail at the first decorator. Explained in docs/explain/paged-attention.md.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_OUR_FOLDER = "kernels-"
HELPERS = (
    *("attention/attention_plain.py", "intrinsics/linear_vectors.py", "intrinsics/numerics.py"),
    *("intrinsics/register_blocks.py", "intrinsics/streaming.py", "intrinsics/vectors.py"),
    *("intrinsics/vectors_codes.py", "intrinsics/words.py", "layers/row_kernels.py"),
    *("matmul/linear_blocks.py", "matmul/linear_blocks_fixed.py", "runtime.py"),
)
"""Files of this package, by their paths in it, whose functions or constants are compiled into the kernels of
other files."""


def _helpers_digest() -> str:
    """A digest of HELPERS.

    Numba stamps a cached kernel with its own file only, so an edit of a helper elsewhere would go unnoticed.
    With the digest in the folder's name such an edit starts a fresh cache.
    """
    digest = hashlib.sha256()
    for name in HELPERS:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def _writable_cache_folder() -> tuple[str, bool]:
    """The folder for compiled kernels, and whether other processes find it: $MOONCAKE_LITE_CACHE or
    ~/.cache/mooncake-lite, else a private temporary one that ends with the process."""
    base = os.environ.get("MOONCAKE_LITE_CACHE") or os.path.join(
        os.path.expanduser("~"), ".cache", "mooncake-lite"
    )
    folder = Path(base) / (_OUR_FOLDER + _helpers_digest())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder), True
    except OSError:
        private = tempfile.mkdtemp(prefix=_OUR_FOLDER)
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return private, False


def _set_cache_folder() -> bool:
    """Respect a folder that the user chose; one that a parent process of ours chose is chosen anew. Returns
    whether other processes find the same folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR", "")
    if chosen and not os.path.basename(chosen).startswith(_OUR_FOLDER):
        return True
    os.environ["NUMBA_CACHE_DIR"], shared = _writable_cache_folder()
    if "numba" in sys.modules:  # it read the environment when it was imported
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
    return shared


SHARED_CACHE = _set_cache_folder()
"""False where each process has to compile for itself, because no cache folder can be written."""

from numba import cfunc, get_num_threads, njit, prange  # noqa: E402 - the cache folder comes first
from numba.extending import register_jitable  # noqa: E402

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Float rules of the kernels: sums may be reordered (or no sum would vectorise), but NaN and infinity keep
their meaning. Numba's plain fastmath=True also promises that there are none, and may then do anything."""

PART: Any = {"cache": True, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""How the parts of a kernel are compiled, which Python never calls itself: without the code for such calls,
which takes a fifth of the time to compile."""

PARALLEL_CALL = threading.Lock()
"""Held around every call of a kernel with parallel=True. Numba's workqueue threading layer, the only one that
is always there, aborts the process when two Python threads are inside such kernels at once; and two of them
would only share the same cores. Block movers take it for large moves, and only if nobody holds it: else they
move without help (blocks.gather_blocks)."""

__all__ = [
    "FAST",
    "PARALLEL_CALL",
    "PART",
    "SHARED_CACHE",
    "cfunc",
    "get_num_threads",
    "njit",
    "prange",
    "register_jitable",
]
