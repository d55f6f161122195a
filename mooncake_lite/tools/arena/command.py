"""`mooncake-lite arena`: race a placement policy against ours, or a class against each other.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/run-an-arena.md.
"""

from __future__ import annotations

from pathlib import Path

import click

from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.config.progress import bar, counted, wide_console
from mooncake_lite.errors import ConfigError, printable
from mooncake_lite.labs.sandbox import CANNOT_PROMISE, Level, required
from mooncake_lite.tools.arena.board import draw, leaderboard, table
from mooncake_lite.tools.arena.bots import BOTS, is_kept, scores_of
from mooncake_lite.tools.arena.player import NAME, player_of
from mooncake_lite.tools.arena.race import PUBLIC_SEED, REQUESTS, RUNS, Race, Score, Scores, Told

MOST_POLICY_BYTES = 1 << 20

REQUESTS_OPTION = click.option(
    "--requests",
    type=click.IntRange(20, 100_000),
    default=REQUESTS,
    show_default=True,
    help=f"Requests of each of the {RUNS} runs of a race.",
)


@click.group("arena")
def arena() -> None:
    """Race placement policies on a simulated cluster. The score is goodput."""


@arena.command()
@click.argument("policy", type=click.Path(path_type=Path))
@REQUESTS_OPTION
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=PUBLIC_SEED, show_default=True)
@click.option("--plot", type=OUT_FILE, help="Draw the race into this SVG file.")
def play(policy: Path, requests: int, seed: int, plot: Path | None) -> None:
    """Play the policy in the file POLICY beside ours.

    POLICY has a function score(nodes): it returns a number for each node that prefills, and the least is
    chosen. It may keep state from one request to the next; each run begins with a new process.
    """
    race = Race(requests, seed)
    with bar("requests", RUNS * requests) as update:
        score, forfeit = _race(_checked(policy), race, "none", lambda done: update(completed=done))
    if forfeit:
        raise click.ClickException(f"{policy.name} forfeits: {forfeit}")
    with counted("bots", 0 if is_kept(race) else len(BOTS)) as told:
        scores = {**scores_of(race, told), policy.name: score}
    wide_console().print(table(scores))
    if plot is not None:
        write_out("--plot", plot, draw(scores))


@arena.command()
@click.argument("folder", type=click.Path(path_type=Path))
@REQUESTS_OPTION
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), required=True, help="Of the race: keep it secret.")
@click.option("--out", type=OUT_FILE, required=True, help="Write the leaderboard, a page of HTML, to FILE.")
@click.option("--trusted", is_flag=True, help="Without a sandbox: only for code that you have read.")
def run(folder: Path, requests: int, seed: int, out: Path, trusted: bool) -> None:
    """Race all policies of FOLDER, one .py file each, in the sandbox, and write a leaderboard.

    A policy that raises, hangs, or answers with something else than numbers forfeits. It may keep state
    within a run; each run begins with a new process.
    """
    files = sorted(folder.glob("*.py"))
    if not files:
        raise ConfigError(f"{folder}: there is no .py file; put one policy of each student there")
    level: Level = "none"
    why = ""
    if not trusted:
        level, why = required()
    if CANNOT_PROMISE[level]:
        click.echo(f"note: {CANNOT_PROMISE[level]}{f' ({why})' if why else ''}", err=True)
    race, scores, forfeits = Race(requests, seed), dict[str, Scores](), dict[str, str]()
    with counted("policies", len(files)) as told:
        for file in files:
            name = printable(file.name)  # with its ending: no policy can take the name of one of ours
            try:
                score, forfeit = _race(_checked(file), race, level)
            except ConfigError as error:  # this file forfeits; the others still race
                score, forfeit = [], printable(str(error))
            if forfeit:
                forfeits[name] = forfeit
            else:
                scores[name] = score
            told()
    with counted("bots", 0 if is_kept(race) else len(BOTS)) as told:
        bots = scores_of(race, told)
    wide_console().print(table({**bots, **scores}))
    for name, reason in forfeits.items():
        click.echo(f"{name} forfeits: {reason}")
    write_out("--out", out, leaderboard(scores, bots, forfeits, race).encode())


def _race(policy: Path, race: Race, level: Level, told: Told = lambda done: None) -> tuple[Scores, str]:
    """Play a policy. Returns its scores, and why it forfeits; "" if it does not. Raises LabError.

    told   gets the number of requests that have ended, of all runs
    """
    scores: list[Score] = []
    for number in range(RUNS):
        with player_of(policy, race.requests, level) as player:
            before = number * race.requests
            scores.append(race.run(NAME, number, lambda done, before=before: told(before + done)))  # type: ignore[misc]
        if player.forfeit:
            break
    return scores, player.forfeit


def _checked(policy: Path) -> Path:
    """Return the file of a policy. Raises ConfigError when it cannot be one."""
    try:
        size = policy.stat().st_size
    except OSError as error:
        raise ConfigError(f"{policy}: {(error.strerror or str(error)).lower()}") from None
    if not policy.is_file() or size > MOST_POLICY_BYTES:
        raise ConfigError(f"{policy}: give a Python file of at most {MOST_POLICY_BYTES >> 20} MiB")
    return policy
