"""Queries about the pool, from `mooncake-lite store ... live` and from gateways: reads the pool's books, and
passes on commands and their answers.

Used by the conductor role. Commands that change the pool, or need store ranks, are carried out by the control
plane (`mooncake_lite.control.commands`). See docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.messages import pool as p
from store.directory import Directory
from store.objects import PoolObject

ROWS = 4096
"""In one answer: 200 kB."""


class PoolAnswers:
    """Open commands: number -> (peer that asked, its query)."""

    def __init__(self, directory: Directory, roles: list[str]) -> None:
        self._directory, self._roles = directory, roles
        self._open: dict[int, tuple[str, p.PoolQuery]] = {}
        self._number = 0

    def read(self, query: p.PoolQuery, now: float) -> m.Message | None:
        """Answer a query that only reads the books; None for a command."""
        if query.what == "ls":
            objects = [obj for obj in self._directory.visible_objects() if obj.object_id > query.after]
            return p.PoolRows([_row(obj, now) for obj in objects[:ROWS]], more=len(objects) > ROWS)
        if query.what == "stat":
            return p.PoolFigures(self._directory.stats(), self.segments())
        return None

    def segments(self) -> list[p.SegmentFigures]:
        """Return the size, free bytes and blocks of what each rank lends, by rank."""
        return [
            p.SegmentFigures(rank, self._roles[rank], *rest)
            for rank, *rest in sorted(self._directory.segments())
        ]

    def command(self, peer: str, query: p.PoolQuery) -> ev.PoolCommand:
        """Turn a query that changes the pool into a command of the control plane."""
        assert query.what != "ls"
        assert query.what != "stat"
        self._number += 1
        self._open[self._number] = peer, query
        path = str(Path(query.folder) / f"{query.keys[0]:016x}.block") if query.folder and query.keys else ""
        return ev.PoolCommand(
            self._number, query.what, query.keys, path, query.force, query.hard, query.soft_s
        )

    def answer(self, effect: fx.AnswerCommand) -> tuple[str, m.Message]:
        """Return who asked for a command, and an answer. None follows one that could not be sent: `carry`."""
        peer, query = self._open[effect.command]
        if effect.ended:
            del self._open[effect.command]
            return peer, m.PoolEnded(effect.problem, effect.blocks, effect.kept, query.number)
        bad = [p.PoolRow(b.object_id, b.key, "dram", b.rank, b.nbytes, "bad") for b in effect.bad]
        return peer, p.PoolProgress(effect.done, effect.nbytes, bad)

    def drop(self, command: int) -> bool:
        """Forget who asked for a command. Returns whether it was still open."""
        return self._open.pop(command, None) is not None


def _row(obj: PoolObject, now: float) -> p.PoolRow:
    return p.PoolRow(obj.object_id, obj.key or 0, "dram", obj.rank, obj.nbytes, _state(obj, now))


def _state(obj: PoolObject, now: float) -> str:
    if obj.unsaved:
        return "unsaved"
    if obj.hard_pinned():
        return "pinned"
    return "leased" if obj.held() else "soft-pinned" if obj.soft_pinned(now) else ""
