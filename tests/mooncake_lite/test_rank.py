"""A rank from outside: how it ends when its role cannot continue."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_lite import rank
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ModelError
from mooncake_lite.launch.place import Place
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.ranks.process import START_THRESHOLD, RankProcess

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("error", "end"),
    [(ModelError("x.json is missing"), ("x.json is missing", 2)), (KeyError(5), ("KeyError: 5",))],
)
def test_a_rank_refuses_what_the_user_asked_for_and_fails_for_any_other_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, end: tuple[object, ...]
) -> None:
    ends: list[tuple[object, ...]] = []
    process = SimpleNamespace(
        place=SimpleNamespace(rank=2), fail=lambda *end: ends.append(end), on_signal=None, role="decode"
    )

    def play(process: object) -> int:
        raise error

    monkeypatch.setattr(rank, "world_from_environment", lambda: Place(2, 4, "mpirun"))
    monkeypatch.setattr(rank, "RankProcess", lambda *parts: process)
    monkeypatch.setattr(rank, "_play", play)
    for name in ("block_stop_signals", "die_with_parent", "shield_output", "watch_signals", "_open_run_dir"):
        monkeypatch.setattr(rank, name, lambda *given: None)
    monkeypatch.setattr(rank, "set_thread_environment", lambda threads: None)
    rank.run(ServeConfig())
    assert ends == [end]


def test_garbage_is_searched_for_less_often_until_a_rank_is_ready_and_never_in_what_it_has_loaded(
    tmp_path: Path,
) -> None:
    before = gc.get_threshold()
    gc.unfreeze()
    process = RankProcess(Place(1, 3, "mpirun"), ServeConfig(), RunDir(tmp_path, lock=-1))
    try:
        assert gc.get_threshold() == (START_THRESHOLD, *before[1:])
    finally:
        process.ready()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() > 0
