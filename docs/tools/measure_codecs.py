"""Measures what the codecs of kernels_numba/codecs.py cost, and writes docs/reference/kv-codecs.md's tables.

    python docs/tools/measure_codecs.py    two minutes on two cores; the default model must be in the cache

Four pieces of a fixed text: the KV of a piece's first PREFIX tokens passes through a codec, as it would on
its way through the pool, and the model reads the rest of the piece, or goes on by itself, on what came back.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fill_readme import filled

from kernels_numba import gather_blocks, scatter_blocks
from kernels_numba.codecs import CODECS, Codec
from mooncake_lite.config.machine import commit, machine, usable_cores
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.caches import new_caches
from mooncake_lite.engine.local import BLOCK_TOKENS, use_threads
from mooncake_lite.model.forward import AttentionBatch, Model, load_model
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from mooncake_lite.tools.demo.document import document_text

PAGE = Path(__file__).parents[1] / "reference" / "kv-codecs.md"
PIECES, PIECE, STEP = 4, 1408, 950
"""Pieces of the text begin STEP tokens apart, so that no two of their ends overlap."""
PREFIX, CONTINUED, CHUNK, RUNS = 1024, 64, 256, 15
PAGES = -(-(PREFIX + max(PIECE - PREFIX, CONTINUED)) // PAGE_TOKENS)

Alter = Callable[[torch.Tensor], torch.Tensor]
"""Another way to encode: (layers, 2, pages, kv_heads, page_size, head_dim) -> what comes back."""


class Reader:
    """The model and the pieces of the text, the KV of their prefixes computed once."""

    def __init__(self) -> None:
        folder = resolve_model("default")
        self.model: Model = load_model(folder)
        ids = torch.tensor(load_tokenizer(folder).encode(document_text()))
        assert len(ids) >= (PIECES - 1) * STEP + PIECE, "the text has become too short"
        self.pieces = [ids[i * STEP : i * STEP + PIECE] for i in range(PIECES)]
        config, device = self.model.config, torch.device("cpu")
        self.caches = new_caches(config, PIECES * PAGES, torch.float32, device)
        self.tables = torch.arange(PIECES * PAGES, dtype=torch.int32).reshape(PIECES, PAGES)
        for number, piece in enumerate(self.pieces):
            for start in range(0, PREFIX, CHUNK):
                self.run([number], piece[None, start : start + CHUNK], start)
        self.exact = self.caches.clone()
        self.used = self.tables[:, : PREFIX // PAGE_TOKENS]

    def run(self, numbers: list[int], ids: torch.Tensor, start: int) -> torch.Tensor:
        """ids (pieces, n) at positions start..start + n - 1 of these pieces -> logits (pieces * n, vocab)."""
        count, new = ids.shape
        positions = torch.arange(start, start + new)
        tables = self.tables[numbers]
        slots = tables[:, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
        lens = torch.full((count,), start + new, dtype=torch.int32)
        batch = AttentionBatch(torch.full_like(lens, new), lens, tables, slots.reshape(-1))
        return self.model.forward(ids.reshape(-1), positions.repeat(count), self.caches, batch)

    def read_on(self) -> tuple[float, torch.Tensor]:
        """Mean loss over the rests of all pieces, and the model's choice after each of their tokens."""
        losses, choices = [], []
        for number, piece in enumerate(self.pieces):
            logits = self.run([number], piece[None, PREFIX:], PREFIX)
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], piece[PREFIX + 1 :]))
            choices.append(logits.argmax(-1))
        return float(torch.stack(losses).mean()), torch.cat(choices)

    def continue_greedily(self) -> torch.Tensor:
        """(pieces, CONTINUED) tokens after the prefixes."""
        numbers = list(range(PIECES))
        ids = torch.stack([piece[PREFIX : PREFIX + 1] for piece in self.pieces])
        for step in range(CONTINUED):
            logits = self.run(numbers, ids[:, -1:], PREFIX + step)
            ids = torch.cat((ids, logits.argmax(-1)[:, None]), 1)
        return ids[:, 1:]


