"""Our own policies in the arena, and what they came to in the public race.

Used by `command.py`. The scores of the public race are kept in bots.json, with its workload, profile and
version. `python -m mooncake_lite.tools.arena.bots` plays them anew and writes the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from mooncake_lite import __version__
from mooncake_lite.tools.arena.race import LINK_BYTES_PER_S, MIX, NODES, PROFILE, RATE, RUNS, Race, Scores

BOTS = ("random", "least-loaded", "local-cache", "global-cache", "kvcache-centric")
FILE = Path(__file__).with_name("bots.json")


class Kept(msgspec.Struct):
    """The file. race: what was played; scores: bot -> its scores, one of each run."""

    race: dict[str, float | int | str]
    scores: dict[str, Scores]


def named(race: Race) -> dict[str, float | int | str]:
    """Return all that a score depends on."""
    return {
        "requests": race.requests, "seed": race.seed, "runs": RUNS, "rate": RATE, "nodes": NODES,
        "link": LINK_BYTES_PER_S, "mix": str(MIX), "profile": PROFILE, "version": __version__,
    }  # fmt: skip


def scores_of(race: Race, told: Callable[[], None] = lambda: None) -> dict[str, Scores]:
    """Return the scores of all bots: those that are kept, if they are of this race.

    told   is called after each bot that is played
    """
    kept = msgspec.json.decode(FILE.read_bytes(), type=Kept)
    if kept.race == named(race):
        return kept.scores
    return played(race, told)


def played(race: Race, told: Callable[[], None] = lambda: None) -> dict[str, Scores]:
    """Play all bots."""
    found: dict[str, Scores] = {}
    for bot in BOTS:
        found[bot] = [race.run(bot, number) for number in range(RUNS)]
        told()
    return found


def is_kept(race: Race) -> bool:
    """Tell whether the scores of the bots in this race are known."""
    return msgspec.json.decode(FILE.read_bytes(), type=Kept).race == named(race)


if __name__ == "__main__":
    public = Race()
    kept = Kept(named(public), played(public))
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=0) + b"\n")
