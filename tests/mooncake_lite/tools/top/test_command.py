"""`mooncake-lite top` from its options to its picture, over HTTP: a recorded run, errors, files."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_lite.cli import main
from mooncake_lite.tools.top import scrape
from mooncake_lite.tools.top.numbers import percent
from mooncake_lite.tools.top.sample import read_samples
from mooncake_lite.tools.top.screen import EMPTY, FULL
from tests.mooncake_lite.tools.top.record import MARK
from tests.mooncake_lite.tools.top.samples import ONLY
from tests.mooncake_lite.tools.top.server import Answer, serving, text

pytestmark = pytest.mark.quick

RECORDING = Path(__file__).with_name("metrics.txt").read_text(encoding="utf-8")


def scrapes() -> list[tuple[float, str]]:
    """(seconds, text) of each scrape of the recorded run (`record.py`)."""
    parts = [part.partition("\n") for part in RECORDING.split(MARK)[1:]]
    return [(float(seconds), body) for seconds, _, body in parts]


def value(body: str, pattern: str) -> float:
    """The sum of the samples of a scrape whose name and labels match."""
    found = re.findall(rf"^mooncake_lite_{pattern} (\S+)$", body, re.MULTILINE)
    assert found, pattern
    return sum(map(float, found))


@pytest.mark.parametrize("at", [0, 1])
def test_a_recorded_run_is_shown_as_it_was(
    at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (began, first), (ended, last) = scrapes()[at : at + 2]
    times = iter((began, ended))
    monkeypatch.setattr(scrape, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setenv("COLUMNS", "100")
    with serving(text(first), text(last)) as server:
        assert main(["top", "--url", server.url, "--interval", "0.1", "--once"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert "SmolLM2-135M-Instruct" in lines[0]
    assert "● ready  up 1 min" in lines[0]

    def row(name: str) -> str:
        return next(line for line in lines if re.search(rf"[│ ] +{name} ", line))

    seconds = ended - began
    for number, role in enumerate(("prefill", "prefill", "decode", "decode"), 1):
        of = rf'{{rank="{number}",role="{role}"}}'
        name = "prefill_computed" if role == "prefill" else "decode"
        grown = value(last, f"{name}_tokens_total{of}") - value(first, f"{name}_tokens_total{of}")
        pages = value(last, f"kv_cache_pages_used{of}")
        cells = row(f"{number} {role}").split()
        assert cells[4:8] == [f"{pages:.0f}", "/", "273", "pages"]
        assert cells[8:10] == [
            f"{value(last, f'{role}_requests_{name}{of}'):.0f}" for name in ("waiting", "running")
        ]
        assert float(cells[10]) == pytest.approx(grown / seconds, rel=0.05, abs=0.5)
        full, empty = cells[3].count(FULL), cells[3].count(EMPTY)
        assert full / (full + empty) == pytest.approx(pages / 273, abs=0.04)
    for number in (5, 6):
        free = value(last, rf'pool_segment_free_bytes{{rank="{number}",role="store"}}')
        size = value(last, rf'pool_segment_bytes{{rank="{number}",role="store"}}')
        assert f"{(size - free) / 2**20:.1f} / {size / 2**20:.1f} MiB" in row(f"{number} store")

    names = next(number for number, line in enumerate(lines) if "prefilling" in line)
    for name, shown in zip(lines[names].split()[1:-1], lines[names - 1].split()[1:-1], strict=True):
        assert float(shown) == value(last, rf'requests_by_stage{{stage="{name}"}}')
    read = r'op="read",peer="store",rank="\d",role="decode"'
    written = r'op="write",peer="decode",rank="\d",role="store"'
    moved = rf"moved_bytes_total{{(?:{read}|{written})}}"
    rate = (value(last, moved) - value(first, moved)) / seconds
    assert f"{rate / 1e6:.1f} MB/s" in row("store → decode")
    assert f"{value(last, 'pool_keys_ssd'):.0f} blk" in row("HDF5")
    found = [value(last, f"pool_{name}_total") for name in ("hits_dram", "hits_ssd", "blocks_looked_up")]
    shares = [percent(part / found[2]) for part in found[:2]]
    assert re.findall(r"[\d.]+ %", row("hits ever")) == shares


def test_the_recording_is_of_more_than_the_picture_shows() -> None:
    assert len(RECORDING) < 150_000
    assert "num_requests_running" not in read_samples(scrapes()[0][1])


def test_where_the_output_is_no_terminal_one_picture_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text(ONLY)) as server:
        assert main(["top", "--url", f"{server.url}/v1", "--interval", "0.1", "--api-key", "secret"]) == 0
    assert "tiny-model" in capsys.readouterr().out
    assert [asked["path"] for asked in server.asked] == ["/metrics", "/metrics"]
    assert {asked["authorization"] for asked in server.asked} == {"Bearer secret"}


def test_the_picture_can_be_a_file_that_needs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "top.svg"
    with serving(text(ONLY)) as server:
        arguments = ["top", "--url", server.url, "--interval", "0.1", "--once", "--svg"]
        assert main([*arguments, str(file)]) == 0
        assert main([*arguments, str(tmp_path / "missing" / "top.svg")]) == 2
    assert "the folder" in capsys.readouterr().err
    svg = file.read_text(encoding="utf-8")
    assert "tiny-model" in svg
    assert svg.count("textLength=") == svg.count("lengthAdjust=") > 20
    assert "@font-face" not in svg
    assert set(re.findall(r"url\(.", svg)) == {"url(#"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--url", "http://127.0.0.1:1"], "no server can be watched at http://127.0.0.1:1 (All connection"),
        (["--url", "127.0.0.1:8000"], "missing an 'http://'"),
        (["--url", "http://[::1"], "is no URL"),
        (["--svg", "top.svg"], "--svg writes one picture: add --once"),
        (["--interval", "nan"], "nan is not in the range"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert why in complaint
    assert complaint.count("\n") == 1


def test_a_server_of_another_kind_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text("vllm:num_requests_running 1\n")) as server:
        assert main(["top", "--url", server.url]) == 2
    assert "(it is no mooncake-lite server: /metrics has none of its metrics)" in capsys.readouterr().err


@pytest.mark.parametrize("before", [[], [text(ONLY)]], ids=["at first", "later"])
def test_a_server_that_wants_another_key_is_one_line_with_both_ways_to_give_it(
    before: list[Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(*before, text("{}", status=401)) as server:
        assert main(["top", "--url", server.url, "--interval", "0.1"]) == 2
    why = f"the server at {server.url} refuses (HTTP 401)"
    fix = "give its API key with --api-key or MOONCAKE_LITE_API_KEY"
    assert capsys.readouterr().err == f"mooncake-lite: error: {why}; {fix}\n"


def test_a_server_that_goes_away_before_the_second_scrape_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(text(ONLY), text("stopping", status=503)) as server:
        assert main(["top", "--url", server.url, "--interval", "0.1", "--once"]) == 2
    assert "has gone away: HTTP 503" in capsys.readouterr().err
