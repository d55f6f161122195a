"""The sandbox: a program in namespaces of its own, watched, limited and killed from outside.

Used by the judge for each task, and by tests for whole MPI jobs. It knows processes and mounts, not labs.
`confine.py` does what must be done inside. Explained in docs/explain/labs.md, "The sandbox".
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.errors import LabError
from mooncake_lite.labs.confine import INSIDE_ID, REFUSED, descendants

SAMPLE_S = 0.05
MARK = "MOONCAKE_LITE_SANDBOX"
"""Variable by which the processes of a sandbox can be found."""
OUT_OF_TIME = 256 - signal.SIGXCPU
"""Exit code of a program that has used its processor time."""
_CONFINE = str(Path(__file__).with_name("confine.py"))
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SECRET = ("kernels_numba", "mooncake_lite", "scheduler", "store", "transport", "tests", "tutorials", ".git")

FIX = (
    "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, start it with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined; or grade without a sandbox: "
    "--trusted"
)


class SandboxRefused(LabError):
    """This machine cannot make a sandbox; the message says why and what to change."""


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
    """Count a process and all below it. Processes cannot leave: orphans come back to the first process."""
    page = os.sysconf("SC_PAGE_SIZE")
    table: dict[int, tuple[int, int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
                table[int(name)] = (int(fields[1]), int(fields[17]), int(fields[21]))
    below: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        below.setdefault(parent, []).append(pid)
    tasks = memory = 0
    waiting = [first]
    while waiting:
        pid = waiting.pop()
        if pid in table:
            tasks += table[pid][1]
            memory += table[pid][2] * page
        waiting += below.get(pid, ())
    return Usage(tasks, memory)


class Confined:
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
        isolated: bool,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program in `tree`, which is mounted as /lab if it is isolated.

        Raises SandboxRefused.
        """
        self.limits = limits
        self._isolated = isolated
        self._folder = Path(tempfile.mkdtemp(prefix="mlab"))
        self._began = time.monotonic()
        self._sampled = 0.0
        told, tell = os.pipe()
        try:
            spec = _specification(command, tree, limits, isolated, dict(env or {}), self._folder)
            spec["told"] = tell
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
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(told)

    def __enter__(self) -> Confined:
        return self

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
        """Kill the first process, and with it all others. Return the exit code of the program."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                if not self._isolated:
                    self._end_below()
                os.kill(self.first, signal.SIGKILL)
        code = self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def _end_below(self) -> None:
        """Without a namespace that dies as a whole: kill what is below the subreaper until nothing is."""
        for _ in range(200):
            below = descendants(self.first)
            for pid in reversed(below):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not below:
                return

    def _first_process(self, told: int) -> int:
        """Wait until the launcher tells the first process. Raises SandboxRefused if it cannot start one."""
        ready, _, _ = select.select([told], [], [], 30)
        line = os.read(told, 32) if ready else b""
        if line:
            return int(line)
        self.process.kill()
        _, errors = self.process.communicate(timeout=30)
        reason = errors.decode(errors="replace").strip() or "no answer"
        raise SandboxRefused(f"this machine cannot make a sandbox ({reason}); {FIX}")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code, what it printed, and which limit it exceeded, if any."""

    code: int
    output: str
    reason: str


def run(command: Sequence[str], tree: Path, limits: Limits, *, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program in the sandbox to its end, or to its first excess. Raises SandboxRefused."""
    output = bytearray()
    with Confined(command, tree, limits, isolated=True, env=env) as running:
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
        raise SandboxRefused(f"this machine cannot make a sandbox ({output.decode().strip()}); {FIX}")
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


def problem() -> str:
    """Return why no sandbox can be made here; empty when one can."""
    limits = Limits(seconds=20, cpu_s=10, memory_mb=256, tasks=8)
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        try:
            ended = run([sys.executable, "-I", "-S", "-c", "print('here')"], Path(folder), limits)
        except SandboxRefused as error:
            return str(error)
    return (
        "" if ended.output == "here\n" else f"a program in a sandbox ended with {ended.code}: {ended.output}"
    )


def _specification(
    command: Sequence[str], tree: Path, limits: Limits, isolated: bool, env: dict[str, str], folder: Path
) -> dict[str, object]:
    """What confine.py has to know."""
    home = "/tmp" if isolated else str(folder)
    megabyte = 1 << 20
    packages = _packages()
    return {
        "isolated": isolated,
        "command": list(command),
        "cwd": "/lab" if isolated else str(tree),
        "env": {
            **{"HOME": home, "TMPDIR": home, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
            **env,
            MARK: str(folder),
        },
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
        "limits": {
            "RLIMIT_AS": (address := max(limits.address_mb, 2 * limits.memory_mb) * megabyte, address),
            "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
            "RLIMIT_FSIZE": (limits.file_mb * megabyte, limits.file_mb * megabyte),
            "RLIMIT_CORE": (0, 0),
        },
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
