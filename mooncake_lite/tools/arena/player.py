"""A policy in a child process, as a placement policy of the control plane.

Used by `race.py`. The child gets columns over the prefill nodes and returns scores; clock, trace, costs and
results stay here. A policy that raises, answers with something else than one finite number for each node, or
exceeds a limit forfeits: the rest of its race is played with the first node, and counts nothing.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

import mooncake_lite
from mooncake_lite.errors import printable
from mooncake_lite.labs.asking import Child, Stopped, in_words
from mooncake_lite.labs.child import Raised
from mooncake_lite.labs.sandbox import Level, Limits
from scheduler.placement import POLICIES
from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View

NAME = "arena"
"""Of the policy in POLICIES, while it plays."""

START_S, DECISION_S = 3.0, 0.002
"""Processor time that a policy may use: to import what it needs, and for each request of the race."""

MEMORY_MB, TASKS = 1024, 32

DRIVER = "mooncake_lite/tools/arena/drive.py"
PACKAGES = [f"mooncake_lite/{name}__init__.py" for name in ("", "labs/", "tools/", "tools/arena/")]


class Answer(msgspec.Struct):
    """What the child returns: a score for each node, and perhaps where a prefix is fetched.

    JSON has no NaN and no infinity: None stands for both.
    """

    scores: list[float | None]
    fetch: list[bool] = []


class Player:
    """A policy that is asked. forfeit: why it plays no more; "" while it does."""

    name = NAME

    def __init__(self, asked: Child) -> None:
        self._child, self.forfeit = asked, ""

    def rank(self, view: View) -> Ranked:
        """Rank all prefill instances by the child's scores."""
        near_s, best_s = view.prefill_s(view.near), view.prefill_s(view.best)
        answer = Answer([0.0] * len(view.near))
        if not self.forfeit:
            try:
                answer = self._ask(view, near_s, best_s)
            except Stopped as stopped:
                self.forfeit = printable(str(stopped))
        ranked = near_only(view, np.array(answer.scores, float))
        if not answer.fetch:
            return ranked
        fetchers = np.array(answer.fetch) & (view.best > view.near)
        reused = np.select([fetchers], [view.best], ranked.reused)
        transfer_s = np.select([fetchers], [view.fetch_s], ranked.transfer_s)
        prefill_s = np.select([fetchers], [best_s], ranked.prefill_s)
        return Ranked(ranked.score, reused, transfer_s, prefill_s, fetchers | (view.near == view.best))

    def _ask(self, view: View, near_s: np.ndarray, best_s: np.ndarray) -> Answer:
        """Return scores and where to fetch. Raises Stopped for an answer that is none."""
        count = len(view.near)
        columns = {
            "queue_s": view.queue_s, "near": view.near, "near_s": near_s, "best_s": best_s,
            "fetch_s": view.fetch_s,
        }  # fmt: skip
        nodes = {name: np.broadcast_to(one, count).tolist() for name, one in columns.items()}
        request = {"best": view.best, "tokens": view.request.num_tokens, "blocks": len(view.request.keys)}
        found = self._child.ask("score", {**nodes, **request}, Answer)
        if isinstance(found, Raised):
            raise Stopped(in_words(found))
        if len(found.scores) != count or len(found.fetch) not in (0, count):
            raise Stopped(
                f"there are {count} nodes; score returned {len(found.scores)} scores and {len(found.fetch)} "
                "fetches: return one score, and if any one fetch, for each node"
            )
        if not np.isfinite(np.array(found.scores, float)).all():
            node = found.scores.index(None)
            raise Stopped(f"score returned NaN or infinity for node {node}: return finite numbers")
        return found


@contextmanager
def player_of(policy: Path, requests: int, level: Level) -> Iterator[Player]:
    """Give a player that asks the policy in a file, and can be named in a configuration as NAME.

    Its process, and so the state that the policy keeps, lasts for one run.

    requests   of the run
    level      how its process is confined

    Raises SandboxRefused.
    """
    cpu_s = math.ceil(START_S + DECISION_S * requests)
    limits = Limits(seconds=10.0 * cpu_s, cpu_s=cpu_s, memory_mb=MEMORY_MB, tasks=TASKS)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-arena-") as place:
        _lay_out(Path(place), policy)
        asked = Child(Path(place), DRIVER, limits, level=level, task_s=limits.seconds)
        player = Player(asked)
        POLICIES[NAME] = lambda: player
        try:
            yield player
        finally:
            del POLICIES[NAME]
            asked.close()


def _lay_out(place: Path, policy: Path) -> None:
    """Copy what the child needs into its folder: the policy, and the files that ask it."""
    root = Path(mooncake_lite.__file__).parents[1]
    for name in (DRIVER, "mooncake_lite/labs/child.py", *PACKAGES):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, place / name)
    shutil.copy(policy, place / "policy.py")
