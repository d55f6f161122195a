"""Emptying the prefix cache over HTTP: what the conductor is asked, and what the client is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.gateway import prefix_reset
from mooncake_lite.gateway.answer_types import ResetAnswer
from mooncake_lite.gateway.cluster_view import ClusterState, ClusterView
from mooncake_lite.gateway.prefix_reset import reset_prefix_cache
from mooncake_lite.gateway.problems import Broken, Unavailable
from mooncake_lite.gateway.settings import read_settings
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, FakeCluster
from tests.mooncake_lite.gateway.test_process import settings_file


class Scripted:
    """A cluster with these answers; the last one is repeated."""

    def __init__(self, *answers: m.PoolEnded) -> None:
        self._answers = list(answers)

    async def remove_all_blocks(self, limit_s: float) -> m.PoolEnded:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def reset(*answers: m.PoolEnded) -> ResetAnswer:
    cluster: Any = Scripted(*answers)
    return asyncio.run(reset_prefix_cache(cluster))


def test_a_client_with_the_key_empties_the_cache_and_hears_how_many_blocks_went(start: Start) -> None:
    gateway, cluster = start(api_key="secret")
    cluster.pool_answers = [m.PoolEnded(blocks=5, kept=2), m.PoolEnded(blocks=2), m.PoolEnded("no room")]
    stranger = gateway.http.post("/reset_prefix_cache")
    gateway.http.headers["Authorization"] = "Bearer secret"
    done, failed = gateway.http.post("/reset_prefix_cache"), gateway.http.post("/reset_prefix_cache")

    assert stranger.status_code == 401
    assert (done.status_code, done.json()) == (200, {"removed_blocks": 7, "kept_blocks": 0})
    assert (failed.status_code, failed.json()["error"]["message"]) == (503, "no room")
    queries = cluster.all_of(m.PoolQuery)
    assert queries == [m.PoolQuery("rm-all", force=True, number=number) for number in (1, 2, 3)]


@pytest.mark.quick
def test_blocks_that_are_being_written_are_waited_for_and_counted_if_they_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_reset, "PAUSE_S", 0.0)
    assert reset(
        m.PoolEnded(blocks=3, kept=2), m.PoolEnded(blocks=1, kept=1), m.PoolEnded(blocks=1)
    ) == ResetAnswer(5, 0)
    monkeypatch.setattr(prefix_reset, "RETRY_LIMIT_S", 0.0)
    assert reset(m.PoolEnded(blocks=3, kept=2)) == ResetAnswer(3, 2)


@pytest.mark.quick
def test_a_tier_that_cannot_log_a_removal_and_a_refusal_are_different_errors() -> None:
    with pytest.raises(Broken, match="may come back"):
        reset(m.PoolEnded("3 blocks may come back", blocks=3))
    with pytest.raises(Unavailable, match="try again"):
        reset(m.PoolEnded("4 other commands; try again"))


@pytest.mark.quick
@pytest.mark.parametrize("stops", [False, True])
def test_a_conductor_that_does_not_answer_is_not_waited_for(run_dir: Path, stops: bool) -> None:
    settings_file(run_dir)
    cluster = FakeCluster(run_dir)
    view = ClusterView(read_settings(run_dir), lambda reason, grace_s: None)

    async def ask() -> None:
        running = asyncio.create_task(view.run())
        while view.state is not ClusterState.READY:
            await asyncio.sleep(0.01)
        cluster.silent = True
        if stops:
            asyncio.get_running_loop().call_later(0.05, view.stop, "Ctrl-C")
        try:
            await view.remove_all_blocks(LIMIT_S if stops else 0.05)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            view.sockets.close()

    with pytest.raises(Unavailable, match="is stopping: Ctrl-C" if stops else "not answered for 0.05 s"):
        asyncio.run(ask())
    cluster.close()
