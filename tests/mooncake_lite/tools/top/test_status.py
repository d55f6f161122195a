"""`mooncake-lite cluster status`: what it prints of an answer, and its exit codes."""

from __future__ import annotations

import json

import pytest

from mooncake_lite.cli import main
from tests.mooncake_lite.tools.top.samples import ONLY, members, prefixed
from tests.mooncake_lite.tools.top.server import serving, text
from tests.mooncake_lite.tools.top.test_command import scrapes

pytestmark = pytest.mark.quick

LOST = "rank 3 (decode) died: its process 4711 ended; it is missing until the next start"


def health(status: str, detail: str = "", *degraded: str) -> str:
    return json.dumps({"status": status, "detail": detail, "weights": "", "degraded": list(degraded)})


def test_instances_are_rows_and_a_lost_member_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text(health("ok")), text(ONLY + "\n" + prefixed(members(6)))) as server:
        assert main(["cluster", "status", "--url", server.url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["1", "prefill"], ["2-4", "decode"], ["5-7", "decode"]]
    assert rows[1][2:] == ["–", "/", "10", "pages", "–", "–", "900", "B"]
    assert rows[2][2:] == ["6", "down", "–", "–", "1.8", "KB"]
    with serving(text(health("ok")), text(ONLY + "\n" + prefixed(members(6)))) as server:
        main(["cluster", "status", "--url", server.url, "--json"])
    found = json.loads(capsys.readouterr().out)["ranks"]
    assert [(one["ranks"], one["down"]) for one in found] == [([1], []), ([2, 3, 4], []), ([5, 6, 7], [6])]


def metrics(term: int = 0) -> str:
    return scrapes()[0][1] + f"mooncake_lite_conductor_term {term}\n"


def test_a_cluster_in_which_all_works_ends_with_0_and_lists_its_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(text(health("ok")), text(metrics())) as server:
        assert main(["cluster", "status", "--url", server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["ok:", "SmolLM2-135M-Instruct,"]
    assert lines[1] == ["rank", "role", "used", "waiting", "running", "moved"]
    assert [line[:2] for line in lines[2:]] == [
        *(
            ["1", "prefill"],
            ["2", "prefill"],
            ["3", "decode"],
            ["4", "decode"],
            ["5", "store"],
            ["6", "store"],
        )
    ]


def test_losses_are_told_and_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    answers = text(health("ok", "", LOST, "rank 5\x1b[2J")), text(metrics(2))
    with serving(*answers) as server:
        assert main(["cluster", "status", "--url", server.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok, but degraded: ")
    assert lines[1:4] == [f"  {LOST}", "  rank 5?[2J", "  the conductor was replaced 2 times"]
    with serving(*answers) as server:
        assert main(["cluster", "status", "--url", server.url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["degraded"][0], found["conductor_term"]) == ("ok", LOST, 2)
    assert [rank["number"] for rank in found["ranks"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("status", "missing"),
    [
        ("starting", "not ready: " + ", ".join(f"{rank} (decode)" for rank in range(2, 9))),
        ("unavailable", "no rank is left that can decode"),
    ],
)
def test_a_cluster_that_does_not_serve_says_what_is_missing(
    status: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(text(health(status, missing), 503), text(metrics())) as server:
        assert main(["cluster", "status", "--url", server.url]) == 1
    assert capsys.readouterr().out.startswith(f"{status}: {missing}\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(text("[]"), "Expected `object`"), (text("{", 200), "truncated"), (text("{}", 404), "HTTP 404")],
)
def test_another_server_is_refused_in_one_line(
    answer: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answer) as server:  # type: ignore[arg-type]
        assert main(["cluster", "status", "--url", server.url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mooncake-lite: error: no cluster answers at {server.url} (")
    assert words in line


def test_no_server_and_a_wrong_url_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--url", "http://127.0.0.1:9"]) == 2
    assert main(["cluster", "status", "--url", "http://[x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("mooncake-lite: error: ") for line in lines] == [True, True]
