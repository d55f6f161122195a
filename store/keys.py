"""Names of KV blocks: the prefix-chain keys of Mooncake's public standard, and a second digest.

Called by gateways (a prompt's keys) and decode ranks (the answer's, one block at a time).
Knows nothing of models: a salt stands for everything else that changes the KV's values.
Explained in docs/explain/paper.md; the chain, for blocks t0, t1, ... of block_tokens tokens:

    local[i] = XXH3(tokens of block i as u32 little-endian)
    seq[0]   = local[0]                         empty salt: exactly the public standard
    seq[0]   = XXH3(XXH3(salt) || local[0])     otherwise
    seq[i]   = XXH3(seq[i-1] || local[i])       both as u64 little-endian; the key of block i

An equal key means an equal whole prefix and an equal salt. A trailing partial block has no key.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from store.errors import TokenError

if TYPE_CHECKING:
    import numpy as np

KEY_SEED = 0
"""The standard says "XXH3-64 with a fixed seed" and not which. 0 is XXH3's own default, so that any
other implementation that leaves the seed alone agrees with ours."""

DIGEST_SEED = 0x4D4F4F4E43414B45
"""Any other constant would do ("MOONCAKE"): the digest must not be a function of the key's hash."""

_PAIR = struct.Struct("<QQ")
_COUNT = struct.Struct("<Q")


def token_bytes(token_ids: Sequence[int]) -> memoryview:
    """Return token ids as u32 little-endian bytes.

    Raises TokenError for an id outside 0 .. 2**32-1 or one that is not an integer.
    """
    try:
        if isinstance(token_ids, bytes | bytearray | memoryview | str):
            raise TypeError(f"not {type(token_ids).__name__}")
        numpy = sys.modules.get("numpy")  # an array exists only where NumPy has been loaded
        if numpy is not None and isinstance(token_ids, numpy.ndarray):
            return _array_bytes(token_ids)
        words = array("I", token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers from 0 to 2**32-1: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")


def prefix_keys(token_ids: Sequence[int], block_tokens: int, salt: bytes = b"") -> list[int]:
    """Return the key (u64) of each full block of a prompt, in order; [] when there is none.

    Raises TokenError for ids that are not u32 or a block_tokens below 1.
    """
    return PrefixChain(block_tokens, salt).extend(token_ids)


def next_key(salt: bytes, last_key: int | None, token_ids: Sequence[int]) -> int:
    """Return the key of one full block. last_key: of the block before it; None for the first block.

    Raises TokenError for ids that are not u32 or a block without tokens.
    """
    (key,) = PrefixChain(len(token_ids), salt, last_key=last_key).extend(token_ids)
    return key


def block_digest(token_ids: Sequence[int]) -> int:
    """Return a second, independent digest (u64) of one block's tokens, which is compared on every hit.

    XXH3-64 with a seed of its own over the number of tokens (u64) and the tokens (u32), little-endian.
    """
    return _digest(token_bytes(token_ids), len(token_ids))


def block_digests(token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """Return `block_digest` of each full block of a prompt, as many as it has keys."""
    return [_digest(block, block_tokens) for block in _full_blocks(token_ids, block_tokens)]


class PrefixChain:
    """A chain of keys that grows with a sequence.

        last_key   key of the last full block, None before the first one
        pending    tokens since then, fewer than block_tokens

    The keys do not depend on the pieces in which the tokens come.
    """

    def __init__(self, block_tokens: int, salt: bytes = b"", *, last_key: int | None = None):
        """Begin a chain, or continue one after last_key (the salt no longer matters then)."""
        if block_tokens < 1:
            raise TokenError(f"block_tokens={block_tokens}: a block holds at least 1 token")
        self.block_tokens = block_tokens
        self.last_key = last_key
        self.pending: list[int] = []
        self._before_first = xxh3_64_intdigest(salt, KEY_SEED) if salt else None

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens; return the keys of the blocks that they complete.

        Each token is hashed once. Tokens of a last, partial block stay in `pending`. Raises TokenError, and
        then nothing is appended.
        """
        # labs:begin 2b
        tokens = [*self.pending, *token_ids] if self.pending else token_ids
        keys = []
        previous = self._before_first if self.last_key is None else self.last_key
        for block in _full_blocks(tokens, self.block_tokens):
            local = xxh3_64_intdigest(block, KEY_SEED)
            previous = local if previous is None else xxh3_64_intdigest(_PAIR.pack(previous, local), KEY_SEED)
            keys.append(previous)
        if keys:
            self.last_key = keys[-1]
        self.pending = list(tokens[len(keys) * self.block_tokens :])
        return keys
        # labs:end 2b


def _array_bytes(token_ids: np.ndarray) -> memoryview:
    """Return `token_bytes` of an array, without a loop."""
    import numpy as np

    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise TypeError(f"not an array of {token_ids.dtype} with {token_ids.ndim} dimensions")
    if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**32:
        raise OverflowError("one is outside")
    return np.ascontiguousarray(token_ids, dtype="<u4").data.cast("B")


def _full_blocks(token_ids: Sequence[int], block_tokens: int) -> Iterator[memoryview]:
    """Yield the bytes of each full block."""
    if block_tokens < 1:
        raise TokenError(f"block_tokens={block_tokens}: a block holds at least 1 token")
    data, step = token_bytes(token_ids), 4 * block_tokens
    return (data[start : start + step] for start in range(0, len(data) - step + 1, step))


def _digest(block: memoryview, tokens: int) -> int:
    return xxh3_64_intdigest(b"".join((_COUNT.pack(tokens), block)), DIGEST_SEED)
