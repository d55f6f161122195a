"""What the picture shows, and that it keeps its shape: many ranks, narrow terminals, hostile names."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from mooncake_lite.tools.top import numbers
from mooncake_lite.tools.top.figures import Figures
from mooncake_lite.tools.top.screen import EMPTY, FULL, Watching, bar, picture
from tests.mooncake_lite.tools.top.samples import SERVER, figures, ranks

pytestmark = pytest.mark.quick

WATCHING = Watching("here:8000", hint="q quit")
POOL = """pool_segment_bytes{rank="9",role="store"} 1048576
pool_segment_free_bytes{rank="9",role="store"} 524288
tier_capacity_bytes{rank="9",role="store"} 4194304
"""
STAGES = "\n".join(
    f'requests_by_stage{{stage="{stage}"}} {count}'
    for count, stage in enumerate(
        ("held", "queued", "promoting", "prefilling", "loading", "decoding", "cancelled")
    )
)


def drawn(found: Figures, watching: Watching = WATCHING, width: int = 80, height: int = 24) -> list[str]:
    """The lines of the picture."""
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(picture(found, watching, width, height))
    return console.export_text().rstrip("\n").split("\n")


def bars(line: str) -> tuple[int, int]:
    """Full and empty cells of the bar in a line."""
    return line.count(FULL), line.count(EMPTY)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("count", [0, 2, 64])
def test_the_picture_fits_into_the_terminal(width: int, height: int, count: int) -> None:
    now = POOL + STAGES + "\n" + ranks(count, count)
    lines = drawn(figures("", now), width=width, height=height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    frames = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert {cell_len(line) for line in frames} == {width}
    assert {line[-1] for line in frames} <= set("╮│╯")


def test_of_many_ranks_the_busiest_are_shown_and_the_others_counted() -> None:
    lines = drawn(figures("", POOL + STAGES + "\n" + ranks(64, 64)))
    rows = [line.split() for line in lines if " prefill " in line or " decode " in line]
    assert [row[1] for row in rows] == ["62", "63", "64", "126", "127", "128"]
    assert "… and 122 more" in "\n".join(lines)


def test_accepted_drafts_are_named_above_the_ranks_where_there_are_drafts() -> None:
    drafts = 'spec_decode_num_{}_tokens_total{{rank="4",role="decode"}} {}\n'
    now = drafts.format("draft", 200) + drafts.format("accepted", 126) + ranks(2, 2)
    for width in (72, 80, 120):
        lines = drawn(figures("", now), width=width)
        assert sum("ranks, 63 % of drafts accepted" in line for line in lines) == 1
        assert {cell_len(line) for line in lines if line.startswith("╭")} == {width}
    assert "drafts" not in "\n".join(drawn(figures("", ranks(2, 2))))


def test_a_bar_shows_its_share_and_never_nothing_for_something() -> None:
    assert bars(bar([(0.5, "red")], 10).plain) == (5, 5)
    assert bars(bar([(0.001, "red")], 10).plain) == (1, 9)
    assert bars(bar([(0.5, "red"), (0.25, "blue")], 8).plain) == (6, 2)
    assert bars(bar([(7.0, "red"), (3.0, "blue")], 8).plain) == (8, 0)
    assert bars(bar([(-1.0, "red")], 8).plain) == (0, 8)


def test_the_stages_of_requests_stand_above_their_names() -> None:
    lines = drawn(figures("", STAGES))
    at = next(number for number, line in enumerate(lines) if "promoting" in line)
    assert lines[at].split()[1:-1] == [
        "held", "queued", "promoting", "prefilling", "loading", "decoding", "cancelled",
    ]  # fmt: skip
    assert lines[at - 1].split()[1:-1] == ["0", "1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    ("server", "watching", "words"),
    [
        (SERVER, WATCHING, "● ready  up 1 min 15 s"),
        (SERVER.replace("degraded 0", "degraded 2"), WATCHING, "● degraded (2)"),
        (SERVER.replace("ready 1", "ready 0"), WATCHING, "● not ready"),
        ("\n".join(line for line in SERVER.splitlines() if "ready" not in line), WATCHING, "● answers"),
        (SERVER, Watching("here:8000", 12.3, "HTTP 500"), "● no answer since 12 s"),
    ],
)
def test_the_first_line_says_how_the_server_is(server: str, watching: Watching, words: str) -> None:
    lines = drawn(figures("", "", server), watching)
    assert "tiny-model  here:8000" in lines[0]
    assert words in lines[0]
    assert not watching.problem or watching.problem in lines[-1]


def test_hostile_names_are_shown_as_text_and_keep_the_layout() -> None:
    evil = "[red]:smile:[/x] \x1b[2J\x07 wide 汉字汉字汉字 " + "y" * 80
    now = "\n".join(
        [
            f'kv_cache_pages{{rank="1",role="{evil}"}} 5',
            f'requests_by_stage{{stage="{evil}"}} 999999999999',
            f'moved_bytes_total{{op="read",peer="{evil}",rank="1",role="{evil}"}} 1e18',
        ]
    )
    server = SERVER.replace("tiny-model", evil).replace("uptime_seconds 75", "uptime_seconds 1e18")
    lines = drawn(figures("", now, server))
    text = "\n".join(lines)
    assert "[red]:smile:[/x] ?[2J?" in text
    assert not {"\x1b", "\x07"} & set(text)
    assert all(cell_len(line) <= 80 for line in lines)
    assert len(lines) <= 24


def test_numbers_are_short_and_have_their_units() -> None:
    assert [numbers.count(n) for n in (None, 0, 0.25, 3, 9.94, 87.2, 1204, 99_999, 204_000, 1e18)] == [
        "–", "0", "0.2", "3", "9.9", "87", "1,204", "99,999", "204k", "1E",
    ]  # fmt: skip
    assert [numbers.rate(n) for n in (None, 0, 900, 12_345_678, 2.5e9)] == [
        "–", "0 B/s", "900 B/s", "12.3 MB/s", "2.5 GB/s",
    ]  # fmt: skip
    assert numbers.of_size(32 * 2**20, 512 * 2**20) == "32 / 512 MiB"
    assert numbers.of_size(330 * 2**20, 2**30) == "330 MiB / 1 GiB"
    assert numbers.of_size(0, 2**30) == "0 / 1 GiB"
    assert (numbers.of_size(None, 1), numbers.of_size(1, None), numbers.age(None)) == ("–", "–", "–")
    assert [numbers.duration(s) for s in (None, 0.0024, 0.024, 1.234, 12.3)] == [
        "–", "2.4 ms", "24 ms", "1.23 s", "12 s",
    ]  # fmt: skip
    assert [numbers.age(s) for s in (12.9, 185, 7800, 90_000)] == [
        "12 s",
        "3 min 5 s",
        "2 h 10 min",
        "1 d 1 h",
    ]
    assert [numbers.span(s) for s in (0.1, 1.04, 5.2)] == ["0.1 s", "1 s", "5 s"]
    assert [numbers.percent(p) for p in (None, 0, 0.004, 0.63, 1)] == ["–", "0 %", "0.4 %", "63 %", "100 %"]


def test_an_instance_of_several_ranks_has_one_row_and_a_lost_member_is_named() -> None:
    roles = ["decode", "member", "member", "member"] * 3
    ups = [
        f'rank_up{{rank="{rank}",role="{role}",first="{(rank - 9) // 4 * 4 + 9}"}} {int(rank != 15)}'
        for rank, role in enumerate(roles, 9)
    ]
    pages = [f'kv_cache_pages{{rank="{rank}",role="decode"}} 8' for rank in (9, 13, 17)]
    for width in (72, 80, 200):
        lines = drawn(figures("", "\n".join([*ups, *pages])), width=width)
        rows = [line.split() for line in lines if " decode " in line]
        assert [row[1] for row in rows] == ["9-12", "13-16", "17-20"]
        assert "15 down" in next(line for line in lines if "13-16" in line)
        assert {cell_len(line) for line in lines if line.startswith("╭")} == {width}
