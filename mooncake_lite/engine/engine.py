"""One model with its KV pages: forward passes over chunks, blocks in and out.

Used by `runner.py` alone. It knows neither messages nor ranks, and keeps no account of its pages: each call
names the pages that it may touch. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import numpy as np
import torch

import kernels_numba
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.caches import new_caches
from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.dealing import Dealing, singles
from mooncake_lite.engine.logprobs import score
from mooncake_lite.engine.sampler import sample
from mooncake_lite.messages import Logprobs, Sampling
from mooncake_lite.model.forward import AttentionBatch, Model
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance import JobId
from scheduler.instance.step import Chunk, Draw


class Engine:
    """Computes chunks on one device.

    num_pages      KV pages of PAGE_TOKENS tokens
    block_tokens   tokens of a pool block, a multiple of PAGE_TOKENS
    dealing        which tokens' KV this member has of each sequence; None: of all
    codec          how blocks are encoded on their way out, and decoded on their way in (kernels_numba.codecs)
    """

    def __init__(
        self,
        model: Model,
        num_pages: int,
        block_tokens: int,
        codec: str = "none",
        dealing: Dealing | None = None,
    ) -> None:
        self.model, self._dealing = model, dealing
        self.block_tokens = block_tokens
        self.codec = kernels_numba.codec(codec) if codec != "none" else None
        self.num_pages = num_pages
        self.caches = new_caches(model.config, num_pages + 1, model.dtype, model.device)  # one for `probe`

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

    def compute(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> tuple[list[Drawn], list[list[Logprobs]]]:
        """Compute the KV of the tokens of all chunks in one forward pass.

        hook     called at each layer
        hidden   what `pass_on` of the stage before has returned; None on the first stage

        Returns a token for each draw of the chunks, and the logprobs of the targets of each chunk that has a
        score, in their order; nothing on a member that is not the first of its group, which does the same
        passes. The pages of a chunk must hold all tokens up to its end.
        """
        chunks = [
            row for chunk in chunks for row in (chunk.rows if self._dealing is None else singles(chunk))
        ]
        placed = _placed(chunks)
        ends = dict(zip(map(id, placed), itertools.accumulate(len(chunk.token_ids) for chunk in placed)))
        rows = [ends[id(chunk)] - 1 for chunk in chunks if chunk.draws]
        num_draws = len(rows)
        for chunk in chunks:
            if chunk.score is not None:
                first = ends[id(chunk)] - len(chunk.token_ids)
                rows += range(first, first + len(chunk.score.targets))
        states = self._states(placed, rows, hook, hidden)
        draws = [chunk.draws for chunk in chunks if chunk.draws]
        if self._dealing is not None and self._dealing.turn:
            return [], []
        logits = self.model.logits(states[:num_draws]).cpu().numpy()
        scores = self._scores(states[num_draws:], chunks)
        if self.model.exchange is not None and self.model.exchange.member:
            return [], []
        rows_of_draws = logits.repeat([len(some) for some in draws], axis=0)
        return sample(rows_of_draws, [draw for some in draws for draw in some]), scores

    def probe(self) -> None:
        """Compute a token on a page that no chunk has. Raises if the engine cannot."""
        draw = Draw(Sampling(0.0), (0,), 0, frozenset())
        self.compute([Chunk(JobId("probe", 0), (0,), 0, (self.num_pages,), (draw,), True)])

    def pass_on(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> np.ndarray:
        """Do as `compute` on a stage that is not the last one. Returns hidden states for the next stage.

        They have a row of bytes for each token: (tokens, hidden_nbytes) uint8.
        """
        states = self._states(_placed(chunks), None, hook, hidden)
        return states.cpu().view(torch.uint8).numpy()  # type: ignore[no-any-return]

    def _states(
        self, placed: Seq[Chunk], rows: list[int] | None, hook: LayerHook | None, hidden: np.ndarray | None
    ) -> torch.Tensor:
        """Do a forward pass over chunks in this order. rows: as in Model.states."""
        device = self.model.device
        ids = [token for chunk in placed for token in chunk.token_ids]
        positions = [position for chunk in placed for position in range(chunk.start, chunk.end)]
        slots_of = _slots if self._dealing is None else self._dealing.slots
        slots = [slot for chunk in placed for slot in slots_of(chunk)]
        ends = [chunk.end for chunk in placed]
        dealt = None if self._dealing is None else self._dealing.contexts(ends)
        batch = AttentionBatch(
            query_lens=self._int32([len(chunk.token_ids) for chunk in placed]),
            context_lens=self._int32(ends) if dealt is None else torch.from_numpy(dealt.own),
            block_tables=self._tables(placed),
            slot_mapping=torch.tensor(slots, device=device),
            leading=sum(len(chunk.token_ids) == 1 for chunk in placed),
            dealt=dealt,
        )
        return self.model.states(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            self.caches,
            batch,
            None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device),
            hook,
            None if hidden is None else torch.from_numpy(hidden).view(self.model.dtype).to(device),
        )

    def _scores(self, states: torch.Tensor, chunks: Seq[Chunk]) -> list[list[Logprobs]]:
        """Return the logprobs of the targets of each chunk that has a score; none if logits are not finite.

        states   a row per target
        """
        found, first = [], 0
        for chunk in chunks:
            if chunk.score is not None:
                targets, sampling = chunk.score.targets, chunk.score.sampling
                rows = states[first : first + len(targets)]
                found.append(score(self.model.logits, rows, targets, sampling.prompt_logprobs))
                first += len(targets)
        return found

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)

    def _tables(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Block tables (batch, longest) int32; entries past a sequence's end are -1 and never read."""
        tables = np.full((len(chunks), max(len(chunk.pages) for chunk in chunks)), -1, dtype=np.int32)
        for row, chunk in zip(tables, chunks):
            row[: len(chunk.pages)] = chunk.pages
        return torch.from_numpy(tables).to(self.model.device)

    # ------------------------------------------------------------------------------ blocks

    def copy_pages(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy the KV of whole pages to other pages, one to one."""
        device = self.caches.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.caches[:, :, target] = self.caches[:, :, source]

    def load_blocks(self, pages: Seq[int], blocks: np.ndarray, layers: slice | None = None) -> None:
        """Copy pool blocks into pages.

        pages    pages of the blocks, one block after the other; a last block (a tail) may have fewer
        blocks   (n, *block_shape) of block_dtype
        layers   that the blocks have; None: all

        A tail is copied as far as there are pages.
        """
        source = self._as_tensor(blocks).to(self.model.device)
        ids = self._page_ids(pages, len(blocks))
        kernels_numba.scatter_blocks(source, self.caches, ids, layers=layers, codec=self.codec)

    def store_blocks(self, pages: Seq[int], out: np.ndarray, layers: slice | None = None) -> None:
        """Copy pages into pool blocks `out`; see load_blocks.

        Of a tail only the tokens that have pages are written, on a device zeros for the others.
        """
        target = self._as_tensor(out)
        ids = self._page_ids(pages, len(out))
        if self.caches.device.type == "cpu":
            kernels_numba.gather_blocks(self.caches, ids, target, layers=layers, codec=self.codec)
            return
        packed = torch.zeros(target.shape, dtype=target.dtype, device=self.caches.device)
        kernels_numba.gather_blocks(self.caches, ids, packed, layers=layers, codec=self.codec)
        target.copy_(packed)

    def _page_ids(self, pages: Seq[int], count: int) -> torch.Tensor:
        """Pages of `count` blocks, (count, pages per block) int32; -1 where a tail has none."""
        per_block = self.block_tokens // PAGE_TOKENS
        least = (count - 1) * per_block + 1
        assert least <= len(pages) <= count * per_block, f"{len(pages)} pages for {count} blocks"
        padded = [*pages, *[-1] * (count * per_block - len(pages))]
        return self._int32(padded).reshape(count, per_block)

    def _as_tensor(self, blocks: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(blocks)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _placed(chunks: Seq[Chunk]) -> list[Chunk]:
    """Put chunks of one token first, as AttentionBatch.leading wants."""
    return sorted(chunks, key=lambda chunk: len(chunk.token_ids) > 1)


def _slots(chunk: Chunk) -> list[int]:
    """Flat cache slot (page * PAGE_TOKENS + offset) of each token of a chunk."""
    pages = chunk.pages
    return [pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(chunk.start, chunk.end)]
