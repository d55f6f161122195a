"""`mooncake-lite profile` measures a model, and writes a file that an emulated engine takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.build import emulated_engine
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.file import read_profile
from tests import emulation
from tests.cluster.tiny import tiny_folder
from tests.python import python

PROFILE = [sys.executable, "-m", "mooncake_lite", "profile"]


def test_a_measured_profile_serves_its_model_and_the_fit_is_shown_beside_the_measurement(
    tmp_path: Path,
) -> None:
    folder = tiny_folder("qwen3", tmp_path / "model")
    out, plot = tmp_path / "profile.json", tmp_path / "fit.svg"
    command = [*PROFILE, str(folder), "--out", str(out), "--plot", str(plot)]
    done = subprocess.run(
        [*command, "--quick", "--time-scale", "0.5"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "prefill",
        "decode",
        "mixed",
        "prompt",
        "KV from SSD",
        "measured ms",
        "fit ms",
        "is off by",
        f"--profile {out}",
    ):
        assert words in done.stdout
    assert plot.read_text().startswith("<?xml")
    profile = read_profile(out)
    compute = profile.compute
    assert profile.model.name == "model"
    assert profile.machine["cores"] >= 1
    assert all(one.seconds > 0 for one in compute.passes)
    assert compute.time_scale == 0.5
    prefill, moves = profile.prefill, profile.moves
    assert all(one.seconds > 0 and one.cached < one.num_tokens for one in prefill.prompts)
    assert moves.near_bytes_per_s
    assert moves.dram_bytes_per_s
    assert moves.ssd_bytes_per_s
    load = compute.passes[0].load
    assert compute.seconds(load) == 0.5 * compute.fit.seconds(load)
    config = ServeConfig(model=str(folder), engine="emulated", profile=str(out))
    assert emulated_engine(config, folder, load_config(folder)).num_pages > 0


TOLD_BEFORE_TORCH = """
import sys
from mooncake_lite.cli import main
from mooncake_lite.launch import threads

def told(count):
    sys.exit(f"told {count}, torch is loaded: {'torch' in sys.modules}")

threads.set_thread_environment = told
main(sys.argv[1:])
"""


def test_threads_are_limited_before_torch_is_imported(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    arguments = ["profile", str(folder), "--out", str(tmp_path / "out"), "--threads", "1"]
    done = python("-c", TOLD_BEFORE_TORCH, *arguments)
    assert done.stderr.splitlines()[-1] == "told 1, torch is loaded: False"


@pytest.mark.quick
def test_what_cannot_be_written_or_is_another_models_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    other = emulation.model_folder(tmp_path / "other", emulation.SMOL)
    kept = emulation.profile_file(other)
    before = kept.read_bytes()
    for arguments, says in (
        (["--out", str(tmp_path / "no" / "f")], "the folder .* does not exist; make it first"),
        (["--out", "f", "--plot", "f.pdf"], "the name must end with .svg or .png"),
        (["--out", "f", "--time-scale", "0"], "time_scale=0: give a factor above 0"),
        (["--out", str(kept)], "is a profile of other, not of model; choose another file"),
    ):
        assert main(["profile", str(folder), *arguments]) == 2
        said = capsys.readouterr().err
        assert re.search(says, said), said
    assert kept.read_bytes() == before
