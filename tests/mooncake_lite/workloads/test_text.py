"""The text of a trace: as many tokens as the trace says, and equal prefixes for equal ids."""

from __future__ import annotations

import random
from itertools import combinations, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.errors import ConfigError
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.text import WORDS, check_distinct, prompt_of, text_of_block
from mooncake_lite.workloads.traces import Trace, TraceRequest
from tests.mooncake_lite.workloads.made import made_trace
from tests.python import printed_by

IDS = st.integers(0, 2**63 - 1)


@pytest.mark.quick
@given(IDS, IDS, st.integers(8, 600))
def test_equal_ids_have_equal_texts_and_other_ids_others(one: int, other: int, tokens: int) -> None:
    text = text_of_block(one, tokens)
    assert len(text.split(" ")) == tokens + 1
    assert text.startswith(text_of_block(one, tokens - 7))
    assert (text == text_of_block(other, tokens)) == (one == other)


@pytest.mark.quick
def test_a_short_block_tells_as_many_ids_as_it_can() -> None:
    assert len(set(WORDS)) == 256
    assert len({text_of_block(number, 2) for number in range(2**16)}) == 2**16


@pytest.mark.quick
def test_every_process_makes_the_same_text() -> None:
    program = "from mooncake_lite.workloads.text import text_of_block; print(text_of_block(182790, 40))"
    texts = {printed_by("-c", program, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert texts == {f"{text_of_block(182790, 40)}\n"}
    assert text_of_block(182790, 9) == " by each in of of of of of game"


@pytest.mark.quick
def test_prompts_share_as_much_text_as_their_ids_say() -> None:
    trace = divided(made_trace(60), 64)
    for one in trace.requests:
        for other in trace.requests:
            shared = [item for item, same in zip(one.hash_ids, other.hash_ids) if item == same]
            text = "".join(text_of_block(item, trace.block_tokens) for item in shared)
            if shared != one.hash_ids:
                assert prompt_of(one, trace.block_tokens).startswith(text)
                assert prompt_of(other, trace.block_tokens).startswith(text)


def same_blocks(one: list[object], other: list[object]) -> int:
    """Leading ones that are equal."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other))])


@pytest.mark.quick
@pytest.mark.parametrize("by", [1, 8, 64, 128, 256, 512])
@pytest.mark.parametrize("step", [1, 255, 256, 65_536, 2**40 + 1])
def test_short_blocks_differ_in_their_words_where_the_ids_of_their_prefixes_differ(
    by: int, step: int
) -> None:
    """Ids are far apart, so that their last digits are equal in several bases; prompts share up to six."""
    draw, paths = random.Random(f"{by} {step}"), [list[int]()]
    for number in range(60):
        path = draw.choice(paths)
        paths.append([*path[:6], number * step, (1000 + number) * step])
    requests = [TraceRequest(0, 512 * len(path), 1, path) for path in paths[1:]]
    small = divided(Trace(requests), by)
    size, words = small.block_tokens, [prompt_of(one, small.block_tokens).split() for one in small.requests]
    blocks = [[each[at : at + size] for at in range(0, len(each), size)] for each in words]
    for (one, one_text), (other, other_text) in combinations(zip(requests, blocks), 2):
        assert same_blocks(one.hash_ids, other.hash_ids) == same_blocks(one_text, other_text)


@pytest.mark.parametrize(
    ("followers", "by", "most"), [pytest.param(257, 512, 256, marks=pytest.mark.quick), (65_537, 256, 128)]
)
def test_a_division_that_would_make_prompts_equal_is_refused_with_one_that_does_not(
    followers: int, by: int, most: int
) -> None:
    trace = Trace([TraceRequest(0, 1024, 1, [7, 1000 * number]) for number in range(followers)])
    small = divided(trace, by)
    refused = f"cannot be divided by {by}: .*; divide by {most} at most"
    with pytest.raises(ConfigError, match=refused):
        check_distinct(small.requests, small.block_tokens)
    with pytest.raises(ConfigError, match=refused):
        prompt_of(small.requests[-1], small.block_tokens)
    fits = divided(trace, most)
    check_distinct(fits.requests, fits.block_tokens)
    check_distinct(small.requests[:-1], small.block_tokens)


def test_a_word_is_a_token_of_the_default_model() -> None:
    tokenizer = load_tokenizer(resolve_model("default"))
    trace = made_trace(20)
    for request in trace.requests:
        assert len(tokenizer.encode(prompt_of(request, trace.block_tokens))) == request.input_length
    for block_id in (0, 182_790, 2**63 - 1):
        for tokens in (1, 7, 8, 512):
            assert len(tokenizer.encode(text_of_block(block_id, tokens))) == tokens
