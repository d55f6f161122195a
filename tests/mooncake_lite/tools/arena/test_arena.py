"""The arena: a policy in a child plays as one of ours, and one that answers badly forfeits."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import msgspec
import pytest

from mooncake_lite.cli import main
from mooncake_lite.tools.arena import bots
from mooncake_lite.tools.arena.board import BEST, draw, leaderboard
from mooncake_lite.tools.arena.command import MOST_POLICY_BYTES
from mooncake_lite.tools.arena.player import NAME, player_of
from mooncake_lite.tools.arena.race import Race, Score, goodput
from scheduler.placement import POLICIES

RACE = Race(40, 3)


@pytest.fixture
def known_bots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play no policy of ours."""
    known = {BEST: [Score(9.0, 0.5, 1.0, [0.0])] * 5}
    monkeypatch.setattr("mooncake_lite.tools.arena.command.scores_of", lambda race, told: known)


FORGED = """
import os

def score(nodes):
    for stream in range(3, 20):
        try:
            os.write(stream, b'{{"value": {{"scores": [{number}, 1, 1, 1]}}}}\\n')
        except OSError:
            pass
    return [1] * 4
"""
LEAST_LOADED = "def score(nodes):\n    return nodes.queue_s\n"
GLOBAL_CACHE = """
import numpy as np

def score(nodes):
    fetch = nodes.fetch_s + nodes.best_s < nodes.near_s
    return nodes.queue_s + np.where(fetch, nodes.fetch_s + nodes.best_s, nodes.near_s), fetch
"""


def policy(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


@cache
def ours(policy: str) -> Score:
    return RACE.run(policy, 0)


def raced(file: Path) -> tuple[Score, str]:
    with player_of(file, RACE.requests, "none") as player:
        return RACE.run(NAME, 0), player.forfeit


@pytest.mark.quick
def test_a_policy_that_says_what_one_of_ours_says_comes_to_the_same(tmp_path: Path) -> None:
    score, forfeit = raced(policy(tmp_path, LEAST_LOADED))
    assert (score, forfeit) == (ours("least-loaded"), "")
    assert NAME not in POLICIES


@pytest.mark.quick
def test_a_policy_may_fetch(tmp_path: Path) -> None:
    score, forfeit = raced(policy(tmp_path, GLOBAL_CACHE))
    assert (score, forfeit) == (ours("global-cache"), "")
    assert score.ttft_s < ours("least-loaded").ttft_s


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def score(nodes): return [1, float('nan'), 2, 3]",
            "NaN or infinity for node 1: return finite numbers",
        ),
        ("def score(nodes): return [1e999] * 4", "NaN or infinity for node 0: return finite numbers"),
        ("def score(nodes): return [1, 2]", "there are 4 nodes; score returned 2 scores and 0 fetches"),
        ("def score(nodes): return nodes.near, [True]", "4 scores and 1 fetches"),
        ("def score(nodes): return 1 / 0", "ZeroDivisionError: division by zero in policy.py:1"),
        ("def score(nodes): return 'fast'", "could not convert string to float"),
        ("def scores(nodes): return 1", "has no attribute 'score'"),
        ("def score(", "the code cannot be imported: SyntaxError"),
        ("import os\ndef score(nodes): os._exit(0)", "ended with exit code 0"),
        ("import os\ndef score(nodes): os.write(1, b'{}')", "score returned 1 scores and 0 fetches"),
        ("def score(nodes): raise ValueError('\\x1b[2J won\\n')", "ValueError: ?[2J won? in policy.py:1"),
        (
            FORGED.format(number="1" + "0" * 400),
            "the answer has another type than asked: Number out of range",
        ),
        (FORGED.format(number="1e999"), "the child wrote something that is no answer"),
    ],
)
def test_a_policy_that_answers_badly_forfeits_with_the_reason(text: str, reason: str, tmp_path: Path) -> None:
    score, forfeit = raced(policy(tmp_path, text))
    assert reason in forfeit
    assert "region" not in forfeit
    assert math.isfinite(score.goodput_rps)


@pytest.mark.quick
def test_a_policy_sees_columns_alone_and_cannot_change_ours(tmp_path: Path) -> None:
    text = (
        "seen = []\n"
        "def score(nodes):\n"
        "    assert len(vars(nodes)) == 8\n"
        "    nodes.queue_s[:] = 0\n"
        "    return [3, 2, 1, 0]\n"
    )
    score, forfeit = raced(policy(tmp_path, text))
    assert not forfeit
    assert score.share < ours("random").share or score.ttft_s > ours("random").ttft_s


@pytest.mark.quick
def test_a_policy_may_keep_state_within_a_run_and_not_beyond(
    tmp_path: Path, known_bots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "seen = []\ndef score(nodes):\n    seen.append(1)\n    assert len(seen) <= 20\n    return [1] * 4\n"
    )
    assert main(["arena", "play", str(policy(tmp_path, text)), "--requests", "20"]) == 0
    text = text.replace("<= 20", "< 20")
    assert main(["arena", "play", str(policy(tmp_path, text)), "--requests", "20"]) == 2
    assert "mine.py forfeits: AssertionError" in capsys.readouterr().err


@pytest.mark.quick
def test_the_kept_scores_are_of_the_public_race_and_in_the_order_of_the_paper() -> None:
    assert bots.is_kept(Race())
    assert not bots.is_kept(RACE)
    kept = bots.scores_of(Race())
    means = [goodput(kept[bot])[0] for bot in bots.BOTS]
    assert means == sorted(means)
    assert len(set(means)) == len(bots.BOTS)


