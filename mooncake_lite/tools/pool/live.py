"""`mooncake-lite store ... live`: the pool of a running cluster of this user, asked over its control socket.

Used by `commands` and by `mooncake_lite.tools.explain`. The run folder (0700) decides who may ask. Explained
in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.launch.running import running, where_else
from mooncake_lite.messages.explain import Explain, Explained
from mooncake_lite.messages.pool import POOL_ANSWERS, PoolEnded, PoolQuery, PoolRow
from mooncake_lite.tools.client import is_loopback
from transport.channel import Spoke
from transport.wire import Decoder

URL = re.compile("https?:/+(.*)")
"""As a path, which has no two slashes in a row."""

LIVE = "live"
"""The word for WHERE: the one cluster of this user that is running here."""

ANSWER_LIMIT_S = 10.0


def run_folder(where: Path, instead: str = "instead of live") -> Path | None:
    """The run folder that WHERE means: a folder, LIVE, or the URL of a cluster of this user on this host.

    None when it means files at rest. Raises UserError.

    instead   how the command takes a run folder
    """
    if (where / "control").is_socket():
        return where
    asked = URL.match(str(where))
    if not asked and (str(where) != LIVE or where.exists()):
        return None
    found = [one for one in running() if not asked or _is_at(one.url, f"http://{asked[1]}")]
    if asked and not found:
        raise UserError(
            f"no cluster of yours at http://{asked[1]} is running on this host; {where_else(instead)}"
        )
    if len(found) == 1:
        return found[0].folder
    if not found:
        raise UserError("no cluster of yours is running here; start one with `mooncake-lite serve`")
    raise UserError(
        f"{len(found)} clusters of yours are running here: {', '.join(map(str, found))}; name one {instead}"
    )


def _is_at(url: str, asked: str) -> bool:
    """Return whether a cluster of this host that says that it is at a URL is the one that was asked for."""
    try:
        ours, wanted = urlsplit(url), urlsplit(asked)
        hosts = {ours.hostname or "", wanted.hostname or ""}
        return ours.port == wanted.port and (len(hosts) == 1 or all(map(is_loopback, hosts)))
    except ValueError:  # no URL, or no port that can be
        return False


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

    def answer(self, query: PoolQuery | Explain) -> Any:
        """The one answer to a query. Raises UserError with the conductor's words when it says no."""
        answer = next(self.ask(query))
        _ended(answer)
        return answer

    def rows(self) -> list[dict[str, Any]]:
        """All blocks in DRAM. Raises UserError where there is no pool."""
        found: list[PoolRow] = []
        while True:
            after = found[-1].object_id if found else -1
            answer = self.answer(PoolQuery("ls", after))
            found += answer.rows
            if not answer.more:
                return list(map(_shown, found))

    def figures(self) -> list[dict[str, Any]]:
        """The counters and gauges of the directory, and what each rank lends. Raises UserError."""
        answer = self.answer(PoolQuery("stat"))
        figures = dict(answer.values)
        for segment in answer.segments:
            name = f"rank {segment.rank} ({segment.role})"
            figures[f"{name} capacity_bytes"] = segment.capacity_bytes
            figures[f"{name} free_bytes"] = segment.free_bytes
            figures[f"{name} blocks"] = segment.blocks
        return [{"figure": name, "value": value} for name, value in figures.items()]

    def remove(self, keys: list[int], *, force: bool) -> tuple[int, int]:
        """Take these blocks out of DRAM and every tier, all or none; without keys all that are not in use.

        Returns (how many went, how many stayed). Raises UserError.
        """
        answer = self.answer(PoolQuery("rm" if keys else "rm-all", keys=keys, force=force))
        return answer.blocks, answer.kept

    def pin(self, keys: list[int], *, hard: bool = False, soft_s: float = 0.0) -> int:
        """Change the pins of these blocks in DRAM, all or none; how many. Raises UserError."""
        return int(self.answer(PoolQuery("pin", keys=keys, hard=hard, soft_s=soft_s)).blocks)

    def compact(self) -> None:
        """Have every store rank begin to rewrite its tier."""
        self.answer(PoolQuery("compact"))

    def verify(self) -> tuple[list[dict[str, Any]], bool]:
        """Compare every block in DRAM with its checksums: the bad ones or a sum, and whether all are good."""
        from mooncake_lite.config.progress import byte_bar

        done, bad = 0, list[PoolRow]()
        with byte_bar("verifying", None) as advance:
            for answer in self.ask(PoolQuery("verify")):
                if _ended(answer):
                    break
                done = answer.done
                bad += answer.bad
                advance(answer.nbytes)
        return list(map(_shown, bad)) or [{"blocks": done, "bad": 0}], not bad

    def get(self, key: int) -> bytes:
        """The verified bytes of a block, by way of a file: control messages carry no KV. Raises UserError."""
        with tempfile.TemporaryDirectory(prefix="mooncake-lite-get-") as folder:
            for answer in self.ask(PoolQuery("get", keys=[key], folder=folder)):
                if _ended(answer):
                    break
                if answer.bad:
                    raise ClusterError(f"block {key:016x}: its bytes in DRAM are not those that were put")
            return (Path(folder) / f"{key:016x}.block").read_bytes()


def _shown(row: PoolRow) -> dict[str, Any]:
    return {
        "key": f"{row.key:016x}", "tier": row.tier, "rank": row.rank, "bytes": row.nbytes, "state": row.state
    }  # fmt: skip


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
