"""Two "nodes" on one machine: network namespaces joined by a veth pair, each with a host name of its own.

Used by `bench transport` and by tests of whatever crosses hosts. Needs root and iproute2; what is written
outside the given folder (/etc/netns) is removed again. `ip netns exec` shows each node its own /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.errors import LaunchError

NETNS = Path("/etc/netns")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""The namespaces see each other alone, so the same addresses serve any number of runs at once."""


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """hosts: both names; the first is where mpirun is to run. agent: script that stands in for ssh."""

    hosts: tuple[str, str]
    addresses: tuple[str, str]
    agent: Path

    def on(self, node: int) -> list[str]:
        """A prefix that runs the command behind it on a node."""
        host = self.hosts[node]
        return ["ip", "netns", "exec", host, "unshare", "-u", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]

    def mpirun_args(self, first: int, second: int) -> list[str]:
        """For mpirun, started under on(0): `first` ranks on the first node, then `second` on the other."""
        hosts = f"{self.hosts[0]}:{first},{self.hosts[1]}:{second}"
        return ["--host", hosts, "--prtemca", "plm_ssh_agent", str(self.agent)]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def problem() -> str:
    """Why no nodes can be made here; "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and util-linux"
    name = f"mlp{secrets.token_hex(3)}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "unshare", "-u", "true")
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces cannot be made: {getattr(error, 'stderr', '') or error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
    return ""


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Make both nodes, and remove them at the end. `folder` gets the ssh stand-in.

    Raises LaunchError with the reason where that is impossible.
    """
    reason = problem()
    if reason:
        raise LaunchError(reason)
    tag = f"ml{secrets.token_hex(3)}"
    nodes = TwoNodes((f"{tag}a", f"{tag}b"), ADDRESSES, folder / "agent.sh")
    try:
        _write_files(nodes)
        _make(nodes, tag)
        yield nodes
    finally:
        for host in nodes.hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=20, check=False)
            shutil.rmtree(NETNS / host, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: another run uses it, and the last one removes it
            NETNS.rmdir()


def _write_files(nodes: TwoNodes) -> None:
    lines = ["127.0.0.1 localhost", *(f"{ip} {host}" for ip, host in zip(nodes.addresses, nodes.hosts))]
    for host in nodes.hosts:
        (NETNS / host).mkdir(parents=True)
        (NETNS / host / "hosts").write_text("\n".join(lines) + "\n")
    nodes.agent.write_text(
        '#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "$host" unshare -u sh -c "hostname $host; $*"\n'
    )
    nodes.agent.chmod(0o700)


def _make(nodes: TwoNodes, tag: str) -> None:
    ends = (f"{tag}v", f"{tag}w")
    for host in nodes.hosts:
        _run("ip", "netns", "add", host)
    # Two numbers: Linux tells of a pair at once that both ends are up when theirs differ, else within a
    # second, and UCX takes no device before that.
    first = ["name", ends[0], "index", "11", "netns", nodes.hosts[0], "type", "veth"]
    _run("ip", "link", "add", *first, "peer", "name", ends[1], "index", "12", "netns", nodes.hosts[1])
    for host, end, address in zip(nodes.hosts, ends, nodes.addresses):
        _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", end)
        _run("ip", "-n", host, "link", "set", end, "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")
