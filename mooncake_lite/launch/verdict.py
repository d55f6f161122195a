"""Why a cluster has ended, told from what its ranks wrote and from what the launcher saw.

Called by the launcher once mpirun is gone. Pure. Explained in docs/lifecycle.md, "When a rank dies".
"""

from __future__ import annotations

import signal

from mooncake_lite.config import ServeConfig
from mooncake_lite.launch.run_dir import RankState


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

    lost          ranks that were seen gone without a last word, in the order in which they went
    mpirun_code   as subprocess gives it: negative for a signal
    signals       what mpirun said about a rank's death
    error         the first error line that a rank printed

    mpirun ends with 0 when a rank was killed under ULFM, so its code alone says little. The first cause
    is wanted: the conductor's own verdict, else who died first, else who failed.
    """
    conductor = states.get(0)
    if conductor and conductor.state == "failed" and conductor.reason.startswith("rank "):
        return conductor.reason
    if mpirun_code < 0:
        return f"mpirun was killed by {_signal(-mpirun_code)}"
    if lost:
        how = signals.get(lost[0]) or "its process ended without a last word"
        return f"rank {lost[0]} ({config.role_of(lost[0])}) died: {how}"
    failed = [state for state in states.values() if state.state == "failed"]
    failed.sort(key=lambda state: state.reason.startswith("stopped:"))  # those followed somebody else's end
    if failed:
        return f"{failed[0].name} failed: {failed[0].reason or 'no reason given'}"
    if len(states) >= config.ranks and all(state.state == "stopped" for state in states.values()):
        return ""
    if error:
        return error
    words = f": {' | '.join(last_lines[-5:])}" if last_lines else ""
    return f"mpirun ended with exit code {mpirun_code} before every rank had started{words}"


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
