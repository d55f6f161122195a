"""What the runner needs of an engine. engine.py has the real one, emulated.py the emulated one.

Used by `runner.py` and `staging.py`. Loads neither torch nor kernels. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mooncake_lite.messages import Logprobs
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance.step import Chunk, Late, TransferEnded


class OnMoved(Protocol):
    """Is told which transfers of halves have ended, and which tokens come late, while chunks are computed."""

    def __call__(self, halves: Seq[TransferEnded], late: Seq[Late] = ()) -> object:
        """Take them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and its logprobs where the request asks for them.

    token   NO_TOKEN where the logits are not finite
    """

    token: int
    logprobs: Logprobs | None = None


class ComputeEngine(Protocol):
    """Computes chunks, and copies KV blocks between its pages and arrays.

    num_pages     KV pages of PAGE_TOKENS tokens
    block_shape   of one pool block as an array; block_dtype: of its elements
    """

    num_pages: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of one pool block."""

    @property
    def block_dtype(self) -> type[np.generic]:
        """Return NumPy's type of one element of a block."""

    def compute(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> tuple[list[Drawn], list[list[Logprobs]]]:
        """Compute all chunks in one pass. hook: called at each layer.

        hidden   on a later stage of a pipeline: what `pass_on` of the stage before has returned

        Returns a token for each draw of the chunks, and the logprobs of the targets of each chunk that has a
        score, in their order; fewer than it has targets if logits are not finite.
        """

    def probe(self) -> None:
        """Compute a token on a page that no chunk has. Raises if the engine cannot."""

    def pass_on(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> np.ndarray:
        """Do as `compute` on a stage that is not the last one.

        Returns hidden states for the next stage: a row of bytes for each token, (tokens, nbytes) uint8.
        """

    def copy_pages(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy the KV of whole pages to other pages, one to one."""

    def load_blocks(self, pages: Seq[int], blocks: np.ndarray, layers: slice | None = None) -> None:
        """Copy blocks (n, *block_shape) into pages; the last block may have fewer pages.

        layers   that the blocks have, in place of all
        """

    def store_blocks(self, pages: Seq[int], out: np.ndarray, layers: slice | None = None) -> None:
        """Copy pages into blocks `out`; see load_blocks."""
