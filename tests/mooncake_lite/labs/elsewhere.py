"""Other machines for tests of the sandbox. Only root can make them.

    python -m tests.mooncake_lite.labs.elsewhere WHO PROGRAM [ARGUMENT ...]

container  root without CAP_SYS_ADMIN, as in Docker's default profile
user       a user without rights, with a read-only /proc/sys, as in most containers
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mooncake_lite.labs.confine import (
    MS_BIND,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_CAPBSET_DROP,
    become,
    bind,
    libc,
    mount,
    must,
)
from mooncake_lite.labs.sandbox import unused_id
from tests.mooncake_lite.labs.trees import ROOT

CAP_SYS_ADMIN, CLONE_NEWNS = 21, 0x00020000


def python_as(who: str, program: str, *arguments: str) -> str:
    """Return what a Python program prints there. Skips the test where this user cannot make it."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("only root with CAP_SYS_ADMIN can make other machines")
    command = [sys.executable, "-m", __name__, who, program, *arguments]
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_reachable(folders: set[Path]) -> None:
    """Let every user reach these folders, in a mount namespace of this process alone."""
    must(libc.unshare(CLONE_NEWNS), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for folder in sorted(folders):
        closed = [path for path in folder.parents if not path.stat().st_mode & 0o001]
        if not closed:
            continue
        with tempfile.TemporaryDirectory() as place:
            mount(str(folder), place, None, MS_BIND | MS_REC)
            mount("tmpfs", str(closed[-1]), "tmpfs", 0, "mode=755")
            bind(place, str(folder))
            must(libc.umount2(place.encode(), 2), "umount")


def main() -> None:
    """Become the other machine's user, and run the program."""
    who, *program = sys.argv[1:]
    make_reachable({Path(sys.base_prefix), Path(sys.prefix), ROOT})
    if who == "container":
        must(libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0), "drop CAP_SYS_ADMIN")
    else:
        mount("/proc/sys", "/proc/sys", None, MS_BIND)
        mount("none", "/proc/sys", None, MS_REMOUNT | MS_BIND | MS_RDONLY)
        become(unused_id())
    os.execv(sys.executable, [sys.executable, "-c", *program])


if __name__ == "__main__":
    main()
