"""A cluster made of one thread: it speaks the messages of a conductor and of two ranks, from a script.

Used by the tests of this folder, against real gateways. Computes nothing: unless told
otherwise, an answer is its own prompt, token by token, the first from rank 1, the others from rank 2.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.gateway.__main__ import serve
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.launch.serve_child import free_port
from transport.channel import CurveKeys, Hub, Spoke
from transport.wire import Decoder

LIMIT_S = 30.0
POLL_S = 0.02
SERVED_ID = "tiny-model"
MAX_MODEL_LEN = 512
FINGERPRINT = bytes(range(16))
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

M = TypeVar("M", bound=m.Message)


def make_model_folder(folder: Path) -> Path:
    """The files of a model that a gateway reads: a byte-level BPE tokenizer, a template, end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    corpus = ["the quick brown fox jumps over the lazy dog", "stream number one two three", "hello world"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken("<|start|>"), AddedToken("<|end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(corpus, trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": inner.get_vocab_size(),
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    )
    return folder


class FakeCluster:
    """A conductor and its ranks. `behaviour` is called with each Submit, in the cluster's thread.

    received       every message of the gateway, in order
    problem        why there are no metrics
    pool_answers   to its next queries about the pool
    hint_outcome   of all hints that come
    silent         the conductor hears, and says nothing
    """

    def __init__(self, run_dir: Path, curve: CurveKeys | None = None):
        self.behaviour: Callable[[FakeCluster, m.Submit], None] = echo
        self.status = m.ClusterStatus(True, "all ranks are ready")
        self.metrics: list[m.Metric] = []
        self.problem = ""
        self.pool_answers: list[m.PoolEnded] = []
        self.hint_outcome: m.HintOutcome = "accepted"
        self.silent = False
        self.received: list[m.Message] = []
        self._curve = curve
        self._news = threading.Condition()
        self._todo: list[Callable[[], None]] = []
        self._ranks: dict[int, Spoke] = {}
        self._endpoint = f"ipc://{run_dir}/tokens-gateway-0"
        self._hub = Hub([f"ipc://{run_dir}/control"], Decoder(m.TO_CONDUCTOR))
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fake-cluster", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- for tests, from any thread

    def do(self, work: Callable[[], None]) -> None:
        """Run in the cluster's thread, which owns the sockets; errors there fail the test at close()."""
        with self._news:
            self._todo.append(work)
        self._hub.wake()

    def wait_for(self, kind: type[M], matches: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of this kind that matches; fails after LIMIT_S."""
        found: list[M] = []

        def look() -> bool:
            found[:] = [item for item in self.received if isinstance(item, kind) and matches(item)]
            return bool(found)

        with self._news:
            assert self._news.wait_for(look, LIMIT_S), f"no {kind.__name__} came; got {self.received[-5:]}"
        return found[0]

    def wait_cancelled(self, request_id: str) -> None:
        self.wait_for(m.RequestCancelled, lambda cancel: cancel.request_id == request_id)

    def all_of(self, kind: type[M]) -> list[M]:
        """Every message of this kind that has come so far."""
        return [message for message in self.received if isinstance(message, kind)]

    def forget(self) -> None:
        """Start a test with an empty memory and the usual behaviour."""
        with self._news:
            self.received.clear()
        self.behaviour = echo
        self.metrics = []
        self.problem = ""
        self.pool_answers = []

    def tell_gateway(self, message: m.Message) -> None:
        """As the conductor."""
        self.do(lambda: self.to_gateway(message))

    def close(self) -> None:
        """As a killed conductor: the sockets are gone."""
        self._ended = True
        self._hub.wake()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    # ---------------------------------------------------------------- for behaviours, in its thread

    def to_gateway(self, message: m.Message) -> None:
        assert self._hub.send("gateway-0", message)

    def tokens(self, rank: int, message: m.Tokens, endpoint: str = "") -> None:
        """As a rank."""
        if rank not in self._ranks:
            curve = self._curve if endpoint else None
            self._ranks[rank] = Spoke(
                endpoint or self._endpoint,
                f"rank-{rank}",
                Decoder(m.Tokens),
                curve,
                context=self._hub.context,
            )
        assert self._ranks[rank].send(message)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._ended:
            received = self._hub.receive(0.5)
            with self._news:
                todo, self._todo = self._todo, []
                self.received += [message for _, message in received]
                self._news.notify_all()
            for _, message in received:
                self._answer(message)
            for work in todo:
                work()
        for spoke in self._ranks.values():
            spoke.close()
        self._hub.close()

    def _answer(self, message: m.Message) -> None:
        if self.silent:
            return
        if isinstance(message, m.GatewayHello):
            self.to_gateway(self.status)
        elif isinstance(message, m.MetricsRequest):
            # not `to_gateway`: a gateway that was told to end may ping once more and be gone
            self._hub.send("gateway-0", m.MetricsReply(message.asked_at_s, self.metrics, self.problem))
        elif isinstance(message, m.PoolQuery):
            self.to_gateway(replace(self.pool_answers.pop(0), number=message.number))
        elif isinstance(message, m.HintArrived):
            blocks, lasts_s = len(message.keys), message.seconds or 0.0
            told = (message.gateway, self.hint_outcome, blocks, blocks, lasts_s, "as asked")
            self.to_gateway(m.HintAnswered(message.hint_id, *told))
        elif isinstance(message, m.Submit):
            self.behaviour(self, message)


def echo(cluster: FakeCluster, submit: m.Submit) -> None:
    """Each answer is the prompt, as far as max_tokens goes."""
    for branch in range(submit.request.n):
        answer(cluster, submit, submit.body.token_ids, branch=branch)


def answer(
    cluster: FakeCluster, submit: m.Submit, token_ids: list[int], finish: str = "stop", branch: int = 0
) -> None:
    """These tokens, the first from rank 1 and each other from rank 2, cut at max_tokens."""
    name = submit.request.request_id
    whole = len(token_ids) <= submit.request.max_tokens
    token_ids = token_ids[: submit.request.max_tokens]
    cached = {"dram": 16, "ssd": 4}
    spans = [m.Span("prefill", 1, 0.25, 0, len(submit.body.token_ids))]
    if not submit.request.max_tokens:
        cluster.tokens(1, m.Tokens(name, 0, [], "length", cached, spans))
        return
    cluster.tokens(1, m.Tokens(name, 0, token_ids[:1], None, cached, spans, branch=branch))
    for index in range(1, len(token_ids)):
        cluster.tokens(2, m.Tokens(name, index, token_ids[index : index + 1], branch=branch))
    end = finish if whole else "length"
    last = [*spans, m.Span("decode", 2, 0.5, 4096, 3)]
    cluster.tokens(2, m.Tokens(name, len(token_ids), [], end, {}, last, branch=branch))


def first_token_only(cluster: FakeCluster, submit: m.Submit) -> None:
    cluster.tokens(1, m.Tokens(submit.request.request_id, 0, submit.body.token_ids[:1]))


def write_settings(
    run_dir: Path, model_folder: Path, limits: dict[str, Any] | None = None, **config: Any
) -> None:
    """The file that a gateway is started with."""
    curve = config.pop("curve", None)
    fields = {
        "config": ServeConfig(**config).to_dict(), "model_folder": str(model_folder),
        "served_id": SERVED_ID, "max_model_len": MAX_MODEL_LEN, "fingerprint": FINGERPRINT.hex(),
        "weights": "float32", "name": "gateway-0", "limits": limits or {}, "parent_pid": os.getpid(),
    }  # fmt: skip
    path = run_dir / "gateway.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(fields | ({"curve": curve} if curve else {})))


def posted(path: str, body: bytes, version: str = "1.1") -> bytes:
    """A POST of JSON, as it goes over the wire."""
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def rest_of(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


class Gateway:
    """A gateway on a free port of loopback, in a run folder; `http` is a client of it."""

    def __init__(
        self, run_dir: Path, model_folder: Path, limits: dict[str, Any] | None = None, **config: Any
    ):
        self.run_dir = run_dir
        self.port = config.setdefault("port", free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        # http alone: to load certificates takes 20 ms
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=LIMIT_S, verify=False)
        write_settings(run_dir, model_folder, limits, **config)

    def is_alive(self) -> bool:
        """Tell whether it has not ended."""
        raise NotImplementedError

    def last_words(self) -> str:
        """What it said when it ended, as far as that is known."""
        return "the gateway has ended"

    def wait_ready(self) -> None:
        """Until /health says 200."""
        self.wait_health(200)

    def wait_health(self, status: int) -> dict[str, Any]:
        """Until /health answers with this status; its body."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self.is_alive(), self.last_words()
            try:
                reply = self.http.get("/health", headers={"Connection": "close"}, timeout=2)
            except httpx.TransportError:
                time.sleep(POLL_S)  # the starting gateway needs the core
                continue
            if reply.status_code == status:
                return dict(reply.json())
        raise AssertionError(f"/health was never {status}")

    def connect(self) -> socket.socket:
        """A connection for what no HTTP client would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)

    def said_to(self, words: bytes) -> bytes:
        """All that the gateway answers to these bytes, until it closes the connection."""
        with self.connect() as client:
            client.sendall(words)
            return rest_of(client)


class GatewayThread(Gateway):
    """A gateway in a thread of the tests, for all that is not about a process.

    What breaks it fails the test, as an exception that its thread did not handle. It complains on the stderr
    of the tests.
    """

    def __init__(self, *arguments: Any, **config: Any):
        super().__init__(*arguments, **config)
        self._end: Future[Callable[[], object]] = Future()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        settings = replace(read_settings(self.run_dir), parent_pid=0)
        asyncio.run(serve(settings, self._begun))

    def _begun(self, end: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: print(context, file=sys.stderr))
        self._end.set_result(lambda: loop.call_soon_threadsafe(end))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end."""
        self.http.close()
        self._thread.join(LIMIT_S)
        assert not self.is_alive(), "the gateway does not end"

    def close(self) -> None:
        """End it, if it has not ended."""
        with suppress(RuntimeError):  # its loop has ended by itself
            self._end.result(LIMIT_S)()
        self.finish()


class GatewayProcess(Gateway):
    """A real gateway, a process.

    descriptors   hard limit of the process; None: that of the tests
    """

    def __init__(self, *arguments: Any, descriptors: int | None = None, **config: Any):
        super().__init__(*arguments, **config)
        command = [sys.executable, "-m", "mooncake_lite.gateway", str(self.run_dir)]
        if descriptors is not None:
            command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        return self.process.communicate()[1]

    def check_quiet(self) -> None:
        """Insist that it had nothing to complain about so far."""
        stderr = self.process.stderr
        said = os.read(stderr.fileno(), 2**16) if select.select([stderr], [], [], 0)[0] else None
        assert said is None, f"the gateway said {said!r}, or has ended"

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for the end; (exit code, what it wrote to stderr)."""
        self.http.close()
        try:
            written = self.process.communicate(timeout=limit_s)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, written

    def close(self) -> None:
        """End it, if it has not ended, and insist that it had nothing to complain about."""
        if self.is_alive():
            self.process.terminate()
        code, written = self.finish()
        assert (code, written) == (0, "")
