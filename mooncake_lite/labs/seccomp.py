"""The system calls that a program in a sandbox may not make, as a program for the kernel's seccomp filter.

Used by sandbox.py; confine.py gives it to the kernel. No region needs these calls. They leave the sandbox
or reach parts of the kernel in which holes were found. It knows numbers, not processes.
Explained in docs/explain/labs.md, "The sandbox".
"""

from __future__ import annotations

import errno
import socket
import struct

Instruction = tuple[int, int, int, int]
"""code, instructions to skip if true, and if false, and a number: struct sock_filter of <linux/filter.h>."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, MACHINE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in struct seccomp_data of <linux/seccomp.h>. Both machines are little-endian."""
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""uname -m -> AUDIT_ARCH_* of <linux/audit.h>, and column of the tables below."""
X32 = 0x40000000
"""Numbers from here on are the x32 ABI of x86-64: other numbers for the same calls."""

REFUSED = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "ptrace": (101, 117),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
}
OUTLIVING = {"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)}
"""They make what outlives its process, where no IPC namespace ends with it."""
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET of <sched.h>."""
AF_NETLINK = 16
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, AF_NETLINK)


def filter_program(machine: str, *, own_namespaces: bool) -> bytes:
    """Return the filter for a machine, as an array of struct sock_filter.

    Without namespaces of its own, a program has no network, and makes nothing that outlives it.
    """
    arch, column = MACHINES[machine]
    refused = REFUSED if own_namespaces else REFUSED | OUTLIVING
    families = FAMILIES if own_namespaces else (socket.AF_UNIX,)
    program: list[Instruction] = [
        (LOAD, 0, 0, MACHINE_AT),
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        *_when((AT_LEAST, X32), [_error(errno.ENOSYS)]),
    ]
    for numbers in refused.values():
        program += _when((EQUAL, numbers[column]), [_error(errno.EPERM)])
    # its flags lie in memory, where a filter cannot look; libc then takes clone
    program += _when((EQUAL, CLONE3[column]), [_error(errno.ENOSYS)])
    namespaces = _when((ANY_BIT, CLONE_NEW), [_error(errno.EPERM)])
    program += _when((EQUAL, CLONE[column]), _look_at_argument(namespaces, (RETURN, 0, 0, ALLOW)))
    known = [line for family in families for line in _when((EQUAL, family), [(RETURN, 0, 0, ALLOW)])]
    for call in (SOCKET, SOCKETPAIR):
        lines = _look_at_argument(known, _error(errno.EAFNOSUPPORT))
        program += _when((EQUAL, call[column]), lines)
    return b"".join(struct.pack("HBBI", *line) for line in [*program, (RETURN, 0, 0, ALLOW)])


def _when(test: tuple[int, int], lines: list[Instruction]) -> list[Instruction]:
    return [(test[0], 0, len(lines), test[1]), *lines]


def _look_at_argument(lines: list[Instruction], otherwise: Instruction) -> list[Instruction]:
    """Only the lower half: the kernel ignores the upper one, as both arguments are 32 bits."""
    return [(LOAD, 0, 0, FIRST_ARGUMENT_AT), *lines, otherwise]


def _error(number: int) -> Instruction:
    return (RETURN, 0, 0, ERROR | number)