class Passage:
    """The prefixes' KV through one codec, in blocks of the pool's size."""

    def __init__(self, reader: Reader, codec: Codec):
        self.reader, self.codec = reader, codec
        config = reader.model.config
        self.ids = reader.used.reshape(-1, BLOCK_TOKENS // PAGE_TOKENS).contiguous()
        unit = codec.unit_nbytes(BLOCK_TOKENS, config.head_dim)
        self.blocks = np.zeros((len(self.ids), config.layers, 2, config.kv_heads, unit), np.uint8)

    def encode(self) -> None:
        gather_blocks(self.reader.exact, self.ids, self.blocks, codec=self.codec)

    def decode(self) -> None:
        scatter_blocks(self.blocks, self.reader.caches, self.ids, codec=self.codec)

    @property
    def bytes_per_token(self) -> int:
        return self.blocks.nbytes // (PIECES * PREFIX)


def errors(reader: Reader) -> list[float]:
    """Root mean square of the error of keys and of values, relative to their own."""
    pages = reader.used.reshape(-1).long()
    exact, found = (caches[:, :, pages].double() for caches in (reader.exact, reader.caches))
    return [float((found - exact)[:, i].norm() / exact[:, i].norm()) for i in range(2)]


def times_per_token(passages: list[Passage]) -> list[tuple[float, float]]:
    """Median microseconds per token to encode and to decode; the codecs take turns."""
    actions = [action for passage in passages for action in (passage.encode, passage.decode)]
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(RUNS):
        for action, times in zip(actions, taken):
            started = time.perf_counter()
            action()
            times.append((time.perf_counter() - started) / (PIECES * PREFIX) * 1e6)
    medians = [statistics.median(times[1:]) for times in taken]
    return list(zip(medians[::2], medians[1::2]))


def codec_table(reader: Reader, passages: list[Passage]) -> list[str]:
    """One row a codec."""
    lines = [
        "| codec | bytes per token | error of keys, values | perplexity | choices changed | "
        "greedy tokens changed | encode, us per token | decode, us per token | pays below |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    plain, plain_times, base = passages[0], (0.0, 0.0), (0.0, torch.empty(0), torch.empty(0))
    for passage, took in zip(passages, times_per_token(passages)):
        passage.encode()
        passage.decode()
        key_error, value_error = errors(reader)
        loss, choices = reader.read_on()
        tokens = reader.continue_greedily()
        if passage is plain:
            base, plain_times = (loss, choices, tokens), took
        changed, other = int((choices != base[1]).sum()), int((tokens != base[2]).sum())
        change = f"{100 * (math.exp(loss - base[0]) - 1):+.2f} %"
        saved, extra = plain.bytes_per_token - passage.bytes_per_token, sum(took) - sum(plain_times)
        speed = f"{saved / extra / 1e3:.1f} GB/s" if extra > 0 else "any speed"
        own = passage is plain
        lines.append(
            f"| {passage.codec.name} | {passage.bytes_per_token:,} | {key_error:.2%}, {value_error:.2%} | "
            f"{math.exp(loss):.3f}{'' if own else f' ({change})'} | {changed} of {len(choices):,} | "
            f"{other} of {tokens.numel()} | {took[0]:.2f} | {took[1]:.2f} | {'' if own else speed} |"
        )
    return lines


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
    "int8, a scale per row (as `int8`)": (8.25, rows_of(64, -127, 127)),
    "int8, keys: a scale per channel of a block": (8.25, key_channels(127, rows_of(64, -127, 127))),
    "int4, a scale per row": (4.25, rows_of(64, -8, 7)),
    "int4, per 32 channels (as `int4`)": (4.5, rows_of(32, -8, 7)),
    "int4, per 16 channels": (5.0, rows_of(16, -8, 7)),
    "int4, per 32 channels, codes -7 to 7": (4.5, rows_of(32, -7, 7)),
    "int4, keys: a scale per channel of a block": (4.375, key_channels(7, rows_of(32, -8, 7))),
}
"""name -> (bits of a number, scales included, and how it comes back)."""


def other_table(reader: Reader) -> list[str]:
    """Ways that were tried for the integer codecs."""
    lines = [
        "| how | bits per number | error of keys, values | perplexity | choices changed |",
        "|---|--:|--:|--:|--:|",
    ]
    reader.caches.copy_(reader.exact)
    base, choices = reader.read_on()
    pages = reader.used.reshape(-1).long()
    for name, (bits, alter) in OTHERS.items():
        reader.caches[:, :, pages] = alter(reader.exact[:, :, pages])
        key_error, value_error = errors(reader)
        loss, found = reader.read_on()
        changed = int((found != choices).sum())
        lines.append(
            f"| {name} | {bits:g} | {key_error:.2%}, {value_error:.2%} | "
            f"{100 * (math.exp(loss - base) - 1):+.2f} % | {changed} of {len(found):,} |"
        )
    return lines


def described(found: dict[str, Any], threads: int) -> str:
    """Where and when."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"Measured on {day}, commit {commit()}: {found['cpu']}, {threads} threads, {found['system']}."


def main() -> None:
    threads, found = usable_cores(), machine()
    use_threads(threads)
    with torch.inference_mode():
        reader = Reader()
        passages = [Passage(reader, codec) for codec in CODECS.values()]
        lines = [described(found, threads), "", *codec_table(reader, passages)]
        lines += ["", "Other ways to scale integers:", "", *other_table(reader)]
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), "measured", "\n".join(lines)), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
