"""What the store keeps when room runs out, and what it never gives up."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator

import pytest

from store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from store.mooncake_store.master.master import Master
from tests.patience import wait_until
from tests.store.mooncake_store.running import MIB, address, master_thread, new_store, rest

LEASE_MS = 4000
OBJECT = bytes(MIB - 64)


@pytest.fixture
def master() -> Iterator[Master]:
    with master_thread(LEASE_MS) as master:
        yield master


@pytest.fixture
def store(master: Master) -> Iterator[MooncakeDistributedStore]:
    store = new_store(address(master), 16 * MIB)
    yield store
    store.close()
    master.catalogue.check()


def pinned(*, hard: bool = False, ttl_ms: int | None = None) -> ReplicateConfig:
    config = ReplicateConfig()
    config.with_hard_pin = hard
    if not hard:
        config.soft_pin_action = SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = ttl_ms
    return config


def fill(
    store: MooncakeDistributedStore, first: int, last: int, config: ReplicateConfig | None = None
) -> list[int]:
    return [store.put(f"k{number}", OBJECT, config) for number in range(first, last)]


def there(store: MooncakeDistributedStore, first: int, last: int) -> list[int]:
    """Numbers of those that are there; grants no lease."""
    names = [f"k{number}" for number in range(first, last)]
    found = store.batch_get_replica_desc(names)
    return [number for number, name in enumerate(names, first) if name in found]


def test_nothing_goes_below_the_high_water_mark(store: MooncakeDistributedStore) -> None:
    assert fill(store, 0, 14) == [0] * 14
    assert there(store, 0, 14) == list(range(14))


def test_above_it_the_oldest_go_at_least_a_twentieth_at_once(store: MooncakeDistributedStore) -> None:
    assert fill(store, 0, 15) == [0] * 15
    assert store.get_size("k14") == len(OBJECT)
    left = there(store, 0, 15)
    assert left == list(range(15 - len(left), 15))
    assert 12 <= len(left) <= 14


def test_a_read_protects_its_object_for_the_time_of_a_lease(store: MooncakeDistributedStore) -> None:
    fill(store, 0, 14)
    assert store.get("k0") == OBJECT
    assert store.is_exist("k1") == 1
    fill(store, 14, 20)
    assert {0, 1} <= set(there(store, 0, 14))
    time.sleep(1.1 * LEASE_MS / 1000)
    fill(store, 20, 40)
    assert not {0, 1} & set(there(store, 0, 20))


def test_a_pool_of_leased_objects_is_full(store: MooncakeDistributedStore) -> None:
    for number in range(16):
        assert fill(store, number, number + 1) == [0]
        assert store.is_exist(f"k{number}") == 1
    assert fill(store, 16, 17) == [-200]
    assert there(store, 0, 16) == list(range(16))
    time.sleep(1.1 * LEASE_MS / 1000)
    assert store.put("later", OBJECT) == 0


def test_hard_pinned_objects_are_never_evicted(store: MooncakeDistributedStore) -> None:
    assert fill(store, 0, 6, pinned(hard=True)) == [0] * 6
    assert fill(store, 6, 60) == [0] * 54
    assert there(store, 0, 6) == list(range(6))
    assert store.remove("k0") == 0
    assert -200 in fill(store, 100, 116, pinned(hard=True))


def test_soft_pinned_objects_go_last_and_only_while_their_pin_lasts(store: MooncakeDistributedStore) -> None:
    fill(store, 0, 4, pinned())
    fill(store, 4, 8, pinned(ttl_ms=1))
    fill(store, 8, 40)
    assert there(store, 0, 8) == [0, 1, 2, 3]
    assert fill(store, 100, 130, pinned()) == [0] * 30, "when nothing else is left they go too"


def test_an_upsert_keeps_the_pin_unless_it_says_otherwise(store: MooncakeDistributedStore) -> None:
    fill(store, 0, 2, pinned())
    assert store.upsert("k0", OBJECT) == 0
    loose = ReplicateConfig()
    loose.soft_pin_action = SoftPinAction.DISABLE
    assert store.upsert("k1", OBJECT, loose) == 0
    fill(store, 2, 40)
    assert there(store, 0, 2) == [0]


def test_what_can_never_fit_evicts_nothing(store: MooncakeDistributedStore) -> None:
    fill(store, 0, 10)
    assert store.put("huge", bytes(17 * MIB)) == -200
    assert there(store, 0, 10) == list(range(10))


def test_room_in_advance_comes_back(master: Master, store: MooncakeDistributedStore) -> None:
    larger = new_store(address(master), 128 * MIB)
    assert larger.put("bulk", OBJECT) == 0
    assert wait_until(lambda: master.catalogue.stats()["spares"] == 0, 10.0)
    assert larger.get("bulk") == OBJECT
    larger.close()


@pytest.mark.parametrize("path", ["", "tcp"])
def test_an_object_that_no_hole_holds_is_scattered_and_nothing_is_evicted(
    master: Master, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second object of 64 KiB goes: half the segment is free, in holes of 64 KiB."""
    monkeypatch.setenv("MOONCAKE_LITE_STORE_PATH", path)
    store, other = new_store(address(master), 4 * MIB), new_store(address(master), 0)
    small = 64 * 1024
    assert [store.put(f"s{number}", bytes([number]) * small) for number in range(52)] == [0] * 52
    assert [store.remove(f"s{number}") for number in range(0, 52, 2)] == [0] * 26
    value = random.Random(1).randbytes(MIB)
    assert store.put("large", value) == 0
    rest(store)
    master.catalogue.check()
    assert master.stats()["evictions"] == 0
    assert other.get("large") == value
    buffer = ctypes.create_string_buffer(MIB)
    assert other.register_buffer(ctypes.addressof(buffer), MIB) == 0
    assert other.get_into("large", ctypes.addressof(buffer), MIB) == MIB
    assert buffer.raw == value
    target = new_store(address(master), 4 * MIB)
    task, code = other.create_move_task("large", store.get_hostname(), target.get_hostname())
    assert code == 0
    assert wait_until(lambda: other.query_task(task)[0].status.name == "SUCCESS")  # type: ignore[union-attr]
    assert other.get("large") == value
    for one in (other, target, store):
        one.close()
    master.catalogue.check()
