"""Why a cluster has ended, told from what its ranks wrote and from what the launcher saw.

Called by the launcher once mpirun is gone, and by a gateway that is told to end. Pure. Explained in
docs/explain/lifecycle.md, "When a rank dies".
"""

from __future__ import annotations

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RankState

GATEWAY_PROCESS = "the gateway process"
CONDUCTOR_PROCESS = "the conductor process"
STEWARD = "rank 0 (steward)"

FOLLOWED = "stopped: "
"""How the reason of a rank begins that ended because of something else, which stands behind it."""


def why_ended(
    config: ServeConfig,
    states: dict[int, RankState],
    lost: list[int],
    *,
    mpirun_code: int,
    signals: dict[int, str],
    error: str,
    last_lines: list[str],
) -> str:
    """One line that names the rank; "" when every rank stopped in an orderly way.

    lost          ranks that were seen gone without a last word before any had failed, in their order
    mpirun_code   as subprocess gives it: negative for a signal
    signals       what mpirun said about a rank's death
    error         the first error line that a rank printed

    mpirun ends with 0 when a rank was killed under ULFM, so its code alone says little. The first cause
    is wanted: the conductor's own verdict, else the rank that died first, else a conductor that fell silent,
    else a rank that failed.
    """
    if verdict := _conductors_verdict(states):
        return verdict
    if mpirun_code < 0:
        return f"mpirun {how_it_ended(mpirun_code)}"
    survived = _survived(states, lost)
    states = {rank: state for rank, state in states.items() if rank not in survived}
    if lost and not survived:
        how = signals.get(lost[0]) or "its process ended without a last word"
        return f"rank {lost[0]} ({config.role_of(lost[0])}) died: {how}"
    if silence := _silence_of_conductor(states):
        return silence
    if failure := _first_failure(states):
        return failure
    stopped = {rank for rank, state in states.items() if state.state == "stopped"}
    if 0 in stopped and len(stopped | survived) >= config.ranks:
        return ""
    if error:
        return error
    words = f": {' | '.join(last_lines[-5:])}" if last_lines else ""
    return f"mpirun ended with exit code {mpirun_code} before every rank had started{words}"


def why_told_to_end(states: dict[int, RankState], orphaned: bool) -> str:
    """One line for the clients of a gateway that gets a signal.

    orphaned    rank 0, which started the gateway, is gone
    """
    if cause := _conductors_verdict(states) or _silence_of_conductor(states):
        return cause
    if failure := _first_failure(states):
        return failure
    conductor = states.get(0)
    if conductor is not None and conductor.ended:
        return f"{STEWARD} was told to end: {conductor.reason}"
    return f"{STEWARD} died" if orphaned else "the gateway was told to end"


def _conductors_verdict(states: dict[int, RankState]) -> str:
    """What the conductor gave as the reason of the end, where it names a process; else "".

    A conductor that hung and then wakes up (mpirun continues processes before it kills them) sees that ranks
    have ended because of its own silence. Their last words then count, not its verdict. They came before it:
    a rank that hung itself and wakes up accuses the conductor too, but later.
    """
    conductor = states.get(0)
    if conductor is None or conductor.state != "failed":
        return ""
    for state in states.values():
        words = state.reason.removeprefix(FOLLOWED)
        accused = conductor.reason.startswith(state.name) and words.startswith(STEWARD)
        if accused and state.said_at <= conductor.said_at:
            return words
    return (
        conductor.reason if conductor.reason.startswith(("rank ", GATEWAY_PROCESS, CONDUCTOR_PROCESS)) else ""
    )


def _survived(states: dict[int, RankState], lost: list[int]) -> set[int]:
    """The ranks without which the others went on, until the conductor stopped for another reason."""
    return {*lost} if 0 in states and states[0].state == "stopped" else set()


def _first_failure(states: dict[int, RankState]) -> str:
    """The rank that failed, before those that followed another one's end; "" when there is none."""
    failed = [state for state in states.values() if state.state == "failed"]
    failed.sort(key=lambda state: state.reason.startswith(FOLLOWED))
    return f"{failed[0].name} failed: {failed[0].reason or 'no reason given'}" if failed else ""


def _silence_of_conductor(states: dict[int, RankState]) -> str:
    """What a rank wrote that ended because the conductor fell silent; "" where that had a last word."""
    if 0 in states and states[0].ended:
        return ""
    reasons = (state.reason.removeprefix(FOLLOWED) for state in states.values() if state.state == "failed")
    return next((reason for reason in reasons if reason.startswith(STEWARD)), "")
