"""Starting a child process that dies with its parent and whose signals are not blocked.

Called by the launcher for mpirun and by rank 0 for the gateway. It may not know what the child is.
Explained in docs/explain/lifecycle.md, "Stopping".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WRAPPER = str(Path(__file__).with_name("exec_child.py"))


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    announce: str = "-",
    new_session: bool = False,
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """Start `command`; the kernel sends it SIGTERM when this process dies.

    announce      environment variable that will hold the child's pid for what it starts itself
    new_session   give it a session of its own: neither a terminal's Ctrl-C nor a signal to this process's
                  group reaches it
    streams       stdin, stdout, stderr as for subprocess.Popen

    Call it from a thread that lives as long as the process: the kernel watches the thread that forked.
    """
    wrapper = [sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()), announce]
    return subprocess.Popen([*wrapper, *command], env=env, start_new_session=new_session, **streams)
