"""The sizes of a model, read from the config.json of its folder.

Used by everything that needs a shape; it knows no tensors. What this project cannot compute is
refused here, before a weight is read: the message names what was found and what is supported. What is read
is read as the family's class of transformers reads it. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from mooncake_lite.errors import ModelError
from mooncake_lite.model.unread_keys import refuse_unread

DType = Literal["float32", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2}

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type -> the one architecture of it that is a plain decoder-only language model."""

_DEFAULT_THETA = 10000.0
_DEFAULT_KV_HEADS = {"mistral": 8, "ministral": 8, "qwen2": 32, "qwen3": 32}
"""What the families mean when config.json leaves the field out; Llama means one per query head."""

_MOST = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**24}
"""Largest values that are read; of all other sizes 2**31 - 1. Tables are made of as many entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches rotary wavelengths beyond the context that it was pretrained on.

    Wavelengths above original_positions / low_freq_factor are multiplied by factor, those below
    original_positions / high_freq_factor stay, the ones between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """All sizes of one model.

    heads, kv_heads   query heads and key/value heads of a layer; heads is a multiple of kv_heads
    max_position      longest context, prompt and answer together, in tokens
    eos_ids           token ids that end an answer, ascending; empty when the folder names none
    qk_norm           queries and keys are RMS-normalised per head before the rotation (Qwen3)
    windows           per layer: a token sees itself and the windows[layer] - 1 tokens before it; None: all
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_ids: tuple[int, ...]

    def kv_identity(self) -> str:
        """Every setting that changes the values of KV, as one line of JSON; equal in every process."""
        windows = {"windows": self.windows} if any(self.windows) else {}
        scaling = None if self.rope_scaling is None else astuple(self.rope_scaling)
        named = {name: getattr(self, name) for name in _OF_KV}
        return json.dumps(windows | named | {"rope_scaling": scaling})


_OF_KV = (
    *("family", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"),
    *("norm_eps", "rope_theta"),
)
"""Settings that change the values of KV, besides windows and scaling."""


def load_config(folder: Path) -> ModelConfig:
    """The sizes of the model in `folder` (config.json, and generation_config.json for the end tokens).

    Raises ModelError when the folder has no valid config.json, or the model is of a kind that is
    not supported: another family, quantised weights, another rotary scaling.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = _family(raw, path)
    _refuse_unsupported(raw, family, path)
    fields = _Fields(raw, path)
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    left_out = heads if "num_key_value_heads" in raw else _DEFAULT_KV_HEADS.get(family, heads)
    kv_heads = fields.size("num_key_value_heads", left_out)
    head_dim = fields.size("head_dim", 128 if family == "qwen3" else max(hidden // heads, 1))
    if heads % kv_heads:
        raise ModelError(f"{path}: {heads} query heads are not a multiple of {kv_heads} key/value heads")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim={head_dim} is odd; the rotary embedding needs pairs")
    theta, scaling = _rope(raw, fields, path)
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=fields.size("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family),
        eos_ids=_eos_ids(folder, raw, fields.size("vocab_size")),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder, whose text may begin with a byte order mark.

    Raises ModelError when it is missing or is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; a Hugging Face model folder is needed") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


class _Fields:
    """Typed access to the fields of config.json; every complaint names the file and the field."""

    def __init__(self, raw: dict[str, Any], path: Path):
        self.raw = raw
        self.path = path

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number in the range of a size; `default` (where there is one) when absent or null."""
        value, most = self._value(name, default), _MOST.get(name, 2**31 - 1)
        if type(value) is not int or not least <= value <= most:
            raise ModelError(
                f"{self.path}: {name}={reprlib.repr(value)} must be a whole number from {least} to {most}"
            )
        return value

    def flag(self, name: str) -> bool:
        """True or false; false when absent or null."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.path}: {name}={reprlib.repr(value)} must be true or false")
        return bool(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that float32 has; `default` (where there is one) when absent or null."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e38:
            raise ModelError(
                f"{self.path}: {name}={reprlib.repr(value)} must be a number above 0 and below 1e38"
            )
        return float(value)

    def _value(self, name: str, default: float | None) -> Any:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {name}")
        return value


def _family(raw: dict[str, Any], path: Path) -> str:
    """The model_type, checked with the architecture: a classifier of the family is not a language model."""
    family = raw.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{path}: model_type {family!r} is not supported; supported are {supported}")
    named = raw.get("architectures") or [FAMILIES[family]]
    if not isinstance(named, list) or FAMILIES[family] not in named:
        raise ModelError(
            f"{path}: architectures {named!r} are not supported; of {family}, {FAMILIES[family]} is"
        )
    return family


def _refuse_unsupported(raw: dict[str, Any], family: str, path: Path) -> None:
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: weights quantised by {method!r} are not supported; use float32 or bfloat16"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported is silu")
    refuse_unread(raw, path)


_WINDOW = 4096
"""What Mistral and Qwen mean when config.json leaves sliding_window out."""
_FULL_LAYERS = 28
"""Qwen's first layers have no window: as many, when config.json leaves max_window_layers out."""
_ORIGINAL = "original_max_position_embeddings"
"""Counts beside the rotary scaling before it counts within."""


def _windows(fields: _Fields, family: str) -> tuple[int | None, ...]:
    """The sliding window of each layer: of those that layer_types names, or else of all from the first on.

    Mistral's first one is 0 (Ministral has layer_types), Qwen's is max_window_layers.
    """
    layers, window = fields.size("num_hidden_layers"), _window(fields, family)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        first = fields.size("max_window_layers", _FULL_LAYERS, least=0) if window and "qwen" in family else 0
        return (None,) * min(first, layers) + (window,) * (layers - min(first, layers))
    known = {"full_attention": None} | ({"sliding_attention": window} if window else {})
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in list(known) for kind in kinds):
        off = "" if window else "; no sliding window is switched on"
        raise ModelError(
            f"{fields.path}: layer_types must name {layers} layers, each {' or '.join(known)}{off}"
        )
    return tuple(known[kind] for kind in kinds)


