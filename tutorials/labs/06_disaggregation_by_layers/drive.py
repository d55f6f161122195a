"""The child's side of 6d: a store by layers in virtual time, and the region of 6d. It also makes figures.

It runs beside a student's code, so it knows no expected value. A pass computes one layer after the other. The
store has the two parts of a half, and a link that carries one group at a time. Every layer of every block has
a number of its own, so layers that leave too early, or whose part is filled again too early, are seen.

    python drive.py data/stores.jsonl > run.csv     plays each store of the file, and prints what it does when
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mooncake_lite.engine.leaving import Leaving, Send, Take, Wait, next_act

NOTHING = -1
"""What lies where no layer was computed or copied."""


def kv(block: int, layer: int) -> int:
    """The KV of a block in a layer."""
    return 1000 * block + layer


class Store:
    """A store by layers, and the pass beside it.

    given   layers, groups [first, end], blocks, and ticks for each layer: layer_ticks of the pass (0: it is
            over), copy_ticks, send_ticks of the link; fails_after: layers after which the pass fails, or None
    pool    [block][layer]
    flying  (part, layers, tick at which the transfer ends), the oldest first
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.now, self.link_free_at = given, 0, 0
        self.at = Leaving([slice(first, end) for first, end in given["groups"]])
        self.pool = [[NOTHING] * given["layers"] for _ in range(given["blocks"])]
        self.parts: list[list[list[int]]] = [[], []]
        self.flying: list[tuple[int, slice, int]] = []
        self.last: Take | None = None
        self.acts: list[list[Any]] = []
        self.early: list[int] = []
        self.spans: list[tuple[str, int, int, int, int]] = []
        self.problem, self.changed = "", False

    def look(self) -> None:
        """Note how far the pass is by now."""
        ticks, fails_after = self.given["layer_ticks"], self.given["fails_after"]
        done = self.now // ticks if ticks else self.given["layers"]
        if fails_after is not None:
            self.at.aborted = done > fails_after
            done = min(done, fails_after)
        self.at.reached = min(done, self.given["layers"])

    def arrive(self, until: int) -> None:
        """Put the bytes of transfers that have ended by this tick into the pool: what is in the part then."""
        for part, layers, ended in self.flying:
            if ended <= until:
                for row, layer in zip(self.parts[part], range(layers.start, layers.stop)):
                    for block, number in enumerate(row):
                        self.pool[block][layer] = number

    def take(self, act: Take) -> None:
        """Copy layers into a part. Those that are not computed hold nothing."""
        self.arrive(self.now)
        if any(part == act.part for part, _, _ in self.flying):
            self.fail(f"takes layers into part {act.part}, whose bytes are still leaving")
        numbers = range(act.layers.start, act.layers.stop)
        self.early += [layer for layer in numbers if layer >= self.at.reached]
        blocks = range(self.given["blocks"])
        self.parts[act.part] = [
            [kv(block, layer) if layer < self.at.reached else NOTHING for block in blocks]
            for layer in numbers
        ]
        began, self.now = self.now, self.now + self.given["copy_ticks"] * len(numbers)
        self.spans.append(("copy", began, self.now, act.layers.start, act.layers.stop))
        self.last = act
        self.at.taken += 1

    def send(self) -> None:
        """Begin to write what was taken last."""
        if self.last is None:
            self.fail("sends, and nothing was taken since it sent before")
            return
        layers = self.last.layers
        began = max(self.now, self.link_free_at)
        self.link_free_at = began + self.given["send_ticks"] * (layers.stop - layers.start)
        self.spans.append(("send", began, self.link_free_at, layers.start, layers.stop))
        self.flying.append((self.last.part, layers, self.link_free_at))
        self.last = None
        self.at.begun += 1
        self.at.flying += 1

    def wait(self, act: Wait) -> None:
        """Let time pass."""
        if act.until == "sent":
            if not self.flying:
                self.fail("waits for a transfer, and none flies")
                return
            self.now = max(self.now, self.flying[0][2])
            self.arrive(self.now)
            self.flying.pop(0)
            self.at.flying -= 1
        elif self.at.aborted or self.at.reached == self.given["layers"]:
            self.fail("waits for layers, and the pass computes no more")
        else:
            self.now += self.given["layer_ticks"] - self.now % self.given["layer_ticks"]

    def fail(self, problem: str) -> None:
        """Note the first thing that is wrong."""
        self.problem = self.problem or problem

    def run(self) -> dict[str, Any]:
        """Do what the region says until it ends. Tells the acts with their ticks, and what the pool has."""
        ended = False
        for _ in range(20 * self.given["layers"] + 20):
            self.look()
            before = repr(self.at)
            act = next_act(self.at)
            self.changed = self.changed or repr(self.at) != before
            self.acts.append([self.now, *told(act)])
            if act is None:
                ended = True
                break
            if isinstance(act, Take):
                self.take(act)
            elif isinstance(act, Send):
                self.send()
            else:
                self.wait(act)
            if self.problem:
                break
        if not ended:
            self.fail("does not end")
        if ended and self.flying and not self.at.aborted:
            self.fail(f"ends while {len(self.flying)} transfers fly")
        return {
            "acts": self.acts,
            "pool": self.pool,
            "ended_at": self.now,
            "taken": self.at.taken,
            "early": self.early,
            "changed": self.changed,
            "problem": self.problem,
        }


def told(act: Take | Send | Wait | None) -> list[Any]:
    """An act as the tests read it."""
    if isinstance(act, Take):
        return ["take", act.layers.start, act.layers.stop, act.part]
    if isinstance(act, Wait):
        return ["wait", act.until]
    return ["end"] if act is None else ["send"]


def store(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play one store beside its pass."""
    return Store(inputs).run()


def decide(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask once for each state of a store. Tells the act, and whether the state was changed."""
    seen = []
    for given in inputs:
        groups = [slice(first, end) for first, end in given.pop("groups")]
        at = Leaving(groups, **given)
        before = repr(at)
        act = next_act(at)
        seen.append({"act": told(act), "changed": repr(at) != before})
    return seen


CALLS = {"store": store, "decide": decide}


def table(path: Path) -> None:
    """Print what each store of a file does when, its pass included."""
    print("group_layers,send_ticks,what,first_tick,last_tick,first_layer,last_layer")
    for line in path.read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        played, ticks = Store(given), given["layer_ticks"]
        played.run()
        computed = [("compute", ticks * n, ticks * (n + 1), n, n + 1) for n in range(given["layers"])]
        for what, begin, end, first, last in [*computed, *played.spans]:
            group = given["groups"][0][1]
            print(f"{group},{given['send_ticks']},{what},{begin},{end},{first},{last - 1}")


if __name__ == "__main__":
    table(Path(sys.argv[1]))
