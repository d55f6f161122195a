"""Parts of a trace, their limits, and how they become one file that a viewer opens."""

from __future__ import annotations

import errno
import json
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.tracing.clocks import Round, offset_to_rank_0, tightest
from mooncake_lite.tracing.lanes import Spans, Timeline
from mooncake_lite.tracing.merge import merge, merged_line
from mooncake_lite.tracing.tracer import BUFFER_NBYTES, PartFile, Tracer, part_path
from tests.mooncake_lite.tracing.reading import read

pytestmark = pytest.mark.quick

MS = 1_000_000


class Clock:
    """A clock that a test sets, in ns."""

    def __init__(self) -> None:
        self.ns = 1000 * MS

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> int:
        """Let time pass. Returns the new time."""
        self.ns += int(ms * MS)
        return self.ns


def new_tracer(folder: Path, number: int = 0, name: str = "rank 0", **settings: Any) -> Tracer:
    return Tracer(number, name, PartFile(folder / "out.json", number), **settings)


# ------------------------------------------------------------------------------ lanes


def test_work_and_waits_fill_a_lane_and_waits_of_one_kind_are_one(tmp_path: Path) -> None:
    clock = Clock()
    tracer = new_tracer(tmp_path, clock=clock)
    steps = Timeline(tracer, "steps")
    for _ in range(3):
        steps.wait("wait for messages", clock())
        clock.pass_ms(10)
    began = clock()
    clock.pass_ms(5)
    steps.work("decode", began, {"jobs": 2})
    steps.wait("wait for transfers", clock())
    clock.pass_ms(1)
    steps.close()
    tracer.close()
    merge(tmp_path / "out.json")
    found = [
        (one.name, one.began_s, round(one.ended_s, 6), one.args) for one in read(tmp_path / "out.json").slices
    ]
    assert found == [
        ("wait for messages", 1.0, 1.03, {}),
        ("decode", 1.03, 1.035, {"jobs": 2}),
        ("wait for transfers", 1.035, 1.036, {}),
    ]


def test_spans_that_overlap_have_lanes_of_their_own_and_a_lane_is_used_again(tmp_path: Path) -> None:
    clock = Clock()
    tracer = new_tracer(tmp_path, clock=clock)
    spans = Spans(tracer, "requests")
    for key in "ab":
        spans.open(key, key)
        clock.pass_ms(1)
    spans.stage("a", "load")
    clock.pass_ms(1)
    spans.stage("a", "load")
    spans.stage("a", "compute")
    clock.pass_ms(1)
    spans.close("a", {"outcome": "finished"})
    clock.pass_ms(1)
    spans.open("c", "c")
    spans.stage("unknown", "load")
    spans.close("unknown")
    spans.close("b")
    spans.close("c")
    assert len(spans) == 0
    tracer.close()
    merge(tmp_path / "out.json")
    slices = {one.name: one for one in read(tmp_path / "out.json").slices}
    lanes = {name: one.lane for name, one in slices.items()}
    assert lanes == dict.fromkeys(["a", "c", "load", "compute"], "requests") | {"b": "requests 2"}
    assert slices["a"].args == {"outcome": "finished"}
    assert (slices["load"].depth, slices["load"].ended_s) == (1, slices["compute"].began_s)


def test_a_span_that_began_before_it_was_told_does_not_take_a_lane_that_was_busy_then(tmp_path: Path) -> None:
    """A transfer is reported after its submission. Another thread may have ended one in between."""
    clock = Clock()
    tracer = new_tracer(tmp_path, clock=clock)
    spans = Spans(tracer, "transfers")
    spans.open(1, "read")
    began = clock.pass_ms(1)
    clock.pass_ms(1)
    spans.close(1)
    spans.open(2, "write", began)
    spans.close(2)
    tracer.close()
    merge(tmp_path / "out.json")
    assert {one.name: one.lane for one in read(tmp_path / "out.json").slices} == {
        "read": "transfers",
        "write": "transfers 2",
    }


