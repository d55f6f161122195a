"""Decode attention over contexts that are dealt out to several members, each of which has some of the KV.

Called by the model's forward pass, by way of PagedPass. Knows arrays, not ranks. After DistAttention (Lin et
al., Infinite-LLM, arXiv 2401.02669): each member makes the highest score, the total and the sums of each
piece that it has, and all merge all pieces.

    token t --- t // unit --> unit u -+- u %  turns --> the member that has its KV
                                      `- u // turns --> its number among that member's units

A member's own units follow each other in its pages. All but the last unit of a context are full, and units
are whole pieces: so a member cuts its own tokens into the pieces of the whole context. They are merged in the
order of the context, and the result has the bits of one rank that has all tokens, in pieces of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels_numba.attention.attention_decode_tiles import decode_parts_v3, merge_pieces
from kernels_numba.checks import NO_WINDOW
from kernels_numba.errors import RangeError
from kernels_numba.runtime import PARALLEL_CALL


def own_tokens(tokens: np.ndarray, turn: int, turns: int, unit: int) -> np.ndarray:
    """Return how many of the first tokens of each context a member has: (b,) int32.

    tokens   (b,) integers; unit: tokens of a unit
    """
    rows, rest = np.divmod(tokens.astype(np.int64), turns * unit)
    return (rows * unit + np.clip(rest - turn * unit, 0, unit)).astype(np.int32)


class DealtContexts:
    """The contexts of one pass, of sequences with one new token each.

        tokens   (b,) integers: of each context, the new one included, on all members
        turn     of this member, of `turns`; unit: tokens of a unit, a multiple of `split`
        split    tokens of a piece
        gather   float32 of this member -> those of all, by turn

    own   (b,) int32: tokens of each context that this member has

    Raises RangeError.
    """

    def __init__(
        self, tokens: np.ndarray, turn: int, turns: int, unit: int, split: int,
        gather: Callable[[np.ndarray], Sequence[np.ndarray]],
    ) -> None:  # fmt: skip
        if unit % split:
            raise RangeError("unit", unit, f"a multiple of the pieces' {split} tokens")
        self.own, self._split, self._gather = own_tokens(tokens, turn, turns, unit), split, gather
        counts = [
            -(-own_tokens(tokens, each, turns, unit).astype(np.int64) // split) for each in range(turns)
        ]
        self._counts = [int(count.sum()) for count in counts]
        firsts = np.array([np.cumsum(count) - count for count in counts])  # of a member's pieces, by sequence
        firsts += np.array([sum(self._counts[:each]) for each in range(turns)])[:, None]
        sequences = [np.full(-(-int(length) // split), b) for b, length in enumerate(tokens)]
        piece = np.concatenate([np.arange(len(one)) for one in sequences])
        sequence = np.concatenate(sequences)
        units, within = np.divmod(piece, unit // split)
        self._order = firsts[units % turns, sequence] + units // turns * (unit // split) + within
        self._pieces = np.stack([sequence] * 3, 1)

    def attend(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: np.ndarray, out: np.ndarray,
        scale: float, threads: int,
    ) -> None:  # fmt: skip
        """Attend to what all members have. Arrays as for paged_attention_decode; tables: of own units."""
        with PARALLEL_CALL:
            _, *mine = decode_parts_v3(
                query, keys, values, tables, self.own, scale, NO_WINDOW, self._split, threads
            )
        kv_heads, group, head_dim = mine[2].shape[1:]
        shapes: list[Any] = [(kv_heads, group), (kv_heads, group), (kv_heads, group, head_dim)]
        found = self._gather(np.concatenate([part.reshape(-1) for part in mine]))
        parts = [_parted(one, count, shapes) for one, count in zip(found, self._counts, strict=True)]
        merge_pieces(self._pieces, *(np.concatenate(each)[self._order] for each in zip(*parts)), out)


def _parted(flat: np.ndarray, count: int, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the arrays of `count` pieces that lie one after the other."""
    ends = np.cumsum([count * int(np.prod(shape)) for shape in shapes])
    return [part.reshape(count, *shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes)]
