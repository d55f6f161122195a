"""The folder of one running cluster: its sockets, rank files and mpirun's temporary files.

The launcher makes it, or rank 0 under a user's own mpirun. Every rank joins it, and the last process that
leaves removes it. Knows no messages. Explained in docs/explain/lifecycle.md, "Stopping".

    RUN_DIR/                 0700, mooncake-lite.<uid>.<random>
      alive                  every process that uses the folder holds a shared flock on it
      control, heart, ...    unix sockets, so the path must stay short
      rank-<n>.json          RankState: what rank n is doing
      gateway.json           0600: the configuration, with the address and the keys of the server
      last-word-<pid>        why a conductor or gateway ended
      mpirun.log             everything that mpirun printed
      session/               TMPDIR of mpirun and the ranks
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import msgspec

from mooncake_lite.errors import LaunchError

ENVIRONMENT = "MOONCAKE_LITE_RUN_DIR"
"""Set by the launcher for the ranks; absent under a user's own mpirun."""

SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path on Linux (sun_path without the closing zero)."""

LONGEST_SOCKET = 32
"""Bytes kept free for the name of a socket in the folder, "/tokens-gateway-0" and its like."""

TRIES = 3
"""To make a folder in one base."""

FORSAKEN_S = 60.0
"""A folder without a lock file is being made at this moment, unless it is older than this."""


ENDS = ("stopped", "failed", "refused")
"""Last states of a rank, by its exit code. Refused: what the user asked for cannot be done."""


class RankState(msgspec.Struct, frozen=True):
    """What rank-<n>.json holds.

    start_time   of the process, in clock ticks since boot (/proc/PID/stat): with the pid it names one
                 process for good
    state        "starting" (reason: what it does now) | "ready" | one of ENDS (reason: why)
    segments     names of the files in /dev/shm that Open MPI made for this rank's node
    said_at      time.time() at which the rank said this
    """

    rank: int
    role: str
    pid: int
    start_time: int
    host: str
    state: str
    reason: str = ""
    segments: list[str] = []
    said_at: float = 0.0

    @property
    def name(self) -> str:
        """How messages to users call the rank."""
        return f"rank {self.rank} ({self.role})"

    @property
    def ended(self) -> bool:
        """The rank has said its last word."""
        return self.state in ENDS


def read_states(folder: Path) -> dict[int, RankState]:
    """What each rank last said about itself in a run folder, by rank. Unreadable files are left out."""
    found = {}
    for file in folder.glob("rank-*.json"):
        try:
            state = msgspec.json.decode(file.read_bytes(), type=RankState)
        except (OSError, msgspec.MsgspecError):
            continue
        found[state.rank] = state
    return dict(sorted(found.items()))


class RunDir:
    """One cluster's folder, with a shared lock on it for as long as this object is open.

    Invariant: while any process has it open, no sweep removes it.
    """

    def __init__(self, path: Path, lock: int):
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> RunDir:
        """A new folder in the first base where its sockets fit. Raises LaunchError when there is none.

        It is tried again, because another start that sweeps may lock a folder before its maker does.
        """
        problems = dict[Path, str]()
        for base, _ in product(bases(), range(TRIES)):
            name = f"mooncake-lite.{os.getuid()}.{secrets.token_hex(4)}"
            try:
                return cls._create_in(base, name)
            except (OSError, LaunchError) as error:
                problems[base] = f"{base}: {getattr(error, 'strerror', None) or error}"
        raise LaunchError(
            f"no folder for the cluster's sockets can be made ({'; '.join(problems.values())}); "
            "set TMPDIR to a short path that is writable"
        )

    @classmethod
    def _create_in(cls, base: Path, name: str) -> RunDir:
        """Made under another name, locked, then renamed: a sweep never sees it without its lock."""
        path = base / name
        if len(os.fsencode(path)) + LONGEST_SOCKET > SOCKET_PATH_LIMIT:
            raise LaunchError(f"the path is too long for a socket ({SOCKET_PATH_LIMIT} bytes)")
        unborn = base / f".{name}"
        unborn.mkdir(mode=0o700)
        try:
            (unborn / "session").mkdir(mode=0o700)
            lock = _lock_shared(unborn)
            unborn.rename(path)
        except OSError:
            shutil.rmtree(unborn, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def join(cls, path: Path | str) -> RunDir:
        """Open a folder that another process made; on another host than that one, make its twin.

        Raises LaunchError when it is not ours alone: another user could have put it there.
        """
        path = Path(path)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise LaunchError(f"the run folder {path} belongs to somebody else or is open to others")
            return cls(path, _lock_shared(path))
        except OSError as error:
            raise LaunchError(f"the run folder {path} cannot be used: {error.strerror}") from None

    @property
    def control(self) -> str:
        """Endpoint of the conductor's control hub."""
        return f"ipc://{self.path}/control"

    @property
    def heart(self) -> str:
        """Endpoint of the conductor's membership monitor."""
        return f"ipc://{self.path}/heart"

    def member(self, rank: int) -> str:
        """Endpoint at which the other ranks of its instance reach a rank of this host."""
        return f"ipc://{self.path}/member-{rank}"

    @property
    def log(self) -> Path:
        """Everything that mpirun printed."""
        return self.path / "mpirun.log"

    def states(self) -> dict[int, RankState]:
        """What each rank last said about itself, by rank. Unreadable files are left out."""
        return read_states(self.path)

    def leave(self) -> bool:
        """Close; remove the folder when nobody else uses it. True when it was removed."""
        if self._lock < 0:
            return False
        lock, self._lock = self._lock, -1
        try:
            fcntl.flock(lock, fcntl.LOCK_UN)  # first, so that of two who leave together one succeeds
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path)
            return True
        except OSError:
            return False
        finally:
            os.close(lock)

    def remove(self) -> None:
        """Close and remove, whoever else may still have it open: the launcher's last step."""
        _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def guard(self) -> subprocess.Popen[bytes]:
        """Start a process that removes the folder once no process uses it, and return that.

        A SIGKILL of this process ends the ranks too, at times before one of them can remove the folder. The
        guard has a session of its own, so that it outlives all of them.
        """
        command = [sys.executable, "-m", __name__, str(self.path)]
        null = subprocess.DEVNULL
        return subprocess.Popen(command, start_new_session=True, stdin=null, stdout=null, stderr=null)