def test_threads_may_add_events_at_once(tmp_path: Path) -> None:
    tracer = new_tracer(tmp_path)
    spans = Spans(tracer, "transfers")

    def work(thread: int) -> None:
        for number in range(200):
            spans.open((thread, number), "read")
            spans.stage((thread, number), "copy")
            spans.close((thread, number))
            tracer.flush_when_due()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    merge(tmp_path / "out.json")
    assert len(read(tmp_path / "out.json").slices) == 2 * 4 * 200


# ------------------------------------------------------------------------------ limits and ends


def test_the_parts_become_one_file_in_the_order_of_their_processes(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        tracer = new_tracer(tmp_path, number, f"rank {number}")
        tracer.slice(tracer.lane("steps"), "prefill", 5 * MS, 7 * MS)
        tracer.close()
    done = merge(tmp_path / "out.json")
    assert (done.parts, done.torn) == (3, 0)
    trace = read(tmp_path / "out.json")
    assert trace.processes == ["rank 0", "rank 2", "rank 10"]
    assert [(one.began_s, one.ended_s) for one in trace.slices] == [(0.005, 0.007)] * 3
    assert done.nbytes == (tmp_path / "out.json").stat().st_size
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o600


def test_a_line_that_a_killed_process_did_not_finish_is_left_out(tmp_path: Path) -> None:
    tracer = new_tracer(tmp_path, 0)
    tracer.slice(tracer.lane("steps"), "prefill", 5 * MS, 7 * MS)
    tracer.flush()
    part = part_path(tmp_path / "out.json", 0)
    part.write_bytes(part.read_bytes() + b'{"ph":"X","pid":0,"ti')
    part_path(tmp_path / "out.json", 1).write_bytes(b'{"ph":"M","pid":1')
    part_path(tmp_path / "out.json", 2).write_bytes(b"")
    done = merge(tmp_path / "out.json")
    assert (done.parts, done.torn) == (3, 2)
    trace = read(tmp_path / "out.json")
    assert trace.processes == ["rank 0"]
    assert [one.name for one in trace.slices] == ["prefill"]


def test_a_trace_that_reaches_its_limit_ends_its_slices_and_says_how_much_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = new_tracer(tmp_path, limit_nbytes=2 << 20)
    spans = Spans(tracer, "requests")
    spans.open("a", "a")
    spans.stage("a", "decode")
    lane = tracer.lane("steps")
    while not tracer.dropped:
        tracer.slice(lane, "decode", 5 * MS, 5 * MS, {"pad": "x" * 1000})
        tracer.flush_when_due()
    for _ in range(4):
        spans.close("a")
        tracer.slice(lane, "late", 6 * MS, 7 * MS)
    tracer.close()
    size = part_path(tmp_path / "out.json", 0).stat().st_size
    assert 2 << 20 < size < (2 << 20) + 4096
    merge(tmp_path / "out.json")
    trace = read(tmp_path / "out.json")
    assert trace.labels == {"rank 0": "5 events dropped: the trace of this process has reached 2 MiB"}
    assert {one.name for one in trace.slices} == {"a", "decode"}
    assert [one["name"] for one in trace.instants] == ["the trace ends here"]
    assert capsys.readouterr().err.count("has reached 2 MiB; the cluster continues") == 1


def test_a_full_disk_ends_the_trace_and_not_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    def sink(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tracer = Tracer(0, "rank 0", sink)
    tracer.flush()
    tracer.instant(tracer.lane("steps"), "late", 5)
    tracer.close()
    assert tracer.problem == "the trace cannot be written: No space left on device"
    assert tracer.dropped == 0
    assert capsys.readouterr().err.count("No space left on device; the cluster continues") == 1


def test_a_sink_that_takes_nothing_does_not_fill_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[bytes] = []
    tracer = Tracer(0, "rank 0", written.append)
    while not tracer.problem:
        tracer.instant(1, "x" * 1000, 5)
    for _ in range(100):
        tracer.instant(1, "x" * 1000, 5)
    tracer.close()
    assert BUFFER_NBYTES < sum(map(len, written)) < BUFFER_NBYTES + 8192
    assert "100 events dropped: events came faster than they could be written" in written[-1].decode()
    assert "events came faster" in capsys.readouterr().err


def test_what_comes_after_the_end_is_not_in_the_file(tmp_path: Path) -> None:
    tracer = new_tracer(tmp_path)
    spans = Spans(tracer, "requests")
    spans.open("a", "a")
    tracer.close()
    spans.close("a")
    tracer.close()
    merge(tmp_path / "out.json")
    trace = read(tmp_path / "out.json")
    assert [one.name for one in trace.slices] == ["a"]
    assert trace.labels == {}


def test_a_trace_that_cannot_be_made_keeps_its_parts_until_they_are_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, parts = tmp_path / "out.json", tmp_path / "out.json.parts"
    assert merged_line(out) == f"there is no trace {out}: {parts} has no parts"
    assert list(tmp_path.iterdir()) == []
    new_tracer(tmp_path).close()
    out.write_text("mine")
    join = f"mooncake-lite join-trace {out}"
    assert merged_line(out) == f"{out} exists already; move it away, then: {join}"
    assert main(join.split()[1:]) == 2
    assert out.read_text() == "mine"
    out.unlink()
    (parts / "joined").mkdir()
    assert "cannot be written (Is a directory); its parts are in" in merged_line(out)
    (parts / "joined").rmdir()
    with part_path(out, 0).open("ab") as part:
        part.write(b"{")
    capsys.readouterr()
    assert main(join.split()[1:]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"trace of 1 processes: {out} (0.0 MB)",
        "1 of them ended in the middle of an event, which was left out",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert read(out).processes == ["rank 0"]


def test_an_arrow_has_the_same_number_in_every_process(tmp_path: Path) -> None:
    for number, step in enumerate(("first", "", "last")):
        spans = Spans(tracer := new_tracer(tmp_path, number, f"rank {number}"), "requests")
        spans.open("cmpl-7", "cmpl-7")
        spans.follow("cmpl-7", "cmpl-7", first=step == "first", last=step == "last")
        tracer.close()
    merge(tmp_path / "out.json")
    (arrows,) = read(tmp_path / "out.json").arrows.values()
    assert [arrow["ph"] for arrow in arrows] == ["s", "t", "f"]
    assert all(arrow["id"] < 2**53 for arrow in arrows), "a number that JavaScript can hold"


# ------------------------------------------------------------------------------ clocks of other hosts


def test_the_offset_of_a_clock_lies_between_the_bounds_that_the_exchanges_give() -> None:
    ahead = 5000  # rank 0's clock shows 5000 more
    rounds = [
        Round(own_before=100, own_after=190, zero_before=ahead + 120, zero_after=ahead + 210),
        Round(own_before=300, own_after=322, zero_before=ahead + 310, zero_after=ahead + 324),
    ]
    offset = tightest(rounds)
    assert abs(offset.ahead_ns - ahead) <= offset.error_ns
    assert offset.error_ns == 18


def test_hosts_find_the_offset_of_their_clocks_in_exchanges() -> None:
    """Two threads stand for two hosts, the second one's clock an hour behind."""
    behind_ns = 3600 * 10**9
    barrier = threading.Barrier(2, timeout=60)
    given: dict[int, bytes] = {}

    class World:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def allgather_bytes(self, data: bytes) -> list[bytes]:
            given[self.rank] = data
            barrier.wait()
            found = [given[0], given[1]]
            barrier.wait()
            return found

    clocks = [time.monotonic_ns, lambda: time.monotonic_ns() - behind_ns]
    found: dict[int, Any] = {}

    def host(rank: int) -> None:
        found[rank] = offset_to_rank_0(World(rank), clocks[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(host, range(2)))
    assert abs(found[0].ahead_ns) <= found[0].error_ns
    assert abs(found[1].ahead_ns - behind_ns) <= found[1].error_ns


def test_times_of_another_host_are_moved_to_the_axis_of_rank_0(tmp_path: Path) -> None:
    tracer = new_tracer(tmp_path, ahead_ns=2 * MS)
    tracer.slice(tracer.lane("steps"), "prefill", 5 * MS, 7 * MS)
    tracer.close()
    merge(tmp_path / "out.json")
    (one,) = read(tmp_path / "out.json").slices
    assert (one.began_s, round(one.ended_s, 6)) == (0.007, 0.009)
    assert json.loads((tmp_path / "out.json").read_text())["displayTimeUnit"] == "ms"
