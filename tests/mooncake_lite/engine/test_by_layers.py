"""KV by layers: what arrives and what leaves is the same as by blocks, whatever the order of transfers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_lite.engine.by_layers import (
    GROUPS,
    Incoming,
    LayersLost,
    MovingHook,
    Outgoing,
    layer_groups,
)
from mooncake_lite.engine.staging import StagingBlocks
from scheduler.instance.step import LayerLoad, WriteGroup
from store.layout import BlockLayout, check_of
from store.objects import BlockRef
from transport.bulk.batch import Transfer
from transport.errors import PeerLost

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(5, 1, 4, 2, 4)
BLOCKS = 3
HALF = 2
"""Blocks of a half: three layers of BLOCKS blocks, and of a part of it one."""


class Batch:
    """Transfers that are done when somebody waits for them."""

    def __init__(self, pool: Pool, moves: Sequence[Transfer]) -> None:
        self.pool, self.moves = pool, moves
        self.over = self.cancelled = False
        self.may_still_land: set[int] = set()

    def poll(self) -> bool:
        return self.over

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout_s: float) -> None:
        if self.over:
            return
        self.over = True
        if self.cancelled:
            return
        if self.pool.fails_after == 0:
            self.may_still_land = {0} if self.pool.late else set()
            raise PeerLost(3, "gone")
        self.pool.fails_after -= 1
        for move in self.moves:
            there = self.pool.bytes[move.offset : move.offset + move.nbytes]
            source, target = (there, move.local) if move.op == "read" else (move.local, there)
            target[: move.nbytes] = source[: move.nbytes]


class Pool:
    """Memory of another rank. fails_after: so many batches go well."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.bytes = np.random.default_rng(1).integers(0, 255, 100 + 24 * layout.nbytes).astype(np.uint8)
        self.batches: list[Batch] = []
        self.fails_after, self.late = 1000, False

    def submit(self, moves: Sequence[Transfer], label: tuple[str, str]) -> Batch:
        self.batches.append(Batch(self, moves))
        return self.batches[-1]

    def block(self, ref: BlockRef) -> np.ndarray:
        return self.bytes[ref.offset : ref.offset + ref.nbytes].view(np.float32).reshape(self.layout.shape)


class Engine:
    """Pages of a block each: (layers, pages, ...)."""

    block_dtype = np.float32

    def __init__(self, layout: BlockLayout) -> None:
        self.block_shape = layout.shape
        self.pages = np.random.default_rng(2).random((layout.layers, 16, *layout.shape[1:]), np.float32)

    def load_blocks(self, pages: Sequence[int], blocks: np.ndarray, layers: slice) -> None:
        self.pages[layers, list(pages)] = blocks.swapaxes(0, 1)

    def store_blocks(self, pages: Sequence[int], out: np.ndarray, layers: slice) -> None:
        out[:] = self.pages[layers, list(pages)].swapaxes(0, 1)


class Rank:
    def __init__(self, layout: BlockLayout = LAYOUT) -> None:
        self.engine: Any = Engine(layout)
        self.pool: Any = Pool(layout)
        segment = np.zeros(8 * layout.nbytes, np.uint8)
        self.staging = StagingBlocks(segment, layout, self.engine)
        assert self.staging.half_blocks == HALF

    @property
    def parts(self) -> tuple[Any, StagingBlocks, Any]:
        return self.engine, self.staging, self.pool


PAGES = (6, 1, 4)


def refs(pool: Pool, count: int = BLOCKS, *, checked: bool = False) -> list[BlockRef]:
    """Blocks of the pool, which do not begin at its beginning."""
    nbytes = pool.layout.nbytes
    places = [BlockRef(n, 3, 100 + 2 * n * nbytes, nbytes) for n in range(count)]
    if not checked:
        return places
    checks = [check_of(LAYOUT.checksums(pool.block(ref))) for ref in places]
    return [BlockRef(ref.object_id, 3, ref.offset, ref.nbytes, check) for ref, check in zip(places, checks)]


