"""The race checker finds each bad kernel in each run, names both sides, and accepts correct kernels."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernels_numba.attention import attention_cuda
from kernels_numba.errors import BackendError
from mooncake_lite.labs.access_map import AccessMap
from mooncake_lite.labs.race_checker import READS, Access, Finding, Recording, conflict, watch
from tests.mooncake_lite.labs import bad_kernels, good_kernels

ROOT = Path(__file__).resolve().parents[3]
RUNS = 5
Runs = dict[str, list[list[Finding]]]


class Judged(msgspec.Struct):
    """What race_child.py prints."""

    good: Runs
    bad: Runs
    attention: Runs
    maps: dict[str, AccessMap]
    tables: list[int]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """Run all kernels, in a process whose Numba simulates."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mooncake_lite.labs.race_child", str(RUNS)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        cwd=ROOT,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Judged)


def marked(kernel: Callable[..., None], mark: str) -> int:
    """Return the line of a kernel that has a mark."""
    lines, first = inspect.getsourcelines(kernel)
    (at,) = (number for number, line in enumerate(lines) if mark in line)
    return first + at


HALF, ALL = bad_kernels.N // 2, bad_kernels.N
EXPECTED: dict[str, tuple[str, str, tuple[int, ...], int, tuple[tuple[int, str], ...]]] = {
    "missing_barrier": ("race", "shared", (0,), ALL, ((0, "writes"), (ALL - 1, "reads"))),
    "missing_barrier_at_the_end_of_a_tile": ("race", "tile", (0,), 4, ((0, "writes"), (1, "reads"))),
    "two_threads_write_a_cell": ("race", "pairs", (0,), HALF, ((0, "writes"), (1, "writes"))),
    "read_before_the_first_write": ("unwritten", "padded", (1, 0), ALL, ((0, "reads"),)),
    "integers_read_before_the_first_write": ("unwritten", "order", (0,), 1, ((0, "reads"),)),
    "barrier_in_a_branch": ("barrier", "", (), 0, ((0, "waits"), (HALF, "has ended"))),
    "a_barrier_in_each_branch": ("barrier", "", (), 0, ((0, "waits"), (HALF, "waits"))),
    "some_threads_return_early": ("barrier", "", (), 0, ((0, "waits"), (ALL - 3, "has ended"))),
    "a_plain_read_beside_atomic_sums": (
        *("race", "total", (0,), 1),
        ((0, "changes atomically"), (1, "reads")),
    ),
    "a_race_in_the_second_array_of_a_line": (
        *("race", "second", (0,), ALL),
        ((0, "writes"), (ALL - 1, "reads")),
    ),
}
"""Kernel -> kind, array, first cell, distinct cells, (thread, operation) of both sides."""


def test_every_bad_kernel_is_in_the_table() -> None:
    assert EXPECTED.keys() == bad_kernels.KERNELS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_kernel_is_found_in_every_run_with_both_sides(judged: Judged, name: str) -> None:
    kernel = bad_kernels.KERNELS[name]
    kind, array, cell, cells, sides = EXPECTED[name]
    found = judged.bad[name]
    assert len(found) == RUNS
    assert all(findings == found[0] for findings in found)
    (one,) = [finding for finding in found[0] if finding.kind == kind]
    assert (one.array, one.cell, one.cells, one.block) == (array, cell, cells, (0, 0, 0))
    assert tuple((access.thread, access.operation) for access in one.accesses) == sides
    for access, mark in zip(one.accesses, ("# one", "# other")):
        if access.operation != "has ended":
            assert (Path(access.file).name, access.line) == ("bad_kernels.py", marked(kernel, mark))


def test_a_bad_kernel_has_no_findings_but_its_own(judged: Judged) -> None:
    kinds = {name: {finding.kind for finding in runs[0]} for name, runs in judged.bad.items()}
    assert kinds.pop("a_barrier_in_each_branch") == {"barrier"}
    assert kinds == {name: {kind} for name, (kind, *_) in EXPECTED.items() if name in kinds}


def test_the_kernel_of_the_page_about_cuda_is_one_that_runs_without_findings() -> None:
    page = (ROOT / "docs/explain/cuda.md").read_text(encoding="utf-8")
    assert f"```py\n{inspect.getsource(good_kernels.neighbour)}```" in page


def test_correct_kernels_have_no_findings(judged: Judged) -> None:
    assert judged.good.keys() == {*good_kernels.KERNELS, "v1 shared", "v2"}
    assert {name: runs for name, runs in judged.good.items() if any(runs)} == {}


