"""Small truths about Linux processes: who is alive, who belongs to a job, what they map.

Used by the launcher and the ranks. It knows /proc and signals, nothing of MPI or clusters.
Explained in docs/explain/lifecycle.md, "Stopping".
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

_SEGMENT = re.compile(rb"/dev/shm/(sm_segment\.[^/\s]+)")


def how_it_ended(code: int) -> str:
    """Words for a process's exit code as subprocess gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when there is no such process.

    Field 22 of /proc/PID/stat. A zombie counts as gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = text[text.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, started: int) -> bool:
    """True while the process that started at `started` still runs under this pid."""
    return started != 0 and start_time(pid) == started


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; {} when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in text.split("\0"))


def processes_with(name: str, value: str) -> dict[int, int]:
    """{pid: start time} of this user's processes that were started with `name=value` in their environment.

    The value is unique to a job (its run folder), so these are the job's processes and no others.
    """
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if folder.stat().st_uid != os.getuid():
                continue
        except OSError:
            continue
        if environment(int(folder.name)).get(name) != value:
            continue
        started = start_time(int(folder.name))
        if started:
            found[int(folder.name)] = started
    return found


def send(pid: int, started: int, signum: int) -> None:
    """Send a signal to exactly this process; nothing happens when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel without pid handles: the check just before is the best there is
        if alive(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return
    try:
        if alive(pid, started):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signum)
    finally:
        os.close(handle)


def mapped_segments(pid: int | str = "self") -> list[str]:
    """Names of Open MPI's files in /dev/shm that a process has mapped: those of all ranks on its node."""
    try:
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return []
    return sorted({match.decode() for match in _SEGMENT.findall(text)})
