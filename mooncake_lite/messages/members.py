"""Between the ranks of an instance: what the first one tells the others, and what they report.

Hidden states of a pipeline are moved by `transport.engine`; messages say where they are. The limit of a
message has room for a long prompt, not for many: chunks of a pass come in as many messages as they need.
Explained in docs/explain/several-ranks.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import Logprobs, Message, Plain, Sampling
from scheduler.instance.step import TransferEnded
from store.objects import BlockRef


class MemberMove(Plain, frozen=True):
    """A group of blocks of step.ReadGroup, LandGroup, WriteGroup or WritePut, or a step.SaveBlock.

    Each rank moves its own part of them.

    number   of the half, the put, or the slot of a SaveBlock
    count    of blocks
    places   of whole blocks, none of a LandGroup and a SaveBlock
    pages    none of a ReadGroup; of a WritePut the slots
    first    of a ReadGroup and a SaveBlock: number of the first block in its sequence
    numbers  of a WriteGroup: those of all blocks
    """

    number: int
    count: int
    places: list[BlockRef]
    pages: list[int]
    first: int = 0
    numbers: list[int] = []


class MemberChunk(Plain, frozen=True):
    """A step.Chunk. answered, stop_ids: as in its draws, if there are any.

    before     the last tokens in front of the chunk, as many as its draws count; see penalties.py
    branches   one draw for each
    targets    of its score; None: it has none
    prompt     whether it belongs to a prefill
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
    prompt: bool = True


class MemberStep(Message, frozen=True):
    """First rank -> every other one: do this, in the order of the fields, after all earlier steps.

    A step with chunks waits, in a pipeline, for the hidden states of the stage before.

    copies   (source, target) of pages
    more     the next message has other chunks of the same step
    """

    reads: list[MemberMove] = []
    lands: list[MemberMove] = []
    writes: list[MemberMove] = []
    saves: list[MemberMove] = []
    puts: list[MemberMove] = []
    copies: list[tuple[int, int]] = []
    chunks: list[MemberChunk] = []
    more: bool = False


class Dismissed(Message, frozen=True):
    """First rank -> every other one: no step comes any more."""


class HiddenAt(Message, frozen=True):
    """A stage -> the next one: hidden states of its next pass lie in a slot, at an offset of its segment."""

    slot: int
    offset: int


class HiddenTaken(Message, frozen=True):
    """A stage -> the one before: the hidden states in a slot are not needed any more."""

    slot: int


class PartEnded(Message, frozen=True):
    """A rank -> the first one: the end of its part of a transfer.

    put     it belongs to a put, and not to a half
    ended   in a pipeline its sums are those of the stage's layers: of each block that was written; of blocks
            that were read, of those that have to be compared
    """

    member: int
    put: bool
    ended: TransferEnded


class LateTokens(Message, frozen=True):
    """The last stage -> the first one: a step.Late."""

    job: tuple[str, int, int]
    tokens: list[int]
    logprobs: list[Logprobs | None]
    scores: list[Logprobs]


TO_MEMBER = MemberStep | Dismissed | HiddenAt | HiddenTaken | PartEnded | LateTokens


class MemberMail(Message, frozen=True):
    """Any message between two ranks of an instance. number: how many have gone the same way before."""

    number: int
    message: TO_MEMBER
