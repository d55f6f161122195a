"""The sandbox: a program in its own namespaces or as its own user, watched, limited and ended from outside.

Used by the judge for each task, and by tests for whole MPI jobs. It knows processes and mounts, not labs.
`confine.py` does what must be done inside. Explained in docs/explain/labs.md, "The sandbox".
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import random
import select
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mooncake_lite.errors import LabError
from mooncake_lite.labs.confine import INSIDE_ID, REFUSED, descendants, processes
from mooncake_lite.labs.seccomp import MACHINES, filter_program

SAMPLE_S = 0.05
MOST_TASKS = 256  # of an unused user, by the kernel: a program that only forks may outrun the samples
MARK = "MOONCAKE_LITE_SANDBOX"
"""Variable by which the processes of a sandbox can be found."""
OUT_OF_TIME = 256 - signal.SIGXCPU
"""Exit code of a program that has used its processor time."""
_CONFINE = str(Path(__file__).with_name("confine.py"))
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SECRET = ("kernels_numba", "mooncake_lite", "scheduler", "store", "transport", "tests", "tutorials", ".git")

_UNUSED_IDS = (range(0x70000000, 0x7FFE0000), range(20_000, 60_000))
"""Users that no distribution, systemd or container gives out; the second is for machines with only 65,536."""
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders in which every user can leave files."""

Level = Literal["namespaces", "uid", "none"]
"""How a program is confined.

    namespaces  it sees a root of its own; if root starts it, it runs as an unused user, else as the same user
    uid         for root where namespaces are refused: it runs as an unused user with a copy of the tree
    none        it is watched and limited only
"""

CANNOT_PROMISE: dict[Level, str] = {
    "namespaces": "",
    "uid": "code of a region can read what all users of this machine can, other programs' arguments too",
    "none": "code of a region can read the reference and the seed, and can change results",
}
"""A sentence for the teacher."""

FIX = (
    "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, grade as root with an "
    "interpreter that every user can run, or start it with --security-opt seccomp=unconfined; or grade "
    "without a sandbox: --trusted"
)


