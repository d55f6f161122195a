"""A runner without torch: KV values are chained hashes, so that one wrong page changes every later token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler.instance import Fault, Result, Step, TransferEnded
from scheduler.instance.progress import LATE_S
from scheduler.instance.step import ENGINE_ERROR, NO_TOKEN, Chunk, Draw, ReadGroup, WriteGroup

PAGE, BLOCK = 2, 4
GARBAGE = [-1] * BLOCK

Block = list[int | None]


def kv_of(tokens: Sequence[int]) -> list[int]:
    """The KV value of each token: it depends on all tokens before it."""
    values: list[int] = []
    for token in tokens:
        values.append(hash((values[-1] if values else 7, token)))
    return values


def choose(value: int, branch: int = 0, vocabulary: int = 50) -> int:
    """The token that follows the one with this KV value, in a branch."""
    return (value + 7 * branch) % vocabulary


class ModelRunner:
    """Carries steps out on lists of integers.

    pool      place -> block; shared by all ranks of a test
    ends      whether a flying transfer ends in this step; breaks: why it fails, "" when it does not
    late      whether bytes of a failed read keep coming until LATE_S later
    raises    whether a chunk cannot be computed; lacks: whether a draw of a chunk, or its scores (None), has
              no finite logits
    spoils    the KV of such a chunk is wrong
    """

    spoils = True

    def __init__(
        self,
        pool: dict[Any, Block],
        num_pages: int,
        half_blocks: int = 2,
        num_slots: int = 2,
        ends: Callable[[], bool] = lambda: True,
        breaks: Callable[[], str] = lambda: "",
        late: Callable[[], bool] = lambda: False,
        raises: Callable[[Chunk], bool] = lambda chunk: False,
        lacks: Callable[[Chunk, Draw | None], bool] = lambda chunk, draw: False,
    ) -> None:
        self.pool = pool
        self.pages: list[Block] = [[None] * PAGE for _ in range(num_pages)]
        self.halves: list[list[Block]] = [[list(GARBAGE) for _ in range(half_blocks)] for _ in range(2)]
        self.slots: list[Block] = [list(GARBAGE) for _ in range(num_slots)]
        self.first: dict[int, int] = {}  # half -> number of the first block that it has read
        self.flying_halves: dict[int, Any] = {}
        self.flying_puts: dict[int, Any] = {}
        self.ends, self.breaks, self.late = ends, breaks, late
        self.raises, self.lacks = raises, lacks
        self.aborted: set[int] = set()  # halves that flew behind a pass that has failed
        self.late_until = [0.0, 0.0]

    @property
    def flying(self) -> bool:
        return bool(self.flying_halves or self.flying_puts)

    def run(self, step: Step, moved: Any = None) -> Result:
        for read in step.reads:
            assert read.half not in self.flying_halves, "a half in flight is used again"
            self.halves[read.half] = [list(GARBAGE) for _ in self.halves[read.half]]
            self.flying_halves[read.half] = read
            self.first[read.half] = read.first
        for half, until in enumerate(self.late_until):
            if step.now < until:
                self.halves[half] = [list(GARBAGE) for _ in self.halves[half]]
        for land in step.lands:
            assert land.half not in self.flying_halves, "a half in flight is read"
            for number, pages in enumerate(_by_block(land.pages, land.count)):
                self._scatter(pages, self.halves[land.half][number], self.first[land.half] + number)
        for write in step.writes:
            assert write.half not in self.flying_halves, "a half in flight is used again"
            self.flying_halves[write.half] = write
            if not write.behind:
                self._copy_out(write)
        saved = []
        for save in step.saves:
            self.slots[save.slot] = self._gather(save.pages, save.index)
            saved.append(tuple(self.slots[save.slot]))
        self.flying_puts |= {put.put: put for put in step.puts}
        for growth in step.grow:
            if growth.copies is not None:
                self._copy(growth.copies, growth.pages[0])
        if step.ahead is not None and (problem := self._come_in(step)):
            return Result(step, (), saved, *self._poll(step.now), 0.5, lost=problem)
        tokens, scores, faults = [], [], []
        for chunk in step.chunks:
            drawn, scored = self._compute(chunk), self._score(chunk)
            fails = self.raises(chunk)
            lacks = [fails or self.lacks(chunk, draw) for draw in chunk.draws]
            is_short = chunk.score is not None and (fails or self.lacks(chunk, None))
            if self.spoils and (fails or is_short or any(lacks)):
                self._spoil(chunk)
            faults += [Fault(chunk.job, ENGINE_ERROR, "a pass over it raises")] * fails
            tokens += [NO_TOKEN if lack else token for lack, token in zip(lacks, drawn)]
            scores += [[] if is_short else scored] * (chunk.score is not None)
        at_fault = [fault.job for fault in faults]
        for write in step.writes:
            if write.job in at_fault and write.behind:
                self.aborted.add(write.half)
            elif write.behind:
                self._copy_out(write)
        halves, puts = self._poll(step.now)
        compute_s = 0.5 if step.chunks else 0.0
        return Result(step, tokens, saved, halves, puts, compute_s, scores=scores, faults=faults)

    def _copy_out(self, write: WriteGroup) -> None:
        """Copy a group into its half; of one that moves by layers, more blocks than fit at once."""
        groups = _by_block(write.pages, len(write.places))
        numbers = write.numbers or range(len(groups))
        blocks = [self._gather(pages, number) for pages, number in zip(groups, numbers)]
        self.halves[write.half] = blocks + self.halves[write.half][len(blocks) :]

    def _come_in(self, step: Step) -> TransferEnded | None:
        """Bring blocks into pages before the pass; returns why that fails."""
        load = step.ahead
        assert load is not None
        assert not self.flying_halves.keys() & set(load.halves), "a half in flight is used again"
        if problem := self.breaks():
            late = self.late()
            for half in load.halves if late else ():
                self.late_until[half] = step.now + LATE_S
            return TransferEnded(0, problem, late)
        for pages, place in zip(_by_block(load.pages, len(load.places)), load.places):
            self._scatter(pages, list(self.pool[place]), 0)
        return None

    def _compute(self, chunk: Chunk) -> list[int]:
        value = 7
        if chunk.start:
            before = self._at(chunk.pages, chunk.start - 1)
            assert before is not None, "a token is computed before the one in front of it"
            value = before
        values = []
        for position, token in enumerate(chunk.token_ids, chunk.start):
            value = hash((value, token))
            self._put(chunk.pages, position, value)
            values.append(value)
        drawn_after = [value] * len(chunk.draws) if chunk.prompt else values
        return [choose(after, draw.branch) for after, draw in zip(drawn_after, chunk.draws, strict=True)]

    def _spoil(self, chunk: Chunk) -> None:
        """Leave wrong KV of a chunk's tokens."""
        for position in range(chunk.start, chunk.end):
            self._put(chunk.pages, position, -7)

    def _score(self, chunk: Chunk) -> list[tuple[int | None, int]]:
        """(KV value of the token before it, token) of each target."""
        targets = enumerate(chunk.score.targets if chunk.score is not None else (), chunk.start)
        return [(self._at(chunk.pages, position), token) for position, token in targets]

    def _at(self, pages: Sequence[int], position: int) -> int | None:
        return self.pages[pages[position // PAGE]][position % PAGE]

    def _put(self, pages: Sequence[int], position: int, value: int) -> None:
        self.pages[pages[position // PAGE]][position % PAGE] = value

    def _copy(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])

    def _gather(self, pages: Sequence[int], number: int) -> Block:
        """The block of this number in its sequence, out of its pages."""
        values = [value for page in pages for value in self._pages_of(number)[page]]
        return values + [None] * (BLOCK - len(values))

    def _scatter(self, pages: Sequence[int], block: Block, number: int) -> None:
        for index, page in enumerate(pages):
            self._pages_of(number)[page] = block[index * PAGE : (index + 1) * PAGE]

    def _pages_of(self, number: int) -> list[Block]:
        """The pages of the member that has the block of this number: of the only one."""
        return self.pages

    def _poll(self, now: float) -> tuple[list[TransferEnded], list[TransferEnded]]:
        halves = []
        for half, group in list(self.flying_halves.items()):
            if self.ends():
                del self.flying_halves[half]
                if half in self.aborted:
                    self.aborted.remove(half)
                    halves.append(TransferEnded(half, "its pass has failed"))
                    continue
                halves.append(self._end(half, group, self.halves[half]))
                if halves[-1].may_still_land and isinstance(group, ReadGroup):
                    self.late_until[half] = now + LATE_S
        puts = []
        for number, put in list(self.flying_puts.items()):
            if self.ends():
                del self.flying_puts[number]
                puts.append(self._end(number, put, [self.slots[slot] for slot in put.slots]))
        return halves, puts

    def _end(self, number: int, group: Any, blocks: list[Block]) -> TransferEnded:
        problem = self.breaks()
        if problem:
            return TransferEnded(number, problem, self.late() or not isinstance(group, ReadGroup))
        for index, place in enumerate(group.places):
            if isinstance(group, ReadGroup):
                blocks[index] = list(self.pool[place])
            else:
                self.pool[place] = list(blocks[index])
        written = blocks[: len(group.places)]
        sums = [tuple(block) for block in written] if isinstance(group, WriteGroup) else ()
        return TransferEnded(number, sums=sums)


class DealtRunner(ModelRunner):
    """Members that have the KV of each sequence together: unit u is in pages of member u % turns.

    unit     tokens of a unit, whole blocks
    copies   of pages, so far
    """

    def __init__(self, *sizes: Any, unit: int, turns: int, **runner: Any) -> None:
        super().__init__(*sizes, **runner)
        self.unit, self.copies = unit, 0
        self.members = [[list(page) for page in self.pages] for _ in range(turns)]

    def _place(self, position: int) -> tuple[list[Block], int]:
        """The pages of a token's member, and which of the tokens of the sequence there it is."""
        unit, within = divmod(position, self.unit)
        turns = len(self.members)
        return self.members[unit % turns], unit // turns * self.unit + within

    def _at(self, pages: Sequence[int], position: int) -> int | None:
        own, at = self._place(position)
        return own[pages[at // PAGE]][at % PAGE]

    def _put(self, pages: Sequence[int], position: int, value: int) -> None:
        own, at = self._place(position)
        own[pages[at // PAGE]][at % PAGE] = value

    def _copy(self, source: int, target: int) -> None:
        self.copies += 1
        for own in self.members:
            own[target] = list(own[source])

    def _pages_of(self, number: int) -> list[Block]:
        return self._place(number * BLOCK)[0]


def _by_block(pages: Sequence[int], count: int) -> list[Sequence[int]]:
    per_block = BLOCK // PAGE
    return [pages[start : start + per_block] for start in range(0, count * per_block, per_block)]
