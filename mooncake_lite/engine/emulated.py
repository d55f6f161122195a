"""An engine that computes nothing: a forward pass is a timed wait, and KV is 8 bytes per token.

Used by the runner in place of engine.py on ranks of `serve --engine emulated`. Loads neither torch nor
kernels. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import reduce

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.dealing import Dealing
from mooncake_lite.messages import Logprobs, Sampling
from mooncake_lite.model.layer_hook import LayerHook
from mooncake_lite.profiles.compute import PassLoad, load_of
from scheduler.instance.foreseen import SHARES, Foreseen
from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence
from scheduler.instance.step import Chunk, Draw
from scheduler.instance.task import NewDrafter
from store.layout import BlockLayout

LOOK_S = 0.002
"""Time between two looks at transfers during a pass; a real pass looks twice a layer."""

FIRST = 0
"""The digest before the first token of a sequence."""


def digest_after(digest: int, token: int) -> int:
    """Return the emulated KV of a token: a digest of the sequence up to it. digest: of the token before."""
    return xxh3_64_intdigest(digest.to_bytes(8, "little") + token.to_bytes(4, "little"))


def emulated_token(digest: int, draw: Draw, vocab_size: int) -> int:
    """Choose the token after a sequence, as a function of the sequence and the seed alone.

    digest   of the sequence's last token: it stands for all tokens before the chosen one

    So the token at position i of an answer is a function of the prompt, the seed and i, whichever rank draws
    it. At temperature 0 the seed has no effect. Stop ids are not chosen before min_tokens. The other settings
    of sampling have no effect.
    """
    sampling: Sampling = draw.sampling
    seed = (sampling.seed + draw.branch) % 2**63 if sampling.temperature > 0 else 0
    token = xxh3_64_intdigest(digest.to_bytes(8, "little"), seed) % vocab_size
    if draw.answered < sampling.min_tokens:
        while token in draw.stop_ids:
            token = (token + 1) % vocab_size
    return token


def emulated_drafter(acceptance: float, vocab_size: int) -> NewDrafter:
    """Return what makes drafts of emulated tokens. acceptance: probability that a draft after right ones is
    right."""

    def new_drafter(job: Job, branch: int) -> Foreseen:
        known = [0, FIRST]  # tokens whose digest is known, and the digest

        def next_token(sequence: Sequence, drafts: Seq[int]) -> int:
            ids = sequence.token_ids
            known[:] = len(ids), reduce(digest_after, ids[known[0] :], known[1])
            draw = Draw(job.sampling, ids, sequence.answered + len(drafts), sequence.stop_ids, branch)
            return emulated_token(reduce(digest_after, drafts, known[1]), draw, vocab_size)

        return Foreseen(job, acceptance, next_token, chance)

    return new_drafter


def chance(request_id: str, position: int) -> int:
    """Return a number below foreseen.SHARES, as by chance, but the same for the same arguments."""
    return xxh3_64_intdigest(request_id.encode(), position) % SHARES


class EmulatedEngine:
    """Stands in for engine.Engine on one rank.

    layout      of pool blocks, the real model's; without a codec. Of a stage of a pipeline: of its layers
    seconds     what a forward pass takes, from a profile
    wait        sleeps (tests give another one)
    hidden_nbytes   of the hidden states of a token; its digest is the first 8 bytes
    dealing     of a member that has the KV of some tokens alone
    draws       whether it draws tokens: of members that compute together, the first one does

    The KV of a token is the digest of its sequence up to it. In a block of the pool, keys and values of each
    head repeat it, in every layer:

        head   block_tokens rows of head_dim numbers:   d0 d0 .. d0 | d1 d1 .. d1 | ...

    So blocks have the size of real ones, equal prefixes have equal bytes, and a rank that was given the wrong
    block, or the wrong part of one, answers with wrong tokens. The last head of the last layer counts.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_pages: int,
        vocab_size: int,
        seconds: Callable[[PassLoad], float],
        wait: Callable[[float], None] = time.sleep,
        hidden_nbytes: int = 8,
        dealing: Dealing | None = None,
        draws: bool = True,
    ) -> None:
        self.layout = layout
        self.block_shape = layout.shape
        self.block_dtype = np.uint16 if layout.itemsize == 2 else np.float32  # the bits of a bfloat16
        self.num_pages = num_pages
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._wait = wait
        self._hidden_nbytes, self._dealing = hidden_nbytes, dealing
        self._draws, self._slot = draws, _slot if dealing is None else dealing.slot
        self._digests = np.zeros(num_pages * PAGE_TOKENS, np.uint64)

    # ------------------------------------------------------------------------------ computing

    def compute(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> tuple[list[Drawn], list[list[Logprobs]]]:
        """Extend the digests of all chunks, and wait for as long as the pass takes.

        hook   called at each layer, and every LOOK_S of a long one
        hidden   of the stage before, whose digests are taken as they are

        Returns a token for each draw of the chunks, in their order, and no logprobs: the gateway refuses
        requests that ask for them.
        """
        drawn, found = list[Drawn](), self._pass(chunks, hook, hidden)
        for chunk, digests in zip(chunks, found if self._draws else ()):
            last = [int(digests[-1])] * len(chunk.draws) if chunk.prompt else digests.tolist()
            drawn += [
                Drawn(emulated_token(digest, draw, self._vocab_size))
                for digest, draw in zip(last, chunk.draws)
            ]
        return drawn, []

    def probe(self) -> None:
        """Do nothing: what is emulated does not break."""

    def pass_on(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None, hidden: np.ndarray | None = None
    ) -> np.ndarray:
        """Do the same on a stage that is not the last one. Returns a row for each token; see contract."""
        digests = np.concatenate(self._pass(chunks, hook, hidden))
        out = np.zeros((len(digests), self._hidden_nbytes), np.uint8)
        out[:, :8] = digests[:, None].view(np.uint8)
        return out

    def _pass(
        self, chunks: Seq[Chunk], hook: LayerHook | None, hidden: np.ndarray | None
    ) -> list[np.ndarray]:
        """Wait for as long as a pass takes. Returns the digests of each chunk's tokens."""
        due, seconds = time.perf_counter(), self._seconds(load_of(chunks))
        found = self._extend_all(chunks, hidden)
        if hook is not None:
            due, seconds = self._layers(hook, due, seconds), 0.0
            if hook.moves:  # the layers before these tokens have come only now
                found = self._extend_all(chunks, hidden)
        if (left_s := due + seconds - time.perf_counter()) > 0:
            self._wait(left_s)
        return found

    def _layers(self, hook: LayerHook, due: float, seconds: float) -> float:
        """Wait for a pass, layer by layer, and longer where the hook waits. Returns when it is due to end."""
        layers = self.layout.layers
        for layer in range(layers):
            called = time.perf_counter()
            hook.before(layer)
            due += seconds / layers + (time.perf_counter() - called) * hook.moves
            while (left_s := due - time.perf_counter()) > 0:
                self._wait(min(left_s, LOOK_S))
                hook.before(layer)
            hook.after(layer)
        return due

    def _extend_all(self, chunks: Seq[Chunk], hidden: np.ndarray | None) -> list[np.ndarray]:
        """Write the digests of the chunks' tokens, and return them."""
        if hidden is None:
            found = [_extended(chunk, before) for chunk, before in zip(chunks, self._before(chunks))]
        else:
            digests = hidden[:, :8].copy().view(np.uint64)[:, 0]
            found = np.split(digests, np.cumsum([len(chunk.token_ids) for chunk in chunks])[:-1])
        for chunk, digests in zip(chunks, found):
            slots = np.array([self._slot(chunk.pages, token) for token in range(chunk.start, chunk.end)])
            self._digests[slots[slots >= 0]] = digests[slots >= 0]
        return found

    def _before(self, chunks: Seq[Chunk]) -> list[int]:
        """Return the digest of the token in front of each chunk, whichever member has it."""
        slots = [self._slot(chunk.pages, chunk.start - 1) if chunk.start else -1 for chunk in chunks]
        found = np.where(np.array(slots) < 0, np.uint64(FIRST), self._digests[slots])
        if self._dealing is not None:
            parts = self._dealing.gather(found.view(np.float32))
            found = np.bitwise_or.reduce([part.view(np.uint64) for part in parts])
        return [int(digest) for digest in found]

    # ------------------------------------------------------------------------------ pages and blocks

    def copy_pages(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy the digests of whole pages to other pages, one to one."""
        self._of_pages[list(targets)] = self._of_pages[list(sources)]

    def load_blocks(self, pages: Seq[int], blocks: np.ndarray, layers: slice | None = None) -> None:
        """Copy the digests of pool blocks into pages; the last block may have fewer pages."""
        if layers is not None and layers.stop < self.layout.layers:
            return
        found = _rows(blocks)[:, -1, -1, -1, :, 0].reshape(-1, PAGE_TOKENS)
        self._of_pages[list(pages)] = found[: len(pages)]

    def store_blocks(self, pages: Seq[int], out: np.ndarray, layers: slice | None = None) -> None:
        """Fill pool blocks with the digests of pages, and zeros where there are no pages."""
        digests = np.zeros((len(out) * self.layout.block_tokens // PAGE_TOKENS, PAGE_TOKENS), np.uint64)
        digests[: len(pages)] = self._of_pages[list(pages)]
        _rows(out)[:] = digests.reshape(len(out), 1, 1, 1, -1, 1)

    @property
    def _of_pages(self) -> np.ndarray:
        """The digests as (pages, PAGE_TOKENS)."""
        return self._digests.reshape(-1, PAGE_TOKENS)


def _rows(blocks: np.ndarray) -> np.ndarray:
    """Blocks as (n, layers, 2, heads, block_tokens, words of a row) uint64."""
    return blocks.view(np.uint64)


def _extended(chunk: Chunk, before: int) -> np.ndarray:
    """Return the digests of a chunk's tokens, uint64. before: that of the token in front of it."""
    return np.fromiter(itertools.accumulate(chunk.token_ids, digest_after, initial=before), np.uint64)[1:]


def _slot(pages: Seq[int], position: int) -> int:
    """Return the slot (page * PAGE_TOKENS + offset) of a position."""
    return pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
