"""config.json: two generations of transformers are read, what is not supported is named and refused."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import Llama3Scaling, load_config
from mooncake_lite.model.generation_config import default_sampling
from mooncake_lite.model.tokenizer import load_tokenizer
from tests.mooncake_lite.model.sound_folder import sound_folder

pytestmark = pytest.mark.quick

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


def folder_with(tmp_path: Path, **changes: Any) -> Path:
    fields = {name: value for name, value in (PLAIN | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_sizes_are_read(tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path))

    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (3, 4, 2, 16)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e4, "rope_scaling": LLAMA3},
        {
            "rope_theta": 1e4,
            "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}},
        },
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e4, **LLAMA3}},
    ],
    ids=["transformers 4", "older", "transformers 5"],
)
def test_llama_3_scaling_is_read_as_each_generation_of_transformers_wrote_it(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(folder_with(tmp_path, **rope))

    assert config.rope_theta == 1e4
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64
    )


def test_what_a_family_leaves_out_means_what_the_family_says(tmp_path: Path) -> None:
    assert load_config(folder_with(tmp_path, num_key_value_heads=...)).kv_heads == 4
    assert load_config(folder_with(tmp_path, rope_theta=...)).rope_theta == 1e4
    assert load_config(folder_with(tmp_path, **QWEN3)).head_dim == 128
    assert load_config(folder_with(tmp_path, **QWEN3)).qk_norm
    assert load_config(folder_with(tmp_path, **QWEN2)).qkv_bias
    assert not load_config(folder_with(tmp_path, **QWEN2)).output_bias
    assert load_config(folder_with(tmp_path, attention_bias=True)).output_bias


def test_the_end_tokens_of_generation_config_win(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert load_config(folder).eos_ids == (2,)

    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 4, 9]}')
    assert load_config(folder).eos_ids == (4, 9)

    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_config(folder).eos_ids == (2,)

    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id='</s>' must be a token id"):
        load_config(folder)


REFUSED = [
    (
        {"model_type": "gpt2"},
        "model_type 'gpt2' is not supported; supported are llama, mistral, ministral, qwen2, qwen3",
    ),
    ({"model_type": ...}, "model_type None is not supported"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification.*LlamaForCausalLM is",
    ),
    ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is silu"),
    ({**MISTRAL, "sliding_window": 0}, "sliding_window=0 must be a whole number from 2 to 2147483647"),
    ({**QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1 must be"),
    ({**QWEN3, "use_sliding_window": True, "layer_types": ["chunked"]}, "layer_types must name"),
    ({**QWEN3, "use_sliding_window": True, "layer_types": [["x"]] * 3}, "layer_types must name"),
    ({**QWEN3, "layer_types": ["sliding_attention"] * 3}, "layer_types .* no sliding window is switched on"),
    ({**QWEN2, "use_sliding_window": "false"}, "use_sliding_window='false' must be true or false"),
    ({"sliding_window": 64}, "sliding_window=64 is not supported in a llama model"),
    ({"rope_parameters": {"full_attention": LLAMA3}}, "rope_parameters of full_attention is not supported"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "supported are default and llama3"),
    ({"rope_scaling": {**LLAMA3, "factor": ...}}, "lacks factor"),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above"),
    ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_size": ...}, "lacks hidden_size"),
    ({"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number from 1 to 10000"),
    ({"rms_norm_eps": -1}, "rms_norm_eps=-1 must be a number above 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a number above 0"),
    ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
    ({"architectures": 7}, "architectures 7 are not supported"),
    ({"eos_token_id": 100}, r"config.json: eos_token_id=100 must be .* from 0 to 99 \(vocab_size=100"),
    ({"eos_token_id": [2, -1]}, r"config.json: eos_token_id=\[2, -1\] must be"),
    ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 key/value heads"),
    ({"head_dim": 15}, "head_dim=15 is odd"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_be_computed_is_refused_in_one_line_that_names_it(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    scaling = changes.get("rope_scaling")
    if isinstance(scaling, dict):
        changes = changes | {"rope_scaling": {k: v for k, v in scaling.items() if v is not ...}}

    with pytest.raises(ModelError, match=message) as caught:
        load_config(folder_with(tmp_path, **changes))

    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers"),
)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [2**31, 2**70, 10**4000, -1, 1.5, True, "1", []], ids=lambda v: str(v)[:6])
def test_a_size_out_of_its_range_is_refused_in_a_short_line(name: str, value: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **(QWEN2 | {"use_sliding_window": True, name: value}))

    with pytest.raises(
        ModelError, match=rf"config\.json: {name}=.* must be a whole number from \d"
    ) as caught:
        load_config(folder)

    assert len(str(caught.value)) < len(str(tmp_path)) + 130


def test_a_byte_order_mark_before_the_json_of_a_model_folder_is_skipped(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path)
    plain = load_tokenizer(folder)
    for path in folder.glob("*.json"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert len(list(folder.glob("*.json"))) > 3

    assert load_config(folder).eos_ids == plain.eos_ids
    assert load_tokenizer(folder).encode("hello") == plain.encode("hello")
    assert default_sampling(folder) is not None


def test_a_window_that_is_not_in_force_is_no_window(tmp_path: Path) -> None:
    def windows(**changes: Any) -> set[int | None]:
        return set(load_config(folder_with(tmp_path, **changes)).windows)

    assert windows(**MISTRAL) == {None}
    assert windows(**QWEN2, sliding_window=4096, use_sliding_window=False) == {None}
    assert windows(**QWEN2, layer_types=["full_attention"] * 3) == {None}


def test_a_window_holds_in_the_layers_that_the_family_says(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return load_config(folder_with(tmp_path, num_hidden_layers=3, **changes)).windows

    on = {"use_sliding_window": True, "sliding_window": 128}
    assert windows(**{**MISTRAL, "sliding_window": 64}) == (64, 64, 64)
    assert windows(**{**MISTRAL, "sliding_window": ...}) == (4096, 4096, 4096)
    assert windows(sliding_window=256) == (None, None, None)  # as long as the context
    assert windows(**QWEN2, **on) == (None, None, None)  # max_window_layers is 28
    assert windows(**QWEN2, **on, max_window_layers=1) == (None, 128, 128)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    for family in (QWEN3, MISTRAL, MISTRAL | {"model_type": "ministral", "architectures": None}):
        assert windows(**{**family, **on}, layer_types=kinds) == (None, 128, None)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")

    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_only_what_changes_kv_is_in_the_identity_of_kv(tmp_path: Path) -> None:
    plain = load_config(folder_with(tmp_path)).kv_identity()

    assert (
        load_config(folder_with(tmp_path, eos_token_id=7, max_position_embeddings=99)).kv_identity() == plain
    )
    for changes in ({"rope_theta": 1e4}, {"rms_norm_eps": 1e-6}, {"rope_scaling": LLAMA3}, {"head_dim": 32}):
        assert load_config(folder_with(tmp_path, **changes)).kv_identity() != plain
