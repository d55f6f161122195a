"""The weights of a model folder: names and shapes checked, mapped into memory, grouped by layer.

Used by forward.py. On a CPU, weights that are stored in the wanted dtype are views
of the file: the processes of a node share them, and nothing here may copy or join them.
Explained in docs/explain/model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from mooncake_lite.errors import ModelError
from mooncake_lite.model.config import DType, ModelConfig
from mooncake_lite.model.shares import Share, shares_of, whole
from mooncake_lite.model.weight_source import WeightSource

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kernels_numba.matmul.linear_blocks import GgufRows
    from mooncake_lite.model.gguf_tensors import GgufTensor

STORED = ("F32", "BF16", "F16")
"""Formats of the safetensors standard that are weights and not codes of a quantiser."""

_Forms: TypeAlias = "tuple[torch.Tensor | GgufRows, torch.Tensor | None]"
"""What a few tokens are multiplied with, and the same values as a tensor if there is one."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_NAMED = 3  # tensors named in a message: enough to see the pattern, short enough for one line


class Linear(NamedTuple):
    """y = x @ weight.T + bias.

    weight   (out, in), as float or as it lies in a GGUF
    bias     (out,) or None
    dense    (out, in): the same values as a tensor; None where there are only blocks
    """

    weight: torch.Tensor | GgufRows
    bias: torch.Tensor | None
    dense: torch.Tensor | None


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
    """Those of a share. head is the embedding itself where they are tied. embedding, head (vocab, hidden).

    The embedding is a tensor wherever there is one: a token reads one row of it. None but on the first stage;
    norm and head: None but on the last one.
    """

    embedding: torch.Tensor | GgufRows | None
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None
    head: Linear | None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of these sizes has, by its name in the file."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
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


def load_weights(
    source: WeightSource, config: ModelConfig, dtype: DType, device: str, share: Share | None = None
) -> Weights:
    """Map the files of a source; convert tensors stored in another dtype, move them to another device.

    config   of the whole model
    share    of an instance of several ranks: only what it computes with is converted and moved; None: all

    Raises ModelError when a tensor is missing, unknown, of another shape or of a format that is not
    supported, or when a file is damaged.
    """
    import torch

    wanted, share = getattr(torch, dtype), share or whole(config)
    tensors: dict[str, torch.Tensor] = {}
    if source.tensors:
        stored = _read_tensors(source.tensors, config)
        config = _untied(config, stored)
        for name in _names(share, config):
            part = _part(stored[name], *_span(name, config, share)).to(device=device, dtype=wanted)
            tensors[name] = part if source.blocks else part.contiguous()  # our kernels multiply the blocks
    first: Mapping[str, torch.Tensor | GgufRows] = tensors
    if source.blocks is not None:
        first = _read_blocks(source.blocks, config, share)
    return _grouped({name: (weight, tensors.get(name)) for name, weight in first.items()}, config, share)


def _untied(config: ModelConfig, stored: dict[str, torch.Tensor]) -> ModelConfig:
    """The sizes, with a head of its own where the files have one that is not the embedding: it counts.

    transformers does the same. An equal one stays out of memory.
    """
    import torch

    if not config.tie_embeddings or _HEAD not in stored:
        return config
    embedding, head = stored[_EMBEDDING], stored[_HEAD]
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return config
    return replace(config, tie_embeddings=False)


def _names(share: Share, config: ModelConfig) -> list[str]:
    """The tensors that a rank computes with."""
    prefixes = [f"model.layers.{layer}." for layer in share.layers]
    if share.is_first or (share.is_last and config.tie_embeddings):
        prefixes.append("model.embed_tokens.")
    if share.is_last:
        prefixes += ["model.norm.", "lm_head."]
    names = [name for name in expected_shapes(config) if name.startswith(tuple(prefixes))]
    added = ("o_proj.bias", "down_proj.bias") if share.member else ()  # to a sum over members: once
    return [name for name in names if not name.endswith(added)]


_ALL = slice(None)


def _span(name: str, config: ModelConfig, share: Share) -> tuple[slice, slice]:
    """The rows and the columns that a share has of a tensor."""
    each = config.head_dim
    query, key = (slice(some.start * each, some.stop * each) for some in (share.heads, share.kv_heads))
    inner, head = (slice(some.start, some.stop) for some in (share.inner, share.vocab))
    rows = {
        "q_proj": query,
        "k_proj": key,
        "v_proj": key,
        "gate_proj": inner,
        "up_proj": inner,
        "lm_head": head,
    }
    columns = {"o_proj": query, "down_proj": inner}
    kind = name.split(".")[-2]
    return rows.get(kind, _ALL), columns.get(kind, _ALL)