@pytest.mark.quick
def test_bots_play_every_run_of_a_race_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bots, "BOTS", ("random",))
    (scores,) = bots.scores_of(Race(20, 3)).values()
    assert len({one.ttft_s for one in scores}) == len(scores) == 5


@pytest.mark.quick
def test_goodput_is_a_mean_with_the_interval_of_student() -> None:
    """For 1 to 5 the deviation is sqrt(2.5), and t(0.95, 4) = 2.132."""
    mean, half = goodput([Score(one, 0.5, 1.0, []) for one in (1.0, 2.0, 3.0, 4.0, 5.0)])
    assert (mean, round(half, 2)) == (3.0, 1.51)


def test_the_kept_scores_are_what_the_bots_come_to(soak: int) -> None:
    if soak == 1:
        pytest.skip("make soak plays the public race")
    assert bots.scores_of(Race()) == bots.played(Race())


@pytest.mark.quick
def test_a_student_plays_beside_our_policies(
    tmp_path: Path, known_bots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "race.svg"
    words = ["arena", "play", str(policy(tmp_path, LEAST_LOADED)), "--requests", "30", "--plot", str(plot)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("mine.py", BEST, "0 of 5", "9.000"))
    assert b"mine.py" in plot.read_bytes()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["play", "none.py"], "no such file or directory"),
        (["play", "."], "give a Python file of at most 1 MiB"),
        (["run", "empty", "--seed", "1", "--out", "b.html"], "there is no .py file"),
        (["run", "empty", "--out", "b.html"], "Missing option '--seed'"),
    ],
)
def test_bad_words_are_refused_with_the_fix(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["arena", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_forfeit_of_ones_own_policy_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = policy(tmp_path, "def score(nodes): return 1 / 0")
    assert main(["arena", "play", str(file), "--requests", "20"]) == 2
    assert "mine.py forfeits: ZeroDivisionError" in capsys.readouterr().err


def test_a_class_races_in_the_sandbox(
    tmp_path: Path, known_bots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = tmp_path / "class"
    policies.mkdir()
    policy(policies, GLOBAL_CACHE, "<b>ada.py")
    policy(policies, "def score(nodes):\n    while True: pass\n", "loop.py")
    policy(policies, "open('/etc/shadow').read()\n" + LEAST_LOADED, "thief.py")
    out = tmp_path / "board.html"
    assert main(["arena", "run", str(policies), "--requests", "20", "--seed", "9", "--out", str(out)]) == 0
    told, page = capsys.readouterr().out, out.read_text()
    assert "loop.py forfeits: it used more than 4 s of processor time" in told
    assert "thief.py forfeits: the code cannot be imported" in told
    assert "<td>1</td><td>&lt;b&gt;ada.py</td>" in page
    assert "kvcache-centric (ours)" in page
    assert "<b>ada" not in page


@pytest.mark.quick
def test_a_bad_file_or_name_costs_no_other_policy_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_bots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that are markup, terminal codes, no text or that of one of ours; a file that is too large."""
    names = [
        "[bold].py",
        f"{BEST}.py",
        f"{BEST} (ours).py",
        "a\x1b[2Jb.py",
        os.fsdecode(b"\xff.py"),
        "$x^$.py",
    ]
    scores = [Score(1.0, 0.5, 1.0, [0.0])] * 5
    monkeypatch.setattr("mooncake_lite.tools.arena.command._race", lambda *_: (scores, ""))
    for name in names:
        policy(tmp_path, LEAST_LOADED, name)
    policy(tmp_path, "#" * (MOST_POLICY_BYTES + 1), "large.py")
    out = tmp_path / "board.html"
    assert main(["arena", "run", str(tmp_path), "--seed", "9", "--out", str(out), "--trusted"]) == 0
    told, page = capsys.readouterr().out, out.read_text()
    assert all(name in told for name in (*names[:3], "a?[2Jb.py", "?.py"))
    assert "large.py forfeits: " in told
    assert f"<td></td><td>{BEST} (ours)</td><td>9.000</td>" in page
    assert page.count("<td>1.000</td>") == len(names)
    draw(dict.fromkeys(("$x^$", "$\\frac{$"), scores))


@pytest.mark.quick
def test_places_are_those_of_the_class_alone() -> None:
    def scores(*found: float) -> list[Score]:
        return [Score(one, 0.5, 1.0, [0.0]) for one in found]

    theirs = {"a": scores(1.0, 3.5), "b": scores(4.0, 5.0)}
    page = leaderboard(theirs, {BEST: scores(3.0, 3.0)}, {"c": "no <reason>"}, RACE)
    assert page.index("<td>1</td><td>b</td>") < page.index(f"<td></td><td>{BEST} (ours)</td>")
    assert page.index(f"{BEST} (ours)") < page.index("<td>2</td><td>a</td>")
    assert "<td>2</td><td>a</td><td>2.250</td><td>2.665</td><td>1 of 2</td>" in page
    assert "c: no &lt;reason&gt;" in page


@pytest.mark.quick
def test_equal_seeds_are_equal_races_and_other_seeds_other_ones() -> None:
    assert msgspec.json.encode(RACE.run("random", 0)) == msgspec.json.encode(ours("random"))
    assert (
        len({ours("random").ttft_s, RACE.run("random", 1).ttft_s, Race(40, 4).run("random", 0).ttft_s}) == 3
    )
