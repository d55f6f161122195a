"""Why a cluster has ended, told from what its ranks wrote and from what the launcher saw.

Called by the launcher once mpirun is gone, and by a gateway that is told to end. Pure. Explained in
docs/explain/lifecycle.md, "When a rank dies".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RankState

GATEWAY_PROCESS = "the gateway process"
CONDUCTOR_PROCESS = "the conductor process"
STEWARD = "rank 0 (steward)"

FOLLOWED = "stopped: "
"""How the reason of a rank begins that ended because of something else, which stands behind it."""


@dataclass(frozen=True)
class Facts:
    """What is known of a cluster that has ended.

    states        what each rank said last
    lost          {rank: time.time() at which it was seen gone without a last word}, in this order
    survives      the cluster goes on without any rank but 0: every rank was ready once, and ULFM is on
    mpirun_code   as subprocess gives it: negative for a signal. Under ULFM mpirun ends with 0 when a rank was
                  killed, so its code alone says little
    signals       what mpirun said about a rank's death, by rank
    errors        the first error line of each rank that printed one; rank 0's may be of the gateway
    last_lines    of everything that was printed
    """

    states: dict[int, RankState]
    lost: dict[int, float] = field(default_factory=dict)
    survives: bool = False
    mpirun_code: int = 0
    signals: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)


def why_ended(config: ServeConfig, facts: Facts) -> tuple[str, int]:
    """Return the first cause in one line, and the exit code: 2 where it is the user's folder or flags.

    In the table, each cause may bring about those below it. ("", 0): all ranks that were needed have stopped.
    """
    states, mpirun_code = facts.states, facts.mpirun_code
    needed = [state for rank, state in states.items() if rank == 0 or not facts.survives]
    refused = [state.reason for state in needed if state.state == "refused"]
    causes = (
        (refused[0] if refused else "", 2),
        (_word_of_steward(states), 1),
        (f"mpirun {how_it_ended(mpirun_code)}" if mpirun_code < 0 else "", 1),
        (_first_loss(config, facts, needed), 1),
        (_silence_of_steward(states)[0], 1),
        (_first_failure(needed), 1),
    )
    for reason, code in causes:
        if reason:
            return reason, code
    stopped = {rank for rank, state in states.items() if state.state == "stopped"}
    if 0 in stopped and (facts.survives or len(stopped) >= config.ranks):
        return "", 0
    for rank, error in facts.errors.items():
        if rank not in states:
            return error, 2 if mpirun_code == 2 else 1
    words = f": {' | '.join(facts.last_lines[-5:])}" if facts.last_lines else ""
    return f"mpirun ended with exit code {mpirun_code} before every rank had started{words}", 1


def why_told_to_end(states: dict[int, RankState], orphaned: bool) -> str:
    """One line for the clients of a gateway that gets a signal.

    orphaned    rank 0, which started the gateway, is gone
    """
    if cause := _word_of_steward(states) or _silence_of_steward(states)[0]:
        return cause
    steward = states.get(0)
    if orphaned and (steward is None or not steward.ended):
        return f"{STEWARD} died"
    if failure := _first_failure(states.values()):
        return failure
    if steward is not None and steward.ended:
        return f"{STEWARD} was told to end: {steward.reason}"
    return "the gateway was told to end"


def _first_loss(config: ServeConfig, facts: Facts, needed: list[RankState]) -> str:
    """The first rank that was lost, unless it was killed as a consequence of something else.

    A steward that fell silent is killed. Without ULFM, mpirun kills all ranks when one has failed.
    """
    since = _silence_of_steward(facts.states)[1]
    if config.mpi_profile == "fast":
        since = min([since, *(state.said_at for state in needed if state.state == "failed")])
    lost = [rank for rank, at in facts.lost.items() if at < since and (rank == 0 or not facts.survives)]
    if not lost:
        return ""
    rank = next((rank for rank in lost if rank in facts.signals), lost[0])
    said = facts.signals.get(rank) or ("" if rank in facts.states else facts.errors.get(rank))
    return f"rank {rank} ({config.role_of(rank)}) died: {said or 'its process ended without a last word'}"


def _word_of_steward(states: dict[int, RankState]) -> str:
    """What the steward gave as the reason of the end, where it names a process or refuses; else ""."""
    steward = states.get(0)
    if steward is None or steward.state not in ("failed", "refused") or _silence_of_steward(states)[0]:
        return ""
    named = steward.reason.startswith(("rank ", GATEWAY_PROCESS, CONDUCTOR_PROCESS))
    return steward.reason if named or steward.state == "refused" else ""


def _first_failure(states: Iterable[RankState]) -> str:
    """The rank that failed, else why one followed another one's end; "" when there is neither."""
    failed = [state for state in states if state.state == "failed"]
    if not failed:
        return ""
    first = min(failed, key=lambda state: (state.reason.startswith(FOLLOWED), state.said_at))
    if first.reason.startswith(FOLLOWED):
        return first.reason.removeprefix(FOLLOWED)
    return f"{first.name} failed: {first.reason or 'no reason given'}"


def _silence_of_steward(states: dict[int, RankState]) -> tuple[str, float]:
    """What the first rank wrote that ended because the steward fell silent, and when; ("", inf) without one.

    A steward that hung may wake up, because mpirun continues processes before it kills them. It then blames a
    signal, or ranks that have ended because of its silence. Their last words count, since they came before.
    A rank that hung itself and wakes up accuses the steward too, but later.
    """
    until = states[0].said_at if 0 in states and states[0].ended else math.inf
    failed = [state for state in states.values() if state.state == "failed" and state.said_at < until]
    told = [(state.reason.removeprefix(FOLLOWED), state.said_at) for state in failed]
    accusing = [one for one in told if one[0].startswith(STEWARD)]
    return min(accusing, key=lambda one: one[1], default=("", math.inf))
