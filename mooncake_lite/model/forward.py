"""The forward pass: token ids in, logits out, keys and values written into paged caches on the way.

Used by the engine; knows pages and slots, never requests. Attention and the writing of KV are
`kernels_numba`; on a CPU in float32 also norms, SwiGLU and the linear layers of small batches; all else is
torch. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional

from kernels_numba import PagedPass, rms_norm, silu_multiply
from kernels_numba.attention.attention_dealt import DealtContexts
from mooncake_lite.config.serve import check_batch_invariant
from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import ITEMSIZE, DType, ModelConfig, load_config
from mooncake_lite.model.decode_pass import DecodePass
from mooncake_lite.model.exchange import Exchange
from mooncake_lite.model.layer_hook import LayerHook
from mooncake_lite.model.linear_paths import choose_paths
from mooncake_lite.model.path_table import PathTable, this_machine
from mooncake_lite.model.projection import INVARIANT, Projection, embedded, invariant_pieces
from mooncake_lite.model.rope import inverse_frequencies, rotary_tables
from mooncake_lite.model.shares import PIECE_TOKENS, Share, whole
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import LayerWeights, Weights, load_weights


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the sequences of one forward pass lie; all tensors on the model's device.

        query_lens    (b,) int32             new tokens of each sequence, at least 1
        context_lens  (b,) int32             its tokens so far, the new ones included
        block_tables  (b, max_pages) int32   its pages, in order; entries past the context are not read
        slot_mapping  (n,) int64             where each new token's KV goes: page * page_size + offset
        leading       how many of the first sequences are known to have one new token
        dealt         the whole contexts, where several members share each; context_lens are of this member

    The new tokens of sequence 0 come first, then those of sequence 1, ...: n = sum(query_lens).
    """

    query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    leading: int = 0
    dealt: DealtContexts | None = None

    @property
    def singles(self) -> int:
        """Leading sequences of one new token. In a decode step these are all, as the sizes tell: asking a GPU
        would mean waiting for it."""
        batch = self.query_lens.shape[0]
        return batch if self.slot_mapping.shape[0] == batch else self.leading


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
    """A decoder-only transformer of the Llama, Mistral, Qwen2 or Qwen3 family, or a share of one.

    Use `load_model`. config: of these layers and heads alone; head: None but on the last stage
    exchange   with the members that hold the other heads, each of which does the same passes; None: no others
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: DType,
        device: str,
        batch_invariant: bool = False,
        exchange: Exchange | None = None,
    ):
        self.exchange = exchange
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.scale = config.head_dim**-0.5
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cosine, sine = rotary_tables(inverse, config.max_position)
        self.cosine, self.sine = cosine.to(self.device), sine.to(self.device)
        self.projections = [_LayerProjections.of(layer) for layer in weights.layers]
        self.head = Projection([weights.head]) if weights.head is not None else None
        self.batch_invariant = batch_invariant
        self._by_our_rows = (dtype, self.device.type) == ("float32", "cpu")
        self.decode: DecodePass | None = None
        if self._by_our_rows:
            groups = [layer.all for layer in self.projections]
            self._choose_kernels([*itertools.chain(*groups), *([self.head] if self.head else [])])
            self.decode = DecodePass(config, weights.layers, groups, self.scale)

    def _choose_kernels(self, projections: list[Projection]) -> None:
        """Which kernels multiply: one family for up to 32 rows, or by the table of this machine."""
        if not self.batch_invariant:
            choose_paths(projections, PathTable(this_machine(torch.get_num_threads())))
            return
        for projection in projections:
            projection.paths, projection.invariant = INVARIANT, True

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
        return self.logits(self.states(token_ids, positions, caches, batch, rows))

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits (r, vocab) float32 of `states`, on all members of a group."""
        assert self.head is not None
        rows = states.shape[0]
        own = self.head(states, self._pieces([], rows))[0].float()
        if self.exchange is None:
            return own
        if rows == 0:
            return own.new_empty(0, self.config.vocab_size)
        parts = self.exchange.gather(own.cpu().numpy().reshape(-1))
        whole = np.concatenate([part.reshape(rows, -1) for part in parts], axis=1)
        return torch.from_numpy(whole).to(self.device)

    @torch.inference_mode()
    def states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor | None = None,
        hook: LayerHook | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do as `forward`, but return what the head makes logits of: (r, hidden), the model's dtype.

        hook   called at each layer; where it does not move layers, not in passes that only decode
        hidden   what the stage before has returned, which is changed; None on the first stage

        A stage that is not the last one returns the hidden states behind its layers, for the next one.

        The logits of many rows take much memory. A caller can make those of a few rows at a time.
        """
        if hidden is None:
            assert self.weights.embedding is not None
            hidden = embedded(token_ids, self.weights.embedding)
        paged = self._paged(caches, batch, positions)
        moves = hook is not None and hook.moves
        count = batch.slot_mapping.shape[0]
        # One new token per sequence, all wanted. Members may take different forms, so both add up all rows.
        only_decodes = batch.query_lens.shape[0] == count and (rows is None or rows.shape[0] == count)
        compiled = only_decodes and not moves and batch.dealt is None
        if compiled and self.decode is not None and self.decode.takes(count):
            delta = self.decode(hidden, paged, None if self.exchange is None else self.exchange.sum)
        else:
            early = None if only_decodes else rows
            hidden, delta = self._layers(hidden, paged, batch, early, hook or LayerHook())
        if only_decodes and rows is not None:
            hidden, delta = hidden[rows], delta[rows]
        if self.weights.norm is None:
            return hidden.add_(delta)
        return self._norm(hidden, self.weights.norm, delta)

    def _layers(
        self,
        hidden: torch.Tensor,
        paged: PagedPass,
        batch: AttentionBatch,
        rows: torch.Tensor | None,
        hook: LayerHook,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All decoder layers: the hidden states of `rows`, and what the last layer's MLP adds to them."""
        pieces = self._pieces(batch.query_lens.tolist() if self.batch_invariant else [], batch.singles)
        delta = None  # what the last half of a layer adds to `hidden`, until the next norm reads both
        layers = zip(self.weights.layers, self.projections, self.config.windows, strict=True)
        for index, (layer, projections, window) in enumerate(layers):
            hook.before(index)
            normed = self._norm(hidden, layer.attention_norm, delta)
            query, key, value = self._heads(normed, layer, projections.query_key_value, pieces)
            paged.write(index, key, value, query)
            attended = paged.attend(index, query, scale=self.scale, window=window).flatten(1)
            if rows is not None and index == self.config.layers - 1:  # later, other tokens have no readers
                hidden, attended = hidden[rows], attended[rows]
                pieces = self._pieces([], hidden.shape[0])
            (delta,) = projections.output(attended, pieces)
            self._add_up(delta)
            hook.after(index)
            normed = self._norm(hidden, layer.mlp_norm, delta)
            (delta,) = projections.down(self._inner(normed, projections.gate_up, pieces), pieces)
            self._add_up(delta)
        assert delta is not None
        return hidden, delta

    def _add_up(self, delta: torch.Tensor) -> None:
        """Add what the other members have of a sum over heads or over the MLP, in place and in float32."""
        if self.exchange is not None:
            here = delta.to(device="cpu", dtype=torch.float32)
            self.exchange.sum(here.numpy())
            delta.copy_(here)

    def _pieces(self, query_lens: list[int], singles: int) -> list[int]:
        """Rows that linear layers multiply together, as invariant_pieces; empty: all."""
        return invariant_pieces(query_lens, singles) if self.batch_invariant else []

    def _paged(self, caches: torch.Tensor, batch: AttentionBatch, positions: torch.Tensor) -> PagedPass:
        """The pages of a batch, as all layers use them."""
        return PagedPass(
            caches,
            batch.block_tables,
            batch.query_lens,
            batch.context_lens,
            batch.slot_mapping,
            positions,
            (self.cosine, self.sine),
            singles=batch.singles,
            split=PIECE_TOKENS if self.batch_invariant else 0,
            dealt=batch.dealt,
        )

    def _heads(
        self, hidden: torch.Tensor, layer: LayerWeights, projection: Projection, pieces: list[int]
    ) -> list[torch.Tensor]:
        """Query, key and value of the new tokens: (n, hidden) -> three (n, heads, head_dim)."""
        shape = (hidden.shape[0], -1, self.config.head_dim)
        query, key, value = (part.view(shape) for part in projection(hidden, pieces))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        return [query, key, value]

    def _inner(self, hidden: torch.Tensor, projection: Projection, pieces: list[int]) -> torch.Tensor:
        """SwiGLU without its last layer: (n, hidden) -> (n, intermediate)."""
        gate, up = projection(hidden, pieces)
        if self._by_our_rows:
            return silu_multiply(gate, up)  # type: ignore[no-any-return]
        return functional.silu(gate, inplace=True).mul_(up)

    def _norm(
        self, values: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add `delta` to the values, in place; divide each row by its root mean square, times the weight."""
        if self._by_our_rows:
            return rms_norm(values, weight, self.config.norm_eps, delta)  # type: ignore[no-any-return]
        if delta is not None:
            values.add_(delta)
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


def load_model(
    folder: Path,
    dtype: DType = "float32",
    device: str = "cpu",
    weights: str = "auto",
    batch_invariant: bool = False,
    share: Share | None = None,
    exchange: Exchange | None = None,
) -> Model:
    """The model in `folder`, ready to compute. Other processes may load the same folder at once.

    weights   "auto": for a few tokens the blocks of the GGUF file that the folder was made from, if it was,
              and tensors for many; "published": those blocks alone; "float32": tensors alone

    batch_invariant   the bits of a sequence do not depend on the other sequences, the threads or the pages;
                      on a CPU in float32
    share             of an instance of several ranks, whose part is wanted alone; None: all of the model
    exchange          between the members of the share's group

    On a CPU in float32 the first process of a machine measures which kernels multiply how many rows
    (linear_paths.py). Raises ModelError when the folder is damaged or not a supported model, or the device
    is not there.
    """
    if dtype not in ITEMSIZE:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(ITEMSIZE)}")
    check_batch_invariant(batch_invariant, dtype, device)
    _check_device(device)
    config = load_config(folder)
    share = share or whole(config)
    assert share.members == 1 or (exchange is not None and exchange.member == share.member)
    source = weight_source(folder, weights, dtype, device)
    found = load_weights(source, config, dtype, device, share)
    return Model(share.part_of(config), found, dtype, device, batch_invariant, exchange)
