"""The text of a trace: as many tokens as the trace says, and equal prefixes for equal ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.text import WORDS, prompt_of, text_of_block
from tests.mooncake_lite.workloads.made import made_trace

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
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {f"{text_of_block(182790, 40)}\n".encode()}
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


def test_a_word_is_a_token_of_the_default_model() -> None:
    tokenizer = load_tokenizer(resolve_model("default"))
    trace = made_trace(20)
    for request in trace.requests:
        assert len(tokenizer.encode(prompt_of(request, trace.block_tokens))) == request.input_length
    for block_id in (0, 182_790, 2**63 - 1):
        for tokens in (1, 7, 8, 512):
            assert len(tokenizer.encode(text_of_block(block_id, tokens))) == tokens
