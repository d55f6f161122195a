"""What members exchange, are told and move: as the formulas of docs/explain/several-ranks.md say, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite.engine.dealing import Dealing
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.flights import Flights
from mooncake_lite.engine.members import Leader, Peers, part_of
from mooncake_lite.messages import BlockRef, Sampling
from mooncake_lite.messages.members import MemberStep
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.shares import Share, shares_of
from scheduler.instance import JobId, Result, Step
from scheduler.instance.dealt_pages import pages_of_rows
from scheduler.instance.pages import pages_for
from scheduler.instance.step import Chunk, Draw
from store.layout import BlockLayout
from tests.mooncake_lite.model.conftest import tiny_model
from tests.mooncake_lite.model.members import Group, Meeting, MetExchange

PAGE = (Path(__file__).parents[3] / "docs/explain/several-ranks.md").read_text(encoding="utf-8")
PAGE_TOKENS, BLOCK, UNIT = 16, 64, 256
TENSOR, CONTEXT = (1, 2, 3), (1, 2, 4)
LENGTHS = (1, 256, 257, 700, 1025)
"""Of contexts: within a piece and a unit, at their ends, and in a second round of four members."""


def by_page(name: str, **values: Any) -> int:
    """Return what a formula of the page gives."""
    formulas = dict(
        line.split(" = ", 1)
        for line in PAGE.partition("```formulas\n")[2].partition("```")[0].splitlines()
        if " = " in line
    )
    found = eval(formulas[name], {"ceil": math.ceil, "min": min, "max": max}, values)
    assert isinstance(found, int)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 16}
    tiny_model("llama", folder, **heads, max_position_embeddings=2048, vocab_size=256)
    return folder


def sizes(config: ModelConfig) -> dict[str, int]:
    names = {"layers": "layers", "hidden": "hidden_size", "vocab": "vocab_size", "heads": "heads"}
    return {name: getattr(config, field) for name, field in names.items()} | {"dim": config.head_dim}


def row(number: int, length: int, turns: int = 1) -> Chunk:
    """A sequence of so many tokens that decodes, on pages of its own."""
    count = pages_of_rows(length, PAGE_TOKENS, UNIT, turns)
    pages = tuple(range(70 * number, 70 * number + count))
    draw = Draw(Sampling(0.0), [5] * length, 0, frozenset())
    return Chunk(JobId(str(number), 0), (5,), length - 1, pages, (draw,), prompt=False)


def tensor(folder: Path, members: int) -> tuple[Meeting, Callable[[list[Chunk]], object]]:
    """Members with parts of all layers; (what they exchange, a pass on all of them)."""
    if members == 1:
        return Meeting(1), Engine(load_model(folder), 210, BLOCK).compute
    group = Group(folder, members)
    engines = [Engine(model, 210, BLOCK) for model in group.models]
    return group.meeting, lambda chunks: group.each(lambda engine: engine.compute(chunks), engines)


def context(folder: Path, turns: int) -> tuple[Meeting, Callable[[list[Chunk]], object]]:
    """Members with some tokens of each context; as tensor."""
    model, group = load_model(folder, batch_invariant=True), Group.__new__(Group)
    group.meeting, group.models = Meeting(turns), [model] * turns
    dealings = [Dealing(turn, turns, UNIT, MetExchange(group.meeting, turn).gather) for turn in range(turns)]
    engines = [Engine(model, 210, BLOCK, dealing=one if turns > 1 else None) for one in dealings]
    for engine in engines:
        engine.caches.zero_()
    return group.meeting, lambda chunks: group.each(lambda engine: engine.compute(chunks), engines)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("members", TENSOR)
def test_tensor_parallel_members_exchange_what_the_page_says(folder: Path, members: int, rows: int) -> None:
    meeting, compute = tensor(folder, members)
    compute([row(number, 9) for number in range(rows)])
    values = sizes(load_config(folder)) | {"members": members, "rows": rows}
    several = members > 1
    assert len(meeting.calls) == several * by_page("tensor_exchanges", **values)
    assert sum(sum(nbytes) for _, nbytes in meeting.calls) == several * by_page("tensor_bytes", **values)


@pytest.mark.parametrize("turns", CONTEXT)
def test_context_parallel_members_exchange_what_the_page_says(folder: Path, turns: int) -> None:
    meeting, compute = context(folder, turns)
    for lengths in [*((length,) for length in LENGTHS), (700, 1025, 3)]:
        meeting.calls.clear()
        compute([row(number, length, turns) for number, length in enumerate(lengths)])
        values = sizes(load_config(folder))
        several = turns > 1
        assert len(meeting.calls) == several * by_page("context_exchanges", **values)
        expected = sum(by_page("context_bytes", **values, context=length) for length in lengths)
        assert sum(sum(nbytes) for _, nbytes in meeting.calls) == several * expected
        assert {kind for kind, _ in meeting.calls} == ({"gather"} if several else set())


@pytest.mark.quick
@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_other_member_is_told_of_a_pass_by_one_message(members: int, rows: int) -> None:
    told: list[tuple[int, Any]] = []
    peers = Peers(range(members), 0, lambda wait_s: (), lambda number, order: told.append((number, order)))
    runner: Any = SimpleNamespace(run=lambda step, moved: Result(step, tokens=[3] * rows))
    leader = Leader(runner, peers, lambda parts, places: [])
    leader.run(Step(0.0, chunks=tuple(row(number, 9) for number in range(rows))))
    assert len(told) == by_page("told", members=members)
    assert [number for number, _ in told] == [*range(1, members)]
    assert all(isinstance(order, MemberStep) and len(order.chunks) == rows for _, order in told)


def moved(share: Share, layout: BlockLayout, own: BlockLayout, blocks: int) -> tuple[int, int, int]:
    """Blocks of a sequence, transfers and bytes that a member moves: all of its part, by the flights."""
    part, moves = part_of(share, layout, UNIT), []
    flights = Flights(SimpleNamespace(submit=lambda some, label: moves.extend(some)), own, part)  # type: ignore[arg-type]
    mine = [block for block in range(blocks) if part.owns(block)]
    places = [BlockRef(block, 0, block * layout.nbytes, layout.nbytes) for block in mine]
    flights.begin(0, "write", places, [np.zeros(own.nbytes, np.uint8) for _ in mine], ("put", ""))
    return len(mine), len(moves), sum(one.nbytes for one in moves)


@pytest.mark.quick
@pytest.mark.parametrize("blocks", [1, 4, 5, 9, 32, 75])
@pytest.mark.parametrize(("members", "turns"), [(1, 1), (2, 1), (3, 1), (1, 2), (1, 4)])
def test_each_member_moves_the_blocks_that_the_page_says(members: int, turns: int, blocks: int) -> None:
    model: Any = SimpleNamespace(
        layers=30, kv_heads=3, heads=9, head_dim=64, intermediate_size=1536, vocab_size=49152
    )
    layout = BlockLayout(30, 3, BLOCK, 64, 4)
    in_all = np.zeros(3, int)
    for share in shares_of(model, members=members, turns=turns):
        own = BlockLayout(30, len(share.kv_heads), BLOCK, 64, 4)
        found = moved(share, layout, own, blocks)
        values = {"blocks": blocks, "of_unit": UNIT // BLOCK, "turn": share.turn, "turns": turns}
        assert found[0] == by_page("context_blocks", **values)
        if turns > 1:
            assert found[1:] == (found[0], found[0] * layout.nbytes)
        elif members > 1:
            nbytes = by_page("tensor_moved", block_bytes=layout.nbytes, own=len(share.kv_heads), kv_heads=3)
            assert found[1:] == (blocks * by_page("tensor_ranges", layers=30), blocks * nbytes)
        in_all += found
    assert in_all[2] == blocks * layout.nbytes, "each byte is moved by one member"


@pytest.mark.quick
@pytest.mark.parametrize("turns", CONTEXT)
def test_each_member_needs_the_pages_that_the_page_says(turns: int) -> None:
    for length in [*LENGTHS, 2048, 8191]:
        values = {"context": length, "unit": UNIT, "page": PAGE_TOKENS, "turns": turns}
        assert pages_of_rows(length, PAGE_TOKENS, UNIT, turns) == by_page("context_pages", **values)
    assert pages_of_rows(8192, PAGE_TOKENS, UNIT, turns) * turns == pages_for(8192, PAGE_TOKENS)


@pytest.mark.quick
def test_the_figures_of_the_default_model_are_those_of_the_formulas() -> None:
    model = {"layers": 30, "hidden": 576, "vocab": 49152, "heads": 9, "dim": 64, "rows": 1}
    for members in (2, 3):
        count = by_page("tensor_exchanges", **model)
        nbytes = by_page("tensor_bytes", **model, members=members)
        assert f"| tensor parallel, {members} members | {count} | {nbytes:,} |" in PAGE
    for length in (256, 2048):
        nbytes = by_page("context_bytes", **model, context=length)
        count = by_page("context_exchanges", **model)
        assert f"| context parallel, {length:,} tokens | {count} | {nbytes:,} |" in PAGE
