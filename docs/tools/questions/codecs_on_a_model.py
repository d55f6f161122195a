"""What the codecs of kernels_numba/codecs.py do to the default model, and how long they take.

Used by q09_codecs.py. The KV of the first PREFIX tokens of a piece of text passes through a codec, as on its
way through the pool. On what comes back the model reads the rest of the piece, or goes on by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from kernels_numba import gather_blocks, scatter_blocks
from kernels_numba.codecs import CODECS, Codec
from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.caches import new_caches
from mooncake_lite.engine.local import BLOCK_TOKENS, use_threads
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.forward import AttentionBatch, Model, load_model
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from mooncake_lite.tools.demo.document import document_text

PIECE, STEP = 1408, 950
"""Tokens of a piece. Pieces begin STEP tokens apart, so that no two of their ends overlap."""

PREFIX, CONTINUED, CHUNK = 1024, 64, 256
PAGES = PIECE // PAGE_TOKENS

TIMED_TOKENS, ROUNDS = 256, 200
"""So short that some of the many rounds have the cores for themselves, also beside other programs."""

Alter = Callable[[torch.Tensor], torch.Tensor]
"""Another way to encode: (layers, 2, pages, kv_heads, page_size, head_dim) -> what comes back."""


def pieces(count: int) -> list[list[int]]:
    """Return token ids of so many pieces of the text."""
    ids = load_tokenizer(resolve_model("default")).encode(document_text())
    assert len(ids) >= (count - 1) * STEP + PIECE, "the text has become too short"
    return [ids[number * STEP : number * STEP + PIECE] for number in range(count)]


class Reader:
    """The model and a piece of text, the KV of its prefix computed once.

    caches   on which it reads on; exact: the same without a codec
    """

    def __init__(self, piece: list[int]) -> None:
        self.model: Model = load_model(resolve_model("default"))
        self.piece = torch.tensor(piece)
        self.caches = new_caches(self.model.config, PAGES, torch.float32, torch.device("cpu"))
        self.table = torch.arange(PAGES, dtype=torch.int32)[None]
        for start in range(0, PREFIX, CHUNK):
            self._run(self.piece[start : start + CHUNK], start)
        self.exact = self.caches.clone()
        self.logits = self.read_on()
        self.answer = self.go_on()

    def _run(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Compute tokens at positions from start on. Returns logits (tokens, vocab)."""
        new = len(ids)
        positions = torch.arange(start, start + new)
        slots = self.table[0, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
        counts = (torch.tensor([n], dtype=torch.int32) for n in (new, start + new))
        batch = AttentionBatch(*counts, self.table, slots)
        return self.model.forward(ids, positions, self.caches, batch)

    def read_on(self) -> torch.Tensor:
        """Return the logits after each token of the rest of the piece."""
        return self._run(self.piece[PREFIX:], PREFIX)

    def go_on(self) -> list[int]:
        """Return CONTINUED greedy tokens after the prefix."""
        ids = [int(self.piece[PREFIX])]
        for step in range(CONTINUED):
            ids.append(int(self._run(torch.tensor(ids[-1:]), PREFIX + step).argmax()))
        return ids[1:]

    def judged(self) -> dict[str, float]:
        """Compare what the model makes of the caches as they are with what it makes of exact ones.

        keys, values  root mean square of their error, relative to their own
        logits        likewise, relative to the spread of the exact logits of a token
        perplexity    of the rest of the piece, relative to the exact one, less 1
        choices       tokens of the rest after which another next token is the likeliest
        """
        used = slice(0, PREFIX // PAGE_TOKENS)
        exact, found = (caches[:, :, used].double() for caches in (self.exact, self.caches))
        keys, values = ((found - exact)[:, i].norm() / exact[:, i].norm() for i in range(2))
        logits, rest = self.read_on(), self.piece[PREFIX + 1 :]
        loss, base = (torch.nn.functional.cross_entropy(each[:-1], rest) for each in (logits, self.logits))
        spread = self.logits - self.logits.mean(-1, keepdim=True)
        return {
            "keys": float(keys), "values": float(values),
            "logits": float((logits - self.logits).norm() / spread.norm()),
            "perplexity": float(torch.exp(loss - base)) - 1,
            "choices": int((logits.argmax(-1) != self.logits.argmax(-1)).sum()),
        }  # fmt: skip

    def changed(self) -> dict[str, int]:
        """Count the greedy tokens that are others on the caches as they are, and those before the first."""
        other = [mine != exact for mine, exact in zip(self.go_on(), self.answer)]
        return {"greedy": sum(other), "before": other.index(True) if any(other) else len(other)}


def units(config: ModelConfig, tokens: int, codec: Codec) -> np.ndarray:
    """Return space for the encoded KV of so many tokens, in blocks of the pool's size."""
    unit = codec.unit_nbytes(BLOCK_TOKENS, config.head_dim)
    return np.zeros((tokens // BLOCK_TOKENS, config.layers, 2, config.kv_heads, unit), np.uint8)


def blocks_of_pages(tokens: int) -> torch.Tensor:
    """Return the pages of each block: (blocks, pages per block) int32."""
    return torch.arange(tokens // PAGE_TOKENS, dtype=torch.int32).reshape(-1, BLOCK_TOKENS // PAGE_TOKENS)


def accuracy(number: int) -> dict[str, dict[str, float]]:
    """Return what each codec, and each other way to scale integers, does to a piece of the text."""
    use_threads(1)
    with torch.inference_mode():
        reader, found = Reader(pieces(number)[-1]), {}
        ids = blocks_of_pages(PREFIX)
        for name, codec in CODECS.items():
            space = units(reader.model.config, PREFIX, codec)
            reader.caches.copy_(reader.exact)
            gather_blocks(reader.exact, ids, space, codec=codec)
            scatter_blocks(space, reader.caches, ids, codec=codec)
            found[name] = {"bytes": space.nbytes / PREFIX, **reader.judged(), **reader.changed()}
        used = slice(0, PREFIX // PAGE_TOKENS)
        for name, (bits, alter) in OTHERS.items():
            reader.caches.copy_(reader.exact)
            reader.caches[:, :, used] = alter(reader.exact[:, :, used])
            found[name] = {"bits": bits, **reader.judged()}
    return found


def speed() -> dict[str, dict[str, float]]:
    """Return the least microseconds that each codec takes for a token on all cores; the codecs take turns."""
    use_threads(usable_cores())
    config = load_config(resolve_model("default"))
    caches = new_caches(config, TIMED_TOKENS // PAGE_TOKENS, torch.float32, torch.device("cpu"))
    caches.normal_(generator=torch.Generator().manual_seed(1))
    ids, taken = blocks_of_pages(TIMED_TOKENS), dict[str, list[list[float]]]()
    spaces = {name: units(config, TIMED_TOKENS, codec) for name, codec in CODECS.items()}
    for _ in range(ROUNDS):
        for name, codec in CODECS.items():
            moments = [time.perf_counter()]
            gather_blocks(caches, ids, spaces[name], codec=codec)
            moments.append(time.perf_counter())
            scatter_blocks(spaces[name], caches, ids, codec=codec)
            moments.append(time.perf_counter())
            taken.setdefault(name, []).append([1e6 * (b - a) / TIMED_TOKENS for a, b in pairwise(moments)])
    least = {name: [min(times) for times in zip(*rounds)] for name, rounds in taken.items()}
    return {name: {"encode_us": encode, "decode_us": decode} for name, (encode, decode) in least.items()}


def rows_of(group: int, lowest: int, highest: int) -> Alter:
    """One scale for `group` channels of a token; codes lowest..highest. The outermost code below 0 goes to
    the number of the largest size where there is one code more on that side."""

    def alter(kv: torch.Tensor) -> torch.Tensor:
        split = kv.unflatten(-1, (-1, group))
        largest = split.gather(-1, split.abs().argmax(-1, keepdim=True))
        scale = largest / lowest if highest < -lowest else largest.abs() / highest
        return ((split / scale).round().clamp(lowest, highest) * scale).flatten(-2)

    return alter


def key_channels(highest: int, values: Alter) -> Alter:
    """Keys with one scale for each channel of a block (over its tokens), values as `values` does it."""

    def alter(kv: torch.Tensor) -> torch.Tensor:
        blocks = kv.unflatten(2, (-1, BLOCK_TOKENS // PAGE_TOKENS))
        scale = blocks.abs().amax((3, 5), keepdim=True) / highest
        keys = ((blocks / scale).round() * scale).flatten(2, 3)
        return torch.stack((keys[:, 0], values(kv)[:, 1]), 1)

    return alter


OTHERS: dict[str, tuple[float, Alter]] = {
    "int8, keys: a scale per channel of a block": (8.25, key_channels(127, rows_of(64, -127, 127))),
    "int4, a scale per row": (4.25, rows_of(64, -8, 7)),
    "int4, per 16 channels": (5.0, rows_of(16, -8, 7)),
    "int4, per 32 channels, codes -7 to 7": (4.5, rows_of(32, -7, 7)),
    "int4, keys: a scale per channel of a block": (4.375, key_channels(7, rows_of(32, -8, 7))),
    "int3, per 32 channels": (3.5, rows_of(32, -4, 3)),
    "int2, per 32 channels": (2.5, rows_of(32, -2, 1)),
}
"""name -> (bits of a number, scales included, and how it comes back)."""
