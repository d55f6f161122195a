"""Runs as a small process of its own: confines itself, then starts the program that it was asked to start.

    python -I -S confine.py SPECIFICATION

`sandbox.Confined` starts it. The first process, which the parent ends to end everything, is process 1 of the
namespaces, or a subreaper where there are none. It reaps what the program leaves. It writes its id to a pipe.
It uses nothing of ours, so that it starts in 20 ms. Explained in docs/explain/labs.md, "The sandbox".

Root makes the namespaces and the mounts with its own rights, and then becomes a user that nothing belongs to.
Another user gets the rights for it from a user namespace, which therefore comes first.
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
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

Specification = dict[str, Any]

REFUSED = 87
"""Exit code when the kernel refuses namespaces or mounts; the reason is on stderr."""

NEW_USERS = 0x10000000
NEW_NAMESPACES = 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000
"""CLONE_NEWUSER; CLONE_NEWPID, NEWNET, NEWIPC and NEWNS of <sched.h>."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
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


def write_at(proc: int, path: str, text: str) -> None:
    """Write a file of /proc, which is open as a folder: it is not in the new root."""
    with os.fdopen(os.open(path, os.O_WRONLY, dir_fd=proc), "w") as file:
        file.write(text)


def leave_users(proc: int, map_it: Callable[[], None]) -> None:
    """Enter a user namespace with one user, in which no other namespace can be made. Raises Refused."""
    must(libc.unshare(NEW_USERS), "unshare")
    map_it()
    with contextlib.suppress(OSError):  # /proc/sys can be read-only; give_up forbids them too
        write_at(proc, "sys/user/max_user_namespaces", "0")


def map_user(proc: int, process: int | str, user: int, group: int) -> None:
    """Say which user and group outside is the one of a process inside. Raises Refused."""
    try:
        if process == "self":  # the kernel wants it of a process without rights outside
            write_at(proc, "self/setgroups", "deny")
        write_at(proc, f"{process}/uid_map", f"{INSIDE_ID} {user} 1")
        write_at(proc, f"{process}/gid_map", f"{INSIDE_ID} {group} 1")
    except OSError as error:
        raise Refused(f"user map: {error.strerror}") from None


