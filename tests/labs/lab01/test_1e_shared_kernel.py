"""1e: a kernel whose threads share scores. The race checker watches every launch."""

from __future__ import annotations

from mooncake_lite.labs.judging import Judge
from tests.labs.lab01.cases import Batch, counted_batch, launch

KERNEL = "attention_v1_shared"
TILE = 64


def test_each_new_token_sees_its_whole_sequence(lab: Judge) -> None:
    batch = Batch(lab, [2 * lab.size.page_tokens, 1], [1, 1], heads=2, kv_heads=2)
    launch(
        lab, KERNEL, batch, "out = softmax(query . keys * scale) . values, over the tokens of its sequence"
    )


def test_a_new_token_sees_no_later_one(lab: Judge) -> None:
    batch = Batch(lab, [lab.size.page_tokens + 2, 2], [2, 2])
    launch(lab, KERNEL, batch, "new token i is at position context - new + i, and sees none after it")


def test_heads_of_a_group_share_a_kv_head(lab: Judge) -> None:
    batch = Batch(lab, [lab.size.page_tokens + 1], [1], heads=4, kv_heads=2)
    launch(lab, KERNEL, batch, "head looks at kv head // group, and heads // kv_heads is the group")


def test_sequences_without_new_tokens_or_context_are_passed(lab: Judge) -> None:
    batch = Batch(lab, [5, 6, 0, 4], [1, 0, 1, 1])
    launch(lab, KERNEL, batch, "a sequence without new tokens has no row; a context of 0 gives zeros")


def test_a_context_of_several_tiles_is_summed_tile_by_tile(lab: Judge) -> None:
    batch = Batch(lab, [2 * TILE + 5], [1], rising=True)
    launch(lab, KERNEL, batch, "a higher score in a later tile shrinks what came before")


def test_a_window_hides_older_tokens(lab: Judge) -> None:
    batch = Batch(lab, [TILE + lab.size.page_tokens + 3, 3], [1, 1], window=TILE + 2)
    launch(lab, KERNEL, batch, "a token sees itself and the window - 1 tokens before it")


def test_rows_longer_than_a_block_are_written_whole(lab: Judge) -> None:
    batch = Batch(lab, [6], [1], head_dim=TILE + 5, scale=0.1)
    launch(lab, KERNEL, batch, "a thread has channels thread, thread + THREADS, ... below head_dim")


def test_large_scores_do_not_overflow(lab: Judge) -> None:
    launch(lab, KERNEL, Batch(lab, [9], [1], scale=50.0), "the highest score is subtracted first")


def test_elements_of_16_bits_are_widened_and_narrowed(lab: Judge) -> None:
    batch = Batch(lab, [lab.size.page_tokens + 2], [1], heads=2, dtype="bfloat16")
    launch(lab, KERNEL, batch, "elements are read through widen and written through narrow")


def test_no_score_is_computed_twice(lab: Judge) -> None:
    batch = counted_batch(lab)
    seen = launch(lab, KERNEL, batch, "the case whose reads are counted")
    if seen.key_reads is not None:
        lab.cost(seen.key_reads, batch.visible() * batch.query.shape[1] * lab.size.head_dim)
