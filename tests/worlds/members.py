"""Instances of the fault world whose ranks work in lockstep: each member has its own pages, staging and part.

The first one's live `engine.members.Leader` tells the others, live messages go between them, and each member
moves what the live `part_of` names. A token is right only if all that members hold of its sequence is.

    UNIT_TOKENS   in which contexts are dealt out: a block or two
    REPORT_S      that a report of a member takes at most

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from mooncake_lite.engine.emulated import FIRST, emulated_token
from mooncake_lite.engine.members import Leader, Peers, part_of
from mooncake_lite.engine.telling import reports_of, step_of
from mooncake_lite.messages.members import PartEnded
from mooncake_lite.model.shares import shares_of
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.runner import FAILED, Move
from scheduler.instance import JobId, Late, Result, Step, TransferEnded
from scheduler.instance.dealt_pages import place_in_rows
from scheduler.instance.step import Chunk, WriteGroup, WritePut
from store.layout import BlockLayout
from store.objects import BlockRef
from tests.worlds.memory import NOTHING, Content, Unit
from tests.worlds.ranks import ExactKV, ExactRunner
from tests.worlds.requests import VOCABULARY, digest_after
from transport.errors import TransferError

UNIT_TOKENS, REPORT_S = (16, 32), 0.004
EMPTY = Step(0.0)


class MemberPart:
    """What one member has of each block: units of [layers, 2, heads], of some blocks or of all.

    where   units of the pool's block, in the order in which they are moved
    meant   units that lie in the member's own block, in its order
    owns    (number of a block in its sequence) -> whether it has a part of it
    """

    def __init__(self, layout: BlockLayout, members: int, turns: int, unit_tokens: int, number: int) -> None:
        heads, size = layout.kv_heads, layout.unit_nbytes
        model: Any = SimpleNamespace(
            layers=layout.layers, heads=heads, kv_heads=heads, intermediate_size=1, vocab_size=1
        )
        share = shares_of(model, 1, members, turns)[number]
        part = part_of(share, layout, unit_tokens)
        ranges = part.ranges(BlockRef(0, 0, 0, layout.nbytes))
        self.where = [unit for at, nbytes in ranges for unit in range(at // size, (at + nbytes) // size)]
        self.meant = [row * heads + head for row in range(2 * layout.layers) for head in share.kv_heads]
        self.turn, self.turns, self.owns = share.turn, turns, part.owns


class MemberKV(ExactKV):
    """The pages of one member. told: chunks of the pass under way, as this member knows them."""

    def __init__(self, part: MemberPart, unit_tokens: int, num_pages: int, *sizes: int) -> None:
        super().__init__(num_pages, *sizes)
        self._part, self._unit_tokens = part, unit_tokens
        self.told: dict[JobId, Chunk] = {}

    def at(self, job: JobId, position: int) -> int | None:
        """Return the digest of a token of a sequence; None if another member has it."""
        place = self._place(job, position)
        return None if place is None else self._pages[place[0]][place[1]]

    def extend(self, job: JobId, position: int, last: int) -> None:
        """Write the digest of the next token. last: of the token in front of it."""
        place, chunk = self._place(job, position), self.told[job]
        if place is not None:
            token = chunk.token_ids[position - chunk.start]
            self._pages[place[0]][place[1]] = digest_after(last, token)

    def _place(self, job: JobId, position: int) -> tuple[int, int] | None:
        """Return page and offset of a token; None if another member has it."""
        size, pages = self._page_tokens, self.told[job].pages
        if self._part.turns == 1:
            return pages[position // size], position % size
        turn, index = place_in_rows(position, size, self._unit_tokens, self._part.turns)
        return (pages[index], position % size) if turn == self._part.turn else None


class FirstKV(MemberKV):
    """The pages of a first member. members: those of all, its own among them."""

    members: Sequence[MemberKV] = ()

    def compute(self, chunk: Chunk) -> list[int]:
        """Have all members write the digests of a chunk. Returns a token for each draw, in their order."""
        last = self._agreed(chunk.job, chunk.start - 1) if chunk.start else FIRST
        for position in range(chunk.start, chunk.end):
            for member in self.members:
                member.extend(chunk.job, position, last)
            last = self._agreed(chunk.job, position)
        return [emulated_token(last, draw, VOCABULARY) for draw in chunk.draws]

    def _agreed(self, job: JobId, position: int) -> int:
        """Return what all members know of a token together: nonsense, if any of them has other bytes."""
        found = {member.at(job, position) for member in self.members}
        (one, *others) = sorted(digest for digest in found if digest is not None)
        return hash((one, *others)) % 2**63 if others else one


class MemberRunner(ExactRunner):
    """The part of one member: it moves blocks' units between the pool and its own staging memory.

    _first   half -> number of the first block that it reads in its sequence
    """

    def __init__(self, part: MemberPart, kv: MemberKV, *parts: Any) -> None:
        super().__init__(kv, *parts)
        self._part, self._own_kv, self._first = part, kv, dict[int, int]()
        layout = self._world.shape.layout
        self._count = 2 * layout.layers * layout.kv_heads

    def begin(self, step: Step) -> float:
        """Begin a step, and return when its computing ends."""
        self._first.update((one.half, one.first) for one in step.reads)
        if step.chunks:
            self.told(step.chunks)
        return super().begin(step)

    def told(self, chunks: Sequence[Chunk]) -> None:
        """Know the chunks of a pass, for the exchange with the others."""
        self._own_kv.told = {chunk.job: chunk for chunk in chunks}

    def ended(self) -> tuple[Sequence[TransferEnded], Sequence[TransferEnded]]:
        """Take out the transfers of halves, and of puts, that have ended by now."""
        halves, _ = self.moved()
        puts, self._ended_puts[:] = tuple(self._ended_puts), ()
        return halves, puts

    def _move(self, move: Move, places: Sequence[BlockRef], numbers: Sequence[int], done: Action) -> None:
        own = [place for place, number in zip(places, numbers) if self._part.owns(number)]
        if own:
            move(self._number, own, done)
        else:
            self._world.clock.after(0.0, done)

    def _owned(self, first: int, count: int) -> Iterator[int]:
        return (n for n in range(count) if self._part.owns(first + n))

    def _hold(self, step: Step) -> list[list[int]]:
        size = self._per_block
        for land in step.lands:
            blocks = self._kept(land.half, self._halves[land.half][: land.count])
            for n in self._owned(self._first[land.half], land.count):
                self._kv.put(land.pages[n * size : (n + 1) * size], blocks[n : n + 1])
        for save in step.saves:
            self._slots[save.slot] = self._kv.block(save.pages)
        for put in step.puts:
            self._puts[put.put] = [self._slots[slot] for slot in put.slots]
        for growth in (one for one in step.grow if one.copies is not None):
            self._kv.copy(growth.copies, growth.pages[0])
        return [[] for _ in step.saves]

    def _read(self, half: int, places: Sequence[BlockRef]) -> TransferEnded:
        own, found = list(self._owned(self._first[half], len(places))), [NOTHING] * len(places)
        self._halves[half] = found
        source_lost = self._has_died([places[n] for n in own]) and self._dice.random() < 0.5
        if own and (source_lost or self._dice.random() < self._odds.read_fails):
            return TransferEnded(half, FAILED, not source_lost and self._fails_late([half]))
        for n in own:
            found[n] = self._content(self._memory.units(places[n], self._count))
        return TransferEnded(half)

    def _content(self, units: dict[int, Unit]) -> Content:
        """Return the KV of a block whose units are moved here; nothing if others are there than it needs."""
        part = self._part
        moved = [units.get(at, Unit(-1, ())) for at in part.where]
        whole = moved == [Unit(number, moved[0].digests) for number in part.meant]
        return Content(moved[0].digests) if whole else NOTHING

    def _wrote(self, number: int, sent: WriteGroup | WritePut) -> TransferEnded:
        if isinstance(sent, WritePut):
            numbers, blocks = [self._of_slot[slot] for slot in sent.slots], self._puts.pop(number)
        else:
            numbers, blocks = list(sent.numbers), self._blocks(sent)
        own = [n for n, block in enumerate(numbers) if self._part.owns(block)]
        fails = bool(own) and self._dice.random() < self._odds.write_fails
        for n in own:
            if not (fails and self._dice.random() < 0.5):
                units = {
                    at: Unit(one, blocks[n].digests) for at, one in zip(self._part.where, self._part.meant)
                }
                self._memory.write_units(sent.places[n], units, self._count)
        if fails:
            return TransferEnded(number, FAILED, self._dice.random() < self._odds.may_still_write)
        return TransferEnded(number)


class LockstepRunner:
    """The engines and the transfers of an instance in lockstep, as its first rank drives them."""

    def __init__(
        self, num_pages: int, number: int, world: Any, wake: Action, ends: Callable[[float], None]
    ) -> None:
        shape = world.shape
        self._world, self._wake, self._ranks = world, wake, shape.config.instance_of(number)
        count, turns = len(self._ranks), shape.turns_of(number)
        sizes = num_pages, shape.page_tokens, shape.layout.block_tokens
        self._own = list[MemberRunner]()
        kvs = list[MemberKV]()
        for member, rank in enumerate(self._ranks):
            part = MemberPart(shape.layout, count // turns, turns, shape.unit_tokens, member)
            kvs.append((MemberKV if member else FirstKV)(part, shape.unit_tokens, *sizes))
            told = partial(self._report, member) if member else wake
            self._own.append(MemberRunner(part, kvs[-1], rank, world, told, ends))
        kvs[0].members = kvs  # type: ignore[attr-defined]
        self._near = [Peers(self._ranks, member, lambda wait_s: (), self._tell) for member in range(count)]
        self._leader = Leader(self, self._near[0], self._sums_of)
        self._halves, self._puts = list[TransferEnded](), list[TransferEnded]()
        self._computed_at, self._tell_leader = 0.0, lambda halves: None

    @property
    def is_stuck(self) -> bool:
        """Tell whether a pass cannot end."""
        return self._own[0].is_stuck

    def begin(self, step: Step) -> float:
        """Begin a step, and return when its computing ends."""
        self._join(step)
        return self._computed_at

    def moved(self) -> tuple[Sequence[TransferEnded], Sequence[Late]]:
        """Take out the transfers of halves of which all members have done their part, during a step."""
        self._tell_leader(self._own[0].moved()[0])
        halves, self._halves = self._halves, []
        return halves, []

    def end(self) -> Result:
        """Return the result of the step."""
        self._join(EMPTY)
        halves, self._halves = self._halves, []
        puts, self._puts = self._puts, []
        result = self._own[0].end()
        assert not (self._own[0]._is_dead and result.tokens), "tokens of an instance that has lost a member"
        return replace(result, halves=halves, puts=puts)

    def _join(self, step: Step) -> None:
        joined = self._leader.run(step, self._told)
        self._told(joined.halves, joined.late)
        self._puts += joined.puts

    def _told(self, halves: Sequence[TransferEnded], late: Sequence[Late] = ()) -> None:
        assert not late
        self._halves += halves

    # ------------------------------------------------------------------------------ for the leader

    def run(self, step: Step, moved: Any = None) -> Result:
        """Begin the first member's part of a step, and tell what has ended of its parts.

        moved   takes what ends later
        """
        self._tell_leader = moved
        if step is not EMPTY:
            self._computed_at = self._own[0].begin(step)
        halves, puts = self._own[0].ended()
        return Result(step, halves=halves, puts=puts)

    def _sums_of(self, parts: Sequence[TransferEnded], places: Sequence[BlockRef]) -> list[list[int]]:
        """Return the checksums of blocks where they lie."""
        memory = self._world.memory
        if any(place.rank in self._world.dead for place in places) and self._world.dice.random() < 0.5:
            raise TransferError(FAILED)
        memory.unsummed.difference_update((place.rank, place.offset) for place in places)
        return [memory.sums(memory.find(place) or NOTHING) for place in places]

    # ------------------------------------------------------------------------------ the other members

    def _tell(self, number: int, message: Any) -> None:
        """Have another member hear a message. It does that at once: no pass is under way."""
        near, own = self._near[number], self._own[number]
        near.hear(message)
        while (order := near.next_step()) is not None:
            step = step_of(order, self._world.clock.now)
            if step.chunks:
                own.told(step.chunks)
            own.begin(replace(step, chunks=()))

    def _report(self, member: int) -> None:
        """Send what has ended of a member's parts to the first one."""
        halves, puts = self._own[member].ended()
        for report in reports_of(member, Result(EMPTY, halves=halves, puts=puts)):
            assert isinstance(report, PartEnded)
            delay_s = self._world.dice.random() * REPORT_S
            self._world._links.send(self._ranks[member], self._ranks[0], delay_s, partial(self._hear, report))

    def _hear(self, report: PartEnded) -> None:
        if not self.is_stuck:
            self._near[0].hear(report)
            self._wake()
