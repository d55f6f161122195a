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
    codec          how blocks are encoded on their way out, and decoded on their way in (kernels_numba.codecs)
    """

    def __init__(self, model: Model, num_pages: int, block_tokens: int, codec: str = "none") -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.codec = kernels_numba.codec(codec) if codec != "none" else None
        self.pages = PagePool(num_pages)
        self.caches = new_caches(model.config, num_pages, model.dtype, model.device)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of one pool block: (layers, 2, kv_heads, block_tokens, head_dim) numbers of the caches' dtype, or
        with a codec (layers, 2, kv_heads, bytes of a unit)."""
        config = self.model.config
        heads = (config.layers, 2, config.kv_heads)
        if self.codec is None:
            return (*heads, self.block_tokens, config.head_dim)
        return (*heads, self.codec.unit_nbytes(self.block_tokens, config.head_dim))

    @property
    def block_dtype(self) -> type[np.generic]:
        """NumPy's type of one element of a block: uint16 holds the bits of a bfloat16."""
        if self.codec is not None:
            return np.uint8
        return np.uint16 if self.model.dtype == torch.bfloat16 else np.float32

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

        blocks   (n, *block_shape) of block_dtype

        A last block that reaches past the sequence's pages (a tail) is copied as far as there are pages.
        """
        source = self._as_tensor(blocks).to(self.model.device)
        ids = self._page_ids(sequence, first, len(blocks))
        kernels_numba.scatter_blocks(source, self.caches, ids, codec=self.codec)

    def store_blocks(self, sequence: Sequence, first: int, out: np.ndarray) -> None:
        """Copy the pages of blocks first, first+1, ... of a sequence into pool blocks `out`; see load_blocks.

        Of a tail only the tokens that have pages are written, on a device zeros for the others.
        """
        target = self._as_tensor(out)
        ids = self._page_ids(sequence, first, len(out))
        if self.caches.device.type == "cpu":
            kernels_numba.gather_blocks(self.caches, ids, target, codec=self.codec)
            return
        packed = torch.zeros(target.shape, dtype=target.dtype, device=self.caches.device)
        kernels_numba.gather_blocks(self.caches, ids, packed, codec=self.codec)
        target.copy_(packed)

    def _page_ids(self, sequence: Sequence, first: int, count: int) -> torch.Tensor:
        """Pages of `count` blocks, (count, pages per block) int32; -1 where a tail has none."""
        per_block = self.block_tokens // PAGE_TOKENS
        pages = sequence.pages[first * per_block : (first + count) * per_block]
        assert len(pages) > (count - 1) * per_block, f"block {first + count - 1} of {sequence.request_id}"
        pages += [-1] * (count * per_block - len(pages))
        return self._int32(pages).reshape(count, per_block)

    def _as_tensor(self, blocks: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(blocks)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
