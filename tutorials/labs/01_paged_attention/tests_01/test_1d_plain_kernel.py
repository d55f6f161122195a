"""1d: a kernel in which each thread computes one number of the output by itself."""

from __future__ import annotations

from mooncake_lite.labs.judging import Judge

from .cases import Batch, counted_batch, launch, launch_with_16_bits

KERNEL = "attention_v1"


def test_the_only_token_of_a_sequence_sees_itself(lab: Judge) -> None:
    launch(lab, KERNEL, Batch(lab, [1], [1]), "a token sees itself: the softmax of one score is 1")


def test_each_new_token_sees_its_whole_sequence(lab: Judge) -> None:
    batch = Batch(lab, [2 * lab.size.page_tokens + 1, 3, 1], [1, 1, 1], heads=2, kv_heads=2)
    launch(
        lab, KERNEL, batch, "out = softmax(query . keys * scale) . values, over the tokens of its sequence"
    )


def test_a_new_token_sees_no_later_one(lab: Judge) -> None:
    batch = Batch(lab, [lab.size.page_tokens + 3, 4], [3, 4])
    launch(lab, KERNEL, batch, "new token i is at position context - new + i, and sees none after it")


def test_heads_of_a_group_share_a_kv_head(lab: Judge) -> None:
    batch = Batch(lab, [lab.size.page_tokens + 1], [2], heads=4, kv_heads=2)
    launch(lab, KERNEL, batch, "head looks at kv head // group, and heads // kv_heads is the group")


def test_sequences_without_new_tokens_or_context_are_passed(lab: Judge) -> None:
    batch = Batch(lab, [5, 6, 0, 4], [1, 0, 1, 2])
    launch(lab, KERNEL, batch, "a sequence without new tokens has no row; a context of 0 gives zeros")


def test_a_window_hides_older_tokens(lab: Judge) -> None:
    batch = Batch(lab, [2 * lab.size.page_tokens + 2, 3], [2, 1], window=lab.size.page_tokens + 1)
    launch(lab, KERNEL, batch, "a token sees itself and the window - 1 tokens before it")


def test_threads_too_many_touch_nothing(lab: Judge) -> None:
    batch = Batch(lab, [7], [1], heads=1, head_dim=5)
    launch(lab, KERNEL, batch, "a block has more threads than this output has numbers")


def test_large_scores_do_not_overflow(lab: Judge) -> None:
    launch(lab, KERNEL, Batch(lab, [9], [1], scale=50.0), "the highest score is subtracted first")


def test_elements_of_16_bits_are_widened_and_narrowed(lab: Judge) -> None:
    launch_with_16_bits(lab, KERNEL, Batch(lab, [lab.size.page_tokens + 2], [1]))


def test_a_thread_reads_the_keys_at_most_twice(lab: Judge) -> None:
    batch = counted_batch(lab)
    seen = launch(lab, KERNEL, batch, "the case whose reads are counted")
    if seen.reads is not None:
        threads_per_row = batch.query.shape[1] * lab.size.head_dim
        lab.cost(seen.reads.keys, 2 * sum(batch.visible()) * threads_per_row * lab.size.head_dim)
