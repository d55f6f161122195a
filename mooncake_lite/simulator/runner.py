"""A runner in virtual time: carries the steps of one rank out, with modelled seconds and transfers.

Used by `computing_rank.py`, in place of `engine.Runner`. No byte moves: that of the fault world of the tests
moves some, and has transfers that fail. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice

from msgspec.structs import replace

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.profiles.compute import PassLoad, load_of
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.surroundings import Surroundings
from scheduler.instance import Late, Result, Step, TransferEnded
from scheduler.instance.step import Chunk, LayerLoad, WriteGroup, WritePut
from store.objects import BlockRef

FAILED = "connection reset"

Move = Callable[[int, Sequence[BlockRef], Action], None]
"""Begins to move blocks for a rank: a method of Hardware."""


class VirtualRunner:
    """The engine and the transfers of one rank.

    wake     is called when a transfer has ended
    ends     is told when the step under way will end, as soon as that is known

    Of an instance it models all ranks. Each stage of a pipeline takes the same part of a pass, and moves its
    part of blocks once it has done what it was told before. Members in lockstep compute each pass together,
    and each moves its own part of blocks over its own links.

    _groups     of layers in which KV moves beside a pass
    _leaving    to be called when the pass of the step under way ends
    _ranks      of the instance; _stages: those of a pipeline, else 1
    _of_slot    slot -> number of its block in its sequence
    _last_done  when the last stage has done all passes so far
    _lost       how the prefix failed that came in beside the pass; None: it did not fail
    _passes     end and seconds of each pass of the step under way
    """

    def __init__(
        self, number: int, world: Surroundings, wake: Callable[[], None], ends: Callable[[float], None]
    ) -> None:
        self._number, self._world, self._wake, self._ends = number, world, wake, ends
        self._ended_halves: list[TransferEnded] = []
        self._ended_puts: list[TransferEnded] = []
        self._late: list[Late] = []
        self._ranks = world.shape.config.instance_of(number)
        self._in_lockstep = world.shape.in_lockstep(number)
        self._stages = 1 if self._in_lockstep else len(self._ranks)
        self._of_slot = dict[int, int]()
        self._groups = min(GROUPS, world.bytes.layers)
        self._last_done = 0.0
        self._lost: TransferEnded | None = None
        self._tokens: list[int] = []
        self._load = PassLoad()
        self._passes: list[tuple[float, float]] = []

    def begin(self, step: Step) -> float:
        """Begin a step, and return when its computing ends if no layer of a prefix is late.

        It waits for no other transfer. A step that computes nothing ends at once.
        """
        world, hardware = self._world, self._world.hardware
        for read in step.reads:
            came = partial(self._came, read.half, read.places)
            numbers = range(read.first, read.first + len(read.places))
            self._when_all_can(partial(self._move, hardware.read, read.places, numbers, came))
        for group in step.writes:
            if not group.behind:
                self._when_all_can(partial(self._write, group, group.places))
        self._of_slot.update((save.slot, save.index) for save in step.saves)
        for put in step.puts:
            left = partial(self._left, self._ended_puts, put.put, put)
            self._move(hardware.write, put.places, [self._of_slot[slot] for slot in put.slots], left)
        self._step, self._saved = step, self._hold(step)
        self._tokens, self._passes, self._lost = [], [], None
        if step.ahead is not None:
            assert step.steps == len(self._ranks) == 1, "neither leaps nor several ranks load by layers"
            self._lost = self._read_ahead(step.ahead)
        if step.chunks:
            self._load = load_of(step.chunks)
            (self._leap if step.steps > 1 else self._only_pass)(step)
        computed_at, pass_s = self._passes[-1] if self._passes else (world.clock.now, 0.0)
        if step.ahead is not None:  # a layer comes while the two groups before it are computed
            least_s = max(0.0, 1 - 2 / self._groups) * pass_s
            hardware.read(self._number, step.ahead.places, self._has_come, least_s)
        self._leaving = [self._leave(group, pass_s) for group in step.writes if group.behind]
        if step.chunks and step.ahead is None:
            self._will_end(computed_at)
        return computed_at

    def _has_come(self) -> None:
        """Know when the step ends: its last group of layers is computed after it has come."""
        ((computed_at, seconds),) = self._passes
        last_s = seconds / self._groups + self._world.hardware.step_s
        self._will_end(max(computed_at, self._world.clock.now + last_s))

    def _will_end(self, time: float) -> None:
        """Tell when the step ends. The last groups of layers may leave then."""
        for leave in self._leaving:
            self._world.clock.at(time, leave)
        self._ends(time)

    def _leave(self, group: WriteGroup, pass_s: float) -> Action:
        """Write blocks by layers, as the pass fills them. Returns what is to be called at its end.

        The last group of layers leaves when the pass has ended, and the groups before it have left.
        """
        parts = [place.nbytes // self._groups for place in group.places]
        last = [replace(place, nbytes=part) for place, part in zip(group.places, parts)]
        first = [replace(place, nbytes=place.nbytes - part) for place, part in zip(group.places, parts)]
        calls = iter((lambda: None, partial(self._write, group, last)))
        self._world.hardware.write(self._number, first, lambda: next(calls)(), pass_s)
        return lambda: next(calls)()

    def _when_all_can(self, begin: Action) -> None:
        """Begin a transfer once the last stage has done what it was told before."""
        if self._last_done > self._world.clock.now:
            self._world.clock.at(self._last_done, begin)
        else:
            begin()

    @property
    def is_stuck(self) -> bool:
        """Tell whether a pass cannot end: a member that takes part in it has died."""
        return self._in_lockstep and self._is_dead

    @property
    def _is_dead(self) -> bool:
        return not self._world.dead.isdisjoint(self._ranks)

    def _write(self, group: WriteGroup, moved: Sequence[BlockRef]) -> None:
        """Begin to write a group. moved: what of its blocks takes time now."""
        if not self._is_dead:
            left = partial(self._left, self._ended_halves, group.half, group)
            self._move(self._world.hardware.write, moved, group.numbers, left)

    def _move(self, move: Move, places: Sequence[BlockRef], numbers: Sequence[int], done: Action) -> None:
        """Begin a transfer, which has ended when each member in lockstep has moved its part.

        numbers   of the blocks in their sequences
        """
        if not self._in_lockstep:
            move(self._number, places, done)
            return
        parts = [(rank, self._part(member, places, numbers)) for member, rank in enumerate(self._ranks)]
        parts = [(rank, part) for rank, part in parts if part]
        left = iter(range(len(parts) - 1, -1, -1))
        for rank, part in parts:
            move(rank, part, lambda: done() if next(left) == 0 else None)

    def _part(self, member: int, places: Sequence[BlockRef], numbers: Sequence[int]) -> list[BlockRef]:
        """Return what a member moves of blocks: those of its units, or its heads of each."""
        shape, count = self._world.shape, len(self._ranks)
        if shape.turns_of(self._number) > 1:
            size = shape.unit_tokens // shape.layout.block_tokens
            return [place for place, number in zip(places, numbers) if number // size % count == member]
        heads = shape.layout.kv_heads
        own = heads // count + (member < heads % count)
        return [replace(place, nbytes=place.nbytes * own // heads) for place in places]

    def _came(self, half: int, places: Sequence[BlockRef]) -> None:
        if not self._is_dead:
            self._ended_halves.append(self._read(half, places))
            self._wake()

    def _left(self, ended: list[TransferEnded], number: int, sent: WriteGroup | WritePut) -> None:
        if not self._is_dead:
            ended.append(self._wrote(number, sent))
            self._wake()

    # ------------------------------------------------------------------------------ bytes

    def _hold(self, step: Step) -> list[list[int]]:
        """Copy what a step copies within the rank. Returns the checksums of the blocks that it saves."""
        return [self._world.bytes.sums(None)] * len(step.saves)

    def _read(self, half: int, places: Sequence[BlockRef]) -> TransferEnded:
        """Return how a read ends: if a source has died, it may have failed."""
        dies = self._has_died(places) and self._world.dice.random() < 0.5
        self._world.skip(0 if dies else 1)
        return TransferEnded(half, FAILED if dies else "")

    def _read_ahead(self, load: LayerLoad) -> TransferEnded | None:
        """Return how blocks fail to come in beside a pass; None: they come."""
        self._world.skip(1)
        return TransferEnded(0, FAILED) if self._has_died(load.places) else None

    def _wrote(self, number: int, sent: WriteGroup | WritePut) -> TransferEnded:
        """Return how a write ends."""
        self._world.skip(1)
        return TransferEnded(number, sums=[self._world.bytes.sums(None)] * len(sent.places))

    def _has_died(self, places: Sequence[BlockRef]) -> bool:
        return not self._world.dead.isdisjoint(place.rank for place in places)

    # ------------------------------------------------------------------------------ passes

    def _only_pass(self, step: Step) -> None:
        self._pass(step.chunks, self._load)

    def _pass(self, chunks: Sequence[Chunk], load: PassLoad) -> list[int]:
        """Do one pass after those before it. Returns its tokens, which the last stage may draw later."""
        drawn = self._draw(chunks) if self._lost is None else []
        seconds = self._world.hardware.pass_s(self._number, load) / self._stages
        begins = self._passes[-1][0] if self._passes else self._world.clock.now
        self._passes.append((begins + (seconds + self._world.hardware.step_s), seconds))
        if self._stages > 1:
            self._draw_late(chunks, drawn, *self._passes[-1])
        else:
            self._tokens += drawn
        return drawn

    def _draw(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return a token for each draw of a pass."""
        return [0 for chunk in chunks for _ in chunk.draws]

    def _leap(self, step: Step) -> None:
        """Do the passes of a leap at once. Each has one token more of each sequence to attend to."""
        pass_s, step_s, load = self._world.hardware.pass_s, self._world.hardware.step_s, self._load
        first_s, more_s = pass_s(self._number, load), pass_s(self._number, longer(load))
        seconds = [first_s + number * (more_s - first_s) for number in range(step.steps)]
        ends = accumulate([one + step_s for one in seconds], initial=self._world.clock.now)
        self._passes = list(zip(islice(ends, 1, None), seconds))
        self._tokens = [0] * (step.steps * len(step.chunks))

    def _draw_late(
        self, chunks: Sequence[Chunk], drawn: Sequence[int], first_done: float, seconds: float
    ) -> None:
        """Have the last stage draw tokens when it has done a pass, which takes each stage so many seconds."""
        behind = first_done + (self._stages - 1) * seconds
        self._last_done, tokens = max(behind, self._last_done + seconds), iter(drawn)
        late = [Late(one.job, [*islice(tokens, len(one.draws))], [None] * len(one.draws)) for one in chunks]
        self._world.clock.at(self._last_done, partial(self._drawn, late))

    def _drawn(self, late: list[Late]) -> None:
        if not self._is_dead:
            self._late += [one for one in late if one.tokens]
            self._wake()

    def cut(self) -> float:
        """End a leap with the pass under way. Returns when that ends."""
        now = self._world.clock.now
        left = next(number for number, (end_s, _) in enumerate(self._passes, 1) if end_s >= now)
        del self._passes[left:]
        del self._tokens[left * len(self._step.chunks) :]
        return self._passes[-1][0]

    def moved(self) -> tuple[Sequence[TransferEnded], Sequence[Late]]:
        """Take out the transfers of halves that have ended by now, and late tokens."""
        halves, self._ended_halves[:] = tuple(self._ended_halves), ()
        late, self._late[:] = tuple(self._late), ()
        return halves, late

    def end(self) -> Result:
        """Return the result of the step, with the transfers that have ended by now."""
        halves, late = self.moved()
        puts, self._ended_puts[:] = tuple(self._ended_puts), ()
        self._world.hardware.count(self._load, len(self._passes))
        *passes, (_, seconds) = self._passes or [(0.0, 0.0)]
        return Result(
            self._step, self._tokens, self._saved, halves, puts, seconds, passes=passes, lost=self._lost,
            late=late,
        )  # fmt: skip


def longer(load: PassLoad) -> PassLoad:
    """Return the load of the next pass of a leap: each sequence attends to one more token."""
    return PassLoad(0, 0, load.sequences, load.context + load.sequences)
