"""gpu_report without a GPU: its processes, its limits, its file, and its checks on the CPU forms."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_numba
from kernels_numba import gpu_report
from kernels_numba.report import gpu_checks, gpu_figures, gpu_mover_checks
from kernels_numba.report.gpu_runner import KILLED_S, LEAST_S, Record, results_of, run_items, together
from tests.kernels_numba.report.rehearsal import on_cpu
from tests.patience import wait_until

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import os, signal, subprocess, sys, time
from kernels_numba.report.gpu_runner import run_items

def good(): return [{"kind": "check", "name": "good", "passed": True, "detail": "", "seconds": 0.0}]
def wrong(): raise ValueError("differs by 7")
def dies(): print("last words", file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)
def hangs(): time.sleep(100)
def two(): return good() + [{"kind": "row", "name": "figure", "ours": 1.5}]
def cut(): print('@result {"kind": "check", "na', end="", flush=True); os._exit(5)
def leaves():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    return good()
def lasts(): time.sleep(0.4); return good()
ITEMS = [(name, globals()[name]) for name in sys.argv[1].split(",")]
sys.exit(run_items(ITEMS, int(sys.argv[3]), lambda: sys.argv[1] != "wrong,good"))
"""


def run(items: str, limit_s: float = 60.0, item_s: float = 30.0) -> list[tuple[str, bool, str]]:
    """(name, passed, detail) of what comes of a part with these items."""
    command = [sys.executable, "-c", PROGRAM, items]
    records = [record for record in results_of("p", command, limit_s, item_s) if record is not None]
    return [(r["name"], r.get("passed", r["kind"]), r["detail"]) for r in records if r["kind"] != "row"]


def test_a_check_that_raises_is_a_failed_check_and_the_next_one_runs() -> None:
    assert run("good,wrong,good") == [
        ("good", True, ""),
        ("wrong", False, "ValueError: differs by 7"),
        ("good", True, ""),
    ]


def test_a_process_that_dies_costs_the_check_that_it_was_at_and_no_other() -> None:
    found = run("good,dies,two,dies,good")
    assert [(name, passed) for name, passed, _ in found] == [
        ("good", True),
        ("dies", False),
        ("good", True),
        ("dies", False),
        ("good", True),
    ]
    assert found[1][2] == "exit code -11 | last words"


def test_a_hanging_check_is_ended_at_its_limit_and_the_next_one_runs() -> None:
    started = time.monotonic()
    assert run("good,hangs,good", item_s=1.5) == [
        ("good", True, ""),
        ("hangs", False, "nothing for 2 s"),
        ("good", True, ""),
    ]
    assert time.monotonic() - started < 30


def test_a_device_that_does_not_work_any_more_gets_a_new_process_and_no_second_failure() -> None:
    assert run("wrong,good") == [("wrong", False, "ValueError: differs by 7"), ("good", True, "")]


def test_a_line_that_death_cut_off_is_no_result_and_loses_none() -> None:
    assert run("good,cut,good") == [("good", True, ""), ("cut", False, "exit code 5"), ("good", True, "")]


def test_a_process_left_behind_holds_nobody_up() -> None:
    started = time.monotonic()
    assert run("leaves,good") == [("good", True, ""), ("good", True, "")]
    assert time.monotonic() - started < 30


def test_a_part_out_of_time_keeps_what_it_had_and_says_what_did_not_run() -> None:
    *passed, last = run("lasts," * 99 + "lasts", limit_s=3.0)
    assert 0 < len(passed) < 100
    assert set(passed) == {("good", True, "")}
    assert last == ("part p", "late", "not done after 3 s with 'lasts': time is up")


def test_a_failure_just_before_the_end_is_a_failure_and_what_comes_after_it_is_late() -> None:
    assert run("good,dies,good", limit_s=LEAST_S) == [
        ("good", True, ""),
        ("dies", False, "exit code -11 | last words"),
        ("part p", "late", "no time left for what comes after 'dies'"),
    ]


def test_parts_run_together_as_many_as_there_may_be_and_lose_no_result() -> None:
    running, most = [0], [0]

    def part(name: str) -> Iterator[Record | None]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        for number in range(3):
            yield None
            yield {"kind": "row", "name": f"{name}{number}"}
        running[0] -= 1

    found = [record["name"] for record in together([part(name) for name in "abcde"], 2)]
    assert sorted(found) == [f"{name}{number}" for name in "abcde" for number in range(3)]
    assert most == [2]
    assert found.index("b0") < found.index("a2")


def test_ending_early_ends_the_parts_that_run() -> None:
    ended = []

    def part(name: str) -> Iterator[Record | None]:
        try:
            yield {"kind": "row", "name": name}
            yield None
        finally:
            ended.append(name)

    results = together([part(name) for name in "abc"], 2)
    next(results)
    results.close()
    assert ended == ["a"]


def test_a_program_that_does_not_start_is_one_failed_check() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    (record,) = filter(None, results_of("p", command, 60.0))
    assert (record["name"], record["passed"]) == ("part p", False)
    assert record["detail"] == "exit code 1 | no torch here"


