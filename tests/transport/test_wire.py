"""transport.wire: what is sent comes back, and nothing else comes through."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import WireError
from transport.wire import VERSION, Decoder, encode

pytestmark = pytest.mark.quick


class Put(msgspec.Struct, frozen=True, tag=True, array_like=True):
    key: int
    data: bytes = b""


class Get(msgspec.Struct, frozen=True, tag=True, array_like=True):
    keys: list[int]


DECODER = Decoder(Put | Get, max_bytes=1000)


@given(key=st.integers(0, 2**64 - 1), data=st.binary(max_size=100))
def test_a_message_comes_back_equal(key: int, data: bytes) -> None:
    assert DECODER.decode(encode(Put(key, data))) == Put(key, data)
    assert DECODER.decode(encode(Get([key]))) == Get([key])


@given(st.binary(max_size=300))
def test_whatever_the_bytes_are_the_only_error_is_wire_error(data: bytes) -> None:
    for candidate in (data, bytes([VERSION]) + data):
        try:
            assert isinstance(DECODER.decode(candidate), Put | Get)
        except WireError:
            continue


def test_a_message_of_another_version_is_refused_by_name() -> None:
    data = bytes([VERSION + 1]) + encode(Put(1))[1:]
    with pytest.raises(WireError, match=f"version {VERSION + 1}, this side speaks {VERSION}"):
        DECODER.decode(data)


def test_deep_nesting_does_not_reach_the_interpreters_limit() -> None:
    with pytest.raises(WireError):
        Decoder(list, 10**6).decode(bytes([VERSION]) + b"\x91" * 500_000 + b"\x90")


def test_a_type_that_is_not_of_the_boundary_is_refused() -> None:
    with pytest.raises(WireError, match="Get"):
        Decoder(Put).decode(encode(Get([1])))


@pytest.mark.parametrize("data", [b"", bytes([VERSION])])
def test_too_few_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="too few"):
        DECODER.decode(data)


def test_limits_in_both_directions_carry_the_numbers() -> None:
    with pytest.raises(WireError, match=r"Put has \d+ bytes, the limit is 1000"):
        encode(Put(1, b"x" * 1000), max_bytes=1000)
    with pytest.raises(WireError, match=r"\d+ bytes, the limit is 1000"):
        DECODER.decode(encode(Put(1, b"x" * 1000)))


def test_a_number_that_messagepack_cannot_hold_is_refused() -> None:
    with pytest.raises(WireError, match="Put cannot be encoded"):
        encode(Put(2**70))