class SandboxRefused(LabError):
    """This machine cannot make a sandbox; the message says why and what to change."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this machine cannot make a sandbox ({reason}); {FIX}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use before it is killed.

        seconds          on the clock
        cpu_s            of processor time, of each process
        memory_mb        resident, of all processes together; address space of each process is twice that
        tasks            processes and threads
        output_bytes     printed
        file_mb, shm_mb  in /tmp together and in one file; in /dev/shm

    Address space is limited to address_mb where a program maps much more than it uses.
    """

    seconds: float
    cpu_s: int
    memory_mb: int
    tasks: int
    output_bytes: int = 1 << 20
    file_mb: int = 64
    shm_mb: int = 16
    address_mb: int = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes below one use now: tasks are processes and threads, memory is resident."""

    tasks: int
    memory_bytes: int


def usage(first: int) -> Usage:
    """Count a process and all below it."""
    table = processes()
    found = [table[pid] for pid in (first, *descendants(first, table)) if pid in table]
    pages = sum(resident for _, _, resident in found)
    return Usage(sum(threads for _, threads, _ in found), pages * os.sysconf("SC_PAGE_SIZE"))


class Confined(contextlib.AbstractContextManager["Confined"]):
    """A running program. Use it as a context manager: at the end nothing of it runs any more.

    process   the Popen of the launcher, whose pipes are those of the program
    first     id of the first process, whose death ends all others
    """

    def __init__(
        self,
        command: Sequence[str],
        tree: Path,
        limits: Limits,
        *,
        level: Level,
        proc: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program in `tree`; in namespaces that is /lab, else a copy of it, or the tree itself.

        proc says whether there is a /proc in namespaces, with the processes of the sandbox. As root in
        namespaces, all files of the tree become readable for everyone. Raises SandboxRefused.
        """
        self.limits = limits
        self._level = level
        self._user = unused_id() if level != "none" and os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="mlab"))
        self._began = time.monotonic()
        self._sampled = 0.0
        told, tell = os.pipe()
        try:
            spec = self._specification(command, tree, dict(env or {}))
            spec |= {"proc": proc, "told": tell}
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _CONFINE, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[tell],
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "")},
            )
            os.close(tell)
            self.first = self._first_process(told)
        except BaseException:
            self._remove_files()
            raise
        finally:
            os.close(told)

    def __exit__(self, *error: object) -> None:
        self.end()

    def over(self) -> str:
        """Return which limit is exceeded, in words; empty when none is. Samples at most every 50 ms."""
        now = time.monotonic()
        if now - self._began > self.limits.seconds:
            return f"ran longer than {self.limits.seconds:g} s"
        if now - self._sampled < SAMPLE_S:
            return ""
        self._sampled = now
        used = usage(self.first)
        if used.tasks > self.limits.tasks:
            return f"started more than {self.limits.tasks} processes and threads"
        if used.memory_bytes > self.limits.memory_mb << 20:
            return f"used more than {self.limits.memory_mb} MB of memory"
        return ""

    def restart_clock(self) -> None:
        """Begin the limit of seconds anew: the program waits for its next input."""
        self._began = time.monotonic()

    def end(self) -> int:
        """End the first process, which takes all others with it; return the exit code of the program."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.kill(self.first, signal.SIGKILL if self._level == "namespaces" else signal.SIGTERM)
        code = self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._remove_files()
        return code

    def _remove_files(self) -> None:
        """Remove the folder of this sandbox, and what its user left in folders of all users."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._level != "uid":
            return
        shared = {folder for folder in (*_SHARED, tempfile.gettempdir()) if os.path.isdir(folder)}
        for entry in (entry for folder in shared for entry in os.scandir(folder)):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == self._user:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)

    def _specification(self, command: Sequence[str], tree: Path, env: dict[str, str]) -> dict[str, object]:
        """What confine.py has to know. Raises SandboxRefused."""
        home, cwd, machine = self._folder, tree, os.uname().machine
        if self._level != "none" and machine not in MACHINES:
            raise SandboxRefused(
                f"the system calls of {machine} are not known: seccomp.py has no table of them"
            )
        if self._level == "namespaces":
            home, cwd = Path("/tmp"), Path("/lab")
            if self._user is not None:
                _make_readable(tree)
        elif self._level == "uid":
            home, cwd = self._folder / "home", self._folder / "lab"
            self._give_folders(tree, home, cwd)
        # Numba keeps a caller whose callee in another file has changed: no run may see the cache of another
        own = {"HOME": str(home), "TMPDIR": str(home), "NUMBA_CACHE_DIR": str(home / "numba")}
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        return {
            "level": self._level,
            "user": self._user,
            "command": list(command),
            "cwd": str(cwd),
            "env": {**own, "PATH": path, **env, MARK: str(self._folder)},
            "limits": _kernel_limits(self.limits, alone=self._user is not None),
            "forbidden": ""
            if self._level == "none"
            else filter_program(machine, own_namespaces=self._level == "namespaces").hex(),
            **(_root(tree, self._folder, self.limits) if self._level == "namespaces" else {}),
        }

    def _give_folders(self, tree: Path, home: Path, cwd: Path) -> None:
        """Give the user of this sandbox a copy of the tree, and a home. Raises SandboxRefused."""
        if self._user is None:
            raise SandboxRefused("only root can become another user")
        _copy_for(self._user, tree, cwd)
        home.mkdir(mode=0o700)
        os.chown(home, self._user, self._user)
        self._folder.chmod(0o711)

    def _first_process(self, told: int) -> int:
        """Wait until the launcher tells the first process. Raises SandboxRefused if it cannot start one."""
        ready, _, _ = select.select([told], [], [], 30)
        line = os.read(told, 32) if ready else b""
        if line:
            return int(line)
        self.process.kill()
        _, errors = self.process.communicate(timeout=30)
        reason = errors.decode(errors="replace").strip() or "no answer"
        raise SandboxRefused(reason)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code, what it printed, and which limit it exceeded, if any."""

    code: int
    output: str
    reason: str


def run(
    command: Sequence[str],
    tree: Path,
    limits: Limits,
    *,
    level: Level = "namespaces",
    proc: bool = False,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program in the sandbox to its end, or to its first excess. Raises SandboxRefused."""
    output = bytearray()
    with Confined(command, tree, limits, level=level, proc=proc, env=env) as running:
        assert running.process.stdin is not None
        running.process.stdin.close()
        reason = ""
        for part in _parts(running):
            output += part
            reason = running.over()
            if len(output) > limits.output_bytes:
                reason = f"printed more than {limits.output_bytes:,} bytes"
            if reason:
                break
        while not reason and running.process.poll() is None:  # the streams are closed, and it still runs
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(SAMPLE_S)
            reason = running.over()
        code = running.end()
    if code == REFUSED and not reason:
        raise SandboxRefused(output.decode(errors="replace").strip())
    if code == OUT_OF_TIME and not reason:
        reason = f"used more than {limits.cpu_s} s of processor time"
    return Ended(code, output[: limits.output_bytes].decode(errors="replace"), reason)


def _parts(running: Confined) -> Iterator[bytes]:
    """Yield what a program prints, and b"" at every sample, until both streams are closed."""
    streams = [running.process.stdout, running.process.stderr]
    open_streams = [stream for stream in streams if stream is not None]
    while open_streams:
        ready, _, _ = select.select(open_streams, [], [], SAMPLE_S)
        if not ready:
            yield b""
        for stream in ready:
            part = os.read(stream.fileno(), 1 << 16)
            if not part:
                open_streams.remove(stream)
            yield part