def become(user: int) -> None:
    """Change to a user with one group of the same number. Raises Refused."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        raise Refused(f"become user {user}: {error.strerror}") from None


def build_root(spec: Specification) -> None:
    """Make a root that holds the listed folders, read-only, and empty /tmp and /dev/shm, and enter it.

    What is listed may lie below /tmp or /dev/shm, so these two come first.
    """
    root = spec["root"]
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    writable = {f"{root}/tmp": spec["tmp_mb"], f"{root}/dev/shm": spec["shm_mb"]}
    for folder, megabytes in writable.items():
        os.makedirs(folder)
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=1777")
    for source, target in spec["binds"]:
        bind(source, root + target)
    for link, target in spec["links"]:
        os.symlink(target, root + link)
    for folder in spec["hidden"]:
        mount("tmpfs", root + folder, "tmpfs", MS_RDONLY, "size=4k")
    lock(root, writable)
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    if spec["proc"]:
        os.makedirs(f"{root}/proc")
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        mount("proc", f"{root}/proc", "proc", flags, "subset=pid")  # processes, and nothing of the kernel
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


def lock(root: str, writable: Collection[str]) -> None:
    """Make each mount below the new root read-only, those inside bound folders too."""
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4].encode().decode("unicode_escape") for line in file]
    for place in places:
        if place.startswith(root + "/") and place not in writable:
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


def give_up(forbidden: str) -> None:
    """Give up all capabilities and the forbidden system calls, for all programs to come. Raises Refused."""
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    must(libc.capset(header, bytes(24)), "capset")
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    program = ctypes.create_string_buffer(bytes.fromhex(forbidden))
    known = struct.pack("@HP", len(program) // 8, ctypes.addressof(program))
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, known, 0, 0), "seccomp")


def limit(spec: Specification) -> None:
    """Set the limits that the program and what it starts inherit."""
    for name, wanted in spec["limits"].items():
        kind = getattr(resource, name)
        _, most = resource.getrlimit(kind)
        known = [value if most == resource.RLIM_INFINITY else min(value, most) for value in wanted]
        resource.setrlimit(kind, tuple(known))


def follow_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent of this process dies. A change of the user forgets it."""
    must(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def run(spec: Specification) -> int:
    """Start the program and reap until it ends. Returns its exit code, 128 and more for a signal."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            if spec["level"] == "uid":
                become(spec["user"])
                give_up(spec["forbidden"])
            limit(spec)
            os.chdir(spec["cwd"])
            os.execve(spec["command"][0], spec["command"], spec["env"])
        except OSError as error:
            print(f"{error.filename}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
        except Refused as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(REFUSED)
    for stream in (0, 1, 2):  # a reader must see the end of the program's output, not that of its reaper
        os.close(stream)
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status) % 256


def processes() -> dict[int, tuple[int, int, int]]:
    """Return {process: (its parent, number of threads, resident pages)} of the machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
                found[int(name)] = (int(fields[1]), int(fields[17]), int(fields[21]))
    return found


def descendants(first: int, among: Mapping[int, tuple[int, int, int]]) -> list[int]:
    """Return the processes below this one. Orphans do not leave: they come back to the first process."""
    below: dict[int, list[int]] = {}
    for pid, (parent, _, _) in among.items():
        below.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = [first]
    while waiting:
        children = below.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def end_below() -> None:
    """Kill what the program left behind: below a subreaper it has nowhere else to be."""
    while left := descendants(os.getpid(), processes()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def end_user(user: int) -> None:
    """Kill all processes of a user at once, so that none of them can fork on, and reap them."""
    if os.fork() == 0:
        become(user)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


class Told(Exception):
    """The parent says that it is over."""


def run_below(spec: Specification) -> int:
    """Run the program where no namespace ends with its first process. SIGTERM ends it sooner."""

    def stop(*_: object) -> NoReturn:
        raise Told

    must(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    try:
        signal.signal(signal.SIGTERM, stop)
        code = run(spec)
    except Told:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if spec["level"] == "uid":
        end_user(spec["user"])
    else:
        end_below()
    return code


def run_inside(spec: Specification, proc: int, parent: socket.socket) -> int:
    """Build the root as process 1 of the namespaces, give up all rights, and run the program."""

    def ask_parent() -> None:
        parent.send(b"?")
        if not parent.recv(1):
            raise Refused("user map: no answer")

    build_root(spec)
    loopback_up()
    if spec["user"] is not None:
        leave_users(proc, ask_parent)
        become(INSIDE_ID)
        follow_parent()
    os.close(proc)
    parent.close()
    give_up(spec["forbidden"])
    return run(spec)


def main() -> NoReturn:
    """Confine, tell the parent the first process, and end with the program's exit code."""
    spec = json.loads(sys.argv[1])
    follow_parent()
    told, inside, user = spec["told"], spec["level"] == "namespaces", spec["user"]
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    ours, theirs = socket.socketpair()
    try:
        if inside:
            outside = os.geteuid(), os.getegid()
            if user is None:
                leave_users(proc, lambda: map_user(proc, "self", *outside))
            must(libc.unshare(NEW_NAMESPACES), "unshare")
        pid = os.fork()
        if pid == 0:
            os.close(told)
            ours.close()
            follow_parent(signal.SIGKILL if inside else signal.SIGTERM)
            os._exit(run_inside(spec, proc, theirs) if inside else run_below(spec))
        os.write(told, f"{pid}\n".encode())
        os.close(told)
        theirs.close()
        if inside and ours.recv(1):
            map_user(proc, pid, user, user)
            ours.send(b"!")
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
