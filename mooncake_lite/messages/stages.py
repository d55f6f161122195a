"""Between the ranks of a pipeline: what the first one tells the others, and what they report.

Hidden states are moved by `transport.engine`; messages say where they are. Each chunk of a pass, and what
comes of it, has a message of its own: the limit of a message has room for a long prompt, not for many.
Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import Logprobs, Message, Plain, Sampling
from scheduler.instance.step import TransferEnded
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
    """A step.Chunk of a prompt. answered, stop_ids: as in its draws, if there are any.

    before     the last tokens in front of the chunk, as many as its draws count; see penalties.py
    branches   one draw for each
    targets    of its score; None: it has none
    """

    job: tuple[str, int, int]
    token_ids: list[int]
    start: int
    pages: list[int]
    sampling: Sampling | None
    before: list[int]
    answered: int
    stop_ids: list[int]
    branches: list[int]
    targets: list[int] | None


class StageStep(Message, frozen=True):
    """First stage -> every other one: do this, in the order of the fields, after all earlier steps.

    A step with chunks waits for the hidden states of the stage before. Each chunk comes in a message of its
    own; more: the next one has another chunk of the same step.
    """

    reads: list[StageMove]
    lands: list[StageMove]
    writes: list[StageMove]
    chunks: list[StageChunk]
    more: bool = False


class HiddenAt(Message, frozen=True):
    """A stage -> the next one: hidden states of its next pass lie in a slot, at an offset of its segment."""

    slot: int
    offset: int


class HiddenTaken(Message, frozen=True):
    """A stage -> the one before: the hidden states in a slot are not needed any more."""

    slot: int


class HalfEnded(Message, frozen=True):
    """A stage -> the first one: the end of a transfer, with the checksums of its layers.

    ended   its sums are of each block that was written; of blocks that were read, of those that have to be
            compared
    """

    stage: int
    ended: TransferEnded


class LateTokens(Message, frozen=True):
    """The last stage -> the first one: a step.Late."""

    job: tuple[str, int, int]
    tokens: list[int]
    logprobs: list[Logprobs | None]
    scores: list[Logprobs]


TO_STAGE = StageStep | HiddenAt | HiddenTaken | HalfEnded | LateTokens


class StageMail(Message, frozen=True):
    """Any message between two stages. number: how many have gone the same way before."""

    number: int
    message: TO_STAGE
