"""One model with its KV pages: prefill in chunks, decode in batches, blocks in and out.

Used by the prefill and decode roles and by `mooncake-lite generate`. It knows no messages and no ranks.
Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import numpy as np
import torch

import kernels_numba
from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.engine.pages import PagePool, new_caches, pages_for
from mooncake_lite.engine.sampler import sample
from mooncake_lite.engine.sequence import Sequence
from mooncake_lite.model import AttentionBatch, Model


class Engine:
    """Runs sequences on one device.

    num_pages      KV pages of PAGE_TOKENS tokens
    block_tokens   tokens of a pool block, a multiple of PAGE_TOKENS
    """

    def __init__(self, model: Model, num_pages: int, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.pages = PagePool(num_pages)
        self.caches = new_caches(model.config, num_pages, model.dtype, model.device)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one pool block: (layers, 2, kv_heads, block_tokens, head_dim)."""
        config = self.model.config
        return (config.layers, 2, config.kv_heads, self.block_tokens, config.head_dim)

    # ------------------------------------------------------------------------------ computing

    def prefill_chunk(self, sequence: Sequence, max_tokens: int) -> int | None:
        """Compute the KV of the next max_tokens tokens or less; the next token once all are computed.

        The sequence must hold pages for all its tokens.
        """
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + max_tokens)
        last = end == len(sequence.token_ids)
        rows = [end - start - 1] if last else []
        logits = self._forward([sequence], [end], rows)
        sequence.num_computed = end
        return sample(logits[0], sequence.sampling, end) if last else None

    def decode_step(self, sequences: list[Sequence]) -> list[int]:
        """One token for each sequence: computes the KV of its last token, and samples the next.

        Every sequence must hold a page for that token. Returns the tokens in the order of `sequences`;
        they are not appended.
        """
        ends = [len(sequence.token_ids) for sequence in sequences]
        logits = self._forward(sequences, ends, list(range(len(sequences))))
        for sequence, end in zip(sequences, ends):
            sequence.num_computed = end
        return [sample(row, s.sampling, end) for row, s, end in zip(logits, sequences, ends)]

    def _forward(self, sequences: list[Sequence], ends: list[int], rows: list[int]) -> np.ndarray:
        """Run the model over tokens num_computed..end-1 of each sequence; logits of `rows` of all of them."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, end in zip(sequences, ends):
            ids += sequence.token_ids[sequence.num_computed : end]
            positions += range(sequence.num_computed, end)
            slots += sequence.slots(sequence.num_computed, end)
        batch = AttentionBatch(
            query_lens=self._int32([end - s.num_computed for s, end in zip(sequences, ends)]),
            context_lens=self._int32(ends),
            block_tables=self._tables(sequences),
            slot_mapping=torch.tensor(slots, device=self.model.device),
        )
        logits = self.model.forward(
            torch.tensor(ids, device=self.model.device),
            torch.tensor(positions, device=self.model.device),
            self.caches,
            batch,
            torch.tensor(rows, dtype=torch.int64, device=self.model.device),
        )
        return logits.cpu().numpy()

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)

    def _tables(self, sequences: list[Sequence]) -> torch.Tensor:
        """Block tables (batch, longest) int32; entries past a sequence's end are -1 and never read."""
        tables = np.full((len(sequences), max(len(s.pages) for s in sequences)), -1, dtype=np.int32)
        for row, sequence in zip(tables, sequences):
            row[: len(sequence.pages)] = sequence.pages
        return torch.from_numpy(tables).to(self.model.device)

    # ------------------------------------------------------------------------------ pages

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence pages for its first num_tokens tokens.

        Raises OutOfPages, and then changes nothing.
        """
        missing = pages_for(num_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pages.take(missing)

    def free(self, sequence: Sequence) -> None:
        """Give back all pages of the sequence."""
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0

    # ------------------------------------------------------------------------------ blocks

    def load_blocks(self, sequence: Sequence, first: int, blocks: np.ndarray) -> None:
        """Copy pool blocks into the pages of blocks first, first+1, ... of a sequence.

        blocks   (n, *block_shape) in the cache's bytes (float32, or uint16 for bfloat16)

        A last block that reaches past the sequence's pages (a tail) is copied as far as there are pages.
        """
        for part, ids in self._whole_and_tail(sequence, first, len(blocks)):
            source = self._as_cache_tensor(blocks[part])[..., : ids.shape[1] * PAGE_TOKENS, :]
            kernels_numba.scatter_blocks(source.contiguous().to(self.model.device), self.caches, ids)

    def store_blocks(self, sequence: Sequence, first: int, out: np.ndarray) -> None:
        """Copy the pages of blocks first, first+1, ... of a sequence into pool blocks `out`; see load_blocks.

        Of a tail only the tokens that have pages are written.
        """
        for part, ids in self._whole_and_tail(sequence, first, len(out)):
            target = self._as_cache_tensor(out[part])
            piece = target[..., : ids.shape[1] * PAGE_TOKENS, :]
            if piece.is_contiguous() and self.caches.device.type == "cpu":
                kernels_numba.gather_blocks(self.caches, ids, piece)
                continue
            packed = torch.empty(piece.shape, dtype=piece.dtype, device=self.caches.device)
            kernels_numba.gather_blocks(self.caches, ids, packed)
            piece.copy_(packed)

    def _whole_and_tail(self, sequence: Sequence, first: int, count: int) -> list[tuple[slice, torch.Tensor]]:
        """Split blocks into those with all their pages and a shorter last one: (which, page ids)."""
        per_block = self.block_tokens // PAGE_TOKENS
        whole = max(0, min(count, len(sequence.pages) // per_block - first))
        parts = []
        if whole:
            ids = sequence.pages[first * per_block : (first + whole) * per_block]
            parts.append((slice(0, whole), self._int32(ids).reshape(whole, per_block)))
        if whole < count:
            ids = sequence.pages[(first + whole) * per_block :]
            assert ids, f"block {first + whole} of {sequence.request_id} has no pages"
            parts.append((slice(whole, whole + 1), self._int32(ids).reshape(1, -1)))
        return parts

    def _as_cache_tensor(self, blocks: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(blocks)
        return tensor.view(torch.bfloat16) if self.model.dtype == torch.bfloat16 else tensor
