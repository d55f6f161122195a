"""The memory that is left: of the machine, and of the control groups that a container's limit stands in.

Used by lenders, which must not lend what is not there: the kernel kills a process that touches it. Explained
in docs/explain/leases.md.
"""

from __future__ import annotations

from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def memory_left() -> int:
    """Return the bytes that this process and its neighbours can still take, without swapping."""
    left = [1024 * _number(_table(PROC / "meminfo").get("MemAvailable:", ""), 1 << 50)]
    for line in _text(PROC / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            left += _groups_left(GROUPS, path, "memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            left += _groups_left(GROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(left))


def _groups_left(root: Path, path: str, limit: str, used: str) -> list[int]:
    """Return what is left in a group and in those around it, as far as they are there and have limits."""
    folder = root / path.strip("/")
    left = []
    for group in (folder, *folder.parents):
        if group.is_relative_to(root) and (most := _number(_text(group / limit), 0)):
            table = _table(group / "memory.stat")
            cached = sum(
                _number(table.get(f"total_{kind}", table.get(kind, "0")))
                for kind in ("inactive_file", "active_file")
            )
            left.append(most - _number(_text(group / used), 0) + cached)
    return left


def _table(path: Path) -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in _text(path).splitlines()}


def _number(text: str, otherwise: int = 1 << 62) -> int:
    return int(text) if text.strip().isdigit() else otherwise


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
