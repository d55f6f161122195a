"""Runs as a small process of its own: confines itself, then starts the program that it was asked to start.

    python -I -S confine.py SPECIFICATION

`sandbox.Confined` starts it. The first process, which the parent kills to end everything, is process 1 of the
namespaces, or a subreaper where there are none. It reaps what the program leaves. It writes its id to a pipe.
It uses nothing of ours, so that it starts in 20 ms. Explained in docs/explain/labs.md, "The sandbox".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

Specification = dict[str, Any]

REFUSED = 87
"""Exit code when the kernel refuses namespaces or mounts; the reason is on stderr."""

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC and NEWNS of <sched.h>."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
INSIDE_ID = 1000
"""The user inside. It is not root, because a program of root would get all capabilities of its namespaces."""

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel refuses a step of the confinement."""


def must(result: int, what: str) -> None:
    """Raise Refused with the kernel's reason if a call of libc failed."""
    if result != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2). Raises Refused."""
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    must(
        libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {source} {target}"
    )


def write(path: str, text: str) -> None:
    """Write a file of /proc or of the new root."""
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> None:
    """Leave the user, PID, network, IPC and mount namespaces of the parent. Raises Refused."""
    user, group = os.geteuid(), os.getegid()
    must(libc.unshare(NEW_NAMESPACES), "unshare")
    try:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{INSIDE_ID} {user} 1")
        write("/proc/self/gid_map", f"{INSIDE_ID} {group} 1")
    except OSError as error:
        raise Refused(f"user map: {error.strerror}") from None


def build_root(spec: Specification) -> None:
    """Make a root that holds the listed folders, read-only, and empty /tmp and /dev/shm, and enter it."""
    root = spec["root"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for source, target in spec["binds"]:
        bind(source, root + target)
    for link, target in spec["links"]:
        os.symlink(target, root + link)
    for folder in spec["hidden"]:
        mount("tmpfs", root + folder, "tmpfs", MS_RDONLY, "size=4k")
    lock(root)
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    for folder, megabytes in (("/tmp", spec["tmp_mb"]), ("/dev/shm", spec["shm_mb"])):
        os.makedirs(root + folder, exist_ok=True)
        mount("tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=1777")
    os.makedirs(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    os.makedirs(f"{root}/etc", exist_ok=True)
    for name, text in spec["etc"].items():
        write(f"{root}/etc/{name}", text)
    os.makedirs(f"{root}/old")
    must(libc.pivot_root(root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    must(libc.umount2(b"/old", MNT_DETACH), "umount the old root")
    os.rmdir("/old")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def bind(source: str, target: str) -> None:
    """Show a file or a folder of the parent at another place."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)


def lock(root: str) -> None:
    """Make each mount below the new root read-only, those inside bound folders too."""
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4].encode().decode("unicode_escape") for line in file]
    for place in places:
        if place.startswith(root + "/"):
            mount("none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept_flags(place))


def kept_flags(place: str) -> int:
    """Flags that a remount must keep: the kernel locks them in mounts that come from another user."""
    have = os.statvfs(place).f_flag
    access = {os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
    flags = have & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    return flags | sum(flag for mark, flag in access.items() if have & mark)


def loopback_up() -> None:
    """MPI needs 127.0.0.1; a new network namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def drop_capabilities() -> None:
    """Give up the capabilities that the first process of a user namespace has, for all programs to come."""
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    must(libc.capset(header, bytes(24)), "capset")
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def limit(spec: Specification) -> None:
    """Set the limits that the program and what it starts inherit."""
    for name, wanted in spec["limits"].items():
        kind = getattr(resource, name)
        _, most = resource.getrlimit(kind)
        known = [value if most == resource.RLIM_INFINITY else min(value, most) for value in wanted]
        resource.setrlimit(kind, tuple(known))


def follow_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    must(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def run(spec: Specification) -> int:
    """Start the program and reap until it ends. Returns its exit code, 128 and more for a signal."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            limit(spec)
            os.chdir(spec["cwd"])
            os.execve(spec["command"][0], spec["command"], spec["env"])
        except OSError as error:
            print(f"{spec['command'][0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    for stream in (0, 1, 2):  # a reader must see the end of the program's output, not that of its reaper
        os.close(stream)
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status) % 256


def descendants(first: int) -> list[int]:
    """Return the processes below this one. Used where no namespace ends them all at once."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b") ")[2].split()[1])
    found: list[int] = []
    waiting = [first]
    while waiting:
        parent = waiting.pop()
        below = [pid for pid, above in parents.items() if above == parent]
        found += below
        waiting += below
    return found


def end_all() -> None:
    """Kill what the program left behind: below a subreaper it has nowhere else to be."""
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def first_process(spec: Specification) -> NoReturn:
    """What the first process does: build, confine, run."""
    if spec["isolated"]:
        build_root(spec)
        loopback_up()
        drop_capabilities()
    else:
        must(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    code = run(spec)
    if not spec["isolated"]:
        end_all()
    os._exit(code)


def main() -> NoReturn:
    """Confine, tell the parent the first process, and end with the program's exit code."""
    spec = json.loads(sys.argv[1])
    follow_parent()
    told = spec["told"]
    try:
        if spec["isolated"]:
            enter_namespaces()
        pid = os.fork()
        if pid == 0:
            follow_parent()
            os.close(told)
            first_process(spec)
        os.write(told, f"{pid}\n".encode())
        os.close(told)
        for stream in (0, 1, 2):
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    except (Refused, OSError) as error:
        with contextlib.suppress(OSError):
            print(error, file=sys.stderr, flush=True)
        os._exit(REFUSED)


if __name__ == "__main__":
    main()