def _window(fields: _Fields, family: str) -> int | None:
    """The size of the window that is switched on, if one is."""
    if "qwen" in family and not fields.flag("use_sliding_window"):
        return None
    if fields.raw.get("sliding_window", None if family == "llama" else _WINDOW) is None:
        return None
    window = fields.size("sliding_window", _WINDOW, least=2)  # transformers' cache keeps all of a window of 1
    if family != "llama":
        return window
    # The class has no windows, but its cache forgets what lies before one, so that the pass decides.
    if fields.raw.get("layer_types") is None and window < fields.size("max_position_embeddings"):
        raise ModelError(f"{fields.path}: sliding_window={window} is not supported in a llama model")
    return None


def _rope(raw: dict[str, Any], fields: _Fields, path: Path) -> tuple[float, Llama3Scaling | None]:
    """The base of the rotary embedding and its scaling, as transformers 4 or 5 wrote them.

    4: rope_theta, rope_scaling {type or rope_type, ...}.   5: rope_parameters {rope_type, rope_theta, ...}.
    Of the two objects rope_scaling counts.
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: {name} must be an object, not {rope!r}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ModelError(f"{path}: {name} of {nested[0]} is not supported; supported is one for all layers")
    refuse_unread(rope, path)
    if raw.get(_ORIGINAL) is not None:
        rope = rope | {_ORIGINAL: raw[_ORIGINAL]}
    rope_fields = _Fields(rope, path)
    theta = rope_fields.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"{path}: rope_type {kind!r} is not supported; supported are default and llama3")
    if kind == "default":
        return theta, None
    scaling = Llama3Scaling(
        factor=rope_fields.number("factor"),
        low_freq_factor=rope_fields.number("low_freq_factor"),
        high_freq_factor=rope_fields.number("high_freq_factor"),
        original_positions=rope_fields.size(_ORIGINAL, fields.size("max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(f"{path}: high_freq_factor must be above low_freq_factor")
    return theta, scaling


def _eos_ids(folder: Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end tokens: generation_config.json has the last word, config.json the first."""
    path, named = folder / "config.json", raw.get("eos_token_id")
    own = folder / "generation_config.json"
    if own.exists() and "eos_token_id" in (generation := read_json(own)):
        path, named = own, generation["eos_token_id"]
    if named is None:
        return ()
    ids = named if isinstance(named, list) else [named]
    if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
        raise ModelError(
            f"{path}: eos_token_id={reprlib.repr(named)} must be a token id or a list of them, from 0 to "
            f"{vocab_size - 1} (vocab_size={vocab_size} in config.json)"
        )
    return tuple(sorted(set(ids)))
