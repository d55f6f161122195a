"""The forward pass: token ids in, logits out, keys and values written into paged caches on the way.

Used by the engine; knows pages and slots, never requests. Attention, the writing of KV and the linear layers
of small batches are `kernels_numba`, all else is torch. Explained in docs/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional

from kernels_numba import paged_attention_decode, paged_attention_prefill, scatter_kv
from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import ITEMSIZE, DType, ModelConfig, load_config
from mooncake_lite.model.projection import Projection, embedded, measure_limits
from mooncake_lite.model.rope import inverse_frequencies, rotary_tables
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import LayerWeights, Weights, load_weights


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the sequences of one forward pass lie; all tensors on the model's device.

        query_lens    (b,) int32             new tokens of each sequence, at least 1
        context_lens  (b,) int32             its tokens so far, the new ones included
        block_tables  (b, max_pages) int32   its pages, in order; entries past the context are not read
        slot_mapping  (n,) int64             where each new token's KV goes: page * page_size + offset

    The new tokens of sequence 0 come first, then those of sequence 1, ...: n = sum(query_lens).
    """

    query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def one_token_each(self) -> bool:
        """True in a decode step. Follows from the sizes alone: asking a GPU would mean to wait for it."""
        return self.slot_mapping.shape[0] == self.query_lens.shape[0]


@dataclass(frozen=True, slots=True)
class _LayerProjections:
    """The linear layers of one decoder layer; those with the same input are one."""

    query_key_value: Projection
    output: Projection
    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, layer: LayerWeights) -> _LayerProjections:
        return cls(
            query_key_value=Projection([layer.query, layer.key, layer.value]),
            output=Projection([layer.output]),
            gate_up=Projection([layer.gate, layer.up]),
            down=Projection([layer.down]),
        )

    @property
    def all(self) -> tuple[Projection, ...]:
        return (self.query_key_value, self.output, self.gate_up, self.down)


class Model:
    """A decoder-only transformer of the Llama, Mistral, Qwen2 or Qwen3 family. Use `load_model`."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: DType, device: str):
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.scale = config.head_dim**-0.5
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cosine, sine = rotary_tables(inverse, config.max_position)
        self.cosine, self.sine = cosine.to(self.device), sine.to(self.device)
        self.projections = [_LayerProjections.of(layer) for layer in weights.layers]
        self.head = Projection([weights.head])
        if (dtype, self.device.type) == ("float32", "cpu"):
            measure_limits([*(each for layer in self.projections for each in layer.all), self.head])

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute n new tokens, write their KV into the caches, return logits.

            token_ids, positions  (n,) int64
            caches                (layers, 2, pages, kv_heads, page_size, head_dim), the model's dtype;
                                  index 0 of the second axis holds keys, 1 values
            rows                  (r,) int64   tokens whose logits are wanted; None for all, empty for none
            returns               (r, vocab) float32

        The KV of earlier tokens must be in the caches. Token ids and positions are not checked here.
        """
        hidden = embedded(token_ids, self.weights.embedding)
        layers = zip(self.weights.layers, self.projections, caches, self.config.windows, strict=True)
        for layer, projections, cache, window in layers:
            normed = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attention(normed, layer, projections, cache, positions, batch, window)
            hidden = hidden + self._mlp(self._norm(hidden, layer.mlp_norm), projections)
        if rows is not None:
            hidden = hidden[rows]
        return self.head(self._norm(hidden, self.weights.norm))[0].float()

    def _attention(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        projections: _LayerProjections,
        cache: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        window: int | None,
    ) -> torch.Tensor:
        """Self-attention of the new tokens over their sequences: (n, hidden) -> (n, hidden)."""
        tokens, head_dim = hidden.shape[0], self.config.head_dim
        query, key, value = (part.view(tokens, -1, head_dim) for part in projections.query_key_value(hidden))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        keys, values, slots = cache[0], cache[1], batch.slot_mapping
        rotary = self.cosine, self.sine
        scatter_kv(key, value, keys, values, slots, rotary=rotary, positions=positions, query=query)
        tables, lens = batch.block_tables, batch.context_lens
        if batch.one_token_each:
            attended = paged_attention_decode(
                query, keys, values, tables, lens, scale=self.scale, window=window
            )
        else:
            attended = paged_attention_prefill(
                query, keys, values, tables, batch.query_lens, lens, scale=self.scale, window=window
            )
        return projections.output(attended.view(tokens, -1))[0]

    def _mlp(self, hidden: torch.Tensor, projections: _LayerProjections) -> torch.Tensor:
        """SwiGLU: (n, hidden) -> (n, hidden)."""
        gate, up = projections.gate_up(hidden)
        return projections.down(functional.silu(gate, inplace=True).mul_(up))[0]

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide each row by its root mean square (in float32), times the weight."""
        return functional.rms_norm(values, (values.shape[-1],), weight, self.config.norm_eps)


def _check_device(device: str) -> None:
    """Raises ModelError when torch has no such device here."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ModelError(f"device {device!r} is not there: this torch sees no GPU; use cpu")
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count()
    if kind != "cuda" or (index and not (index.isdigit() and int(index) < count)):
        raise ModelError(f"device {device!r} is not there: use cpu, cuda, or cuda:0 to cuda:{count - 1}")


def load_model(folder: Path, dtype: DType = "float32", device: str = "cpu", weights: str = "auto") -> Model:
    """The model in `folder`, ready to compute. Other processes may load the same folder at once.

    weights   "auto": for a few tokens the blocks of the GGUF file that the folder was made from, if it was,
              and tensors for many; "published": those blocks alone; "float32": tensors alone

    On a CPU in float32 this measures up to which batch each kind of layer goes through our kernels
    (projection.py). Raises ModelError when the folder is damaged or not a supported model, or the device
    is not there.
    """
    if dtype not in ITEMSIZE:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(ITEMSIZE)}")
    _check_device(device)
    config = load_config(folder)
    source = weight_source(folder, weights, dtype, device)
    return Model(config, load_weights(source, config, dtype, device), dtype, device)
