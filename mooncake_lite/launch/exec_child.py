"""Runs as a tiny process of its own and turns into the program that it was asked to start.

Called by `child.start_child` with its path: between fork and exec a process with threads may not run Python,
so what must happen there happens here. Ranks and the gateway import follow_parent(). Imports of this file
delay every start, so it has few. Explained in docs/explain/lifecycle.md.

    python -I -S exec_child.py PARENT_PID ANNOUNCE PROGRAM [ARGUMENT ...]

ANNOUNCE is a variable that gets this process's pid, or "-". Exits 127 when PROGRAM cannot be run.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> bool:
    """Ask the kernel to send this process SIGTERM when its parent dies; does nothing outside Linux.

    Returns whether process `parent` is still the parent: one that had died before hears nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == parent


def main() -> None:
    """Die with the parent, unblock the signals that the parent blocked, become PROGRAM."""
    parent, announce, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if not follow_parent(parent):
        os._exit(143)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python sets them, for itself alone
        signal.signal(number, signal.SIG_DFL)
    if announce != "-":
        os.environ[announce] = str(os.getpid())
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main()
