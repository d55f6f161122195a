"""A runner in virtual time: carries the steps of one rank out, with modelled seconds and transfers.

Used by `computing_rank.py`, in place of `engine.Runner`. Faults are transfers that fail, and requests that
cannot be computed. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice

from msgspec.structs import replace

from mooncake_lite.control.request import client_id_of
from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.profiles.compute import PassLoad, load_of
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.faults import LATE_WRITE_S
from mooncake_lite.simulator.kv import KV, NOTHING, Content
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.tokens import VOCABULARY
from scheduler.instance import Fault, JobId, Late, Result, Step, TransferEnded
from scheduler.instance.staging import HALVES
from scheduler.instance.step import ENGINE_ERROR, NO_TOKEN, Chunk, Growth, LayerLoad, WriteGroup
from store.layout import check_of
from store.objects import BlockRef

FAILED = "connection reset"
BAD = "other bytes"


class VirtualRunner:
    """The engine and the transfers of one rank.

    wake     is called when a transfer has ended
    ends     is told when the step under way will end, as soon as that is known
    halves   what the staging halves hold, and _slots the single slots

    Of a pipeline it models all stages. Each takes the same part of a pass, and moves its part of blocks once
    it has done what it was told before.

    _groups     of layers in which KV moves beside a pass
    _leaving    to be called when the pass of the step under way ends
    _ranks      of the pipeline; one alone without a pipeline
    _last_done  when the last stage has done all passes so far
    """

    def __init__(
        self,
        number: int,
        kv: KV,
        world: Surroundings,
        wake: Callable[[], None],
        ends: Callable[[float], None],
    ) -> None:
        self._number, self._kv, self._world, self._wake, self._ends = number, kv, world, wake, ends
        self._per_block = world.shape.layout.block_tokens // world.shape.page_tokens  # pages
        self._halves: list[list[Content]] = [[] for _ in range(HALVES)]
        self._slots: dict[int, Content] = {}
        self._late_until = [0.0] * HALVES
        self._no_sums = [0] * world.memory.layers  # of bytes that nobody follows
        self._ended_halves: list[TransferEnded] = []
        self._ended_puts: list[TransferEnded] = []
        self._late: list[Late] = []
        self._ranks = world.shape.config.instance_of(number)
        self._groups = min(GROUPS, world.memory.layers)
        self._last_done = 0.0
        self._lost: TransferEnded | None = None
        self._tokens: list[int] = []
        self._faults: list[Fault] = []
        self._load = PassLoad()
        self._passes: list[tuple[float, float]] = []  # end and seconds of each pass of the step under way

    def begin(self, step: Step) -> float:
        """Begin a step, and return when its computing ends if no layer of a prefix is late.

        It waits for no other transfer. A step that computes nothing ends at once.
        """
        world, kv = self._world, self._kv
        for read in step.reads:
            landed = partial(self._arrived, read.half, read.places)
            self._when_all_can(partial(world.hardware.read, self._number, read.places, landed))
        for land in step.lands:
            kv.put(land.pages, self._kept(land.half, self._halves[land.half][: land.count]))
        for group in step.writes:
            if not group.behind:
                self._when_all_can(partial(self._write, group, group.places))
        for save in step.saves:
            self._slots[save.slot] = kv.block(save.pages)
        saved = [self._sums(self._slots[save.slot]) for save in step.saves]
        for put in step.puts:
            blocks = [self._slots[slot] for slot in put.slots]
            left = partial(self._left, self._ended_puts, put.put, put.places, partial(list, blocks))
            world.hardware.write(self._number, put.places, left)
        for growth in step.grow:
            if growth.copies is not None:
                kv.copy(growth.copies, growth.pages[0])
        self._step, self._saved = step, saved
        self._tokens, self._passes, self._faults, self._lost = [], [], [], None
        if step.ahead is not None:
            assert step.steps == len(self._ranks) == 1, "neither leaps nor pipelines load by layers"
            self._come_in(step.ahead)
        self._compute(step)
        computed_at, pass_s = self._passes[-1] if self._passes else (world.clock.now, 0.0)
        if step.ahead is not None:  # a layer comes while the two groups before it are computed
            least_s = max(0.0, 1 - 2 / self._groups) * pass_s
            world.hardware.read(self._number, step.ahead.places, self._has_come, least_s)
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
        computed = all(one.job != group.job for one in self._faults)
        calls = iter((lambda: None, partial(self._write, group, last, computed)))
        self._world.hardware.write(self._number, first, lambda: next(calls)(), pass_s)
        return lambda: next(calls)()

    def _when_all_can(self, begin: Action) -> None:
        """Begin a transfer once the last stage has done what it was told before."""
        if self._last_done > self._world.clock.now:
            self._world.clock.at(self._last_done, begin)
        else:
            begin()

    @property
    def _is_dead(self) -> bool:
        return not self._world.dead.isdisjoint(self._ranks)

    def _blocks(self, group: WriteGroup) -> list[Content]:
        """Return what the blocks of a group hold now."""
        size = self._per_block
        found = [self._kv.block(group.pages[n * size : (n + 1) * size]) for n in range(len(group.places))]
        return self._kept(group.half, found)

    def _write(self, group: WriteGroup, moved: Sequence[BlockRef], computed: bool = True) -> None:
        """Begin to write a group. Its blocks are copied as late as may be.

        moved      what of them takes time now
        computed   False: its pass has failed, and so does this
        """
        copied = partial(self._blocks, group) if computed else list[Content]
        left = partial(self._left, self._ended_halves, group.half, group.places, copied)
        if not self._is_dead:
            self._world.hardware.write(self._number, moved, left)

    def _come_in(self, load: LayerLoad) -> None:
        """Bring blocks into pages before a pass. Their layers come beside it."""
        world, places = self._world, load.places
        found = [world.memory.find(place) or NOTHING for place in places]
        self._kv.put(load.pages, found)
        for half in load.halves:
            self._halves[half] = [NOTHING] * len(places)
        source_lost = not world.dead.isdisjoint(place.rank for place in places)
        if source_lost or world.dice.random() < world.faults.read_fails:
            late = world.dice.random() < world.faults.may_still_write
            for half in load.halves if late else ():
                self._late_until[half] = world.clock.now + world.dice.random() * LATE_WRITE_S
            self._lost = TransferEnded(0, FAILED, late)
        elif bad := self._differ(places, found):
            self._lost = TransferEnded(0, BAD, bad=bad)

    def _differ(self, places: Sequence[BlockRef], found: Sequence[Content]) -> list[BlockRef]:
        """Return the places that have to be compared, and hold other bytes than were put there."""
        pairs = zip(places, found) if self._world.exact else ()
        return [place for place, block in pairs if place.check not in (0, check_of(self._sums(block)))]

    def _compute(self, step: Step) -> None:
        """Do the passes of a step, until one of them draws a token that ends an answer, or none."""
        at = self._world.clock.now
        chunks: Sequence[Chunk] = step.chunks
        if not chunks:
            return
        load, stops = load_of(chunks), chunks[0].draws[0].stop_ids if step.steps > 1 else frozenset()
        self._load = load
        if step.steps > 1 and not self._kv.is_exact:
            self._leap(step, load)
            return
        growths = deque(step.later)
        for number in range(1, step.steps + 1):
            if number > 1:
                chunks, load = self._next_pass(chunks, number, growths), _longer(load)
            drawn = self._pass(chunks) if self._lost is None else []
            seconds = self._world.hardware.pass_s(self._number, load) / len(self._ranks)
            at += seconds + self._world.hardware.step_s
            self._passes.append((at, seconds))
            if len(self._ranks) > 1:
                self._draw_late(chunks, drawn, at, seconds)
                return
            self._tokens += drawn
            if NO_TOKEN in drawn or not stops.isdisjoint(drawn):
                return

    def _pass(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute chunks. Returns a token for each draw."""
        if not self._kv.is_exact:
            return self._kv.compute(chunks)
        return [token for chunk in chunks for token in self._tokens_of(chunk)]

    def _tokens_of(self, chunk: Chunk) -> list[int]:
        """Compute a chunk. One that cannot be computed lacks tokens, and its KV is wrong.

        Not in a pipeline: there the KV counts as computed before the last stage has drawn.
        """
        poison = self._world.requests[client_id_of(chunk.job.request_id)].poison
        if poison is None or not poison.is_in(chunk):
            return self._kv.compute([chunk])
        raises, wrong = poison.code == ENGINE_ERROR, VOCABULARY * (len(self._ranks) == 1)
        self._faults += [Fault(chunk.job, ENGINE_ERROR, "a pass over it fails")] * raises
        ids = [token + wrong for token in chunk.token_ids]
        drawn = zip(chunk.draws, self._kv.compute([replace(chunk, token_ids=ids)]))
        return [NO_TOKEN if raises or draw.branch == poison.branch else token for draw, token in drawn]

    def _leap(self, step: Step, load: PassLoad) -> None:
        """Do the passes of a leap at once. Each has one token more of each sequence to attend to."""
        pass_s, step_s = self._world.hardware.pass_s, self._world.hardware.step_s
        first_s, more_s = pass_s(self._number, load), pass_s(self._number, _longer(load))
        seconds = [first_s + number * (more_s - first_s) for number in range(step.steps)]
        ends = accumulate([one + step_s for one in seconds], initial=self._world.clock.now)
        self._passes = list(zip(islice(ends, 1, None), seconds))
        self._tokens = [0] * (step.steps * len(step.chunks))

    def _draw_late(
        self, chunks: Sequence[Chunk], drawn: Sequence[int], first_done: float, seconds: float
    ) -> None:
        """Have the last stage draw tokens when it has done a pass, which takes each stage so many seconds."""
        behind = first_done + (len(self._ranks) - 1) * seconds
        self._last_done, tokens = max(behind, self._last_done + seconds), iter(drawn)
        late = [Late(one.job, [*islice(tokens, len(one.draws))], [None] * len(one.draws)) for one in chunks]
        self._world.clock.at(self._last_done, partial(self._drawn, late))

    def _drawn(self, late: list[Late]) -> None:
        if not self._is_dead:
            self._late += [one for one in late if one.tokens]
            self._wake()

    def _next_pass(
        self, chunks: Sequence[Chunk], number: int, growths: deque[tuple[int, Growth]]
    ) -> Sequence[Chunk]:
        """Return the chunks of the next pass of a leap. Each computes the token that the last pass drew."""
        if not self._kv.is_exact:
            return chunks
        pages: dict[JobId, Sequence[int]] = {}
        while growths and growths[0][0] == number:
            growth = growths.popleft()[1]
            pages[growth.job] = growth.pages
        found = []
        for chunk, token in zip(chunks, self._tokens[-len(chunks) :]):
            draw = replace(chunk.draws[0], answered=chunk.draws[0].answered + 1)
            held = (*chunk.pages, *pages.get(chunk.job, ()))
            found.append(replace(chunk, token_ids=[token], start=chunk.end, pages=held, draws=(draw,)))
        return found

    def cut(self) -> float:
        """End a leap with the pass under way. Returns when that ends."""
        now = self._world.clock.now
        left = next(number for number, (end_s, _) in enumerate(self._passes, 1) if end_s >= now)
        del self._passes[left:]
        del self._tokens[left * len(self._step.chunks) :]
        self._faults = self._faults if NO_TOKEN in self._tokens else []
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
            late=late, faults=self._faults,
        )  # fmt: skip

    def _sums(self, block: Content) -> list[int]:
        return block.sums(self._world.memory.layers) if self._world.exact else self._no_sums

    def _arrived(self, half: int, places: Sequence[BlockRef]) -> None:
        """End a read. Bytes of one that has failed may come into the half much later."""
        world = self._world
        if self._is_dead:
            return
        source_lost = not world.dead.isdisjoint(place.rank for place in places) and world.dice.random() < 0.5
        if source_lost or world.dice.random() < world.faults.read_fails:
            late = not source_lost and world.dice.random() < world.faults.may_still_write
            self._halves[half] = [NOTHING] * len(places)
            if late:
                self._late_until[half] = world.clock.now + world.dice.random() * LATE_WRITE_S
            self._ended_halves.append(TransferEnded(half, FAILED, late))
        else:
            self._halves[half] = found = [world.memory.find(place) or NOTHING for place in places]
            bad = self._differ(places, found)
            self._ended_halves.append(TransferEnded(half, BAD if bad else "", bad=bad))
        self._wake()

    def _kept(self, half: int, blocks: list[Content]) -> list[Content]:
        """Return what a half holds of blocks: nothing while bytes of a failed read come into it."""
        return blocks if self._world.clock.now >= self._late_until[half] else [NOTHING] * len(blocks)

    def _left(
        self,
        ended: list[TransferEnded],
        number: int,
        places: Sequence[BlockRef],
        copied: Callable[[], list[Content]],
    ) -> None:
        """End a write. One that has failed leaves some of its places as they were. One of no blocks fails."""
        world = self._world
        if self._is_dead:
            return
        blocks = copied()
        fails = world.dice.random() < world.faults.write_fails or not blocks
        for place, block in zip(places, blocks) if world.exact else ():
            if not (fails and world.dice.random() < 0.5):
                world.memory.write(place, block)
        if fails:
            late = world.dice.random() < world.faults.may_still_write
            ended.append(TransferEnded(number, FAILED, late))
        else:
            ended.append(TransferEnded(number, sums=[self._sums(block) for block in blocks]))
        self._wake()


def _longer(load: PassLoad) -> PassLoad:
    """Return the load of the next pass of a leap: each sequence attends to one more token."""
    return PassLoad(0, 0, load.sequences, load.context + load.sequences)
