"""Labs with CUDA regions: races are named, other right kernels pass, and a kernel must compile for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_lite.labs.checking import check
from mooncake_lite.labs.dev_check import Bench
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.show import read_trace_of
from tests.mooncake_lite.labs.sample_class import reference
from tests.mooncake_lite.labs.trees import ROOT, edit

BARRIER = "        cuda.syncthreads()\n"
FILE = "kernels_numba/attention/attention_cuda.py"

TWO_BUFFERS = """
    row, head, me = cuda.blockIdx.x, cuda.blockIdx.y, THREADS - 1 - cuda.threadIdx.x
    dims, rows = query.shape[2], key_cache.shape[2]
    kv_head = head * key_cache.shape[1] // query.shape[1]
    sequence, before = 0, query_lens[0]
    while row >= before:
        sequence += 1
        before += query_lens[sequence]
    newest = context_lens[sequence] - before + row
    share = (dims + THREADS - 1) // THREADS
    shared = cuda.shared.array((2, THREADS), np.float32)
    mine = cuda.local.array(MAX_CHANNELS, np.float32)
    for c in range(share):
        mine[c] = 0.0
    best, weights, side = -1e30, 0.0, 0
    oldest = max(0, newest - window + 1)
    while oldest <= newest:
        here = min(THREADS, newest + 1 - oldest)
        if me < here:
            dot = 0.0
            for d in range(dims):
                page, slot = block_tables[sequence, (oldest + me) // rows], (oldest + me) % rows
                dot += widen(query[row, head, d]) * widen(key_cache[page, kv_head, slot, d])
            shared[side, me] = dot * scale
        cuda.syncthreads()
        for k in range(here):
            top = max(best, shared[side, k])
            old, new = math.exp(best - top), math.exp(shared[side, k] - top)
            best, weights = top, weights * old + new
            page = block_tables[sequence, (oldest + k) // rows]
            for c in range(min(share, max(0, dims - me * share))):
                value = widen(value_cache[page, kv_head, (oldest + k) % rows, me * share + c])
                mine[c] = mine[c] * old + new * value
        oldest, side = oldest + THREADS, 1 - side
    for c in range(min(share, max(0, dims - me * share))):
        out[row, head, me * share + c] = narrow(np.float32(mine[c] / weights if weights > 0 else 0.0), out)
"""
"""Right, but different: two buffers and one barrier a tile, threads backwards, runs of channels, and a step
of the online softmax for each token."""


@pytest.fixture
def bench(tree: Path) -> Bench:
    """Lab 1, and a tree that the test may break."""
    return Bench(ROOT, lab_in(ROOT, 1), tree)


def judged(bench: Bench, text: str, *only: str) -> Outcome:
    """Run tests of 1e with another kernel."""
    task = bench.lab.task("1e")
    source = bench.source(task)
    path = bench.tree / task.file
    path.write_text(source.replace(reference(bench.lab)["1e"], text.lstrip("\n")), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != source
    return run_tests(ROOT, bench.lab, ["1e"], bench.tree, {"public": 5}, level="none", only=only)


def test_a_missing_barrier_is_named_by_threads_and_lines(bench: Bench) -> None:
    outcome = judged(bench, reference(bench.lab)["1e"].replace(BARRIER, "", 1), "several_tiles")
    (case,) = outcome.cases
    assert not case.passed
    assert "came back  race on scores[" in case.message
    assert "thread 0 writes at attention_cuda.py:" in case.message
    assert "(scores[thread] = score * scale), thread" in case.message
    assert "and no barrier lies between" in case.message
    drawn = outcome.traces["1e"]
    assert (drawn["kind"], drawn["array"]) == ("accesses", "scores")
    assert any("!" in row for rows in drawn["phases"] for row in rows)
    assert read_trace_of(drawn).as_text().startswith("scores: which thread ")


def test_the_picture_shows_the_block_with_the_first_wrong_number(bench: Bench) -> None:
    wrong = "        mean = sums[c] / total if total > ZERO and head != 2 else NAN\n"
    right = reference(bench.lab)["1e"]
    line = next(line for line in right.splitlines(keepends=True) if "mean = sums[c]" in line)
    outcome = judged(bench, right.replace(line, wrong), "heads_of_a_group")
    assert outcome.traces["1e"]["block"] == [0, 2, 0]


@pytest.mark.quick
def test_no_file_of_the_lab_has_another_kernel_that_shares_scores() -> None:
    lab = lab_in(ROOT, 1)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in lab.files}
    shared = [line for text in texts.values() for line in text.splitlines() if "cuda.shared.array(" in line]
    assert [line.strip() for line in shared] == ["scores = cuda.shared.array(THREADS, np.float32)"]


def test_another_right_kernel_gets_all_points_of_its_task(bench: Bench) -> None:
    outcome = judged(bench, TWO_BUFFERS)
    assert [case.message for case in outcome.cases if not case.passed] == []
    assert [cost.value <= cost.limit for cost in outcome.costs] == [True]


def test_a_kernel_that_only_the_simulator_runs_turns_the_check_red(bench: Bench) -> None:
    """NumPy's functions run in the simulator; Numba has none of them on a GPU."""
    edit(bench.tree / FILE, "math.exp(score * scale - highest)", "np.exp(score * scale - highest)")
    said: list[str] = []
    assert not check(bench.tree, bench.lab, [bench.lab.task("1d")], said.append, gpu=True)
    tests = "0/8 public, 10 of 10 tests, which count nothing before the gate is passed"
    assert f"1d  A kernel with one thread for each number: {tests}" in said
    assert any("it does not lower to PTX: KeyError: <ufunc 'exp'>" in line for line in said)
    assert any(line.startswith(("no GPU run: ", "on ")) for line in said)
