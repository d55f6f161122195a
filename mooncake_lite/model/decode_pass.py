"""The decoder layers of a decode step in one compiled call, where our kernels multiply every layer.

Used by forward.py, whose loop over the layers is the general form and gives the same bits. Knows weights and
projections; what is computed stands in kernels_numba/layers/decode_layers.py. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from kernels_numba import PagedPass
from kernels_numba.layers.decode_layers import DecodeLayers, LayerArrays
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.projection import MAX_ROWS_OF_X, Projection
from mooncake_lite.model.weights import LayerWeights


class DecodePass:
    """The layers of a float32 model on a CPU, whose paths are chosen (linear_paths.py).

    projections   of each layer: q, k and v; output; gate and up; down
    """

    def __init__(
        self, config: ModelConfig, weights: Seq[LayerWeights], projections: Seq[Seq[Projection]], scale: float
    ) -> None:
        self._config, self._weights, self._projections, self._scale = config, weights, projections, scale
        self._layers: DecodeLayers | None = None
        self._ready: dict[int, tuple[DecodeLayers, np.ndarray] | None] = {}

    def takes(self, rows: int) -> bool:
        """Whether it computes passes over so many sequences of one new token each."""
        if rows not in self._ready:
            self._ready[rows] = self._ready_for(rows)
        return self._ready[rows] is not None

    def __call__(
        self, hidden: torch.Tensor, paged: PagedPass, meet: Callable[[np.ndarray], None] | None = None
    ) -> torch.Tensor:
        """Run all layers; return what the last MLP adds to `hidden`, which is changed in place.

        hidden   (n, hidden) float32; self.takes(n) must hold
        meet     adds up the parts of all members, in place; None where there is one
        """
        ready = self._ready[hidden.shape[0]]
        assert ready is not None
        layers, ways = ready
        return layers(hidden, paged, ways, meet)  # type: ignore[no-any-return]

    def _ready_for(self, rows: int) -> tuple[DecodeLayers, np.ndarray] | None:
        """The layers, and how they multiply so many rows; None where torch multiplies some of them."""
        if not 0 < rows <= MAX_ROWS_OF_X:
            return None
        families = [[each.paths.family(rows) for each in layer] for layer in self._projections]
        if any("torch" in layer for layer in families):
            return None
        if self._layers is None:
            self._layers = self._made()
        fixed = [[family == "fixed" for family in layer] for layer in families]
        return self._layers, self._layers.ways(rows, fixed)

    def _made(self) -> DecodeLayers:
        layers = [
            LayerArrays(
                norms=(layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm),
                linears=[each.kernels for each in projections],
                biases=[linear.bias for each in projections for linear in each.linears],
                window=window,
            )
            for layer, projections, window in zip(self._weights, self._projections, self._config.windows)
        ]
        config = self._config
        return DecodeLayers(layers, head_dim=config.head_dim, eps=config.norm_eps, scale=self._scale)
