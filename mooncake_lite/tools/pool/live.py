"""`mooncake-lite store ... live`: the pool of a running cluster of this user, asked over its control socket.

Used by `commands` and by `mooncake_lite.tools.explain`. The run folder (0700) decides who may ask. Explained
in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.launch.running import running
from mooncake_lite.messages.explain import Explain, Explained
from mooncake_lite.messages.pool import (
    POOL_ANSWERS,
    PoolEnded,
    PoolFigures,
    PoolProgress,
    PoolQuery,
    PoolRow,
    PoolRows,
)
from transport.channel import Spoke
from transport.wire import Decoder

LIVE = "live"
"""The word for WHERE: the one cluster of this user that is running here."""

ANSWER_LIMIT_S = 10.0


def run_folder(where: Path, instead: str = "instead of live") -> Path | None:
    """The run folder that WHERE means; None when it means files at rest. Raises UserError.

    instead   how the command takes a run folder
    """
    if (where / "control").is_socket():
        return where
    if str(where) != LIVE or where.exists():
        return None
    found = running()
    if len(found) == 1:
        return found[0].folder
    if not found:
        raise UserError("no cluster of yours is running here; start one with `mooncake-lite serve`")
    raise UserError(
        f"{len(found)} clusters of yours are running here: {', '.join(map(str, found))}; "
        f"name the folder of one {instead}"
    )


class LivePool:
    """One connection to a conductor."""

    def __init__(self, spoke: Spoke) -> None:
        self._spoke = spoke

    def ask(self, query: PoolQuery | Explain) -> Iterator[Any]:
        """The answers to a query, as they come. Raises ClusterError when the next one does not."""
        if not self._spoke.send(query):
            raise ClusterError("the conductor does not take messages")
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while time.monotonic() < deadline:
            for answer in self._spoke.receive(deadline - time.monotonic()):
                yield answer
                deadline = time.monotonic() + ANSWER_LIMIT_S
        raise ClusterError(f"the conductor has not answered for {ANSWER_LIMIT_S:.0f} s")

    def rows(self) -> list[PoolRow]:
        """All blocks in DRAM. Raises UserError where there is no pool."""
        found: list[PoolRow] = []
        while True:
            after = found[-1].object_id if found else -1
            answer = next(self.ask(PoolQuery("ls", after)))
            _ended(answer)
            assert isinstance(answer, PoolRows)
            found += answer.rows
            if not answer.more:
                return found

    def figures(self) -> dict[str, int]:
        """The counters and gauges of the directory, and what each rank lends. Raises UserError."""
        answer = next(self.ask(PoolQuery("stat")))
        _ended(answer)
        assert isinstance(answer, PoolFigures)
        figures = dict(answer.values)
        for segment in answer.segments:
            name = f"rank {segment.rank} ({segment.role})"
            figures[f"{name} capacity_bytes"] = segment.capacity_bytes
            figures[f"{name} free_bytes"] = segment.free_bytes
            figures[f"{name} blocks"] = segment.blocks
        return figures

    def explain(self, request_id: str) -> Explained:
        """What the conductor keeps of the decision about a request. Raises UserError if it cannot say it."""
        answer = next(self.ask(Explain(request_id)))
        _ended(answer)
        assert isinstance(answer, Explained)
        return answer

    def remove(self, keys: list[int], *, force: bool) -> int:
        """Take these blocks out of DRAM and every tier, all or none; how many. Raises UserError."""
        answer = next(self.ask(PoolQuery("rm", keys=keys, force=force)))
        _ended(answer)
        return int(answer.blocks)

    def pin(self, keys: list[int], *, hard: bool = False, soft_s: float = 0.0) -> int:
        """Change the pins of these blocks in DRAM, all or none; how many. Raises UserError."""
        answer = next(self.ask(PoolQuery("pin", keys=keys, hard=hard, soft_s=soft_s)))
        _ended(answer)
        return int(answer.blocks)

    def remove_all(self, *, force: bool) -> tuple[int, int]:
        """Take every block out that is not in use: (how many went, how many stayed)."""
        answer = next(self.ask(PoolQuery("rm-all", force=force)))
        _ended(answer)
        return answer.blocks, answer.kept

    def compact(self) -> None:
        """Have every store rank begin to rewrite its tier."""
        _ended(next(self.ask(PoolQuery("compact"))))

    def verify(self, advance: Callable[[int], object]) -> tuple[int, list[PoolRow]]:
        """Compare every block in DRAM with its checksums: (how many, the bad ones). advance: bytes done."""
        done = 0
        bad: list[PoolRow] = []
        for answer in self.ask(PoolQuery("verify")):
            if _ended(answer):
                return done, bad
            assert isinstance(answer, PoolProgress)
            done = answer.done
            bad += answer.bad
            advance(answer.nbytes)
        raise AssertionError("ask() ends by raising")

    def get(self, key: int) -> bytes:
        """The verified bytes of a block, by way of a file: control messages carry no KV. Raises UserError."""
        with tempfile.TemporaryDirectory(prefix="mooncake-lite-get-") as folder:
            for answer in self.ask(PoolQuery("get", keys=[key], folder=folder)):
                if _ended(answer):
                    break
                if answer.bad:
                    raise ClusterError(f"block {key:016x}: its bytes in DRAM are not those that were put")
            return (Path(folder) / f"{key:016x}.block").read_bytes()


def _ended(answer: Any) -> bool:
    """Whether this is the last answer. Raises UserError with the conductor's words when it says no."""
    if not isinstance(answer, PoolEnded):
        return False
    if answer.problem:
        raise UserError(answer.problem)
    return True


@contextmanager
def live_pool(folder: Path) -> Iterator[LivePool]:
    """Connected to the conductor of this run folder."""
    run_dir = RunDir.join(folder)
    try:
        with Spoke(run_dir.control, f"pool-{os.getpid()}", Decoder(POOL_ANSWERS | Explained)) as spoke:
            yield LivePool(spoke)
    finally:
        run_dir.leave()
