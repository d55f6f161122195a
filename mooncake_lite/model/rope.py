"""The tables of the rotary position embedding, made once; scatter_kv of kernels_numba rotates with them.

Used by forward.py. Plain functions on tensors; knows no model and no cache.
Explained in docs/explain/model.md.
"""

from __future__ import annotations

import math

import torch

from mooncake_lite.model.config import Llama3Scaling

ONE_THREAD_VALUES = 2048
"""So many cosines torch computes in one thread. More it shares between threads, and when those make MKL's
first call of the function in a process at the same moment, one may get another variant of it: one process in
fifty had last bits of its own in the second half of the table, and so other keys than its peers."""


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> torch.Tensor:
    """Radians per position of each pair of channels: (head_dim // 2,) float32.

    Written in the order of operations of `transformers`, whose bits it therefore has.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inverse = 1.0 / (theta**exponents)
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    blend = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * inverse / scaling.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / scaling.factor, inverse)
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, stretched)


def rotary_tables(inverse: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position, each (positions, 1, 2 * len(inverse)) float32.

    Both halves of a row are equal but for the sign of the sine, which is minus in the first: the
    rotation then needs no negation. A table makes a position's values the same in every batch, and computing
    it in pieces makes them the same in every process.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    pieces = angles.split(max(1, ONE_THREAD_VALUES // len(inverse)))
    cosine, sine = torch.cat([p.cos() for p in pieces]), torch.cat([p.sin() for p in pieces])
    return torch.cat((cosine, cosine), 1).unsqueeze(1), torch.cat((-sine, sine), 1).unsqueeze(1)