def test_items_before_skip_are_not_run(capsys) -> None:
    def never() -> list[Record]:
        raise AssertionError

    assert run_items([("a", never), ("b", lambda: [{"kind": "row", "name": "b"}])], 1, lambda: True) == 0
    assert [json.loads(line[8:])["name"] for line in capsys.readouterr().out.splitlines()] == ["b", "b"]


def as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> list[str]:
    """Every part gives `records`; returns the names of the parts that are asked for."""
    asked: list[str] = []

    def results(name: str, command: list[str], limit_s: float) -> Iterator[Record | None]:
        part = command[command.index("--part") + 1]
        assert part == name.split()[0]
        assert 0 < limit_s <= gpu_report.MEASURES.get(part, gpu_report.CHECKS_S)
        asked.append(name)
        return iter(records)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "results_of", results)
    monkeypatch.setattr(gpu_report, "machine", lambda: {"gpu": "H000"})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return asked


GOOD: Record = {"kind": "check", "name": "a", "passed": True, "detail": "", "seconds": 0.0}
ROW: Record = gpu_figures.row("b", "GB/s", 3.0, [1.0, 2.0, 3.0], ("c", [1.0]), ("d", 6.0)) | {"kind": "row"}
LATE: Record = {"kind": "late", "name": "part x", "detail": "time is up"}
KERNEL: Record = {"kind": "kernel", "name": "k", "registers": 9, "shared_bytes": 0, "spill_bytes": 0}


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([GOOD, ROW, KERNEL], 0),
        ([], 1),
        ([GOOD | {"passed": False}], 1),
        ([GOOD, LATE], 3),
        ([LATE], 3),
        ([GOOD | {"passed": False}, LATE], 1),
    ],
)
def test_the_report_runs_every_part_and_passes_only_if_something_was_checked(
    monkeypatch, tmp_path, capsys, records, code
) -> None:
    asked = as_if_there_were_a_gpu(monkeypatch, records)
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--json", str(tmp_path / "r.json")])
    assert gpu_report.main() == code
    assert {name.split()[0] for name in asked} == {
        *gpu_report.CHECKS,
        *gpu_report.KERNELS,
        *gpu_report.MEASURES,
    }
    assert asked[-4:] == list(gpu_report.MEASURES), "nothing runs beside a measurement"
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found) == ["date", "machine", "commit", "rows", "checks", "late", "kernels", "seconds"]
    for kind, field in (("check", "checks"), ("late", "late")):
        assert len(found[field]) == len([r for r in records if r["kind"] == kind]) * len(asked)
    assert ("NO TIME part x: time is up" in capsys.readouterr().out) == (LATE in records)
    if code == 0:
        assert found["rows"][0]["ours"] == 1.5
        assert found["rows"][0]["ratio_to_limit"] == 0.25
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_the_file_holds_every_result_at_once_and_a_machine_without_a_name_loses_none(
    monkeypatch, tmp_path
) -> None:
    as_if_there_were_a_gpu(monkeypatch, [])

    def results(*_: Any) -> Any:
        yield GOOD
        assert json.loads((tmp_path / "r.json").read_text())["checks"][-1]["name"] == "a"
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "results_of", results)
    monkeypatch.setattr(gpu_report, "machine", lambda: 1 / 0)
    report = gpu_report.Report(tmp_path / "r.json")
    with pytest.raises(KeyboardInterrupt):
        gpu_report.fill(report, {"decode": 1}, {})
    names = [check["name"] for check in json.loads((tmp_path / "r.json").read_text())["checks"]]
    assert names == ["machine", "a"]


def test_what_no_longer_fits_into_the_time_is_late_and_did_not_fail(monkeypatch) -> None:
    asked = as_if_there_were_a_gpu(monkeypatch, [GOOD])
    report = gpu_report.Report(None)
    gpu_report.run_shared(report, {"decode": 1, "graph": 1}, limit_s=10.0)
    assert asked == []
    details = [(part["name"], part["detail"]) for part in report.content["late"]]
    assert details == [("part decode 1/1", "no time left"), ("part graph 1/1", "no time left")]
    assert report.exit_code == 3


def test_all_time_limits_together_fit_into_one_command_of_ten_minutes() -> None:
    assert gpu_report.CHECKS_S + sum(gpu_report.MEASURES.values()) == gpu_report.TOTAL_S
    assert gpu_report.TOTAL_S + 10 * KILLED_S <= 600
    assert all(limit_s > LEAST_S for limit_s in gpu_report.MEASURES.values())


def test_the_processes_of_a_part_share_its_items_out_and_keep_neighbours_together() -> None:
    items = [(str(number), list) for number in range(11)]
    shares = [[title for title, _ in gpu_report.shared(items, f"{i}/3")] for i in range(3)]
    assert shares == [["0", "1", "6", "7"], ["2", "3", "8", "9"], ["4", "5", "10"]]
    assert gpu_report.shared(items, "0/1") == items


