"""What each rank of an instance holds of a model: layers in a pipeline, heads in tensor parallel.

Used by `sizes.py`, `weights.py`, `forward.py` and the engines. Knows no tensors. Explained in
docs/explain/layer-wise-prefill.md.

    the default model    layers   query heads   KV heads   of the MLP    vocabulary
    1 of 2 stages        0..14    0..8          0..2       0..1535       0..49151
    member 0 of 2        0..29    0..5          0, 1       0..767        0..24575
    member 1 of 2        0..29    6..8          2          768..1535     24576..49151
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import ModelConfig

UNIT = 32
"""Spans of the MLP and of the vocabulary end at multiples of this, a block of every GGUF format we read."""

PIECE_TOKENS = 256
"""Attention whose bits must not depend on who computes it sums a sequence in pieces that end at multiples of
so many of its tokens."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of an instance holds of a model. Make it with `shares_of` or `whole`.

        heads, kv_heads   query heads, and the key and value heads that they read
        inner             rows of gate and up, columns of down
        vocab             rows of the head; all ranks that embed tokens have the whole embedding
        stage, stages     place in a pipeline
        member, members   place in a group that computes every pass together, each with some heads
        turn, turns       place in a group that computes every pass together, each with some of the tokens' KV

    The spans of all members of a group are the whole, in order.
    """

    layers: range
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    stage: int
    stages: int
    member: int
    members: int
    turn: int = 0
    turns: int = 1

    @property
    def is_first(self) -> bool:
        """Tell whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Tell whether it makes logits."""
        return self.stage == self.stages - 1

    def part_of(self, model: ModelConfig) -> ModelConfig:
        """Return the sizes of this share: its layers and heads, and its part of the MLP."""
        return replace(
            model,
            layers=len(self.layers),
            windows=model.windows[self.layers.start : self.layers.stop],
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )

    def largest(self, model: ModelConfig) -> Share:
        """Return the share of the same instance whose KV takes the most bytes per token."""
        return shares_of(model, self.stages, self.members, self.turns)[0]


def whole(model: ModelConfig) -> Share:
    """Return the one share of an instance of one rank."""
    return shares_of(model)[0]


def shares_of(model: ModelConfig, stages: int = 1, members: int = 1, turns: int = 1) -> list[Share]:
    """Divide a model among the stages of a pipeline, or among members that compute every pass together.

    turns   all of them have the whole model, and divide tokens

    Layers and KV heads that cannot be divided evenly: the first ranks hold one more. Query heads follow their
    KV heads. The MLP and the vocabulary are divided evenly: members meet after each half of a layer, so the
    slowest member of each half counts.

    Raises ModelError for more members than KV heads, ValueError for stages and members together.
    """
    if sum(count > 1 for count in (stages, members, turns)) > 1:
        raise ValueError(f"{stages} stages, {members} members and {turns} turns: only one may be above 1")
    if turns > 1:
        return [replace(whole(model), turn=turn, turns=turns) for turn in range(turns)]
    if members > model.kv_heads:
        raise ModelError(
            f"tensor parallel size {members}: the model has {model.kv_heads} key/value heads; "
            "use at most so many"
        )
    layers, kv_heads = _dealt(model.layers, stages), _dealt(model.kv_heads, members)
    inner, vocab = _cut(model.intermediate_size, members), _cut(model.vocab_size, members)
    group = model.heads // model.kv_heads
    return [
        Share(
            layers=layers[stage],
            heads=range(kv_heads[member].start * group, kv_heads[member].stop * group),
            kv_heads=kv_heads[member],
            inner=inner[member],
            vocab=vocab[member],
            stage=stage,
            stages=stages,
            member=member,
            members=members,
        )
        for stage in range(stages)
        for member in range(members)
    ]


def _dealt(total: int, parts: int) -> list[range]:
    """Divide evenly; the first parts have one more."""
    each, more = divmod(total, parts)
    firsts = [part * each + min(part, more) for part in range(parts + 1)]
    return [range(first, end) for first, end in itertools.pairwise(firsts)]


def _cut(total: int, parts: int) -> list[range]:
    """Divide evenly at multiples of UNIT, where there are enough of them for all parts."""
    unit = UNIT if total >= parts * UNIT else 1
    ends = [part * total // (parts * unit) * unit for part in range(parts)] + [total]
    return [range(first, end) for first, end in itertools.pairwise(ends)]
