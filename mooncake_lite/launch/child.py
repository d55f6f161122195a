"""A child process that dies with its parent: starting it, and being it.

The launcher starts mpirun, rank 0 starts conductor and gateway. It may not know what the child is.
Explained in docs/explain/lifecycle.md, "Stopping".
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mooncake_lite.errors import UserError

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


def run_child(module: str, run: Callable[[Path], object]) -> NoReturn:
    """Be the child `python -m MODULE RUN_DIR`: call run(RUN_DIR), and end the process.

    Exit code 0, or with a last word 1 when it breaks and 2 for a UserError. It does not wait for its threads:
    one may still tokenise a prompt of a client that has left.
    """
    code = 0
    try:
        if len(sys.argv) != 2:
            raise UserError(f"usage: python -m {module} RUN_DIR")
        run(Path(sys.argv[1]))
    except UserError as error:
        code = 2
        _say_last(str(error))
    except Exception as error:
        code = 1
        if os.environ.get("MOONCAKE_LITE_DEBUG"):
            traceback.print_exc()
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        _say_last(f"{module.rpartition('.')[2]}: {why}")
    sys.stdout.flush()
    os._exit(code)


def end_child(thread: str, reason: str) -> NoReturn:
    """End this process because a thread of it has died. The next process takes its place."""
    _say_last(f"thread {thread} died: {reason}")
    os._exit(1)


def _say_last(why: str) -> None:
    """Print why this process ends, and leave it in the run folder for its parent."""
    print(f"mooncake-lite: error: {why}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, IndexError):
        last_word(Path(sys.argv[1]), os.getpid()).write_text(why)


def last_word(run_dir: Path, pid: int) -> Path:
    """Return the file in which a child leaves why it ends, if it can tell."""
    return run_dir / f"last-word-{pid}"
