"""Other model families than the default model's, served by whole clusters; and the fast launch profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_lite.demo.cluster import Cluster
from mooncake_lite.launch.machine import find_mpirun
from mooncake_lite.launch.open_mpi import inspect_open_mpi
from mooncake_lite.model.config import DType
from tests.cluster import asking, reference, tiny
from tests.cluster.conftest import START_LIMIT_S

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "bfloat16"), ("qwen3", "float32")])
def test_a_family_answers_as_one_process_does_cold_from_dram_and_from_hdf5(
    family: str, dtype: DType, tmp_path: Path
) -> None:
    """Qwen2 in float32 is served below, with the fast profile."""
    folder = tiny.tiny_folder(family, tmp_path / "model")
    prompts = tiny.prompts()
    expected = reference.greedy_texts(folder, prompts, dtype=dtype)
    full = [len(prompt) // 64 * 64 for prompt in prompts]
    flags = [str(folder), *tiny.FLAGS, "--dtype", dtype, "--ssd-dir", str(tmp_path / "tier")]
    flags += ["--eviction", "leaves-first"]  # one that needs to know what each block hangs on
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        assert asking.ask_all(cluster.base_url, prompts) == (expected, full)
    if family == "qwen3":  # one of them: a start costs seconds, and the tier does not know families
        with Cluster(flags, tmp_path / "log 2") as cluster:
            cluster.wait_ready(START_LIMIT_S)
            assert asking.ask_all(cluster.base_url, prompts) == (expected, full)


def test_the_fast_profile_serves_the_same_tokens(tmp_path: Path) -> None:
    if refusal := inspect_open_mpi(find_mpirun()).refusal("fast"):
        pytest.skip(refusal)
    folder = tiny.tiny_folder("qwen2", tmp_path / "model")
    prompts = tiny.prompts(4)
    with Cluster([str(folder), *tiny.FLAGS, "--profile", "fast"], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        expected = reference.greedy_texts(folder, prompts)
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        assert cluster.stop() < 5.0