def _part(tensor: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    """A view; of a bias, (rows,)."""
    return tensor[rows] if tensor.dim() == 1 else tensor[rows, columns]


def check_weights(source: WeightSource, config: ModelConfig, members: int = 1) -> None:
    """Hold the headers of the files against the sizes of the model and of the shares of `members` ranks.

    Errors as in load_weights.
    """
    if source.tensors:
        with ExitStack() as stack:
            _open_tensors(source.tensors, config, "np", stack)
    if source.blocks is not None:
        for share in shares_of(config, members=members):
            _find_blocks(source.blocks, config, share)


def _read_tensors(paths: tuple[Path, ...], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the model by name, as stored: views of the mapped files. Errors as in load_weights."""
    with ExitStack() as stack:
        files = _open_tensors(paths, config, "pt", stack)
        return {name: file.get_tensor(name) for name, file in files.items()}


def _open_tensors(
    paths: tuple[Path, ...], config: ModelConfig, framework: str, stack: ExitStack
) -> dict[str, Any]:
    """The open file of each tensor, by the tensor's name. Errors as in load_weights."""
    from safetensors import SafetensorError, safe_open

    expected, folder = expected_shapes(config), paths[0].parent
    known = expected | {_HEAD: (config.vocab_size, config.hidden_size)}
    tensors: dict[str, Any] = {}
    unknown: list[str] = []
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework=framework))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name in known:
                _check_tensor(path, name, file.get_slice(name), known[name])
                tensors[name] = file
            elif not name.endswith("rotary_emb.inv_freq"):  # a buffer of old files, which is computed
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
        keys = " (vocab_size, hidden_size)" if name in (_EMBEDDING, _HEAD) else ""
        raise ModelError(f"{path}: {name} has shape {shape}; config.json asks for {expected}{keys}")
    if kind not in STORED:
        raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(STORED)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _read_blocks(path: Path, config: ModelConfig, share: Share) -> dict[str, torch.Tensor | GgufRows]:
    """The tensors of a share by name, as they lie in the GGUF file. Errors as in load_weights.

    The processes of a node share the mapped file but for Q and K, whose rows are put in order, and columns.
    """
    from mooncake_lite.model.convert import unpermuted

    tensors: dict[str, Any] = {}
    for name, tensor in _find_blocks(path, config, share).items():
        data = tensor.data
        if name.endswith("q_proj.weight"):
            data = unpermuted(data, len(share.heads))
        elif name.endswith("k_proj.weight"):
            data = unpermuted(data, len(share.kv_heads))
        tensors[name] = _as_stored(tensor.format, data, tensor.shape)
    return tensors


def _find_blocks(path: Path, config: ModelConfig, share: Share) -> dict[str, GgufTensor]:
    """A share's parts of the tensors by name, in the mapped GGUF file. Errors as in load_weights."""
    from mooncake_lite.model.convert import gguf_name
    from mooncake_lite.model.gguf_tensors import gguf_tensors

    stored, shapes = gguf_tensors(path), expected_shapes(config)
    if config.tie_embeddings and gguf_name(_HEAD) in stored:
        raise ModelError(f"{path} has a head; set tie_word_embeddings to false in config.json")
    found: dict[str, GgufTensor] = {}
    for name in _names(share, config):
        tensor, shape = stored.get(gguf_name(name)), shapes[name]
        if tensor is None or tensor.shape != shape:
            problem = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise ModelError(f"{path}: {name} is {problem}; config.json asks for {shape}")
        if len(shape) == 1 and tensor.format != "F32":
            raise ModelError(f"{path}: {name} is stored as {tensor.format}; supported is F32")
        try:
            found[name] = tensor if len(shape) == 1 else tensor.part(*_span(name, config, share))
        except ValueError as error:
            raise ModelError(
                f"{path}: {name} cannot be shared by {share.members} members: {error}; use weights=float32 "
                "or another tensor parallel size"
            ) from None
    return found


def _as_stored(format: str, data: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor | GgufRows:
    """Float32 as a tensor of its own (a row or two, in the default model); blocks as they lie."""
    import torch

    from kernels_numba.matmul.linear_blocks import GgufRows

    if format == "F32":
        return torch.from_numpy(data.copy().view("<f4").reshape(shape))
    return GgufRows(format, data)


def _grouped(found: dict[str, _Forms], config: ModelConfig, share: Share) -> Weights:
    embedding = head = None
    if share.is_first:
        blocks, tensor = found[_EMBEDDING]
        embedding = blocks if tensor is None else tensor
    if share.is_last:
        forms = (
            [_rows(form, share.vocab) for form in found[_EMBEDDING]]
            if config.tie_embeddings
            else found[_HEAD]
        )
        head = Linear(forms[0], None, forms[1])
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(found, f"model.layers.{layer}.") for layer in share.layers),
        norm=_tensor(found["model.norm.weight"]) if share.is_last else None,
        head=head,
    )


def _rows(weight: Any, span: range) -> Any:
    """Some rows, not copied; None of None."""
    from kernels_numba.matmul.linear_blocks import GgufRows

    if isinstance(weight, GgufRows):
        return GgufRows(weight.format, weight.blocks[span.start : span.stop])
    return None if weight is None else weight[span.start : span.stop]


def _tensor(forms: _Forms) -> torch.Tensor:
    """Of a tensor that is float32 in every file."""
    return cast("torch.Tensor", forms[0] if forms[1] is None else forms[1])


def _layer(found: dict[str, _Forms], prefix: str) -> LayerWeights:
    def linear(name: str) -> Linear:
        weight, dense = found[f"{prefix}{name}.weight"]
        bias = found.get(f"{prefix}{name}.bias")
        return Linear(weight, None if bias is None else _tensor(bias), dense)

    def vector(name: str) -> torch.Tensor | None:
        forms = found.get(prefix + name)
        return None if forms is None else _tensor(forms)

    return LayerWeights(
        attention_norm=_tensor(found[prefix + "input_layernorm.weight"]),
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        query_norm=vector("self_attn.q_norm.weight"),
        key_norm=vector("self_attn.k_norm.weight"),
        mlp_norm=_tensor(found[prefix + "post_attention_layernorm.weight"]),
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
