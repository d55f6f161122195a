"""Between the ranks of a pipeline: what the first one tells the others, and what they report.

Hidden states are moved by `transport.engine`; messages say where they are.
Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import Logprobs, Message, Plain, Sampling
from store.objects import BlockRef


class StageMove(Plain, frozen=True):
    """A group of blocks of step.ReadGroup, LandGroup or WriteGroup. Each stage moves its own layers.

    places   of whole blocks, none of a LandGroup; pages: none of a ReadGroup
    """

    half: int
    count: int
    places: list[BlockRef]
    pages: list[int]


class StageChunk(Plain, frozen=True):
    """A step.Chunk of a prompt. sequence, answered, stop_ids: as in its draws, if there are any.

    branches   one draw for each
    targets    of its score; None: it has none
    """

    job: tuple[str, int, int]
    token_ids: list[int]
    start: int
    pages: list[int]
    sampling: Sampling | None
    sequence: list[int]
    answered: int
    stop_ids: list[int]
    branches: list[int]
    targets: list[int] | None


class StageStep(Message, frozen=True):
    """First stage -> every other one: do this, in the order of the fields, after all earlier steps.

    A step with chunks waits for the hidden states of the stage before.
    """

    reads: list[StageMove]
    lands: list[StageMove]
    writes: list[StageMove]
    chunks: list[StageChunk]


class HiddenAt(Message, frozen=True):
    """A stage -> the next one: hidden states of its next pass lie in a slot, at an offset of its segment."""

    slot: int
    offset: int


class HiddenTaken(Message, frozen=True):
    """A stage -> the one before: the hidden states in a slot are not needed any more."""

    slot: int


class HalfEnded(Plain, frozen=True):
    """A step.TransferEnded of one stage, with the checksums of its layers.

    sums   of each block that was written; of blocks that were read, of those that have to be compared
    """

    number: int
    problem: str
    may_still_land: bool
    sums: list[list[int]]


class LateTokens(Plain, frozen=True):
    """A step.Late."""

    job: tuple[str, int, int]
    tokens: list[int]
    logprobs: list[Logprobs | None]
    scores: list[Logprobs]


class StageEnded(Message, frozen=True):
    """A stage -> the first one: transfers have ended, or the last stage has done a pass."""

    stage: int
    halves: list[HalfEnded]
    late: list[LateTokens]


TO_STAGE = StageStep | HiddenAt | HiddenTaken | StageEnded


class StageMail(Message, frozen=True):
    """Any message between two stages. number: how many have gone the same way before."""

    number: int
    message: TO_STAGE
