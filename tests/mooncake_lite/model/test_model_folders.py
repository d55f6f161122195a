"""Model folders as people have them: logits are those of transformers, or the folder is refused by a key.

The folders are generated: families, the forms that transformers 4 and 5 give to config.json, and options one
by one and in pairs. The weights of a family are the same in all of its folders; only config.json changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mooncake_lite.errors import ModelError
from mooncake_lite.model import config as config_module
from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import _check_device, load_model
from mooncake_lite.model.unread_keys import NEUTRAL

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD_LLAMA3 = {"type": "llama3", **{name: LLAMA3[name] for name in list(LLAMA3)[1:4]}}

ROTARY: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": OLD_LLAMA3},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    {"original_max_position_embeddings": 8},
]
WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": 16},
    {"sliding_window": None},
    {"layer_types": [FULL, SLIDING, FULL]},
    {"layer_types": [FULL] * 3},
]
QWEN: list[dict[str, Any]] = [{"use_sliding_window": True}, {"max_window_layers": 1}]
OTHERS: list[dict[str, Any]] = [{"tie_word_embeddings": True}, {"is_causal": None}]

OPTIONS = {
    "llama": [*ROTARY, *WINDOWS[:3:2], *OTHERS],
    "mistral": [*ROTARY[:2], *WINDOWS, *OTHERS[:1]],
    "ministral": [*ROTARY[3:4], *WINDOWS],
    "qwen2": [*ROTARY[2:3], *WINDOWS, *QWEN],
    "qwen3": [*ROTARY[1:2], *WINDOWS, *QWEN, *OTHERS[:1]],
}
"""Of each family. What all families share is paired with more options in the first one."""

HARMLESS: dict[str, Any] = {
    "attention_dropout": 0.5,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 2,
    "dtype": "bfloat16",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "initializer_range": 0.9,
    "label2id": {"a": 0, "b": 1, "c": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "pad_token_id": 5,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "return_dict": True,
    "transformers_version": "4.1.0",
    "use_cache": False,
}
"""Keys of the classes that cannot change logits, with values away from their defaults."""

NO_WINDOW = "Could not find a `sliding_window` argument in the config"
"""transformers asks a Ministral model for the size of a window, even if none of its layers has one."""

IDS = [i * 7 % 190 + 3 for i in range(60)]
PARTS = (slice(0, 40), slice(40, 59), slice(59, 60))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., Any]) -> dict[str, Path]:
    """family -> a folder of it."""
    folders = {}
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        folders[family] = tmp_path_factory.mktemp(family)
        make_tiny(family, folders[family])
    return folders | {"ministral": folders["mistral"]}


def variant(base: Path, folder: Path, family: str, form: int, changes: dict[str, Any]) -> Path:
    """A folder with the weights of `base`, and config.json as transformers 4 or 5 (`form`) would have it."""
    raw = json.loads((base / "config.json").read_text())
    raw.update(model_type=family, architectures=[f"{family.capitalize()}ForCausalLM"])
    raw.pop("layer_types", None)  # so that the other keys count
    if form == 4:
        raw |= {"rope_theta": raw.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        raw |= {"torch_dtype": raw.pop("dtype"), "transformers_version": "4.46.0"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | changes))
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").symlink_to(base / "model.safetensors")
    return folder


@torch.inference_mode()
def expected(folder: Path) -> torch.Tensor:
    """Logits of IDS by transformers: in one pass, and over a cache in as many as PARTS are."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, cache = torch.tensor([IDS]), DynamicCache(config=model.config)
    passes = [model(ids[:, part], past_key_values=cache, use_cache=True).logits[0] for part in PARTS]
    return torch.cat([model(ids).logits[0], *passes])


def found(folder: Path, paged_loop: Callable[..., Any]) -> torch.Tensor:
    loop = paged_loop(load_model(folder))
    passes = torch.cat([loop.forward({0: IDS[part]}, {0: part.start}) for part in PARTS])
    return torch.cat([passes, passes])


def judged(folder: Path, keys: set[str], paged_loop: Callable[..., Any]) -> str:
    """What became of a folder: "" for logits as they should be, the refused key, or else what is wrong."""
    try:
        ours = found(folder, paged_loop)
    except ModelError as error:
        name = re.search(r"(?:config\.json|folder): (?:\d+ )?(\w+)", str(error))
        return name[1] if name and name[1] in keys and "\n" not in str(error) else f"wrong: {error}"
    try:
        theirs = expected(folder)
    except Exception as error:
        return "" if NO_WINDOW in str(error) else f"wrong: served, and transformers says {error}"
    furthest = (ours - theirs).abs().max().item()
    return "" if furthest < 1e-3 else f"wrong: logits differ by {furthest}"


def options(family: str) -> Iterator[dict[str, Any]]:
    """None, one by one, and in pairs."""
    yield {}
    yield from OPTIONS[family]
    for one, other in itertools.combinations(OPTIONS[family], 2):
        if not one.keys() & other.keys():
            yield one | other