def _remove(path: Path) -> None:
    """Remove a folder. There are several tries, because a process that is ending may put a file into it."""
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)


def bases() -> list[Path]:
    """Where run folders may lie, best first: the user's own runtime folder, TMPDIR, /tmp."""
    wanted = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    found: list[Path] = []
    for text in wanted:
        path = Path(text)
        if text and path.is_absolute() and path.is_dir() and path not in found:
            found.append(path)
    return found


def sweep() -> list[Path]:
    """Remove folders of this user that no process uses any more, with the shared memory they name.

    They stay behind when a launcher and all its ranks were killed. Returns what was removed.
    """
    removed = []
    for base in bases():
        for pattern in ("mooncake-lite.{}.*", ".mooncake-lite.{}.*"):
            for path in base.glob(pattern.format(os.getuid())):
                if _sweep_one(path):
                    removed.append(path)
    return removed


def _sweep_one(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # another process has removed it
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    try:
        lock = os.open(path / "alive", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - status.st_mtime < FORSAKEN_S:
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    run_dir = RunDir(path, lock)
    host = socket.gethostname()
    segments = [name for state in run_dir.states().values() if state.host == host for name in state.segments]
    if not run_dir.leave():
        return False
    remove_segments(segments)
    return True


SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "sm_segment."


def remove_segments(names: list[str]) -> None:
    """Unlink Open MPI's files in /dev/shm of these names, if they are this user's."""
    for name in names:
        path = SHARED_MEMORY / name
        if not name.startswith(SEGMENT_PREFIX) or "/" in name:
            continue
        try:
            if path.lstat().st_uid == os.getuid():
                path.unlink()
        except OSError:
            continue


def _lock_shared(folder: Path) -> int:
    """An open descriptor with a shared lock on the folder's `alive` file."""
    lock = os.open(folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


if __name__ == "__main__":  # be the guard: wait until no process has the lock
    with contextlib.suppress(OSError), Path(sys.argv[1], "alive").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    _sweep_one(Path(sys.argv[1]))
