"""Why a cluster ended: the first cause, and the rank's name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.output import Output, RankLine
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RankState
from mooncake_lite.launch.verdict import why_ended, why_told_to_end

pytestmark = pytest.mark.quick

CONFIG = ServeConfig()


def states(*pairs: tuple[str, str]) -> dict[int, RankState]:
    """Rank files of ranks 0, 1, ...: (state, reason)."""
    return {
        rank: RankState(
            rank=rank, role=CONFIG.role_of(rank), pid=1, start_time=1, host="h", state=state, reason=reason
        )
        for rank, (state, reason) in enumerate(pairs)
    }


def verdict(found: dict[int, RankState], lost: list[int] | None = None, **more: object) -> str:
    facts = {"mpirun_code": 0, "signals": {}, "error": "", "last_lines": []} | more
    return why_ended(CONFIG, found, lost or [], **facts)  # type: ignore[arg-type]


STOPPED = ("stopped", "")
READY = ("ready", "")
SILENCE = "rank 0 (steward) gave no sign of life for 6.2 s"
FOLLOWED = ("failed", f"stopped: {SILENCE}")
GATEWAY_KILLED = "the gateway process 77 was killed by signal 9 (SIGKILL)"


def test_everybody_stopped_is_no_error() -> None:
    assert verdict(states(STOPPED, STOPPED, STOPPED, STOPPED)) == ""


def test_a_cluster_that_went_on_without_a_rank_and_was_stopped_later_has_no_error() -> None:
    assert verdict(states(STOPPED, STOPPED, READY, STOPPED), [2]) == ""


def test_the_conductors_verdict_comes_first() -> None:
    found = states(("failed", "rank 2 (decode) died: no heartbeat for 6 s"), STOPPED, ("ready", ""), STOPPED)
    assert verdict(found, [2]) == "rank 2 (decode) died: no heartbeat for 6 s"


def test_a_lost_conductor_is_the_cause_and_not_those_who_noticed() -> None:
    found = states(("ready", ""), FOLLOWED, FOLLOWED, FOLLOWED)
    assert verdict(found, [0]) == "rank 0 (steward) died: its process ended without a last word"


def test_a_killed_gateway_is_the_cause_though_ranks_were_killed_after_it() -> None:
    found = states(("failed", GATEWAY_KILLED), READY, READY, READY)
    assert verdict(found, [1]) == GATEWAY_KILLED


def test_a_conductor_that_hung_and_wakes_up_does_not_blame_a_rank_that_ended_because_of_it() -> None:
    accused = ("failed", "rank 2 (decode) died: its process 7 ended")
    assert verdict(states(accused, READY, FOLLOWED, READY)) == SILENCE
    assert verdict(states(accused, READY, ("failed", f"stopped: {accused[1]}"), READY)) == accused[1]


def test_a_rank_that_hung_and_wakes_up_does_not_blame_the_conductor_that_ended_it() -> None:
    died = "rank 1 (prefill) died: no sign of life for 6.0 s"
    conductor, hung = states(("failed", died), FOLLOWED).values()
    late = msgspec.structs.replace(hung, said_at=12.0)
    assert verdict({0: msgspec.structs.replace(conductor, said_at=11.0), 1: late}) == died
    assert verdict({0: msgspec.structs.replace(conductor, said_at=13.0), 1: late}) == SILENCE


def test_a_conductor_that_hangs_is_the_cause_and_not_those_who_ended_because_of_it() -> None:
    assert verdict(states(READY, FOLLOWED, FOLLOWED, READY)) == SILENCE
    assert verdict(states(("failed", "ValueError: 5"), FOLLOWED, READY, READY)) == (
        "rank 0 (steward) failed: ValueError: 5"
    )


@pytest.mark.parametrize(
    ("found", "orphaned", "why"),
    [
        (states(("failed", GATEWAY_KILLED), READY), True, GATEWAY_KILLED),
        (
            states(("failed", "rank 2 (decode) died: its process 5 ended"), READY),
            True,
            "rank 2 (decode) died",
        ),
        (states(READY, FOLLOWED), True, SILENCE),
        (states(READY, ("failed", "KeyError: 1")), False, "rank 1 (prefill) failed: KeyError: 1"),
        (states(("stopped", "SIGTERM"), READY), True, "rank 0 (steward) was told to end: SIGTERM"),
        (states(READY, READY), True, "rank 0 (steward) died"),
        (states(READY, READY), False, "the gateway was told to end"),
        ({}, False, "the gateway was told to end"),
    ],
)
def test_clients_of_a_gateway_that_gets_a_signal_hear_the_cause(
    found: dict[int, RankState], orphaned: bool, why: str
) -> None:
    assert why_told_to_end(found, orphaned).startswith(why)


def test_an_exit_code_is_told_in_words() -> None:
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-15) == "was killed by signal 15 (SIGTERM)"
    assert how_it_ended(-63) == "was killed by signal 63"


def test_mpirun_ends_with_0_though_a_rank_was_killed_and_the_rank_is_named_with_the_signal() -> None:
    found = states(READY, STOPPED, STOPPED, READY)
    said = verdict(found, [3], signals={3: "signal 9 (Killed)"})
    assert said == "rank 3 (store) died: signal 9 (Killed)"


def test_a_rank_that_failed_is_told_before_those_that_followed_it() -> None:
    found = states(FOLLOWED, FOLLOWED, ("failed", "out of memory"), FOLLOWED)
    assert verdict(found) == "rank 2 (decode) failed: out of memory"


def test_a_killed_mpirun_is_told_as_such() -> None:
    assert (
        verdict(states(*[("stopped", "SIGTERM")] * 4), mpirun_code=-9)
        == "mpirun was killed by signal 9 (SIGKILL)"
    )


def test_a_start_without_any_rank_shows_what_mpirun_said() -> None:
    said = verdict({}, mpirun_code=213, last_lines=["a", "b", "There are not enough slots"])
    assert (
        said
        == "mpirun ended with exit code 213 before every rank had started: a | b | There are not enough slots"
    )


def test_an_error_that_a_rank_has_printed_is_used_when_there_is_no_file() -> None:
    assert verdict({}, mpirun_code=2, error="max_model_len=9 is wrong") == "max_model_len=9 is wrong"


def test_lines_of_ranks_are_shown_and_mpiruns_own_and_errors_are_kept(tmp_path: Path) -> None:
    output = Output(CONFIG, tmp_path / "log")
    first = output.feed("stdout", b"[1,2]<stdout>: hel")
    second = output.feed("stdout", b"lo\n[prterun-h-1@1,0]<stderr>: mooncake-lite: error: rank 2 is gone\n")
    third = output.feed(
        "stderr", b"-----\nprterun noticed that process rank 2 with PID 9 on node h exited on\n"
    )
    output.feed("stderr", b"signal 9 (Killed).\n")
    output.close()
    assert (first, second, third) == ([], [RankLine(2, "hello")], [])
    assert (output.name(2), output.error) == ("decode-2", "rank 2 is gone")
    assert (output.signal_of(2), output.signal_of(1)) == ("signal 9 (Killed)", "")
    assert (tmp_path / "log").read_bytes().startswith(b"[1,2]<stdout>: hello\n")


def test_open_mpis_boxes_are_shown_whole_and_the_one_about_untested_windows_is_not(tmp_path: Path) -> None:
    output = Output(CONFIG, tmp_path / "log")
    bar = "-" * 74

    def box(words: str) -> bytes:
        return "".join(f"[1,0]<stderr>: {line}\n" for line in (bar, words, "", bar)).encode()

    assert (
        output.feed("stderr", box("WARNING: The selected 'osc' module 'sm' is not tested for post-failure"))
        == []
    )
    shown = output.feed("stderr", box("No network interfaces were found"))
    output.close()
    assert [line.text for line in shown] == [bar, "No network interfaces were found", "", bar]


def test_a_bar_that_opens_nothing_holds_no_line_back_for_ever(tmp_path: Path) -> None:
    output = Output(CONFIG, tmp_path / "log")
    lines = ["-" * 80, *(f"line {number}" for number in range(60))]
    shown = output.feed("stdout", "".join(f"[1,3]<stdout>: {line}\n" for line in lines).encode())
    output.close()
    assert [line.text for line in shown] == lines
