"""A thread that dies ends its rank, and the conductor hears which thread and why."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.ranks.assemble import _Neighbours
from mooncake_lite.ranks.plan import StartPlan
from transport.channel import CurveKeys, Hub
from transport.wire import Decoder

pytestmark = pytest.mark.quick

LIMIT_S = 20.0


def boom(*_: object) -> Any:
    raise KeyError("a bug of ours")


def test_a_dead_heart_ends_the_rank_and_the_conductor_hears_why(tmp_path: Path) -> None:
    failed: list[str] = []
    keys = CurveKeys.generate()
    with (
        Hub([f"ipc://{tmp_path}/control"], Decoder(m.TO_CONDUCTOR), keys) as hub,
        Hub([f"ipc://{tmp_path}/heart"], Decoder(m.Stop), keys) as hearts,
    ):
        process: Any = SimpleNamespace(config=ServeConfig(), role="store", fail=failed.append)
        world: Any = SimpleNamespace(
            rank=3, node_of=[0] * 4, node_ranks=range(4), allgather_bytes=lambda data: [data] * 4
        )
        plan = StartPlan(hub.endpoints, hearts.endpoints, *[keys.to_bytes()] * 3)
        neighbours = _Neighbours(process, world, plan)
        neighbours.heart._spoke.receive = boom  # type: ignore[method-assign]
        ((_, message),) = hub.receive(LIMIT_S)
        neighbours.heart._thread.join(LIMIT_S)
        neighbours.conductor.close()
    assert message == m.RankLost(3, 0, "failed: thread heart rank-3 died: KeyError: 'a bug of ours'")
    assert failed == ["thread heart rank-3 died: KeyError: 'a bug of ours'"]
