"""1e: a kernel whose threads share scores. The race checker watches every launch."""

from __future__ import annotations

from mooncake_lite.labs.judging import Judge

from .cases import Batch, counted_batch, launch, launch_with_16_bits

KERNEL = "attention_v1_shared"
TILE = 64
SHARE = 4
"""A thread computes at most the SHARE-th part of a row's scores."""


def launch_shared(lab: Judge, batch: Batch, rule: str) -> int | None:
    """Launch, and expect that the threads share the work of each row.

    Returns the elements of keys that all of them have read; None on a GPU.
    """
    reads = launch(lab, KERNEL, batch, rule).reads
    if reads is None:
        return None
    called, (_, heads, head_dim) = batch.called(KERNEL), batch.query.shape
    share = "the threads of a block share the scores of a row: none computes more than a quarter of them"
    most = sum(-(-tokens // SHARE) for tokens in batch.visible()) * heads * head_dim
    lab.at_most(reads.keys_of_busiest, most, f"{called} (elements of key_cache, of one thread)", share)
    once = "the threads of a block share the channels of a row: each value is read once for it"
    most = sum(batch.visible()) * heads * head_dim
    lab.at_most(reads.values, most, f"{called} (elements of value_cache, of all threads)", once)
    return reads.keys


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
    launch_shared(lab, batch, "a higher score in a later tile shrinks what came before")


def test_a_window_hides_older_tokens(lab: Judge) -> None:
    batch = Batch(lab, [TILE + lab.size.page_tokens + 3, 3], [1, 1], window=TILE + 2)
    launch_shared(lab, batch, "a token sees itself and the window - 1 tokens before it")


def test_rows_longer_than_a_block_are_written_whole(lab: Judge) -> None:
    batch = Batch(lab, [6], [1], head_dim=TILE + 5, scale=0.1)
    launch(lab, KERNEL, batch, "a thread has channels thread, thread + THREADS, ... below head_dim")


def test_large_scores_do_not_overflow(lab: Judge) -> None:
    launch(lab, KERNEL, Batch(lab, [9], [1], scale=50.0), "the highest score is subtracted first")


def test_elements_of_16_bits_are_widened_and_narrowed(lab: Judge) -> None:
    launch_with_16_bits(lab, KERNEL, Batch(lab, [lab.size.page_tokens + 2], [1]))


def test_the_threads_of_a_block_share_the_work_of_a_row(lab: Judge) -> None:
    launch_shared(lab, Batch(lab, [TILE // 2], [1]), "a row of fewer tokens than there are threads")


def test_no_score_is_computed_twice(lab: Judge) -> None:
    batch = counted_batch(lab)
    keys = launch_shared(lab, batch, "the case whose reads are counted")
    if keys is not None:
        lab.cost(keys, sum(batch.visible()) * batch.query.shape[1] * lab.size.head_dim)
