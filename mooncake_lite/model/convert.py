"""Makes a Hugging Face folder out of the GGUF file of the default model.

Used by resolve.py, after the file's digest has been compared with the published one. So nothing is checked
here: no other file is ever converted. It knows the GGUF format (through `gguf`) and what GGUF changes
of a Llama model, and no network and no cache. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_lite.model.safetensors_writer import write_float32

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name in a GGUF block -> name in a Hugging Face layer."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3  # a kind of token in tokenizer.ggml.token_type


def convert(gguf_path: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and the tokenizer's files.

    progress(done, total) counts bytes of weights. Peak memory is the file's own pages and a few times
    its largest tensor.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_tokenizer(fields, folder)
    _write_weights(reader, config, folder / "model.safetensors", progress)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    theta = _shortest(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", fields["llama.embedding_length"] // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,  # transformers 4 reads this one, 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """9.999999747378752e-06, which is a float32, back to the 1e-05 that its author wrote."""
    return float(str(np.float32(value)))


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """An answer ends with the end of a turn or the end of a text, whichever the model writes."""
    ends = [fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.tokens"].index("<|endoftext|>")]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": ends,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Rebuild the BPE tokenizer from its tokens and merges.

    The file names the pre-tokenizer it was trained with. smollm: every digit
    stands alone, then the bytes are split as GPT-2 did.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()
    }
    settings: dict[str, Any] = {name: tokens[i] for name, i in special.items() if i is not None}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(
    reader: Any, config: dict[str, Any], path: Path, progress: Callable[[int, int], None]
) -> None:
    """Dequantise tensor by tensor, in the order of the file."""
    shapes = {_name(tensor.name): tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    total = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    done = 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    write_float32(path, shapes, _tensors(reader, config), written)


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[np.ndarray]:
    import gguf

    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            values = unpermuted(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermuted(values, config["num_key_value_heads"])
        yield values


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rows for Llama models; put them side by side again.

    weight (heads * head_dim, a row's values or blocks): GGUF row h (0a 0b 1a 1b ...) -> (0a 1a ... 0b 1b ...)
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    _, layer, tensor, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_TENSORS[tensor]}.weight"


def gguf_name(name: str) -> str:
    """The reverse of _name; for a tensor that GGUF has no name for, the name itself."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer is None:
        return {ours: theirs for theirs, ours in _OUTER.items()}.get(name, name)
    theirs = {ours: theirs for theirs, ours in _TENSORS.items()}.get(layer[2])
    return f"blk.{layer[1]}.{theirs}.weight" if theirs else name


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
