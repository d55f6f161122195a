"""Mooncake in 300 lines: one file, four threads and a real model, without any package of this project.

The main thread is the Conductor. It places requests, and the threads pass KV blocks to each other in queues:

    Conductor --prefill--> prefill 0 or 1 --admit--> decode 0 --token--> Conductor
                              ^      |                  |
                             get    keep               keep
                              |      v                  v
                            store: the pool of KV blocks

A KV block is an array (layers, 2, kv_heads, BLOCK, head_dim); index 0 of its second axis holds keys.
Each docstring names the file of the project that does the same for real. Tutorial 00b explains this file.
Usage: python tutorials/nano_mooncake.py "What is a mooncake?" "Who eats mooncakes?"
"""

import json, os, sys, threading, time
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: each thread computes on one core
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest as xxh3

CACHE = Path(os.environ.get("MOONCAKE_LITE_CACHE") or "~/.cache/mooncake-lite").expanduser()
BLOCK = 16  # tokens per block: the paper uses 16 to 512
THRESHOLD = 1.5  # fetch a prefix from the pool if it is longer than the rank's own by this factor
BLOCK_LOAD_S = 2e-4  # estimate for one block
TTFT_SLO_S, TBT_SLO_S = 60.0, 2.0  # the Conductor refuses a request that it predicts to miss one of these
MAX_TOKENS, LIMIT_S = 2048, 120.0  # of prompt and answer; of every wait
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHAT += "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def chained_keys(tokens, keys=()) -> list:
    """Return the key of each full block: a hash of its tokens and of the key before: see store/keys.py."""
    keys = list(keys)  # of the first blocks, if they are known
    for start in range(len(keys) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        key = xxh3(np.array(tokens[start : start + BLOCK], "<u4").tobytes())
        keys.append(xxh3(np.array([keys[-1], key], "<u8").tobytes()) if keys else key)
    return keys


def matched(keys, known) -> int:
    """Count the leading keys that are known: see scheduler/prefix_index.py."""
    return next((i for i, key in enumerate(keys) if key not in known), len(keys))


class Model:
    """SmolLM2, a model of the Llama family, in NumPy: see mooncake_lite/model/forward.py."""

    def __init__(self, folder):
        if not (folder / "config.json").exists():
            raise ValueError(f"there is no model in {folder}: run `mooncake-lite model pull`")
        self.sizes = json.loads((folder / "config.json").read_text())
        self.ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.outer, self.layers = {}, [{} for _ in range(self.sizes["num_hidden_layers"])]
        for name, weight in load_file(folder / "model.safetensors").items():
            parts = name.split(".")  # such as model.layers.3.self_attn.q_proj.weight
            (self.layers[int(parts[2])] if parts[1] == "layers" else self.outer)[parts[-2]] = weight
        self.dim, self.kv_heads = self.sizes["head_dim"], self.sizes["num_key_value_heads"]
        turns = self.sizes["rope_theta"] ** -(np.arange(0, self.dim, 2) / self.dim)  # radians per position
        self.turns = np.tile(turns, 2).astype(np.float32)

    def new_kv(self, tokens, blocks) -> np.ndarray:
        """Make room for the KV of a sequence that begins with blocks: see mooncake_lite/engine/caches.py."""
        kv = np.empty((len(self.layers), 2, self.kv_heads, tokens, self.dim), np.float32)
        if blocks:
            np.concatenate(blocks, axis=3, out=kv[..., : sum(block.shape[3] for block in blocks), :])
        return kv

    def forward(self, batch) -> np.ndarray:
        """Compute new tokens, write their KV, return the logits of the last one of each sequence. `batch` is
        [(kv, position of the first new token, new tokens)]: see mooncake_lite/model/forward.py."""
        ends = np.cumsum([len(tokens) for _, _, tokens in batch])
        positions = np.concatenate([first + np.arange(len(tokens)) for _, first, tokens in batch])
        angles = positions.astype(np.float32)[:, None, None] * self.turns
        hidden = self.outer["embed_tokens"][np.concatenate([tokens for _, _, tokens in batch])]
        for number, layer in enumerate(self.layers):
            normed = self.norm(hidden, layer["input_layernorm"])
            products = [normed @ layer[f"{x}_proj"].T for x in "qkv"]
            query, key, value = (x.reshape(len(x), -1, self.dim) for x in products)
            query, key = self.rotate(query, angles), self.rotate(key, angles)
            attended = np.empty_like(query)
            for (kv, first, tokens), end in zip(batch, ends):
                rows, context = slice(end - len(tokens), end), first + len(tokens)
                kv[number, :, :, first:context] = np.stack((key[rows], value[rows])).swapaxes(1, 2)
                attended[rows] = self.attend(query[rows], *kv[number, :, :, :context])
            hidden = hidden + attended.reshape(len(hidden), -1) @ layer["o_proj"].T
            normed = self.norm(hidden, layer["post_attention_layernorm"])
            gate = normed @ layer["gate_proj"].T
            gate *= (1 + np.tanh(gate / 2)) / 2  # SiLU
            hidden = hidden + gate * (normed @ layer["up_proj"].T) @ layer["down_proj"].T
        return self.norm(hidden[ends - 1], self.outer["norm"]) @ self.outer["embed_tokens"].T

    def norm(self, x, weight) -> np.ndarray:
        """Divide each row by its root mean square: see kernels_numba/layers/row_kernels.py."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.sizes["rms_norm_eps"]) * weight

    def rotate(self, x, angles) -> np.ndarray:
        """Turn pairs of channels by angles that grow with position: see kernels_numba/movers/rotary.py."""
        low, high = np.split(x, 2, axis=-1)
        return x * np.cos(angles) + np.concatenate((-high, low), axis=-1) * np.sin(angles)

    def attend(self, query, keys, values) -> np.ndarray:
        """Attend from the last n tokens: query (n, heads, dim), keys and values (kv_heads, tokens, dim). The
        heads of a group share a KV head: see kernels_numba/attention/attention_prefill.py."""
        (n, heads, dim), tokens = query.shape, keys.shape[1]
        grouped = query.swapaxes(0, 1).reshape(self.kv_heads, -1, dim)
        scores = (grouped @ keys.swapaxes(1, 2)).reshape(heads, n, tokens) * np.float32(dim**-0.5)
        scores[:, np.arange(tokens) > np.arange(tokens - n, tokens)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights.reshape(self.kv_heads, -1, tokens) @ values).reshape(heads, n, dim).swapaxes(0, 1)


class Request:
    """What ranks read of a request, then what the Conductor notes: see mooncake_lite/control/request.py."""

    def __init__(self, prompt, max_tokens, ends):
        self.prompt, self.keys, self.max_tokens, self.ends = prompt, chained_keys(prompt), max_tokens, ends
        self.reusable = self.keys[: (len(prompt) - 1) // BLOCK]  # the last token is computed, for its logits
        self.rank, self.predicted_s, self.cached, self.answer = None, 0.0, 0, []
        self.times = [time.perf_counter()]  # of the arrival, then of each token

    def ended(self, answer) -> bool:
        """Return whether an answer is complete: see mooncake_lite/gateway/stops.py."""
        return len(answer) >= self.max_tokens or (len(answer) > 0 and answer[-1] in self.ends)


class Store(threading.Thread):
    """A thread that keeps blocks. Messages name its methods: see mooncake_lite/ranks/store/loop.py."""

    def __init__(self, name, conductor, capacity):
        super().__init__(name=name, daemon=True)
        self.conductor, self.capacity, self.blocks = conductor, capacity, OrderedDict()
        self.inbox, self.running, self.stopping = SimpleQueue(), [], threading.Event()

    def run(self) -> None:
        """Read, compute, tell, until `stopping` is set: see mooncake_lite/ranks/computing/loop.py."""
        try:
            while not self.stopping.is_set():
                with suppress(Empty):
                    method, *arguments = self.inbox.get(timeout=0 if self.running else 0.05)
                    getattr(self, method)(*arguments)
                if self.running:
                    self.step()
        except Exception as error:
            self.conductor.inbox.put(("failed", self.name, error))

    def keep(self, blocks) -> None:
        """Insert {key: block}, evict the least recently used ones, report both: see store/policies/lru.py."""
        self.blocks.update(blocks)
        self.leading(list(blocks))
        evicted = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.capacity)]
        self.conductor.inbox.put(("changed", self.name, list(blocks), evicted))

    def leading(self, keys) -> list:
        """Return the leading blocks here; the last one ages first: see store/policies/leaves_first.py."""
        found = keys[: matched(keys, self.blocks)]
        for key in reversed(found):
            self.blocks.move_to_end(key)
        return [self.blocks[key] for key in found]

    def get(self, keys, reply) -> None:
        """Send the leading blocks that are here: see transport/engine.py."""
        reply.set_result(self.leading(keys))


class Rank(Store):
    """A thread that also computes prompts and answers: see mooncake_lite/ranks/computing/loop.py."""

    def prefill(self, request, fetch, decode) -> None:
        """Reuse blocks, compute the other tokens, pass all on: see scheduler/instance/planner.py."""
        began, model, store = time.perf_counter(), self.conductor.model, self.conductor.store
        blocks = self.leading(request.reusable)
        if fetch:
            reply = Future()
            store.inbox.put(("get", request.reusable[len(blocks) :], reply))
            blocks += reply.result(timeout=LIMIT_S)
        kv, cached = model.new_kv(len(request.prompt), blocks), len(blocks) * BLOCK
        token = int(model.forward([(kv, cached, request.prompt[cached:])]).argmax())
        for i in range(len(blocks), len(request.keys)):
            blocks.append(kv[..., i * BLOCK : (i + 1) * BLOCK, :].copy())
        self.keep(dict(zip(request.keys, blocks)))
        store.inbox.put(("keep", dict(zip(request.keys, blocks))))
        self.conductor.inbox.put(("prefilled", request, cached, token, time.perf_counter() - began))
        decode.inbox.put(("admit", request, [*blocks, kv[..., len(blocks) * BLOCK :, :]], token))

    def admit(self, request, blocks, token) -> None:
        """Let a sequence join the running batch: see scheduler/instance/continuous.py."""
        if not request.ended([token]):
            kv = self.conductor.model.new_kv(len(request.prompt) + request.max_tokens, blocks)
            self.running.append((request, kv, [*request.prompt, token], request.keys))

    def step(self) -> None:
        """Compute a token of each running sequence, store full blocks: see mooncake_lite/engine/runner.py."""
        began, batch, self.running = time.perf_counter(), self.running, []
        logits = self.conductor.model.forward([(kv, len(t) - 1, t[-1:]) for _, kv, t, _ in batch])
        for (request, kv, tokens, keys), row in zip(batch, logits):
            if len(tokens) % BLOCK == 0:
                keys, block = chained_keys(tokens, keys), kv[..., len(tokens) - BLOCK : len(tokens), :].copy()
                self.conductor.store.inbox.put(("keep", {keys[-1]: block}))
            tokens.append(int(row.argmax()))
            self.conductor.inbox.put(("token", request, tokens[-1], time.perf_counter() - began))
            if not request.ended(tokens[len(request.prompt) :]):
                self.running.append((request, kv, tokens, keys))


class Mooncake:
    """The Conductor and its threads. Prefill ranks decode if no other does: mooncake_lite/config/modes.py."""

    def __init__(self, prefills=2, decodes=1, pool_blocks=512, folder=CACHE / "models/SmolLM2-135M-Instruct"):
        self.model, self.inbox, self.store = Model(folder), SimpleQueue(), Store("store", self, pool_blocks)
        self.prefills = [Rank(f"prefill {i}", self, pool_blocks // 4) for i in range(prefills)]
        self.decodes = [Rank(f"decode {i}", self, 0) for i in range(decodes)]
        self.threads = [*self.prefills, *self.decodes, self.store]  # ranks end first: they wait for the store
        self.index, self.queue_s = {t.name: set() for t in self.threads}, {t.name: 0.0 for t in self.threads}
        self.token_s, self.step_s = 0.004, 0.05  # a token of prefill, a decode step: guesses until measured
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End the threads: see mooncake_lite/ranks/process.py."""
        for thread in self.threads:
            thread.stopping.set()
            thread.join(LIMIT_S)

    def submit(self, text, max_tokens) -> Request:
        """Place a request, or raise ValueError: see mooncake_lite/control/requests.py."""
        prompt = self.model.tokenizer.encode(CHAT.format(text), add_special_tokens=False).ids
        if len(prompt) + max_tokens > MAX_TOKENS:
            raise ValueError(f"{len(prompt)} prompt tokens + {max_tokens} to answer: at most {MAX_TOKENS}")
        request = Request(prompt, max_tokens, self.model.ends)
        fetch = self.schedule(request)
        self.queue_s[request.rank.name] += request.predicted_s
        request.rank.inbox.put(("prefill", request, fetch, self.decodes[0] if self.decodes else request.rank))
        return request

    def schedule(self, request) -> bool:
        """Algorithm 1: the rank with the least predicted TTFT: see scheduler/placement/kvcache_centric.py."""
        choices, pool = [], matched(request.reusable, self.index["store"])
        for rank in self.prefills:
            near = matched(request.reusable, self.index[rank.name])
            fetch = pool > THRESHOLD * near
            transfer_s = (pool - near) * BLOCK_LOAD_S if fetch else 0.0
            prefill_s = (len(request.prompt) - BLOCK * (pool if fetch else near)) * self.token_s
            ttft_s = transfer_s + self.queue_s[rank.name] + prefill_s
            choices.append((ttft_s, rank.name, rank, fetch, prefill_s))
        ttft_s, _, request.rank, fetch, request.predicted_s = min(choices)
        if ttft_s > TTFT_SLO_S or self.step_s > TBT_SLO_S:
            raise ValueError(f"refused: predicted TTFT {ttft_s:.1f} s, TBT {self.step_s:.2f} s")
        return fetch

    def wait(self, condition) -> None:
        """Handle messages of the threads until a condition holds: see mooncake_lite/control/machine.py."""
        while not condition():
            method, *arguments = self.inbox.get(timeout=LIMIT_S)
            getattr(self, method)(*arguments)

    def changed(self, name, added, removed) -> None:
        """Update the index of who holds which blocks: see scheduler/prefix_index.py."""
        self.index[name] = self.index[name].union(added).difference(removed)

    def prefilled(self, request, cached, token, seconds) -> None:
        """Note the first token, and learn how long prefill takes: see mooncake_lite/control/measured.py."""
        request.cached = cached
        self.queue_s[request.rank.name] -= request.predicted_s
        self.token_s += 0.2 * (seconds / (len(request.prompt) - cached) - self.token_s)
        self.token(request, token, self.step_s)

    def token(self, request, token, seconds) -> None:
        """Note a token, and learn how long a decode step takes: see mooncake_lite/gateway/answer.py."""
        self.step_s += 0.2 * (seconds - self.step_s)
        request.answer.append(token)
        request.times.append(time.perf_counter())

    def failed(self, name, error) -> None:
        """End with the error of a thread: see mooncake_lite/ranks/steward/losses.py."""
        raise RuntimeError(f"{name} failed") from error


if __name__ == "__main__":
    try:
        if not sys.argv[1:] or sys.argv[1].startswith("-"):
            raise ValueError('usage: python nano_mooncake.py "PROMPT" ...')
        with closing(Mooncake()) as mooncake:
            requests = [mooncake.submit(text.encode(errors="replace").decode(), 64) for text in sys.argv[1:]]
            mooncake.wait(lambda: all(request.ended(request.answer) for request in requests))
        for r in requests:
            print(mooncake.model.tokenizer.decode(r.answer))
            print(f"[{len(r.prompt)} tokens, {r.cached} cached, TTFT {r.times[1] - r.times[0]:.2f} s]")
    except (ValueError, KeyboardInterrupt) as error:
        print(f"nano_mooncake: {str(error) or 'stopped'}", file=sys.stderr)
        sys.exit(2)
