"""store.mooncake_store.config, arguments and buffers: what callers may say."""

from __future__ import annotations

import numpy as np
import pytest

from store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from store.mooncake_store.arguments import as_view, checked_number, is_usable, wish_of
from store.mooncake_store.buffers import BufferHandle, Buffers
from store.mooncake_store.codes import CodeError
from store.mooncake_store.config import Setup, parse_size

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16MB", 16 << 20),
        ("16 MB", 16 << 20),
        ("1gb", 1 << 30),
        ("4k", 4096),
        ("7", 7),
        (0, 0),
        (5, 5),
        ("2TB", 2 << 40),
    ],
)
def test_sizes_are_powers_of_1024(text: object, nbytes: int) -> None:
    assert parse_size("global_segment_size", text) == nbytes


@pytest.mark.parametrize(
    "text", ["50%", "", "MB", "-1", -1, 1.5, None, "1.5MB", "16MiB", True, "99TB", 2**60]
)
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(CodeError, match="global_segment_size") as caught:
        parse_size("global_segment_size", text)
    assert caught.value.code == -600


def test_a_setup_without_a_master_is_refused() -> None:
    with pytest.raises(CodeError, match="master_server_addr"):
        Setup.from_values({"local_hostname": "here"})


def test_setup_wants_its_names_and_no_others() -> None:
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match="missing"):
        store.setup("127.0.0.1")
    with pytest.raises(TypeError, match="nosuch"):
        store.setup(*["127.0.0.1", "P2PHANDSHAKE", 1, 1, "tcp", "", "127.0.0.1:1"], nosuch=1)
    with pytest.raises(TypeError, match="global_segment_size"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", "16MB", 1, "tcp", "", "127.0.0.1:1")


def test_a_wrong_type_is_named_by_its_argument() -> None:
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match="master_server_addr must be a str, not NoneType"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", 1, 1, "tcp", "", None)
    with pytest.raises(TypeError, match="regex_pattern must be a str, not int"):
        store.remove_by_regex(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment_name must be a str, not NoneType"):
        store.batch_replica_clear(["a"], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="targets must be a list of str, not str"):
        store.create_copy_task("a", "b")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="target must be a str, not NoneType"):
        store.create_move_task("a", "b", None)  # type: ignore[arg-type]


def test_an_array_of_python_objects_is_no_buffer_of_bytes() -> None:
    """Its memory holds addresses, which mean nothing to whoever reads them."""
    records = np.zeros(2, [("Offset", np.int32), ("what", object)])
    for value in (np.array([object()]), memoryview(np.array([object()])), records):
        with pytest.raises(TypeError, match="Python objects"):
            as_view(value)
    assert as_view(np.zeros(2, [("Offset", np.int32)])).nbytes == 8


def test_a_store_that_was_not_set_up_answers_with_codes() -> None:
    store = MooncakeDistributedStore()
    assert (store.put("a", b"1"), store.get("a"), store.is_exist("a")) == (-600, b"", -600)
    assert (store.get_batch(["a"]), store.batch_is_exist(["a"]), store.remove("a")) == ([b""], [-600], -600)
    assert (store.get_buffer("a"), store.get_into("a", 1, 1), store.get_hostname()) == (None, -600, "")
    assert (store.remove_all(), store.remove_by_regex("a"), store.get_size("a")) == (-600, -600, -600)
    assert (store.get_replica_desc("a"), store.batch_replica_clear(["a"])) == ([], [])
    assert store.create_copy_task("a", ["b"]) == ((0, 0), -600)
    assert store.query_task((1, 0)) == (None, -600)
    assert store.get_into_ranges([1], [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert (store.close(), store.health_check()) == (0, 1)


def test_a_wish_says_what_a_config_means() -> None:
    config = ReplicateConfig()
    config.replica_num = 2
    config.soft_pin_action = SoftPinAction.ENABLE
    config.preferred_segment, config.preferred_segments = "a", ["b", "a"]
    wish = wish_of(config)
    assert (wish.replicas, wish.soft_pin_ms, wish.preferred) == (2, 1_800_000, ["a", "b"])
    config.soft_pin_ttl_ms = 5
    assert wish_of(config).soft_pin_ms == 5  # type: ignore[union-attr]
    config.soft_pin_action = SoftPinAction.DISABLE
    assert wish_of(config) is None
    with pytest.raises(TypeError, match="ReplicateConfig"):
        wish_of({})  # type: ignore[arg-type]


def test_two_configs_share_no_list() -> None:
    first, second = ReplicateConfig(), ReplicateConfig()
    first.preferred_segments.append("a")
    assert second.preferred_segments == []


def test_numbers_are_addresses_and_sizes() -> None:
    assert checked_number("size", np.int64(5)) == 5
    for wrong in (-1, 2**64, "5", None, True, 1.0):
        with pytest.raises(TypeError, match="size"):
            checked_number("size", wrong)


def test_a_buffer_with_gaps_or_wide_items_is_flattened() -> None:
    assert bytes(as_view(memoryview(b"abcdef")[::2])) == b"ace"
    assert bytes(as_view(np.arange(3, dtype="<u2"))) == b"\0\0\1\0\2\0"
    assert len(as_view(np.zeros((2, 3), np.float32))) == 24


def test_names_have_a_limit() -> None:
    assert is_usable("k" * 65536)
    assert not is_usable("k" * 65537)
    assert not is_usable("\u00fc" * 65536)
    assert not is_usable("")


def test_registered_ranges_do_not_overlap() -> None:
    buffers = Buffers()
    assert [buffers.register(*one) for one in ((100, 50), (200, 50), (150, 50))] == [0, 0, 0]
    assert [buffers.register(*one) for one in ((149, 1), (90, 11), (0, 5), (300, 0))] == [-600] * 4
    assert (buffers.room(120), buffers.room(150), buffers.room(99), buffers.room(250)) == (30, 50, 0, 0)
    assert (buffers.unregister(150), buffers.unregister(150), buffers.unregister(101)) == (0, -600, -600)
    buffers.check()


def test_a_handle_is_a_buffer_with_an_address() -> None:
    import ctypes

    handle = BufferHandle(b"hello")
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"hello"
    assert bytes(memoryview(handle)) == b"hello"


def test_what_has_no_bytes_to_give_is_a_type_error_and_nothing_is_an_empty_value() -> None:
    assert len(as_view(np.zeros((0, 3)))) == 0
    released = memoryview(b"gone")
    released.release()
    for wrong in (np.zeros(2, "M8[s]"), released, None):
        with pytest.raises(TypeError, match="must be a buffer"):
            as_view(wrong)


def test_numbers_and_patterns_beyond_all_bounds_are_errors_of_the_caller() -> None:
    store = MooncakeDistributedStore()
    for size in (2**63, 2**64 - 1):
        with pytest.raises(TypeError, match="size"):
            store.put_from("a", 4096, size)
        with pytest.raises(TypeError, match="size"):
            store.batch_put_from(["a"], [4096], [size])
    for pattern in ("(", "a{99999999999}", "(" * 5000):
        assert store.remove_by_regex(pattern) == -600
