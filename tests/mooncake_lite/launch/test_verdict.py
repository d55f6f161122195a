"""Why a cluster ended: the first cause, and the rank's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.output import Output, RankLine
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RankState
from mooncake_lite.launch.verdict import Facts, why_ended, why_told_to_end

pytestmark = pytest.mark.quick

CONFIG = ServeConfig()


def states(*said: tuple[str, str] | tuple[str, str, float]) -> dict[int, RankState]:
    """Rank files of ranks 0, 1, ...: (state, reason, when it was said). By default at 2.0."""
    return {
        rank: RankState(
            rank=rank, role=CONFIG.role_of(rank), pid=1, start_time=1, host="h", state=state, reason=reason,
            said_at=at[0] if at else 2.0,
        )
        for rank, (state, reason, *at) in enumerate(said)
    }  # fmt: skip


def known(found: dict[int, RankState], *lost: int, survives: bool = False, **more: Any) -> Facts:
    """What is known. lost: ranks that were seen gone at 1.0, 1.1, ..."""
    seen = {rank: 1.0 + index / 10 for index, rank in enumerate(lost)}
    return Facts(found, **({"lost": seen, "survives": survives} | more))


STOPPED = ("stopped", "")
READY = ("ready", "")
STARTING = ("starting", "joining MPI")
SILENCE = "rank 0 (steward) gave no sign of life for 6.2 s"
FOLLOWED = ("failed", f"stopped: {SILENCE}")
GATEWAY_KILLED = "the gateway process 77 was killed by signal 9 (SIGKILL)"
NO_TOKENIZER = "/models/x/tokenizer.json is missing"
REFUSED = ("refused", NO_TOKENIZER)
NO_WORD = "died: its process ended without a last word"
IN_ORDER = ("", 0)

SITUATIONS = {
    "every rank stopped": (known(states(STOPPED, STOPPED, STOPPED, STOPPED)), IN_ORDER),
    "a rank was lost before an orderly stop": (
        known(states(STOPPED, STOPPED, READY, STOPPED), 2, survives=True),
        IN_ORDER,
    ),
    "a rank was killed in an orderly stop": (
        known(states(STOPPED, STOPPED, READY, STOPPED), survives=True),
        IN_ORDER,
    ),
    "a rank failed before an orderly stop": (
        known(states(STOPPED, ("failed", "KeyError: 1", 0.0), STOPPED, STOPPED), survives=True),
        IN_ORDER,
    ),
    "the steward names a rank": (
        known(states(("failed", "rank 2 (decode) died: no heartbeat for 6 s"), STOPPED, READY, STOPPED), 2),
        ("rank 2 (decode) died: no heartbeat for 6 s", 1),
    ),
    "the gateway was killed, and ranks after it": (
        known(states(("failed", GATEWAY_KILLED), READY, READY, READY), 1),
        (GATEWAY_KILLED, 1),
    ),
    "the gateway refuses": (known(states(REFUSED, FOLLOWED, FOLLOWED, FOLLOWED)), (NO_TOKENIZER, 2)),
    "the steward refuses, and all ranks leave": (
        known(states(*[REFUSED] * 4), mpirun_code=2),
        (NO_TOKENIZER, 2),
    ),
    "a rank refuses, and the steward names it": (
        known(
            states(("failed", f"rank 2 (decode) failed: ModelError: {NO_TOKENIZER}"), FOLLOWED, REFUSED), 1
        ),
        (NO_TOKENIZER, 2),
    ),
    "a rank refused long ago, and the others went on until rank 0 was killed": (
        known(states(READY, READY, REFUSED, READY), 0, survives=True),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "a steward hung, and wakes up to blame a rank that ended because of it": (
        known(states(("failed", "rank 2 (decode) died: its process 7 ended", 3.0), READY, FOLLOWED, READY)),
        (SILENCE, 1),
    ),
    "a steward hung, and wakes up to hear mpirun's signal": (
        known(states(("stopped", "SIGTERM", 3.0), FOLLOWED, FOLLOWED, FOLLOWED), survives=True),
        (SILENCE, 1),
    ),
    "a steward stopped in order, and a rank that had not heard of it follows": (
        known(states(STOPPED, ("failed", f"stopped: {SILENCE}", 9.0), STOPPED, STOPPED), survives=True),
        IN_ORDER,
    ),
    "mpirun was killed": (
        known(states(*[("stopped", "SIGTERM")] * 4), mpirun_code=-9),
        ("mpirun was killed by signal 9 (SIGKILL)", 1),
    ),
    "a rank was killed while another one starts": (
        known(states(STARTING, STARTING, READY, STARTING), 2, 1),
        (f"rank 2 (decode) {NO_WORD}", 1),
    ),
    "a rank vanished before its file": (
        known({0: states(STARTING)[0]}, 2),
        (f"rank 2 (decode) {NO_WORD}", 1),
    ),
    "a rank vanished before its file, with an error line": (
        known({0: states(STARTING)[0]}, 2, errors={0: "gateway: KeyError: 5", 2: "no run folder"}),
        ("rank 2 (decode) died: no run folder", 1),
    ),
    "mpirun says which of two lost ranks was killed": (
        known(states(READY, STOPPED, STOPPED, READY), 0, 3, signals={3: "signal 9 (Killed)"}),
        ("rank 3 (store) died: signal 9 (Killed)", 1),
    ),
    "rank 0 was killed": (
        known(states(READY, FOLLOWED, FOLLOWED, FOLLOWED), 0, survives=True),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "rank 3 was lost, and rank 0 long after it": (
        known(states(READY, READY, READY, READY), 3, 0, survives=True, signals={3: "signal 9 (Killed)"}),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "rank 1 failed, and rank 0 was killed long after it": (
        known(states(READY, ("failed", "KeyError: 1", 0.0), READY, READY), 0, survives=True),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "rank 0 was killed long after its gateway printed an error and was started again": (
        known(states(*[READY] * 4), 0, survives=True, errors={0: "thread heart died: KeyError: 5"}),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "rank 3 was lost, and rank 0 fails long after it": (
        known(states(("failed", "ValueError: 5"), FOLLOWED, READY, READY), 3, survives=True),
        ("rank 0 (steward) failed: ValueError: 5", 1),
    ),
    "rank 3 was lost, and rank 0 falls silent long after it": (
        known(states(READY, FOLLOWED, FOLLOWED, READY), 3, survives=True),
        (SILENCE, 1),
    ),
    "rank 0 fell silent, and was killed by mpirun then": (
        known(states(READY, FOLLOWED, FOLLOWED, READY), lost={3: 1.0, 0: 3.0}, survives=True),
        (SILENCE, 1),
    ),
    "a rank that woke up was told that it is lost, and rank 0 was killed long after it": (
        known(
            states(READY, ("failed", "stopped: rank 1 (prefill) died: no sign of life", 0.0)),
            0,
            survives=True,
        ),
        (f"rank 0 (steward) {NO_WORD}", 1),
    ),
    "a rank failed in the start, and others followed": (
        known(
            states(("failed", "stopped: 2", 1.0), ("failed", "stopped: 2", 1.0), ("failed", "out of memory"))
        ),
        ("rank 2 (decode) failed: out of memory", 1),
    ),
    "ranks follow, and the steward was killed before it could tell": (
        known(states(READY, ("failed", "stopped: rank 2 (decode) died: its process 7 ended"), READY, READY)),
        ("rank 2 (decode) died: its process 7 ended", 1),
    ),
    "two ranks failed in the start": (
        known(states(STARTING, ("failed", "late", 3.0), ("failed", "out of memory", 2.0), STARTING)),
        ("rank 2 (decode) failed: out of memory", 1),
    ),
    "a rank was killed in the start, and another one failed before the launcher had looked": (
        known(states(STARTING, ("failed", "MPI_ERR_PROC_FAILED", 0.9), STARTING, STARTING), 2),
        (f"rank 2 (decode) {NO_WORD}", 1),
    ),
    "nothing but an error line": (known({}, mpirun_code=2, errors={0: "no such flag"}), ("no such flag", 2)),
    "nothing but what mpirun said": (
        known({}, mpirun_code=213, last_lines=["a", "b", "not enough slots"]),
        ("mpirun ended with exit code 213 before every rank had started: a | b | not enough slots", 1),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_first_cause_is_told_with_the_exit_code(situation: str) -> None:
    facts, expected = SITUATIONS[situation]
    assert why_ended(CONFIG, facts) == expected


def test_without_ulfm_ranks_that_mpirun_killed_after_a_failure_are_no_cause() -> None:
    facts = known(states(STARTING, STARTING, ("failed", "out of memory"), STARTING), lost={0: 2.1, 1: 2.1})
    assert why_ended(ServeConfig(mpi_profile="fast"), facts)[0] == "rank 2 (decode) failed: out of memory"


def test_a_rank_that_hung_and_wakes_up_does_not_blame_the_steward_that_ended_it() -> None:
    died = "rank 1 (prefill) died: no sign of life for 6.0 s"
    late = ("failed", f"stopped: {SILENCE}", 12.0)
    assert why_ended(CONFIG, known(states(("failed", died, 11.0), late)))[0] == died
    assert why_ended(CONFIG, known(states(("failed", died, 13.0), late)))[0] == SILENCE


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
        (states(READY, ("failed", "KeyError: 1")), True, "rank 0 (steward) died"),
        (states(("stopped", "SIGTERM"), ("failed", "KeyError: 1")), True, "rank 1 (prefill) failed"),
        (states(REFUSED, READY), True, NO_TOKENIZER),
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
    assert (output.name(2), output.errors) == ("decode-2", {0: "rank 2 is gone"})
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


def test_zero_bytes_before_a_line_hide_neither_an_error_nor_a_box(tmp_path: Path) -> None:
    output = Output(CONFIG, tmp_path / "log")
    shown = output.feed(
        "stderr", b"[1,2]<stderr>: \0words\n\0[1,0]<stderr>: \0mooncake-lite: error: it is gone\n"
    )
    output.close()
    assert (shown, output.errors) == ([RankLine(2, "words")], {0: "it is gone"})
    assert b"\0" not in (tmp_path / "log").read_bytes()


def test_what_open_mpi_says_of_a_call_that_a_lost_rank_ended_goes_to_the_log_alone(tmp_path: Path) -> None:
    output = Output(CONFIG, tmp_path / "log")
    says = "NBC_Progress: an error 75 was found during schedule 0x1 at row-offset 8 - aborting the schedule"
    shown = output.feed("stderr", f"[1,1]<stderr>: \0{says}\n[1,1]<stderr>: words\n".encode())
    output.close()
    assert shown == [RankLine(1, "words")]
    assert says in (tmp_path / "log").read_text()
