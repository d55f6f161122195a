"""Two "nodes" on one machine, for tests: skipped, with the reason, where they cannot be made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_lite.launch import namespaces
from mooncake_lite.launch.namespaces import TwoNodes, problem

__all__ = ["TwoNodes", "problem", "two_nodes"]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """namespaces.two_nodes; skips the test where that is impossible."""
    if reason := problem():
        pytest.skip(reason)
    with namespaces.two_nodes(folder) as nodes:
        yield nodes