@pytest.mark.parametrize(("layers", "room"), [(1, 1), (5, 1), (5, 3), (30, 40), (30, 1), (80, 7)])
def test_groups_cover_the_layers_in_order_and_none_is_too_large(layers: int, room: int) -> None:
    groups = layer_groups(layers, room)
    assert [layer for group in groups for layer in range(layers)[group]] == list(range(layers))
    assert all(group.stop - group.start <= room for group in groups)
    assert len(groups) >= min(layers, GROUPS // 2)


@pytest.mark.parametrize("halves", [(0, 1), (1,)])
@pytest.mark.parametrize("checked", [False, True])
def test_each_layer_is_in_its_pages_when_it_is_needed(halves: tuple[int, ...], checked: bool) -> None:
    rank = Rank()
    places = refs(rank.pool, checked=checked)
    incoming = Incoming(*rank.parts, LayerLoad(halves, places, PAGES, ("a", 0)))  # type: ignore[arg-type]
    hook = MovingHook(lambda: None, incoming)
    assert len(rank.pool.batches) == len(halves)
    for layer in range(LAYOUT.layers):
        hook.before(layer)
        for page, ref in zip(PAGES, places):
            assert rank.engine.pages[layer, page].tobytes() == rank.pool.block(ref)[layer].tobytes()
        hook.after(layer)
    assert all(batch.over for batch in rank.pool.batches)


@pytest.mark.parametrize("late", [False, True])
def test_a_transfer_that_fails_gives_the_pass_up_and_leaves_none_under_way(late: bool) -> None:
    rank = Rank()
    rank.pool.fails_after, rank.pool.late = 2, late
    incoming = Incoming(*rank.parts, LayerLoad((0, 1), refs(rank.pool), PAGES, ("a", 0)))  # type: ignore[arg-type]
    incoming.need(1)
    with pytest.raises(LayersLost) as caught:
        incoming.need(2)
    assert "gone" in caught.value.ended.problem
    assert caught.value.ended.may_still_land == late
    assert all(batch.over for batch in rank.pool.batches)


def test_other_bytes_than_were_put_give_the_pass_up_and_are_named() -> None:
    rank = Rank()
    places = refs(rank.pool, checked=True)
    rank.pool.bytes[places[1].offset + LAYOUT.layer_nbytes] ^= 1
    incoming = Incoming(*rank.parts, LayerLoad((0, 1), places, PAGES, ("a", 0)))  # type: ignore[arg-type]
    with pytest.raises(LayersLost) as caught:
        incoming.need(LAYOUT.layers - 1)
    assert caught.value.ended.bad == [places[1]]


def test_a_layer_leaves_once_it_is_computed_and_not_before() -> None:
    rank = Rank()
    places = refs(rank.pool)
    group = WriteGroup(1, PAGES, places, ("a", 0), 0, behind=True)  # type: ignore[arg-type]
    outgoing = Outgoing(*rank.parts, group)
    hook = MovingHook(lambda: None, None, [outgoing])
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(outgoing.run()))
    thread.start()
    for layer in range(LAYOUT.layers):
        assert len(rank.pool.batches) <= layer
        hook.before(layer)
        rank.engine.pages[layer] += 1.0
        hook.after(layer)
    thread.join(10)
    (end,) = ended
    expected = [rank.engine.pages[:, page] for page in PAGES]
    for ref, block in zip(places, expected):
        assert (rank.pool.block(ref) == block).all()
    assert (end.number, end.problem) == (1, "")
    assert end.sums == [LAYOUT.checksums(np.ascontiguousarray(block)) for block in expected]


def test_as_many_layers_leave_at_once_as_half_of_a_half_has_room_for() -> None:
    """Not the number of groups but the memory bounds them here: two layers of 12 blocks each."""
    rank, count = Rank(BlockLayout(32, 1, 4, 2, 4)), 12
    places = refs(rank.pool, count)
    outgoing = Outgoing(*rank.parts, WriteGroup(1, range(count), places, ("a", 0), 0, behind=True))  # type: ignore[arg-type]
    outgoing.reached(32)
    assert outgoing.run().problem == ""
    assert len(rank.pool.batches) == 16
    for page, ref in enumerate(places):
        assert (rank.pool.block(ref) == rank.engine.pages[:, page]).all()


def test_a_store_by_layers_that_fails_tells_whether_bytes_may_come_late() -> None:
    rank = Rank()
    rank.pool.fails_after, rank.pool.late = 1, True
    group = WriteGroup(0, PAGES, refs(rank.pool), ("a", 0), 0, behind=True)  # type: ignore[arg-type]
    outgoing = Outgoing(*rank.parts, group)
    outgoing.reached(LAYOUT.layers)
    end = outgoing.run()
    assert "gone" in end.problem
    assert (end.may_still_land, end.sums) == (True, ())
    assert all(batch.over for batch in rank.pool.batches)


def test_a_hook_that_moves_nothing_only_looks() -> None:
    looks: list[int] = []
    hook = MovingHook(lambda: looks.append(1))
    assert not hook.moves
    hook.before(0)
    hook.after(0)
    assert len(looks) == 2