def test_no_part_starts_processes_without_items(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for part, count in (gpu_report.CHECKS | gpu_report.KERNELS).items():
        items = gpu_report.items_of(part)
        assert all(gpu_report.shared(items, f"{i}/{count}") for i in range(count)), part


def test_ending_the_report_ends_the_part_that_it_waits_for(tmp_path) -> None:
    mark = tmp_path / "running"
    program = f"""
import signal, sys
from kernels_numba.report import gpu_runner
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
child = "import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(100)"
list(gpu_runner.results_of("p", [sys.executable, "-c", child], 60.0))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    try:
        assert wait_until(lambda: mark.exists() and mark.read_text() != "")
        parent.terminate()
        assert parent.wait(20) == 143
        assert wait_until(lambda: not Path(f"/proc/{mark.read_text()}").exists())
    finally:
        parent.kill()
        parent.wait(20)


@pytest.mark.parametrize("part", ["blocks", "codecs"])
def test_the_checks_of_movers_pass_on_the_cpu_forms(monkeypatch, part: str) -> None:
    on_cpu(monkeypatch)
    checks = list(getattr(gpu_mover_checks, f"{part}_checks")())
    assert len(checks) > 10
    for _, action in checks:
        assert action()


@pytest.mark.parametrize("part", ["decode", "prefill", "graph"])
def test_the_checks_of_attention_and_graphs_pass_on_the_cpu_forms(monkeypatch, part: str) -> None:
    """In float32 alone: other element types compile for half a minute, and take the same path here."""
    on_cpu(monkeypatch)
    checks = list(getattr(gpu_checks, f"{part}_checks")())
    assert len(checks) > 2 * len(gpu_checks.SHAPES) or part == "graph"
    chosen = [action for title, action in checks if "float32 (9, 3, 64)" in title or title[-7:] == "float32"]
    assert len(chosen) == (1 if part == "graph" else 2)
    for action in chosen:
        assert action()


def test_the_checks_find_one_wrong_number(monkeypatch) -> None:
    on_cpu(monkeypatch)
    plain, codecs = kernels_numba.gather_blocks, kernels_numba.paged_attention_decode
    calls = []

    def gather(caches: Any, ids: Any, out: Any, **options: Any) -> None:
        plain(caches, ids, out, **options)
        calls.append(0)
        if len(calls) % 2 == 0 or "codec" not in options or options["codec"] is None:
            out.view(-1, out.shape[-1])[5, 0] += 1 if out.dtype != torch.uint8 else 3

    def decode(*arrays: Any, out: Any, **options: Any) -> Any:
        codecs(*arrays, out=out, **options)
        out[1, 0, 0] += 0.1
        return out

    monkeypatch.setattr(kernels_numba, "gather_blocks", gather)
    monkeypatch.setattr(kernels_numba, "paged_attention_decode", decode)
    attention = [action for title, action in gpu_checks.decode_checks() if "float32 (9" in title]
    for action in (next(gpu_mover_checks.codecs_checks())[1], attention[0]):
        with pytest.raises(AssertionError, match=r"differ|error"):
            action()


def test_the_checks_find_that_a_piece_of_a_long_context_is_missing(monkeypatch) -> None:
    on_cpu(monkeypatch)
    paged = gpu_checks.make_paged(torch.bfloat16, [16384], [1], (4, 1, 64))
    wanted = paged.expected()
    gpu_checks.compare(wanted.bfloat16(), wanted)
    paged.lens -= 384  # one of some 43 pieces
    with pytest.raises(AssertionError, match="error"):
        gpu_checks.compare(paged.expected().bfloat16(), wanted)


def test_the_figures_are_made_of_medians_and_of_the_best_limit(monkeypatch) -> None:
    on_cpu(monkeypatch)
    monkeypatch.setattr(gpu_figures, "RUNS", 3)
    sizes = {"copier": 1 << 16, "multiplier": 64}
    for name, size in sizes.items():
        small = getattr(gpu_figures, name)
        monkeypatch.setattr(gpu_figures, name, lambda small=small, size=size: small(size))
    rows = gpu_figures._mover_rows(2, 1, 8, 16) + gpu_figures._page_rows(1, 4, 32)
    rows += gpu_figures._codec_rows("int4", 1, 1, 64, 16)
    rows += gpu_figures._decode_rows(2, 64, 2, torch.float32) + gpu_figures._prefill_rows(16, 32)
    assert len(rows) == 3 + 3 + 2 + 2 + 3
    for row in rows:
        assert set(row) == {
            "name",
            "unit",
            "ours",
            "peer",
            "limit",
            "ratio_to_peer",
            "ratio_to_limit",
            "runs",
        }
        assert row["ours"] > 0
        assert row["runs"] == 3
        json.dumps(row)
    for name in ("decode", "prefill", "blocks", "codecs"):
        assert all(callable(measure) for _, measure in getattr(gpu_figures, f"measure_{name}")())
