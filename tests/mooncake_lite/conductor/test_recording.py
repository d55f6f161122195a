"""A recording gives back what was recorded, names what is wrong with a file, and replays to equal effects."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from mooncake_lite import __version__
from mooncake_lite.cli import main
from mooncake_lite.conductor.loop import ConductorRole
from mooncake_lite.conductor.recording import FORMAT, MAGIC, Digester, Recorder, Recording
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.control.effects import Effect, Fail, StartPrefill, WakeAt
from mooncake_lite.control.events import (
    Event,
    GatewayReady,
    RankJoined,
    RankLost,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    Tick,
    Undelivered,
)
from mooncake_lite.errors import RecordingError
from store.layout import BlockLayout
from store.objects import BlockRef, BlockRemoved, BlockStored
from tests.mooncake_lite.conductor.fake_hub import FakeHub

pytestmark = pytest.mark.quick

CONFIG = ControlConfig(
    layout=(2, 1, 16, 4, 4, "none"), roles=["steward", "prefill", "decode", "store"], nodes=[0, 0, 0, 0]
)
BLOCK_BYTES = 1024

STORY: list[tuple[Event, float]] = [
    (RankJoined(1, 0, 1, ("prefill",), 0, slots=1), 0.5),
    (RankJoined(2, 0, 2, ("decode",), 0, slots=4), 0.6),
    (RankJoined(3, 0, 3, ("store",), 0, segment_bytes=16 * BLOCK_BYTES), 0.7),
    (GatewayReady("gateway"), 0.8),
    (RequestArrived("a", 40, 10, [2**64 - 1, 7], [5, 6]), 1.25),
    (RequestArrived("b", 1000, 10, list(range(62)), list(range(62))), 1.5),
    (RequestCancelled("a"), 2.0),
    (RequestFailed(1, 0, "a", 1, "cancelled"), 2.5),
    (RequestArrived("c", 40, 10, [2**64 - 1, 7], [5, 6]), 3.0),
    (RankLost(2, 0, "killed"), 3.5),
    (RankLost(0, 0, "a thread died"), 4.0),
]
"""A cluster comes up, gets a request that is cancelled and one that is too large, and goes on without a rank,
but not without rank 0."""


def record(path: Path, story: list[tuple[Event, float]] = STORY, *, digest: bool = True) -> None:
    """A recording of this story; with digest=False of one that had no effects."""
    control = Control(CONFIG)
    recorder = Recorder(path, CONFIG)
    for event, now in story:
        effects = control.on(event, now)
        recorder.record(event, now, effects if digest else [])
    recorder.close()


def test_a_recording_gives_back_every_event_its_time_and_the_configuration(tmp_path: Path) -> None:
    order = StartPrefill(
        1, "a", 0, [BlockRef(1, 3, 0, 1024)], [], None, {"dram": 16}, 0.5, [(3, 0.1, 1024, 1)]
    )
    story = [*STORY, (Undelivered(order, "the queue is full"), 5.0)]
    record(tmp_path / "run", story)
    recording = Recording(tmp_path / "run")

    assert recording.header.version == __version__
    assert recording.header.config == CONFIG
    assert [(entry.event, entry.now) for entry in recording.entries()] == story
    assert (recording.torn_bytes, recording.read_bytes) == (0, recording.num_bytes)
    recording.close()


def test_a_recording_is_for_its_user_alone_and_never_replaces_a_file(tmp_path: Path) -> None:
    record(tmp_path / "run")
    before = (tmp_path / "run").read_bytes()

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o600
    with pytest.raises(
        RecordingError, match="exists already; remove it, or choose another file with --record"
    ):
        Recorder(tmp_path / "run", CONFIG)
    with pytest.raises(RecordingError, match="choose a file in a folder that is there and writable"):
        Recorder(tmp_path / "missing" / "run", CONFIG)
    assert (tmp_path / "run").read_bytes() == before


def test_the_digest_tells_effects_their_order_and_their_kind_apart() -> None:
    digest = Digester().digest
    one, two = WakeAt(1.0), Fail("a", "why")

    assert digest([one, two]) == Digester().digest([one, two])
    assert len({digest(some) for some in ([one, two], [two, one], [one], [two], [])}) == 5
    assert digest([BlockStored(1, 3, "dram")]) != digest([BlockRemoved(1, 3, "dram")])


def test_events_reach_the_file_though_the_recorder_is_never_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", CONFIG)
    for number in range(5):
        recorder.record(Tick(), float(number), [])
    recording = Recording(tmp_path / "run")

    assert len(list(recording.entries())) >= 4
    recorder.close()
    recording.close()


def test_the_event_that_ends_a_conductor_is_the_last_one_in_its_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig()
    decides = control_config(config, BlockLayout(2, 1, 64, 8, 4), [0] * config.ranks)
    hub: Any = FakeHub()
    role = ConductorRole(
        config, hub, decides, recorder=Recorder(tmp_path / "run", decides), clock=lambda: 1.0
    )
    role.step([("gateway-0", RequestCancelled("a"))])
    monkeypatch.setattr(role.control, "on", lambda event, now: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        role.step([("gateway-0", RequestCancelled("b"))])
    recording = Recording(tmp_path / "run")
    assert [entry.event for entry in recording.entries()] == [RequestCancelled("a"), RequestCancelled("b")]
    recording.close()
    role.close()


@pytest.mark.parametrize("missing", range(1, 8))
def test_a_torn_last_event_is_told_and_not_an_error(tmp_path: Path, missing: int) -> None:
    record(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(whole[:-missing])
    recording = Recording(tmp_path / "run")

    assert len(list(recording.entries())) == len(STORY) - 1
    assert recording.read_bytes + recording.torn_bytes == len(whole) - missing
    assert recording.torn_bytes > 0
    recording.close()


def frame(content: object) -> bytes:
    data = msgspec.msgpack.encode(content)
    return len(data).to_bytes(4, "little") + data


HEADER = frame((FORMAT, "0.1.0", CONFIG))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a recording; give a file that `serve --record` wrote"),
        (b"not a recording at all", "is not a recording"),
        (MAGIC, "ends before its header"),
        (MAGIC + HEADER[:20], "ends before its header"),
        (
            MAGIC + frame((FORMAT + 1, "9.9", "x")),
            "has format 4, .* reads 3; replay it with mooncake-lite 9.9",
        ),
        (MAGIC + frame((1, "0.1.0", CONFIG)), "has format 1, .* reads 3; replay it with mooncake-lite 0.1.0"),
        (MAGIC + frame("header"), "damaged at byte 8"),
        (MAGIC + frame((FORMAT, "0.1.0", {"layout": []})), "damaged at byte 8"),
        (MAGIC + HEADER + frame((1.0, 5, ["Nonsense"])), f"damaged at byte {8 + len(HEADER)}: Invalid value"),
        (MAGIC + HEADER + frame((1.0, 5)), f"damaged at byte {8 + len(HEADER)}"),
        (MAGIC + HEADER + b"\xff\xff\xff\xff", "a frame of 4294967295 bytes, the limit is"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_named_in_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    (tmp_path / "run").write_bytes(content)

    assert main(["replay-events", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(RecordingError, match=words):
        list(Recording(tmp_path / "run").entries())


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-events", str(tmp_path / "run")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_replay_that_is_equal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")

    assert main(["replay-events", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"{len(STORY)} events of 3.5 s" in said
    assert "requests: 1 cancelled, 1 failed, 1 rejected; 0 open" in said
    assert said.endswith("equal: every event has the effects that were recorded\n")


def test_a_replay_names_the_first_event_whose_effects_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", digest=False)

    assert main(["replay-events", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "first difference: event 1, 0.000000 s after the first event" in said
    assert "RankJoined(rank=1, epoch=0, instance=1, duties=['prefill']" in said
    assert "Readiness(ready=False" in said


UNKNOWN = RankLost(99, 0, "killed")
"""The control plane raises for a rank that it does not know."""


@pytest.mark.parametrize(
    ("event", "recorded", "code", "words"),
    [
        (UNKNOWN, None, 0, "equal: every event"),
        (UNKNOWN, [], 1, "replayed: IndexError"),
        (Tick(), None, 1, "recorded: an exception; replayed: "),
    ],
)
def test_an_event_that_raised_is_equal_exactly_when_its_replay_raises(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    event: Event,
    recorded: list[Effect] | None,
    code: int,
    words: str,
) -> None:
    recorder = Recorder(tmp_path / "run", CONFIG)
    recorder.record(event, 1.0, recorded)
    recorder.close()

    assert main(["replay-events", str(tmp_path / "run")]) == code
    assert words in capsys.readouterr().out


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "run", CONFIG)
    monkeypatch.setattr("mooncake_lite.conductor.recording.os.write", full)
    for number in range(5):
        recorder.record(Tick(), float(number), [])
    recorder.close()

    assert capsys.readouterr().err.count("No space left on device") == 1


def test_after_a_full_disk_events_take_no_memory_and_leave_no_gap_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mooncake_lite.conductor.recording.FLUSH_NBYTES", 1000)
    recorder = Recorder(tmp_path / "run", CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr("mooncake_lite.conductor.recording.os.write", full)
        recorder.record(Tick(), 0.0, [])
    for _ in range(1000):
        recorder.record(Tick(), 0.0, [])
        assert len(recorder._buffer) < 1000
    recorder.close()
    recording = Recording(tmp_path / "run")

    assert list(recording.entries()) == []
    recording.close()


def test_a_write_that_takes_a_part_of_the_bytes_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("mooncake_lite.conductor.recording.os.write", lambda file, data: write(file, data[:7]))
        record(tmp_path / "run")
    recording = Recording(tmp_path / "run")

    assert [(entry.event, entry.now) for entry in recording.entries()] == STORY
    assert recording.torn_bytes == 0
    recording.close()


def test_every_event_can_be_read_from_a_recording() -> None:
    bases = (ev.Event, ev.RankEvent, ev.RequestEvent, ev.BranchEvent)
    kinds = {kind for base in bases for kind in base.__subclasses__()} - set(bases)
    assert kinds == set(get_args(ev.AnyEvent))
