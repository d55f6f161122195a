"""One linear layer, in the form that is fastest for the number of rows at hand.

Used by forward.py. Knows tensors only. Explained in docs/model.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from mooncake_lite.model.weights import Linear

TRANSPOSED_ROWS = range(8, 65)
"""Batches in which torch's CPU product is faster the other way round.

Measured, float32, one thread, ms for weights 49152 x 576 and 1536 x 576:

    rows            1             2             4             8             16            256
    x @ W.T     7.2 / 0.12    7.9 / 0.15   14.9 / 0.26   17.1 / 0.39   20.9 / 0.42   128 / 2.9
    (W @ x.T).T 5.1 / 0.13   15.7 / 0.28   17.8 / 0.26   11.6 / 0.27   14.4 / 0.24   128 / 3.0
    W @ x[0]    4.4 / 0.13
"""


def linear(rows: torch.Tensor, layer: Linear) -> torch.Tensor:
    """rows (n, in) -> (n, out), contiguous, in the dtype of rows; adds the bias if there is one."""
    count = rows.shape[0]
    weight, bias = layer
    if rows.is_cuda or rows.dtype != torch.float32:
        return functional.linear(rows, weight, bias)
    if count == 1:
        product = torch.mv(weight, rows[0])
        return (product if bias is None else product + bias).unsqueeze(0)
    if count in TRANSPOSED_ROWS:
        product = torch.mm(weight, rows.t()).t()
        return product.contiguous() if bias is None else product + bias
    return functional.linear(rows, weight, bias)
