"""Two "nodes" on one machine, for tests: skipped, with the reason, where they cannot be made."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_lite.launch import namespaces
from mooncake_lite.launch.namespaces import TwoNodes, problem

CLONE_NEWNET = 0x40000000
"""Linux: a network namespace."""

__all__ = ["TwoNodes", "inside", "problem", "serve_args", "two_nodes"]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """namespaces.two_nodes; skips the test where that is impossible."""
    if reason := problem():
        pytest.skip(reason)
    with namespaces.two_nodes(folder) as nodes:
        yield nodes


@contextlib.contextmanager
def inside(host: str) -> Iterator[ThreadPoolExecutor]:
    """One thread, and whatever threads it starts, in the network of a node."""

    def enter() -> None:
        namespace = os.open(f"/run/netns/{host}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network of {host}")
        finally:
            os.close(namespace)

    with ThreadPoolExecutor(1, initializer=enter) as thread:
        yield thread


def serve_args(nodes: TwoNodes, first: int, second: int) -> list[str]:
    """Make the options of `serve` that put `first` ranks on the first node and `second` on the other."""
    agent = f"--prtemca plm_ssh_agent {nodes.agent}"
    return ["--hosts", f"{nodes.hosts[0]}:{first},{nodes.hosts[1]}:{second}", "--mpi-arg", agent]
