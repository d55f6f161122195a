"""The emulated engine: tokens depend on the request alone, KV on the tokens before it, waits on times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.emulated import EmulatedEngine, emulated_drafter
from mooncake_lite.messages import Sampling
from mooncake_lite.profiles.compute import PassLoad, load_of
from scheduler.instance import DECODE, Job, JobId, pages_for
from scheduler.instance.drafts import accepted
from scheduler.instance.sequence import Sequence
from scheduler.instance.step import Chunk, Draw
from store.layout import BlockLayout
from tests import emulation
from tests.python import python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = BlockLayout(layers=3, kv_heads=2, block_tokens=64, head_dim=32, itemsize=4)
PROMPT = [(7 * i + 3) % 150 for i in range(150)]


class Rank:
    """An engine and 16 of its pages, from page `first` on. waited: the seconds of its waits.

    layers   of a stage of a pipeline
    """

    def __init__(
        self, first: int = 0, seconds: float = 0.0, layers: int = LAYOUT.layers, hidden_nbytes: int = 8
    ) -> None:
        self.waited: list[float] = []
        wait, vocabulary = self.waited.append, emulation.VOCABULARY
        self.layout = replace(LAYOUT, layers=layers)
        self.engine = EmulatedEngine(self.layout, 32, vocabulary, lambda load: seconds, wait, hidden_nbytes)
        self.pages = tuple(range(first, first + 16))[::-1]

    def chunk(self, tokens: list[int], start: int, draw: Draw | None, prompt: bool = True) -> Chunk:
        draws = (draw,) if draw is not None else ()
        return Chunk(JobId("a", 0), tokens[start:], start, self.pages, draws, prompt)

    def blocks(self, length: int) -> np.ndarray:
        """The pool blocks of the first tokens."""
        count = -(-length // LAYOUT.block_tokens)
        out = np.full((count, *self.layout.shape), 7, np.float32)
        self.engine.store_blocks(self._first_pages(length), out)
        return out

    def load(self, blocks: np.ndarray, length: int) -> None:
        self.engine.load_blocks(self._first_pages(length), blocks)

    def _first_pages(self, length: int) -> tuple[int, ...]:
        return self.pages[: pages_for(length, PAGE_TOKENS)]

    def answer(
        self, tokens: list[int], start: int, count: int, sampling: Sampling | None = None
    ) -> list[int]:
        """Compute from `start` on, then decode."""
        tokens = list(tokens)
        prompt = len(tokens)
        for index in range(count):
            draw = Draw(sampling or Sampling(0.0), tuple(tokens), index, frozenset())
            (drawn,), _ = self.engine.compute([self.chunk(tokens, start, draw, not index)])
            start = len(tokens)
            tokens.append(drawn.token)
        return tokens[prompt:]


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 1.0])
def test_drafts_are_the_tokens_that_the_engine_draws_as_often_as_they_shall_be(acceptance: float) -> None:
    vocabulary, prompt, sampling = emulation.VOCABULARY, PROMPT[:20], Sampling(1.0, seed=3, min_tokens=100)
    stops, tried, right = frozenset(range(0, vocabulary, 2)), 0, 0
    for name in "abcd":
        ids = list(prompt)
        job = Job(name, 0, frozenset({DECODE}), ids, 0, 999, 999, stops, sampling)
        drafter, rank = emulated_drafter(acceptance, vocabulary)(job, 1), Rank()
        rank.engine.compute([rank.chunk(ids[:-1], 0, None)])
        while len(ids) < 240:
            answered = len(ids) - len(prompt)
            drafts, predicted = drafter.after(Sequence(ids, answered, 999, 999, stops), 7)
            draws = [Draw(sampling, ids, answered + row, stops, 1, tuple(drafts[:row])) for row in range(8)]
            rows = (ids[-1], *drafts)
            chunk = Chunk(JobId(name, 0, 1), rows, len(ids) - 1, rank.pages, tuple(draws), False)
            tokens = [one.token for one in rank.engine.compute([chunk])[0]]
            count = accepted(chunk, tokens)
            tried, right = tried + min(count + 1, 7), right + count
            ids += tokens[: count + 1]
            assert (len(drafts), predicted) == (7, False)
        plain = list(prompt)
        fresh = Rank()
        for index in range(len(ids) - len(prompt)):
            draw = Draw(sampling, tuple(plain), index, stops, 1)
            start = len(plain) - 1 if index else 0
            plain.append(fresh.engine.compute([fresh.chunk(plain, start, draw, not index)])[0][0].token)
        assert ids == plain
    assert abs(right / tried - acceptance) < (0.08 if acceptance < 1 else 1e-9)


def test_tokens_are_the_same_however_the_prompt_is_cut_and_wherever_the_answer_goes_on() -> None:
    whole = Rank().answer(PROMPT, 0, 20)
    assert whole == emulation.answer(PROMPT, 20)
    cut = Rank(first=5)
    for start, end in ((0, 70), (70, 71), (71, 149)):
        assert cut.engine.compute([cut.chunk(PROMPT[:end], start, None)]) == ([], [])
    assert cut.answer(PROMPT, 149, 20) == whole
    moved = Rank(first=9)
    moved.load(cut.blocks(150), 150)
    assert moved.answer([*PROMPT, *whole[:1]], 150, 5) == whole[1:6]


def test_the_last_token_of_a_full_hit_is_computed_from_the_kv_of_the_one_before() -> None:
    owner, reader = Rank(), Rank(first=3)
    expected = owner.answer(PROMPT[:128], 0, 3)
    reader.load(owner.blocks(128), 128)
    assert reader.answer(PROMPT[:128], 127, 3) == expected


def test_a_wrong_block_changes_the_tokens() -> None:
    owner, stranger, reader = Rank(), Rank(), Rank()
    expected = owner.answer(PROMPT[:128], 0, 8)
    stranger.answer([5, *PROMPT[1:128]], 0, 1)
    reader.load(stranger.blocks(128), 128)
    assert reader.answer(PROMPT[:128], 127, 8) != expected


def test_a_block_has_the_bytes_of_the_real_model_and_equal_prefixes_have_equal_ones() -> None:
    one, other = Rank(), Rank(first=8)
    one.answer(PROMPT, 0, 1)
    other.answer([*PROMPT[:64], *PROMPT[:64]], 0, 1)
    mine, theirs = one.blocks(128), other.blocks(128)
    assert mine[0].nbytes == LAYOUT.nbytes
    assert (mine[0] == theirs[0]).all()
    assert (mine[1] != theirs[1]).any()
    bits = mine.view(np.uint64)
    assert bits.shape[:5] == (2, *LAYOUT.shape[:4])
    assert (bits == bits[:, :1, :1, :1]).all(), "each head of each layer has them, and so each member"
    assert len(set(map(bytes, mine[:, 0, 0, 0].reshape(128, -1)))) == 128
    assert LAYOUT.checksums(mine[0]) == LAYOUT.checksums(theirs[0])


def test_a_tail_is_copied_as_far_as_it_has_pages() -> None:
    rank, reader = Rank(), Rank(first=2)
    expected = rank.answer(PROMPT[:100], 0, 4)
    tail = rank.blocks(100)
    assert not tail[1][..., 48:, :].any()
    reader.load(tail, 100)
    assert reader.answer([*PROMPT[:100], expected[0]], 100, 3) == expected[1:]


def test_a_seed_counts_only_when_tokens_are_drawn() -> None:
    greedy = Rank().answer(PROMPT, 0, 8, Sampling(0.0, seed=5))
    assert greedy == Rank().answer(PROMPT, 0, 8, Sampling(0.0, seed=6))
    drawn = Rank().answer(PROMPT, 0, 8, Sampling(1.0, seed=5))
    assert drawn == Rank().answer(PROMPT, 0, 8, Sampling(1.0, seed=5))
    assert drawn != Rank().answer(PROMPT, 0, 8, Sampling(1.0, seed=6))


def test_each_branch_of_a_prompt_draws_with_a_seed_of_its_own_and_on_a_copy_of_its_last_page() -> None:
    rank = Rank()
    draws = tuple(Draw(Sampling(1.0, seed=5), tuple(PROMPT), 0, frozenset(), branch) for branch in range(3))
    drawn, _ = rank.engine.compute([Chunk(JobId("a", 0), PROMPT, 0, rank.pages, draws, True)])
    alone = [Rank().answer(PROMPT, 0, 2, Sampling(1.0, seed=5 + branch)) for branch in range(3)]
    assert [one.token for one in drawn] == [tokens[0] for tokens in alone]

    branched = (*rank.pages[:9], 30)
    rank.engine.copy_pages([rank.pages[9]], [30])
    tokens = [*PROMPT, alone[2][0]]
    draw = Draw(Sampling(1.0, seed=5), tuple(tokens), 1, frozenset(), 2)
    (second,), _ = rank.engine.compute([Chunk(JobId("a", 0, 2), tokens[150:], 150, branched, (draw,), False)])
    assert second.token == alone[2][1]


def same(hidden: np.ndarray) -> np.ndarray:
    return hidden


def staged(passed: Callable[[np.ndarray], np.ndarray] = same) -> tuple[list[int], Rank, Rank]:
    """Tokens after each of three chunks that two stages compute. passed: hidden states on their way."""
    first, last = Rank(first=5, layers=2, hidden_nbytes=24), Rank(first=5, layers=1)
    tokens = []
    for start, end in ((0, 70), (70, 71), (71, 150)):
        draw = Draw(Sampling(0.0), PROMPT, 0, frozenset())
        hidden = first.engine.pass_on([first.chunk(PROMPT[:end], start, None)])
        assert hidden.shape == (end - start, 24)
        drawn, _ = last.engine.compute([last.chunk(PROMPT[:end], start, draw)], None, passed(hidden))
        tokens += [one.token for one in drawn]
    return tokens, first, last


def test_stages_give_the_tokens_of_a_whole_engine_and_each_its_layers_of_the_blocks() -> None:
    whole = Rank()
    tokens, first, last = staged()
    assert tokens[-1:] == whole.answer(PROMPT, 0, 1)
    blocks, parts = whole.blocks(150), [first.blocks(150), last.blocks(150)]
    assert [part.shape[1] for part in parts] == [2, 1]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), blocks)


def test_chunks_of_several_prompts_go_from_stage_to_stage_together() -> None:
    first, last = Rank(layers=2), Rank(layers=1)
    chunks = []
    for number, length in enumerate((3, 40, 1)):
        tokens = PROMPT[number : number + length]
        draws = (Draw(Sampling(0.0), tokens, 0, frozenset()),)
        chunks.append(Chunk(JobId("abc"[number], 0), tokens, 0, (4 * number, 4 * number + 1, 9), draws, True))
    drawn, _ = last.engine.compute(chunks, None, first.engine.pass_on(chunks))
    assert [one.token for one in drawn] == [emulation.answer(chunk.token_ids, 1)[0] for chunk in chunks]


def test_wrong_hidden_states_give_wrong_tokens_and_wrong_blocks() -> None:
    tokens, _, last = staged()
    wrong_tokens, _, wrong = staged(lambda hidden: np.roll(hidden, 1, axis=0) ^ 1)
    assert wrong_tokens != tokens
    assert (wrong.blocks(150) != last.blocks(150)).any()


def test_no_stop_id_is_chosen_before_min_tokens() -> None:
    rank = Rank()
    stops = frozenset(range(emulation.VOCABULARY)) - {77}
    for answered, allowed in ((2, True), (3, False)):
        draw = Draw(Sampling(0.0, min_tokens=3), tuple(PROMPT), answered, stops)
        (drawn,), _ = rank.engine.compute([rank.chunk(PROMPT, 0, draw)])
        assert (drawn.token == 77) is allowed


def test_a_pass_waits_for_what_the_profile_says_of_its_chunks() -> None:
    rank = Rank(seconds=5.0)
    decode = rank.chunk([*PROMPT[:100], 9], 100, None, prompt=False)
    both = [rank.chunk(PROMPT[:20], 10, None), decode]
    rank.engine.compute(both)
    (waited,) = rank.waited
    assert 4.0 < waited <= 5.0
    pairs = sum(range(11, 21))
    assert load_of(both) == PassLoad(new_tokens=10, pairs=pairs, sequences=1, context=101)


RANK = """
import sys
from pathlib import Path
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.engine.build import emulated_engine
from mooncake_lite.launch.preflight import preflight
from mooncake_lite.model.config import load_config
from mooncake_lite.ranks.computing import loop, machine
from mooncake_lite import rank
from mooncake_lite.conductor import __main__ as conductor
from mooncake_lite.ranks import assemble, plan
from mooncake_lite.ranks.steward import assemble as rank_0
from mooncake_lite.ranks.store import loop as store_loop
from mooncake_lite.ranks.store.tier_folder import open_tier
from mooncake_lite.model.sizes import block_layout
import mooncake_lite.gateway.__main__
import numpy as np

