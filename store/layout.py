"""The layout of one KV block in the pool: its shape, and the bytes of each layer and each head.

Called by all parts that move blocks or check them. Knows arrays' sizes only, neither keys nor models.
Explained in docs/explain/lifecycle.md. One block is contiguous:

    [layers, 2, kv_heads] units      2: keys, then values
     `--- one layer is one range (layer_range)
                `--- a run of heads is two ranges of that layer (head_ranges)

A unit is one head's keys or values of one layer: block_tokens x head_dim numbers, or what a codec made of
them (kernels_numba/codecs.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from store.errors import LayoutError

PLAIN = "none"
"""The codec that leaves blocks as they are. Its sizes are known here, so that a process which uses no other
codec does not load `kernels_numba`."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes of a block.

    itemsize   bytes of one number in the engines' caches (4: float32, 2: bfloat16)
    codec      of the blocks in the pool, one of kernels_numba.codecs.CODECS; "none": the caches' own bytes

    Raises LayoutError for sizes below 1, an unknown codec, or a head_dim that the codec cannot take.
    """

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    itemsize: int
    codec: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.codec != PLAIN:
            _check_codec(self.codec, self.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a block as an array.

        Without a codec: (layers, 2, kv_heads, block_tokens, head_dim) numbers of itemsize bytes. With a
        codec: (layers, 2, kv_heads, unit_nbytes) bytes.
        """
        unit = (self.block_tokens, self.head_dim) if self.codec == PLAIN else (self.unit_nbytes,)
        return (self.layers, 2, self.kv_heads, *unit)

    @property
    def unit_nbytes(self) -> int:
        """Return the bytes of one head's keys or values of one layer."""
        if self.codec == PLAIN:
            return self.block_tokens * self.head_dim * self.itemsize
        from kernels_numba.codecs import CODECS

        return CODECS[self.codec].unit_nbytes(self.block_tokens, self.head_dim, self.itemsize)

    @property
    def cache_nbytes(self) -> int:
        """Return the bytes that the same tokens take in an engine's caches: `nbytes` without a codec."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * self.itemsize

    @property
    def layer_nbytes(self) -> int:
        """Return the bytes of one layer of a block."""
        return 2 * self.kv_heads * self.unit_nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of a block."""
        return self.layers * self.layer_nbytes

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Return (offset, nbytes) of a layer within the block. Raises LayoutError without such a layer."""
        if not 0 <= layer < self.layers:
            raise LayoutError(f"layer {layer} of a block of {self.layers}")
        return layer * self.layer_nbytes, self.layer_nbytes

    def head_ranges(self, layer: int, first: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (offset, nbytes) of the keys and of the values of heads first .. first+count-1 of a
        layer."""
        if not (first >= 0 and count >= 1 and first + count <= self.kv_heads):
            raise LayoutError(f"heads {first} .. {first + count - 1} of a block of {self.kv_heads}")
        start, nbytes = self.layer_range(layer)
        head = self.unit_nbytes
        keys = start + first * head
        return (keys, count * head), (keys + nbytes // 2, count * head)

    def checksums(self, buffer: object) -> list[int]:
        """Return XXH3-64 (seed 0) of each layer's range of a block.

        buffer   C-contiguous, any item type, exactly nbytes bytes

        Raises LayoutError when the size is another.
        """
        view = as_bytes(buffer, self.nbytes)
        step = self.layer_nbytes
        return [xxh3_64_intdigest(view[start : start + step]) for start in range(0, self.nbytes, step)]


def checksum(layer: Any) -> int:
    """Return XXH3-64 (seed 0) of the bytes of one layer of a block: a C-contiguous buffer."""
    return xxh3_64_intdigest(memoryview(layer).cast("B"))


def check_of(checksums: Sequence[int]) -> int:
    """Return one number for the checksums of a block: XXH3-64 (seed 0) of them as u64, and never 0."""
    return xxh3_64_intdigest(array("Q", checksums).tobytes()) or 1


def _check_codec(codec: str, head_dim: int) -> None:
    """Raise LayoutError for an unknown codec, or for a head_dim that the codec cannot take."""
    from kernels_numba.codecs import CODECS
    from kernels_numba.errors import ShapeError

    if codec not in CODECS:
        raise LayoutError(f"codec={codec!r}: use one of {', '.join(CODECS)}")
    try:
        CODECS[codec].check(head_dim)
    except ShapeError as error:
        raise LayoutError(f"codec={codec!r} with head_dim={head_dim}: {error}") from None


def as_bytes(buffer: object, nbytes: int) -> memoryview:
    """Return a flat byte view of a buffer. Raises LayoutError if it has gaps, or not exactly nbytes."""
    view = memoryview(buffer)  # type: ignore[arg-type]
    if view.nbytes != nbytes or not view.c_contiguous:
        contiguous = "contiguous" if view.c_contiguous else "with gaps"
        raise LayoutError(f"a buffer of {view.nbytes} B, {contiguous}; {nbytes} B, contiguous, are needed")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