@pytest.mark.parametrize("barrier", ["0", "1"])
def test_a_barrier_that_is_taken_out_of_attention_is_missed_in_every_run(
    judged: Judged, barrier: str
) -> None:
    runs = judged.attention[barrier]
    assert len(runs) == RUNS
    assert all(findings and findings == runs[0] for findings in runs)
    assert {(one.kind, one.array) for one in runs[0]} == {("race", "scores")}
    codes = [access.code for access in runs[0][0].accesses]
    assert codes == ["scores[thread] = score * scale", "top = max(top, scores[k])"]


def test_a_finding_is_one_sentence_with_threads_cell_and_the_code_of_both_lines(judged: Judged) -> None:
    (one,) = judged.bad["missing_barrier"][0]
    first, second = (
        marked(bad_kernels.missing_barrier, "# one"),
        marked(bad_kernels.missing_barrier, "# other"),
    )
    assert str(one) == (
        f"race on shared[0] (and 15 more cells): thread 0 writes at bad_kernels.py:{first} "
        f"(shared[i] = numbers[i]  # one), thread 15 reads at bad_kernels.py:{second} "
        "(out[i] = shared[(i + 1) % N]  # other), and no barrier lies between"
    )
    (one,) = judged.bad["barrier_in_a_branch"][0]
    assert str(one).startswith(
        "not all threads of block (0, 0, 0) come to the same barrier: thread 0 waits at "
    )
    assert str(one).endswith("thread 8 has ended")
    (one,) = judged.bad["read_before_the_first_write"][0]
    assert str(one).startswith(
        "padded[1, 0] (and 15 more cells) is read before it is written: thread 0 reads"
    )


def test_the_map_of_scores_shows_who_writes_then_who_reads(judged: Judged) -> None:
    scores = judged.maps["scores"]
    threads = attention_cuda.THREADS
    assert (scores.unit, scores.columns) == ("cell", list(range(threads)))
    wrote, read, wrote_again, read_again, nothing = scores.phases
    assert wrote == ["." * thread + "w" + "." * (threads - thread - 1) for thread in range(threads)]
    assert read == ["r" * threads] * threads
    assert [row.count("w") for row in wrote_again] == [1] * 6 + [0] * (threads - 6)
    assert read_again == ["r" * 6 + "." * (threads - 6)] * threads
    assert set("".join(nothing)) == {"."}


def test_the_map_of_pages_shows_the_pages_of_the_block_table(judged: Judged) -> None:
    pages = judged.maps["key_cache"]
    used = judged.tables[:9]  # 70 tokens in pages of 8
    assert (pages.unit, pages.columns) == ("page", sorted(used))
    first = pages.phases[0]
    for thread, row in enumerate(first):
        assert row == "".join("r" if page == used[thread // 8] else "." for page in pages.columns)


def test_a_race_is_marked_in_the_map_and_in_both_pictures(judged: Judged) -> None:
    broken = judged.maps["broken"]
    assert broken.phases == [
        ["".join("!" if at in (i, (i + 1) % 16) else "." for at in range(16)) for i in range(16)]
    ]
    text, picture = broken.as_text(), broken.as_svg()
    assert "  thread       0  !!.............." in text.splitlines()
    assert picture.count("thread 0 races for cell") == 2


def test_a_process_that_does_not_simulate_is_told_what_to_set() -> None:
    with pytest.raises(BackendError, match="set NUMBA_ENABLE_CUDASIM=1 before the start"), watch():
        pass


@pytest.mark.quick
@pytest.mark.parametrize(
    ("accesses", "races"),
    [
        ([(0, "writes"), (0, "reads")], None),
        ([(0, "reads"), (1, "reads")], None),
        ([(1, "changes atomically"), (0, "changes atomically")], None),
        ([(0, "reads"), (1, "writes")], (1, 0)),
        ([(2, "writes"), (1, "writes"), (3, "reads")], (1, 2)),
        ([(0, "changes atomically"), (1, "reads")], (0, 1)),
        ([(0, "reads"), (1, "changes atomically")], (1, 0)),
    ],
)
def test_accesses_race_if_two_threads_make_them_and_one_changes_the_cell(
    accesses: list[tuple[int, str]], races: Any
) -> None:
    pair = conflict({Access(thread, operation, "kernel.py", 1) for thread, operation in accesses})
    assert races == (pair and tuple(access.thread for access in pair))


def test_accesses_of_an_array_are_counted_by_thread() -> None:
    recording = Recording()
    recording._counts.update({("keys", READS, 0): 3, ("keys", READS, 1): 5, ("values", READS, 0): 9})
    assert (recording.count("keys", READS), recording.most_of_a_thread("keys", READS)) == (8, 5)
    assert (recording.count("none", READS), recording.most_of_a_thread("none", READS)) == (0, 0)