folder = Path(sys.argv[1])
config = ServeConfig(model=str(folder), engine="emulated", profile=sys.argv[2], ssd_dir=sys.argv[3], port=1)
engine = emulated_engine(config, folder, load_config(folder))
layout = block_layout(config, load_config(folder))
StagingBlocks(np.zeros(8 * layout.nbytes, np.uint8), layout, engine)
fingerprint = plan.pool_fingerprint(config, folder)
tier = open_tier(config, 0, layout, fingerprint)
tier.close()
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numba", "llvmlite", "kernels_numba"}))
"""


def test_no_process_of_an_emulated_cluster_imports_torch_or_kernels(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    arguments = [str(folder), str(emulation.profile_file(folder)), str(tmp_path / "tier")]
    done = python("-c", RANK, *arguments)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_the_part_of_drafts_that_is_asked_for_is_right_and_rows_draw_what_steps_would() -> None:
    found = {}
    for acceptance in (1.0, 0.6):
        rank, ids, seen = Rank(), PROMPT[:4], [0, 0]
        job = Job("a", 0, frozenset(), ids, 0, 200, 999, sampling=Sampling(0.8, seed=3))
        drafter = emulated_drafter(acceptance, emulation.VOCABULARY)(job, 0)
        whole = Rank().answer(ids, 0, 200, job.sampling)
        told = rank.answer(ids, 0, 1, job.sampling)
        while len(told) < 190:
            sequence = Sequence([*ids, *told], len(told), 200, 999, frozenset())
            drafts, predicted = drafter.after(sequence, 7)
            assert (len(drafts), predicted) == (7, False)
            rows = tuple(
                Draw(job.sampling, sequence.token_ids, len(told) + row, frozenset(), 0, tuple(drafts[:row]))
                for row in range(8)
            )
            start = len(sequence.token_ids) - 1
            chunk = Chunk(job.id, (told[-1], *drafts), start, rank.pages, rows, False)
            drawn = [one.token for one in rank.engine.compute([chunk])[0]]
            count = accepted(chunk, drawn)
            seen[0], seen[1] = seen[0] + count, seen[1] + min(7, count + 1)
            told += drawn[: count + 1]
        assert told == whole[: len(told)]
        found[acceptance] = seen[0] / seen[1]
    assert found[1.0] == 1.0
    assert abs(found[0.6] - 0.6) < 0.12