def possible() -> tuple[Level, str]:
    """Return the best level that this machine allows, and why it allows no better one."""
    limits = Limits(seconds=20, cpu_s=10, memory_mb=256, tasks=8)
    command = [sys.executable, "-I", "-S", "-c", "print('here')"]
    reasons: list[str] = []
    levels: tuple[Level, ...] = ("namespaces", "uid")
    for level in levels:
        with tempfile.TemporaryDirectory(prefix="mlab") as folder:
            try:
                ended = run(command, Path(folder), limits, level=level)
            except SandboxRefused as error:
                reasons.append(f"{level}: {error.reason}")
                continue
        if ended.output == "here\n":
            return level, "; ".join(reasons)
        reasons.append(f"{level}: a program ended with {ended.code}: {ended.output.strip()}")
    return "none", "; ".join(reasons)


def required() -> tuple[Level, str]:
    """Return the best level that confines, and why no better one is possible. Raises SandboxRefused."""
    level, why = possible()
    if level == "none":
        raise SandboxRefused(why)
    return level, why


def unused_id() -> int:
    """Return a number that no account, group or process has as its id. Raises SandboxRefused."""
    with open("/proc/self/uid_map") as file:
        most = max(first + count for first, _, count in (map(int, line.split()) for line in file))
    choice = next((ids for ids in _UNUSED_IDS if ids.stop <= most), None)
    if choice is None:
        raise SandboxRefused(f"root can become no other user here: /proc/self/uid_map ends at {most}")
    while True:
        found = random.SystemRandom().choice(choice)
        if not _is_used(found):
            return found


def _is_used(number: int) -> bool:
    for look_up in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            look_up(number)
            return True
    return any(entry.name.isdigit() and _owner(entry) == number for entry in os.scandir("/proc"))


def _owner(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_uid
    except OSError:  # it has ended
        return -1


def _make_readable(tree: Path) -> None:
    """Let every user read a tree, where it does not yet. Links stay as they are."""
    for folder, _, files in os.walk(tree):
        for path, wanted in ((folder, 0o555), *((os.path.join(folder, name), 0o444) for name in files)):
            mode = os.lstat(path).st_mode
            if mode & wanted != wanted and not stat.S_ISLNK(mode):
                os.chmod(path, stat.S_IMODE(mode) | wanted)


def _copy_for(user: int, tree: Path, into: Path) -> None:
    """Copy a tree that only this user can read."""
    shutil.copytree(tree, into, symlinks=True)
    for folder, _, files in os.walk(into):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            os.chown(path, user, user, follow_symlinks=False)
    into.chmod(0o700)


def _root(tree: Path, folder: Path, limits: Limits) -> dict[str, object]:
    """What a program in namespaces sees."""
    packages = _packages()
    return {
        "root": str(folder),
        "binds": [*packages, (str(tree), "/lab")],
        "links": [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)],
        "hidden": _hidden(packages),
        "tmp_mb": limits.file_mb,
        "shm_mb": limits.shm_mb,
        "etc": {
            "passwd": f"student:x:{INSIDE_ID}:{INSIDE_ID}::/tmp:/bin/sh\n",
            "group": f"student:x:{INSIDE_ID}:\n",
            "hosts": f"127.0.0.1 localhost {os.uname().nodename}\n",
        },
    }


def _kernel_limits(limits: Limits, *, alone: bool) -> dict[str, tuple[int, int]]:
    """The limits that the kernel enforces. alone: the user of the program has no other processes."""
    megabyte, tasks = 1 << 20, max(MOST_TASKS, 2 * limits.tasks)
    address = max(limits.address_mb, 2 * limits.memory_mb) * megabyte
    return {
        "RLIMIT_AS": (address, address),
        "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
        "RLIMIT_FSIZE": (limits.file_mb * megabyte, limits.file_mb * megabyte),
        "RLIMIT_CORE": (0, 0),
        **({"RLIMIT_NPROC": (tasks, tasks)} if alone else {}),
    }


def _packages() -> list[tuple[str, str]]:
    """The interpreter, its packages and the libraries of the system: (folder, the same folder inside)."""
    wanted = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    for prefix in (sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix):
        if not any(Path(prefix).is_relative_to(path) for path in wanted):
            wanted.append(prefix)
    if os.path.exists("/etc/ld.so.cache"):
        wanted.append("/etc/ld.so.cache")
    return [(path, path) for path in wanted]


def _hidden(binds: Sequence[tuple[str, str]]) -> list[str]:
    """Folders with solutions or tests inside what is bound: installed copies, and the tree of this code."""
    folders = {path for path in [*site.getsitepackages(), *sys.path] if "site-packages" in path}
    folders.add(str(Path(__file__).resolve().parents[2]))
    found = [f"{folder}/{name}" for folder in sorted(folders) for name in _SECRET]
    return [
        path for path in found if os.path.isdir(path) and any(Path(path).is_relative_to(b) for b, _ in binds)
    ]
