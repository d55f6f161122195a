"""Emulated engines of several ranks in lockstep: equal answers, and a wrong one where a part is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.dealing import Dealing
from mooncake_lite.engine.emulated import EmulatedEngine
from mooncake_lite.engine.members import part_of
from mooncake_lite.messages import Sampling
from mooncake_lite.model.shares import shares_of
from scheduler.instance import JobId
from scheduler.instance.dealt_pages import pages_of_rows
from scheduler.instance.step import Chunk, Draw
from store.layout import BlockLayout
from tests import emulation
from transport.exchange import SharedExchange

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(layers=2, kv_heads=3, block_tokens=32, head_dim=4, itemsize=4)
UNIT, PROMPT = 32, [(11 * i + 5) % 150 for i in range(185)]


class Model:
    """What `shares_of` asks for."""

    layers, heads, kv_heads, intermediate_size, vocab_size = 2, 9, 3, 64, 64


def engine(heads: int = 3, dealing: Dealing | None = None, draws: bool = True) -> EmulatedEngine:
    layout = BlockLayout(2, heads, 32, 4, 4)
    return EmulatedEngine(
        layout, 32, emulation.VOCABULARY, lambda load: 0.0, lambda seconds: None, dealing=dealing, draws=draws
    )


def decoded(one: EmulatedEngine, pages: Sequence[int], first: int, count: int) -> list[int]:
    """Decode after the prompt's KV, which is there. Returns nothing from a member that draws nothing."""
    tokens, answer = [*PROMPT, first], list[int]()
    for index in range(count):
        draw = Draw(Sampling(0.0), tuple(tokens), index + 1, frozenset())
        chunk = Chunk(JobId("a", 0), tokens[-1:], len(tokens) - 1, tuple(pages), (draw,), False)
        drawn, _ = one.compute([chunk])
        tokens.append(EXPECTED[index + 1])
        answer += [token.token for token in drawn]
    return answer


EXPECTED = emulation.answer(PROMPT, 12)


def blocks_of_prompt() -> np.ndarray:
    """The blocks of the prompt as one rank stores them; the last one is partial, and no first member's."""
    one, pages = engine(), range(32)
    one.compute([Chunk(JobId("a", 0), PROMPT, 0, tuple(pages), (), True)])
    out = np.zeros((6, *LAYOUT.shape), np.float32)
    one.store_blocks(pages[:12], out)
    return out


def together(members: int, act: Callable[[int, SharedExchange], Any]) -> list[Any]:
    """Have each member act in a thread of its own."""
    memory = np.zeros(SharedExchange.nbytes(members, 4096), np.uint8)
    found: list[Any] = [None] * members

    def run(member: int) -> None:
        found[member] = act(member, SharedExchange(memory, member, members, 20.0))

    threads = [threading.Thread(target=run, args=(member,)) for member in range(members)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("lost", [None, 0, 1, 5])
def test_ranks_that_share_a_context_decode_as_one_and_a_lost_block_of_any_changes_the_answer(
    turns: int, lost: int | None
) -> None:
    blocks, pages = blocks_of_prompt(), list(range(pages_of_rows(256, PAGE_TOKENS, UNIT, turns)))

    def act(turn: int, exchange: SharedExchange) -> list[int]:
        dealing = Dealing(turn, turns, UNIT, exchange.gather)
        one = engine(dealing=dealing, draws=not turn)
        for block in range(6):
            at = 2 * (block // turns)
            if block % turns == turn and block != lost:
                one.load_blocks(pages[at : at + 2], blocks[block : block + 1])
        return decoded(one, pages, EXPECTED[0], 11)

    answer, *others = together(turns, act)
    assert others == [[]] * (turns - 1), "the first member draws"
    assert (answer == EXPECTED[1:]) == (lost != 5), "the digest of the last token stands for all before it"


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_members_of_any_size_read_what_members_of_another_wrote(writers: int, readers: int) -> None:
    pool = np.zeros(6 * LAYOUT.nbytes, np.uint8)
    pages = range(32)

    def parts(members: int) -> list[tuple[EmulatedEngine, Any]]:
        shares = shares_of(Model(), members=members)  # type: ignore[arg-type]
        return [(engine(len(share.kv_heads)), part_of(share, LAYOUT, UNIT)) for share in shares]

    def moved(part: Any, own: np.ndarray, to_pool: bool) -> None:
        for number, block in enumerate(own.reshape(6, -1).view(np.uint8)):
            ref: Any = type("Ref", (), {"offset": number * LAYOUT.nbytes, "nbytes": LAYOUT.nbytes})
            first = 0
            for offset, nbytes in part.ranges(ref):
                there, here = pool[offset : offset + nbytes], block[first : first + nbytes]
                first += nbytes
                (there if to_pool else here)[:] = here if to_pool else there

    for one, part in parts(writers):
        one.compute([Chunk(JobId("a", 0), PROMPT, 0, tuple(pages), (), True)])
        own = np.zeros((6, *one.block_shape), np.float32)
        one.store_blocks(pages[:12], own)
        moved(part, own, True)
    assert pool.tobytes() == blocks_of_prompt().tobytes(), "equal KV gives equal bytes at every size"
    for one, part in parts(readers):
        own = np.zeros((6, *one.block_shape), np.float32)
        moved(part, own, False)
        one.load_blocks(pages[:12], own)
        assert decoded(one, pages, EXPECTED[0], 11) == EXPECTED[1:]
