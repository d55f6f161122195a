"""Whole clusters for tests: real ranks under mpirun, the default model, a free port."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.launch.serve_child import free_port as find_free_port
from mooncake_lite.model.config import load_config
from mooncake_lite.model.resolve import resolve_model

START_LIMIT_S = 240.0
"""With kernels that are compiled first, beside other tests."""

SMALL = [
    *("--pool-bytes", "256MiB", "--kv-cache-bytes", "256MiB", "--max-model-len", "4096"),
    *("--max-num-seqs", "20"),
]
"""A cluster that fits beside others: 86 blocks in the pool, 5,461 tokens of pages in each engine, and the 20
prompts of `reference` in one batch."""


@pytest.fixture(scope="session", autouse=True)
def model_folder() -> Path:
    """The default model, pulled when it is not there."""
    folder = resolve_model("default")
    assert load_config(folder).layers == 30
    return folder


@pytest.fixture(scope="package")
def serving_tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SSD folder of `serving`."""
    return tmp_path_factory.mktemp("serving") / "tier"


@pytest.fixture(scope="package")
def serving_record(serving_tier: Path) -> Path:
    """The recording of `serving`."""
    return serving_tier.parent / "recording"


@pytest.fixture(scope="package")
def serving(serving_tier: Path, serving_record: Path) -> Iterator[Cluster]:
    """One cluster for all tests that only talk to it; with an SSD tier, a short queue and 20 slots."""
    folder = serving_tier.parent
    flags = [*SMALL, "--ssd-dir", str(serving_tier), "--max-queue", "20", "--record", str(serving_record)]
    with Cluster(flags, folder / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        yield cluster
    if os.environ.get("CI"):
        print((folder / "log").read_text())


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses at this moment."""
    return find_free_port()
