"""The block's shape: ranges tile it, and checksums belong to layers."""

from __future__ import annotations

import numpy as np
import pytest

from store.errors import LayoutError
from store.layout import BlockLayout

pytestmark = pytest.mark.quick
LAYOUT = BlockLayout(layers=3, kv_heads=4, block_tokens=16, head_dim=8, itemsize=2)


def test_sizes_are_those_of_the_array() -> None:
    array = np.zeros(LAYOUT.shape, np.uint16)
    assert LAYOUT.nbytes == array.nbytes
    assert LAYOUT.layer_nbytes == array[0].nbytes


def test_a_layer_is_one_range_and_a_run_of_heads_two() -> None:
    array = np.zeros(LAYOUT.shape, np.uint16)
    flat = array.reshape(-1).view(np.uint8)
    array[1] = 7
    array[2, :, 1:3] = 9
    offset, nbytes = LAYOUT.layer_range(1)
    assert (flat[offset : offset + nbytes].view(np.uint16) == 7).all()
    for offset, nbytes in LAYOUT.head_ranges(2, 1, 2):
        assert (flat[offset : offset + nbytes].view(np.uint16) == 9).all()
    assert sum(nbytes for _, nbytes in LAYOUT.head_ranges(2, 1, 2)) == 2 * int((array == 9).sum())


def test_a_flipped_bit_changes_the_checksum_of_its_layer_alone() -> None:
    array = np.arange(LAYOUT.nbytes // 2, dtype=np.uint16).reshape(LAYOUT.shape)
    before = LAYOUT.checksums(array)
    array[1, 0, 2, 3, 4] ^= 1
    after = LAYOUT.checksums(array)
    assert [a == b for a, b in zip(before, after)] == [True, False, True]


def test_wrong_sizes_are_refused_with_their_numbers() -> None:
    with pytest.raises(LayoutError, match="needed"):
        LAYOUT.checksums(bytes(LAYOUT.nbytes - 1))
    with pytest.raises(LayoutError, match="gaps"):
        LAYOUT.checksums(np.zeros(2 * LAYOUT.nbytes, np.uint8)[::2])
    with pytest.raises(LayoutError, match="layer 3"):
        LAYOUT.layer_range(3)
    with pytest.raises(LayoutError, match="heads 3"):
        LAYOUT.head_ranges(0, 3, 2)
    with pytest.raises(LayoutError, match="layers=0"):
        BlockLayout(0, 1, 1, 1, 1)


def test_a_codec_makes_units_smaller_and_ranges_with_them() -> None:
    exact = BlockLayout(30, 3, 64, 64, 4)
    small = BlockLayout(30, 3, 64, 64, 4, "int8")
    assert small.unit_nbytes == 64 * (2 + 64)
    assert small.shape == (30, 2, 3, 64 * 66)
    assert small.nbytes == 30 * 2 * 3 * small.unit_nbytes
    assert small.cache_nbytes == exact.nbytes == exact.cache_nbytes
    assert small.layer_range(29) == (29 * 6 * small.unit_nbytes, 6 * small.unit_nbytes)
    assert small.head_ranges(0, 1, 2) == ((66 * 64, 2 * 66 * 64), (4 * 66 * 64, 2 * 66 * 64))
    assert len(small.checksums(bytes(small.nbytes))) == 30


def test_a_codec_that_is_unknown_or_cannot_take_the_heads_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"codec='zip': use one of none, bfloat16, int8, int4, fp8"):
        BlockLayout(1, 1, 16, 8, 4, "zip")
    with pytest.raises(LayoutError, match=r"int4.*head_dim=7"):
        BlockLayout(1, 1, 16, 7, 4, "int4")


def test_kv_of_a_token_takes_what_the_paper_says() -> None:
    """ "layers * 2 * kv_heads * head_dim * bytes": LLaMA3-70B in bf16 320 KiB, 128k tokens 40 GiB."""
    llama = BlockLayout(layers=80, kv_heads=8, block_tokens=256, head_dim=128, itemsize=2)
    assert llama.nbytes == 256 * 320 * 2**10
    assert 128 * 2**10 // 256 * llama.nbytes == 40 * 2**30
