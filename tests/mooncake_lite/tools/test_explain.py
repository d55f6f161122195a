"""`mooncake-lite explain`: what a recording says of a request, and of one that is not in it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from mooncake_lite.cli import main
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.control.effects import StartPrefill
from mooncake_lite.errors import RecordingError
from mooncake_lite.tools.explain import from_recording
from scheduler import CostConfig, Terms
from scheduler.costs import DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.placement.explanation import Candidate, Explanation

pytestmark = pytest.mark.quick

BLOCK_BYTES = 1024
CONFIG = ControlConfig(
    layout=(2, 1, 16, 4, 4, "none"),
    roles=["steward", "prefill", "prefill", "decode", "store", "store"],
    nodes=[0, 0, 1, 0, 0, 1],
    max_queue=3,
    costs=CostConfig(
        prefill=PrefillCost(0.0, 0.01),
        decode=DecodeCost(0.02, 0.001, 0.0),
        transfer=TransferCost(1e5, 0.0),
        load=LoadCost(1e6, 1e5, 0.0),
        is_guess=False,
    ),
)
KEYS = [11, 12, 13, 14]


def arrived(name: str, tokens: int, keys: list[int] | None = None) -> ev.RequestArrived:
    return ev.RequestArrived(name, tokens, 10, keys or [], keys or [])


def joined(rank: int) -> ev.RankJoined:
    role = CONFIG.roles[rank]
    slots, nbytes = {"prefill": (1, 0), "decode": (8, 0)}.get(role, (0, 64 * BLOCK_BYTES))
    return ev.RankJoined(rank, 0, rank, (role,), CONFIG.nodes[rank], slots, nbytes)  # type: ignore[arg-type]


def record(path: Path, *, digest: bool = True) -> None:
    """Two nodes. `first` leaves four blocks on node 0; then `busy` occupies its prefill rank.

    Two more wait, and the last one is refused.
    """
    control, recorder = Control(CONFIG), Recorder(path, CONFIG)

    def tell(event: ev.Event, now: float) -> list[object]:
        effects = control.on(event, now)
        recorder.record(event, now, effects if digest else [])
        control.check()
        return list(effects)

    for rank in range(1, len(CONFIG.roles)):
        tell(joined(rank), 0.1)
    tell(ev.GatewayReady("gateway"), 0.2)
    (order,) = (one for one in tell(arrived("first", 66, KEYS), 1.0) if isinstance(one, StartPrefill))
    sums = [[1, 2]] * (len(order.store))
    tell(ev.PrefillEnded(order.rank, 0, "first", 1, sums, [0], 0.0, 0.66, 0.0, 66, 0), 1.67)
    tell(arrived("busy", 200, [*KEYS, *range(21, 29)]), 3.0)
    tell(arrived("second", 70, KEYS), 3.5)
    for number in range(4):
        tell(arrived(f"later-{number}", 400), 3.5)
    recorder.close()


def candidate(prefill: int, fetch: bool, *numbers: float) -> Candidate:
    return Candidate(prefill, 3, fetch, Terms(*numbers))  # type: ignore[arg-type]


def close(found: Candidate, wanted: Candidate) -> bool:
    assert msgspec.structs.asdict(found.terms) == pytest.approx(msgspec.structs.asdict(wanted.terms))
    return (found.prefill, found.decode, found.fetch) == (wanted.prefill, wanted.decode, wanted.fetch)


def test_a_recording_explains_a_request_with_every_candidate_and_term(tmp_path: Path) -> None:
    """Rank 2 would fetch 4 KiB at 100 kB/s and compute 6 tokens. Rank 1 is busy for 0.88 s more.

    It would load 4 KiB at 1 MB/s. Messages take 10 ms, so a prefill takes its slot 67 / 66 times as long as
    it computes.
    """
    queue_s = 1.36 * 67 / 66 - 0.5
    record(tmp_path / "run")
    found = from_recording("second", tmp_path / "run")
    assert (found.policy, found.outcome, found.reason) == ("kvcache-centric", "placed", "")
    rows = [
        candidate(2, True, 0.06 + 0.04096, 0.0, 0.04096, 0.06, 0, 4, 4, 1, 0.022, 0.01),
        candidate(1, True, 0.06 + queue_s, queue_s, 0.0, 0.06, 4, 4, 4, 1, 0.022, 0.014096),
    ]
    assert len(found.candidates) == 2
    assert all(map(close, found.candidates, rows))


def test_a_refused_request_has_its_reason_and_what_would_have_been_compared(tmp_path: Path) -> None:
    record(tmp_path / "run")
    found = from_recording("later-3", tmp_path / "run")
    assert found.outcome == "refused"
    assert found.reason == "3 requests are waiting, the limit is 3"
    assert [row.prefill for row in found.candidates] == [1, 2]


def test_a_recording_of_other_effects_explains_nothing(tmp_path: Path) -> None:
    record(tmp_path / "run", digest=False)
    with pytest.raises(RecordingError, match="event 1 has other effects here"):
        from_recording("second", tmp_path / "run")


def test_the_command_prints_a_table_or_json_and_names_the_nearest_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    record(tmp_path / "run")
    assert main(["explain", "second", "--recording", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "second: kvcache-centric chose prefill 2 and decode 3"
    assert lines[1] == "of 4 reused blocks 0 were near, and 4 were fetched (a transfer of 41.0 ms)"
    assert lines[2].split()[:6] == ["prefill", "decode", "score", "ms", "TTFT", "ms"]
    assert "a part of TTFT, and not of the score" in lines[-1]
    assert lines[4].split()[0] == "1"
    assert lines[4].split()[-6:-2] == ["4", "4", "4", "0"]  # near the other instance, which fetches none
    assert lines[3].split() == [
        "2",
        "3",
        "101.0",
        "111.0",
        "0.0",
        "41.0",
        "10.0",
        "60.0",
        "0",
        "4",
        "4",
        "4",
        "1",
        "22.0",
    ]
    assert main(["explain", "second", "--recording", run, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert msgspec.convert(shown, Explanation) == from_recording("second", tmp_path / "run")
    assert main(["explain", "secnd", "--recording", run]) == 2
    assert capsys.readouterr().err == (
        f"mooncake-lite: error: {run} has no request 'secnd'; 7 are in the recording, among them second\n"
    )
    assert main(["explain", "a", "--recording", run, "--cluster", run]) == 2
    assert "give one of them" in capsys.readouterr().err
    file = tmp_path / "explained"
    assert main(["explain", "second", "--recording", run, "--json", str(file)]) == 0
    assert msgspec.json.decode(file.read_bytes(), type=Explanation).request_id == "second"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_was_never_placed_waits(
    leaves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control, recorder = Control(CONFIG), Recorder(tmp_path / "run", CONFIG)
    events: list[ev.Event] = [joined(rank) for rank in range(1, 6)]
    events += [ev.GatewayReady("gateway"), ev.RankLost(3, 0, "it died"), arrived("early", 66)]
    for event in [*events, ev.RequestCancelled("early")] if leaves else events:
        recorder.record(event, 1.0, control.on(event, 1.0))
    recorder.close()
    assert main(["explain", "early", "--recording", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("early: waits: ")


def test_a_refused_request_is_shown_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run")
    assert main(["explain", "later-3", "--recording", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("later-3: refused: 3 requests are waiting, the limit is 3\n")


def test_an_event_that_raises_ends_the_replay_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run")
    monkeypatch.setattr(Control, "on", Mock(side_effect=KeyError(5)))
    with pytest.raises(RecordingError, match="event 1 raises KeyError: 5"):
        from_recording("second", tmp_path / "run")
