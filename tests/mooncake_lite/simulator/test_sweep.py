"""`simulate sweep`: one table whatever the number of processes, and files that are refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.errors import ClusterError
from mooncake_lite.simulator.sweep import NO_OPTIONS, play_sweep, processes, read_sweep
from mooncake_lite.workloads.traces import write_trace
from tests.mooncake_lite.workloads.made import made_trace

SWEEP = """
trace = "trace.jsonl"
seeds = [1, 2]
[cluster]
nodes = "1P1D"
limit-requests = {requests}
spread = true
[vary]
policy = ["random", "kvcache-centric"]
link-gbps = [24, 100.0]
"""


def written(folder: Path, text: str = SWEEP.format(requests=30)) -> Path:
    (folder / "trace.jsonl").write_bytes(write_trace(made_trace(3_000)))
    file = folder / "sweep.toml"
    file.write_text(text)
    return file


def test_one_process_and_two_give_the_same_table_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tables, results = written(tmp_path), [], []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        assert main(["simulate", "sweep", str(file), "--jobs", jobs, "--json", str(out)]) == 0
        tables.append(capsys.readouterr().out)
        results.append(out.read_bytes())
    assert results[0] == results[1]
    assert tables[0] == tables[1]
    rows = json.loads(results[0])["rows"]
    assert [list(row["values"].values()) for row in rows] == [
        [policy, gbps] for policy in ("random", "kvcache-centric") for gbps in (24, 100.0)
    ]
    assert all(one["completed"] == 30 for row in rows for one in row["results"])
    assert rows[0]["results"][0] != rows[0]["results"][1], "seeds change nothing"


def test_ctrl_c_keeps_the_runs_that_have_ended(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    sweep = read_sweep(written(tmp_path))
    with ThreadPoolExecutor(1) as executor:
        results = play_sweep(sweep, executor, interrupt)
        executor.shutdown(cancel_futures=True)
    assert [len(found) for found in results] in ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])


def is_gone(group: int, limit_s: float) -> bool:
    """Tell whether no process of a group is left, at the latest after a while."""
    for _ in range(int(limit_s / 0.1)):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_that_another_thread_takes_interrupts_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's thread blocks nothing, so the signal can come to it; the children still start whole."""
    submit, done = ProcessPoolExecutor.submit, threading.Event()
    library = threading.Thread(target=done.wait, args=(60.0,), daemon=True)
    library.start()
    started = []

    def pressed(self: ProcessPoolExecutor, what: Any, /, *args: Any) -> Any:
        assert library.ident is not None
        signal.pthread_kill(library.ident, signal.SIGINT)
        future = submit(self, what, *args)
        started.extend(multiprocessing.active_children())
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", pressed)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), processes(2, mpi=False):
            raise AssertionError("Ctrl-C was lost")
    finally:
        done.set()
    assert len(set(started)) == 2, "both starts were whole"
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_tells_what_is_done_and_leaves_no_process(tmp_path: Path) -> None:
    file, out = written(tmp_path, SWEEP.format(requests=3_000)), tmp_path / "out.json"
    file.write_text(file.read_text().replace('"kvcache-centric"]', '"least-loaded", "round-robin"]'))
    command = [sys.executable, "-m", "mooncake_lite", "simulate", "sweep", str(file), "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--json", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        time.sleep(4)
        os.killpg(process.pid, signal.SIGINT)
        table, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    done = sum(len(row["results"]) for row in json.loads(out.read_text())["rows"])
    assert f"stopped after {done} of 12 runs" in said, said
    assert "Traceback" not in said
    assert "policy" in table
    assert is_gone(process.pid, limit_s=20)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[vary]", "[varied]"), "Object contains unknown field `varied`"),
        (('policy = ["random", "kvcache-centric"]', "policy = []"), "give values to policy"),
        (('"random"', '"fastest"'), "'fastest' is not one of"),
        (("link-gbps = [24", "link-gbps = [0"), "0.0 is not in the range"),
        (("spread", "spred"), "No such option '--spred'"),
        (("spread = true", "spred = false"), "No such option '--spred'"),
        (("spread = true", 'json = "a"'), "json is no option of a sweep"),
        (('nodes = "1P1D"', 'nodes = "8P"'), "name nodes that prefill and nodes that decode"),
        (('trace = "trace.jsonl"', 'trace = "none.jsonl"'), "no such file"),
        (("seeds = [1, 2]", "seeds = []"), "0 runs; vary something, in at most 10,000 runs"),
        (("[1, 2]", "[1, 2"), "sweep.toml: "),
    ],
)
def test_bad_files_are_refused_before_anything_runs(
    change: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    assert file.read_text().count(change[0]) == 1
    file.write_text(file.read_text().replace(*change))
    assert main(["simulate", "sweep", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_false_leaves_a_flag_out_and_takes_the_other_half_of_a_pair(tmp_path: Path) -> None:
    text = SWEEP.format(requests=30).replace('["random", "kvcache-centric"]', '["random"]')
    text = text.replace("spread = true", "one-node = false\noverlap-transfers = false")
    rows = read_sweep(written(tmp_path, text + "spread = [true, false]\n")).rows
    assert [values[-1] for values, _ in rows] == [True, False, True, False]
    for values, runs in rows:
        for run in runs:
            found = run["spread"], run["one_node"], run["overlap_transfers"]
            assert found == (values[-1], False, False)


@pytest.mark.quick
def test_options_about_one_run_are_no_options_of_a_sweep() -> None:
    assert {"--json", "--plot", "--seed", "--runs", "--kill"} == set(NO_OPTIONS)


@pytest.mark.quick
def test_a_run_that_tells_nothing_is_named_by_what_was_varied(tmp_path: Path) -> None:
    text = (
        SWEEP.format(requests=30).replace("link-gbps", "kv-cache-bytes").replace("[24, 100.0]", '["168MB"]')
    )
    sweep = read_sweep(written(tmp_path, text))
    message = r"^policy (random|kvcache-centric), kv-cache-bytes 168MB: .* KV pages are needed"
    with ThreadPoolExecutor(1) as executor, pytest.raises(ClusterError, match=message):
        play_sweep(sweep, executor, lambda: None)
