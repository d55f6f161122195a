"""Keys: the public standard to the letter, the salt, and the chain in pieces."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from store.errors import TokenError
from store.keys import PrefixChain, block_digest, block_digests, prefix_keys

pytestmark = pytest.mark.quick
tokens = st.lists(st.integers(0, 3), max_size=24)


def standard(token_ids: list[int], block_tokens: int) -> list[int]:
    """The public standard, word by word: XXH3 of u32 little-endian tokens, chained as u64 pairs."""
    keys: list[int] = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        block = token_ids[start : start + block_tokens]
        local = xxh3_64_intdigest(struct.pack(f"<{block_tokens}I", *block))
        keys.append(xxh3_64_intdigest(struct.pack("<QQ", keys[-1], local)) if keys else local)
    return keys


def test_golden_keys_never_change() -> None:
    assert [f"{key:016x}" for key in prefix_keys(range(12), 4)] == GOLDEN_EMPTY_SALT
    assert [f"{key:016x}" for key in prefix_keys(range(12), 4, b"tenant")] == GOLDEN_TENANT
    assert f"{block_digest([1, 2, 3, 4]):016x}" == GOLDEN_DIGEST


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_an_empty_salt_gives_the_public_standard(token_ids, block_tokens) -> None:
    assert prefix_keys(token_ids, block_tokens) == standard(token_ids, block_tokens)


@given(
    tokens, tokens, st.integers(1, 4), st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"", b"a", b"b"])
)
def test_an_equal_key_means_an_equal_whole_prefix_and_salt(
    first, second, block_tokens, salt, other_salt
) -> None:
    first_keys = prefix_keys(first, block_tokens, salt)
    second_keys = prefix_keys(second, block_tokens, other_salt)
    for i, key in enumerate(first_keys):
        for j, other in enumerate(second_keys):
            same = first[: (i + 1) * block_tokens] == second[: (j + 1) * block_tokens] and salt == other_salt
            assert (key == other) == same


@given(st.lists(tokens, max_size=6), st.integers(1, 5), st.sampled_from([b"", b"salt"]))
def test_a_chain_fed_in_pieces_has_the_keys_of_the_whole(pieces, block_tokens, salt) -> None:
    chain = PrefixChain(block_tokens, salt)
    keys = [key for piece in pieces for key in chain.extend(piece)]
    whole = [token for piece in pieces for token in piece]
    assert keys == prefix_keys(whole, block_tokens, salt)
    assert chain.pending == whole[len(keys) * block_tokens :]
    assert chain.last_key == (keys[-1] if keys else None)


def test_a_chain_continues_behind_the_last_key_of_a_prompt() -> None:
    prompt, answer = list(range(8)), [50, 51, 52, 53, 54]
    keys = prefix_keys(prompt, 4, b"s")
    continued = PrefixChain(4, last_key=keys[-1]).extend(answer)
    assert keys + continued == prefix_keys(prompt + answer, 4, b"s")


def test_keys_are_the_same_in_a_process_with_another_hash_seed() -> None:
    program = (
        "import json; from store.keys import *;"
        "print(json.dumps([prefix_keys(range(64), 16, b'x'), block_digests(range(64), 16)]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60, check=True
    )
    assert json.loads(run.stdout) == [prefix_keys(range(64), 16, b"x"), block_digests(range(64), 16)]


def test_a_trailing_partial_block_has_no_key() -> None:
    assert prefix_keys(range(7), 4) == prefix_keys(range(4), 4)
    assert prefix_keys(range(3), 4) == []
    assert prefix_keys([], 4) == []


def test_arrays_and_lists_have_the_same_keys() -> None:
    ids = list(range(0, 2**20, 4097))
    for kind in ("<i8", "<u4", ">i4", "<u8"):
        assert prefix_keys(np.array(ids, kind), 16, b"s") == prefix_keys(ids, 16, b"s")
    assert prefix_keys(np.arange(20)[::2], 5) == prefix_keys(list(range(0, 20, 2)), 5)


def test_the_digest_is_independent_of_the_key_and_sees_the_length() -> None:
    assert block_digests(range(8), 4) == [block_digest(range(4)), block_digest(range(4, 8))]
    assert block_digest([1, 2, 3, 4]) != prefix_keys([1, 2, 3, 4], 4)[0]
    assert block_digest([0]) != block_digest([0, 0])


@pytest.mark.parametrize(
    "ids",
    [[-1], [2**32], ["a"], [1.5], b"abcd", "abcd", np.array([-1]), np.array([1.0]), np.zeros((2, 2), int)],
)
def test_token_ids_that_are_not_u32_are_refused_by_name(ids) -> None:
    with pytest.raises(TokenError, match="token ids must be integers"):
        prefix_keys(ids, 1)


def test_a_refused_token_leaves_the_chain_as_it_was() -> None:
    chain = PrefixChain(2)
    chain.extend([1])
    with pytest.raises(TokenError):
        chain.extend([2, -1])
    assert chain.pending == [1]
    assert chain.extend([2]) == prefix_keys([1, 2], 2)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(TokenError, match="at least 1"):
        prefix_keys([1], 0)
    with pytest.raises(TokenError, match="at least 1"):
        block_digests([1], 0)


GOLDEN_EMPTY_SALT = ["a1d0bd893c9531ac", "db33494ff9c294ff", "eb92e7b6e955eee4"]
GOLDEN_TENANT = ["cbcd9e4914189867", "ec08cc1d66fa52a4", "075f128bdf51bd96"]
GOLDEN_DIGEST = "fe337fae5081b6f3"
