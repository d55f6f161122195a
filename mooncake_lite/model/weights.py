"""The weights of a model folder: names and shapes checked, mapped into memory, grouped by layer.

Used by forward.py and fingerprint.py. On a CPU, weights that are stored in the wanted dtype are views
of the file: the processes of a node share them, and nothing here may copy or join them.
Explained in docs/model.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import DType, ModelConfig, read_json

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kernels_numba.linear_blocks import GgufRows

STORED = ("F32", "BF16", "F16")
"""Formats of the safetensors standard that are weights and not codes of a quantiser."""

WEIGHT_FORMATS = ("float32", "published")

_NAMED = 3  # tensors named in a message: enough to see the pattern, short enough for one line


class Linear(NamedTuple):
    """y = x @ weight.T + bias.   weight (out, in), as float or as it lies in a GGUF; bias (out,) or None."""

    weight: torch.Tensor | GgufRows
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. query_norm and key_norm are (head_dim,), None in families without them."""

    attention_norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. head is the embedding itself where they are tied. embedding, head (vocab, hidden)."""

    embedding: torch.Tensor | GgufRows
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor | GgufRows


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or those that its index names, sorted.

    Raises ModelError when there is neither, or the index names a file that is missing or lies elsewhere.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}; a shard must lie in the same folder")
        if not (folder / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing")
    return [folder / name for name in names]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of these sizes has, by its name in the file."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def load_weights(folder: Path, config: ModelConfig, dtype: DType, device: str) -> Weights:
    """Map the weights of `folder`; convert those stored in another dtype, move them to another device.

    Raises ModelError when a tensor is missing, unknown, of another shape or of a format that is not
    supported, or when a file is damaged.
    """
    import torch

    wanted = getattr(torch, dtype)
    tensors = {
        name: tensor.to(device=device, dtype=wanted) for name, tensor in read_tensors(folder, config).items()
    }
    return _grouped(tensors, config)


def read_tensors(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the model by name, as stored: views of the mapped files. Errors as in load_weights."""
    from safetensors import SafetensorError, safe_open

    expected = expected_shapes(config)
    tensors: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    with ExitStack() as stack:
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in expected:
                    _check_tensor(path, name, file.get_slice(name), expected[name])
                    tensors[name] = file.get_tensor(name)
                elif not _harmless(name, config):
                    unknown.append(name)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if unknown:
        raise ModelError(
            f"{folder}: {len(unknown)} tensors are not part of a {config.family} model: {_some(unknown)}"
        )
    return tensors


def _check_tensor(path: Path, name: str, stored: object, expected: tuple[int, ...]) -> None:
    shape, kind = tuple(stored.get_shape()), stored.get_dtype()  # type: ignore[attr-defined]
    if shape != expected:
        raise ModelError(f"{path}: {name} has shape {shape}; config.json asks for {expected}")
    if kind not in STORED:
        raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(STORED)}")


def _harmless(name: str, config: ModelConfig) -> bool:
    """Old files carry buffers that are computed, and tied ones sometimes the embedding a second time."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def published_file(folder: Path) -> Path:
    """The GGUF file that the folder was made from. Raises ModelError when there is not exactly one."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(
            f"weights 'published' are read from the one GGUF file in the model folder, and {folder} has "
            f"{len(found)}; use weights 'float32'"
        )
    return found[0]


def check_weight_format(weights: str, dtype: str, device: str) -> None:
    """Raises ModelError for a format that is not known, or not with this dtype on this device."""
    if weights not in WEIGHT_FORMATS:
        raise ModelError(f"weights {weights!r} are not supported; supported are {', '.join(WEIGHT_FORMATS)}")
    if weights == "published" and (dtype, device) != ("float32", "cpu"):
        raise ModelError(
            f"weights 'published' need dtype float32 and device cpu, not {dtype} and {device}; "
            "use weights 'float32'"
        )


def load_published(folder: Path, config: ModelConfig) -> Weights:
    """Map the GGUF file: the processes of a node share it, but for Q and K, whose rows are put in order.

    Raises ModelError when there is no such file, or it does not hold this model.
    """
    from mooncake_lite.model.convert import gguf_name, unpermuted
    from mooncake_lite.model.gguf_tensors import gguf_tensors

    path = published_file(folder)
    stored = gguf_tensors(path)
    tensors: dict[str, Any] = {}
    for name, shape in expected_shapes(config).items():
        tensor = stored.get(gguf_name(name))
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise ModelError(f"{path}: {name} is {found}; config.json asks for {shape}")
        data = tensor.data
        if name.endswith("q_proj.weight"):
            data = unpermuted(data, config.heads)
        elif name.endswith("k_proj.weight"):
            data = unpermuted(data, config.kv_heads)
        tensors[name] = _as_stored(tensor.format, data, shape)
    return _grouped(tensors, config)


def _as_stored(format: str, data: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor | GgufRows:
    """Float32 as a tensor of its own (a row or two, in the default model); blocks as they lie."""
    import torch

    from kernels_numba.linear_blocks import GgufRows

    if format == "F32":
        return torch.from_numpy(data.copy().view("<f4").reshape(shape))
    return GgufRows(format, data)


def _grouped(tensors: dict[str, Any], config: ModelConfig) -> Weights:
    embedding = tensors["model.embed_tokens.weight"]
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(tensors, f"model.layers.{layer}.") for layer in range(config.layers)),
        norm=tensors["model.norm.weight"],
        head=embedding if config.tie_embeddings else tensors["lm_head.weight"],
    )


def _layer(tensors: dict[str, Any], prefix: str) -> LayerWeights:
    def linear(name: str) -> Linear:
        return Linear(tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    return LayerWeights(
        attention_norm=tensors[prefix + "input_layernorm.weight"],
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        query_norm=tensors.get(prefix + "self_attn.q_norm.weight"),
        key_norm=tensors.get(prefix + "self_attn.k_norm.weight"),
        mlp_norm=tensors[prefix + "post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