@pytest.mark.parametrize("family", OPTIONS)
def test_a_generated_folder_has_the_logits_of_transformers_or_is_refused_by_its_key(
    family: str, bases: dict[str, Path], tmp_path: Path, paged_loop: Callable[..., Any]
) -> None:
    verdicts: dict[str, str] = {}
    for number, changes in enumerate(options(family)):
        form = 4 + number % 2
        folder = variant(bases[family], tmp_path / "folder", family, form, changes)
        verdicts[f"{form}: {changes}"] = judged(folder, set(changes), paged_loop)

    assert {text: verdict for text, verdict in verdicts.items() if verdict.startswith("wrong")} == {}
    assert list(verdicts.values()).count("") > len(verdicts) / 3


def test_a_key_that_is_not_read_and_has_an_effect_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    for family, (name, neutral) in zip(itertools.cycle(OPTIONS), NEUTRAL.items()):
        for value in (*neutral, None, {"1": {"rms_norm_eps": 0.5}}, [1, 0, 1], 0.5, "other", not neutral[-1]):
            folder = variant(bases[family], tmp_path, family, 5, {name: value})
            if value in neutral:
                load_config(folder)
                continue
            with pytest.raises(ModelError, match=rf"config\.json: {name}=.* is not supported; supported is "):
                load_config(folder)


def test_keys_without_effect_may_say_anything(
    bases: dict[str, Path], tmp_path: Path, paged_loop: Callable[..., Any]
) -> None:
    unknown = {
        "our_note": "x",
        "num_experts": 8,
        "max_batch": [1, 2],
        "dual_chunk_attention_config": {"a": 1},
    }
    biases = {"attention_bias": True, "mlp_bias": True}
    of_others = {
        "llama": {"use_sliding_window": True, "max_window_layers": "x"},
        **dict.fromkeys(("mistral", "ministral"), biases | {"use_sliding_window": False}),
        "qwen2": biases,
        "qwen3": {"mlp_bias": True},
    }
    for number, family in enumerate(OPTIONS):
        changes = HARMLESS | unknown | of_others[family]
        folder = variant(bases[family], tmp_path / "folder", family, 4 + number % 2, changes)
        assert judged(folder, set(), paged_loop) == ""


class Recording(dict[str, Any]):
    """A JSON object that remembers the names of the keys that were asked for."""

    names: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("family", OPTIONS)
def test_each_key_of_the_class_in_transformers_is_read_or_refused_or_harmless(
    family: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    changes = {"use_sliding_window": True, "sliding_window": 512, "rope_parameters": LLAMA3}
    folder = variant(bases[family], tmp_path, family, 5, changes)
    recording = Recording(json.loads((folder / "config.json").read_text()))
    recording.names = set()
    monkeypatch.setattr(config_module, "read_json", lambda path: recording)
    load_config(folder)
    read = recording.names - NEUTRAL.keys()
    config = AutoConfig.for_model(family)
    keys = {field.name for field in dataclasses.fields(config)} | {"output_attentions"}

    assert keys - read - NEUTRAL.keys() == keys & HARMLESS.keys()
    assert not read & HARMLESS.keys()


def test_a_head_counts_wherever_it_is_not_the_embedding(
    bases: dict[str, Path], tmp_path: Path, paged_loop: Callable[..., Any]
) -> None:
    stored = load_file(bases["llama"] / "model.safetensors")
    own, embedding = stored.pop("lm_head.weight"), stored["model.embed_tokens.weight"]
    heads = {"own": own, "equal": embedding.clone(), "of another type": embedding.bfloat16(), "none": None}
    for head, tied in itertools.product(heads.values(), (True, False)):
        folder = variant(bases["llama"], tmp_path / "folder", "llama", 5, {"tie_word_embeddings": tied})
        (folder / "model.safetensors").unlink()
        tensors = stored if head is None else stored | {"lm_head.weight": head}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        verdict = judged(folder, {"tensors"}, paged_loop)
        assert verdict == ("tensors" if head is None and not tied else "")


@pytest.mark.quick
def test_the_page_about_model_folders_lists_what_is_refused_and_what_has_no_effect() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/own-model.md").read_text(encoding="utf-8")
    refused, harmless = page.partition("These keys change")[2].split("The following keys cannot")

    assert set(re.findall(r"`(\w+)`", refused)) == NEUTRAL.keys()
    assert set(re.findall(r"`(\w+)`", harmless.partition("A key that")[0])) == HARMLESS.keys()


@pytest.mark.parametrize(
    ("device", "is_there"),
    [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("cuda:x", False), ("mps", False)],
)
def test_a_device_is_one_that_torch_sees(
    device: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with contextlib.nullcontext() if is_there else pytest.raises(ModelError, match="cuda:0 to cuda:1"):
        _check_device(device)
