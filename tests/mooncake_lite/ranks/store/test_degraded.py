"""A tier in trouble: the terminal, the conductor and the gateways hear of its beginning and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.gateways import Gateways
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ThreadDied
from mooncake_lite.ranks.store.loop import StoreRole
from mooncake_lite.ranks.store.tier_folder import open_tier, too_large
from store.tier import HDF5Tier
from tests.mooncake_lite.conductor.test_conductor_role import Cluster
from tests.mooncake_lite.ranks.links import link_to
from tests.patience import wait_until
from tests.store.samples import FINGERPRINT, SMALL

pytestmark = pytest.mark.quick
FULL = "the SSD tier cannot write: No space left on device ({} dropped)"


class Told:
    """A store rank with a tier; what it tells the conductor."""

    def __init__(self, folder: Path) -> None:
        self.messages: list[Any] = []
        spoke: Any = SimpleNamespace(
            send=self.messages.append, wake=lambda: None, receive=lambda limit_s: time.sleep(0.001) or []
        )
        engine: Any = SimpleNamespace(local=np.zeros(SMALL.nbytes, np.uint8), counters={})
        self.tier = HDF5Tier(folder, 1 << 26, SMALL, FINGERPRINT)
        hello = m.RankHello(3, "store", 0, epoch=2)
        self.link = link_to(spoke, hello, engine)
        self.role = StoreRole(engine, self.link, self.tier, SMALL)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path / "tier")
    yield told
    told.role.close(5.0)


def test_the_terminal_hears_of_the_beginning_and_the_end_and_the_conductor_of_each_change(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    health, role = told.role._health, told.role
    role._tell_troubles(0.0)
    health.not_written(1, "No space left on device")
    role._tell_troubles(1.0)
    role._tell_troubles(2.0)
    health.not_written(103)
    role._tell_troubles(3.0)
    health.written()
    health.sealed()
    role._tell_troubles(4.0)
    assert told.messages == [
        m.Degraded(3, "writes", FULL.format("1 block")),
        m.Degraded(3, "writes", FULL.format("104 blocks")),
        m.Degraded(3, "writes", ""),
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"mooncake-lite: rank 3 (store): {FULL.format('1 block')}",
        "mooncake-lite: rank 3 (store): the SSD tier can write again",
    ]


def test_gateways_hear_what_is_degraded_and_by_which_rank(told: Told) -> None:
    cluster = Cluster()
    full = FULL.format("104 blocks")
    (status,) = cluster.tell("rank-3", m.Degraded(3, "writes", full))
    assert status == m.ClusterStatus(True, "ready", [f"rank 3 (store): {full}"])
    (status,) = cluster.tell("rank-3", m.Degraded(3, "writes", ""))
    assert status == m.ClusterStatus(True, "ready", [])


def test_each_kind_of_trouble_of_each_rank_is_told_by_itself() -> None:
    gateways = Gateways([0] * 5, "")
    for rank, kind in ((4, "writes"), (3, "writes"), (3, "blocks")):
        gateways.set_degraded(m.Degraded(rank, kind, f"{kind} of {rank}"), "store")
    gateways.set_degraded(m.Degraded(3, "writes", ""), "store")
    gateways.set_degraded(m.Degraded(4, "blocks", ""), "store")
    assert gateways.status.degraded == ["rank 4 (store): writes of 4", "rank 3 (store): blocks of 3"]


def test_a_thread_of_the_tier_that_dies_ends_the_rank_with_its_name_and_the_reason(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> Never:
        raise MemoryError("a bug of ours")

    monkeypatch.setattr(told.tier, "load", bug)
    told.link._reported_at = time.monotonic()
    told.role._load(m.LoadBlocks(3, 1, [7], [7], [m.BlockRef(1, 3, 0, SMALL.nbytes)]))
    with pytest.raises(ThreadDied, match=r"^thread tier-reader-\d died: MemoryError: a bug of ours$"):
        told.role.run()


def test_what_a_rank_says_carries_its_number_and_its_epoch(told: Told) -> None:
    told.role.announce()
    told.role._load(m.LoadBlocks(3, 1, [7], [7], [m.BlockRef(1, 3, 0, SMALL.nbytes)]))
    assert wait_until(lambda: told.role._outbox)
    told.role._remove(m.RemoveBlocks(3, [7]))
    told.role._send_outbox()
    assert {(message.rank, message.epoch) for message in told.messages} == {(3, 2)}
    assert {type(message) for message in told.messages} >= {m.TierIndexed, m.BlocksLoaded}


def test_a_tier_larger_than_its_disk_is_warned_about_and_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ssd_bytes, warned in ((1 << 24, False), (1 << 60, True)):
        config = ServeConfig(ssd_dir=str(tmp_path), ssd_bytes=ssd_bytes)
        tier = open_tier(config, 0, SMALL, bytes(16))
        tier.close()
        out = capsys.readouterr().out
        assert out.count("\n") == warned
        assert (f"--ssd-bytes {ssd_bytes} is more than the disk of {tmp_path}/store-0" in out) is warned
    assert "3 B are free and the tier holds 2 B" in too_large(tmp_path, 9, 3, 2)
