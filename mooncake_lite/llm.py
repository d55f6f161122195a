"""`LLM`: answers from Python, in this process or from a running cluster.

    from mooncake_lite import LLM

    llm = LLM()                                      # or LLM(cluster="http://127.0.0.1:8000")
    for output in llm.generate(["The capital of France is", "Two and two is"]):
        print(output.outputs[0].text)

The names are those of vLLM. A request has the fields, checks and defaults of docs/reference/http.md. In this
process it goes from the gateway's work on bodies straight to a computing rank: the live planner with its
prefix cache, and neither MPI nor a pool. The programs in examples/ use it.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.conductor.open_bodies import OpenBody
from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.modes import DUTIES
from mooncake_lite.config.reading import config_from
from mooncake_lite.config.serve import DEFAULT_MODEL, PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ClusterError, ConfigError, RequestError
from mooncake_lite.gateway import answer_types as types
from mooncake_lite.gateway.answer import Answers
from mooncake_lite.gateway.prompt_work import Prepared, PromptWork
from mooncake_lite.gateway.sampling import SamplingBody
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.gateway.shapes import Tally
from mooncake_lite.launch.threads import threads_for
from mooncake_lite.model.config import load_config
from mooncake_lite.model.progress import resolve_visibly
from mooncake_lite.model.sizes import context_length
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from mooncake_lite.ranks.computing.build import computing_rank
from mooncake_lite.ranks.computing.machine import Told
from mooncake_lite.ranks.computing.page_hints import PageHints
from mooncake_lite.tools.client import one_line, open_client, problem_of
from scheduler.instance import Staging, pages_for

if TYPE_CHECKING:
    import httpx

    from kernels_numba.ahead import Report

Kind = Literal["completion", "chat"]

Prompt = str | Sequence[int]
"""A text, or token ids."""

Conversation = Sequence[Mapping[str, str]]
"""Messages: [{"role": "user", "content": "..."}, ...]."""

Prefix = Prompt | Conversation | None
"""What a hint is about; None: a session."""

ROLE = "compute"
"""Of the only rank of this process: it prefills and decodes."""

PARALLEL = 32
"""Requests that are sent to a cluster at once: half of what may wait there by default."""

_ANSWER = msgspec.json.Decoder(types.ChatCompletion | types.TextCompletion)
_HINT_ANSWER = msgspec.json.Decoder(types.HintAnswer)

ANSWER_LIMIT_S = 600.0
"""A cluster that sends nothing for this long, or refuses a request for this long, has failed."""

LONGEST_PAUSE_S = 10.0
"""Between two tries of a refused request, also where the cluster asks for more: it may be free sooner."""

BUSY = 429
"""HTTP status of a request that is refused because too many wait, with the seconds to wait in Retry-After."""


class SamplingParams(SamplingBody, kw_only=True, omit_defaults=True):
    """How an answer is made. For None, the model's generation config decides, or OpenAI's default.

    max_tokens of `generate` is 16 by default, that of `chat` what is left of the context. Each field, also
    those of SamplingBody, is that of the same name in docs/reference/http.md.
    """

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    token_ids       of the answer; empty from a cluster, which sends text
    finish_reason   "stop" or "length"
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt.

    num_cached_tokens   tokens of the prompt whose KV was reused
    """

    prompt: Prompt | Conversation
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int


class _Answering(Protocol):
    def answer(self, kind: Kind, bodies: Sequence[Mapping[str, Any]]) -> list[RequestOutput]:
        """Return the answers to these request bodies, in their order."""

    def hint(self, body: Mapping[str, Any]) -> types.HintAnswer:
        """Return what becomes of the hint in this body."""


class LLM:
    """A language model. One thread at a time may use it.

    model     name or folder
    cluster   URL of a running server; "": this process computes
    api_key   of the server; by default MOONCAKE_LITE_API_KEY
    options   of this process, as `mooncake-lite serve` names them: dtype="bfloat16", kv_cache_bytes="2GiB"

    Raises ConfigError for a wrong option, ModelError for a model that cannot be used.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, cluster: str = "", api_key: str | None = None, **options: Any
    ) -> None:
        if cluster and (options or model != DEFAULT_MODEL):
            raise ConfigError(f"the cluster at {cluster} has its model and options; leave them out here")
        self._answering: _Answering = _Cluster(cluster, api_key) if cluster else _Process(model, options)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt as it is. Raises RequestError, or ClusterError when the cluster fails."""
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return self._answer("completion", "prompt", [prompts] if one else prompts, sampling_params)

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer each conversation, in the model's chat template. Raises as `generate` does."""
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        return self._answer("chat", "messages", [messages] if one else messages, sampling_params)

    def share(self, prefix: Prefix = None, *, session: str = "", copies: int = 1) -> types.HintAnswer:
        """Put copies of KV on further stores. Like the other hints, it changes no token.

        prefix    a prompt or a conversation; None: the latest prompt that came with `session`

        Raises RequestError, or ClusterError when the cluster fails, as all hints do.
        """
        return self._hint("share", prefix, session, copies=copies)

    def prefetch(
        self, prefix: Prefix = None, *, session: str = "", seconds: float | None = None
    ) -> types.HintAnswer:
        """Read KV from SSD, which will be needed in so many seconds; None: now."""
        return self._hint("prefetch", prefix, session, seconds=seconds)

    def demote(self, prefix: Prefix = None, *, session: str = "") -> types.HintAnswer:
        """Evict KV before other KV."""
        return self._hint("demote", prefix, session)

    def pin(
        self, prefix: Prefix = None, *, session: str = "", seconds: float | None = None
    ) -> types.HintAnswer:
        """Do not evict KV while requests find space, for so many seconds; 0 ends a pin; None: a day."""
        return self._hint("pin", prefix, session, seconds=seconds)

    def retain(self, prefix: Prefix = None, *, session: str = "", seconds: float) -> types.HintAnswer:
        """Evict KV after all other KV, for so many seconds."""
        return self._hint("retain", prefix, session, seconds=seconds)

    def _hint(self, verb: m.Verb, prefix: Any, session: str, **more: float | None) -> types.HintAnswer:
        field = "messages" if prefix and isinstance(prefix[0], Mapping) else "prompt"
        body = {"verb": verb, field: prefix, "session": session or None, **more}
        _check_finite(body)
        return self._answering.hint({name: value for name, value in body.items() if value is not None})

    def _answer(
        self, kind: Kind, field: str, prompts: Sequence[Any], params: SamplingParams | None
    ) -> list[RequestOutput]:
        given = msgspec.to_builtins(params or SamplingParams(), str_keys=True)
        biases = {f"logit_bias.{token}": bias for token, bias in given.get("logit_bias", {}).items()}
        _check_finite(given | biases)
        return self._answering.answer(kind, [{field: prompt, **given} for prompt in prompts])


def _check_finite(fields: Mapping[str, Any]) -> None:
    """Raises RequestError for a number that JSON would write as null: the default."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}={value} must be a finite number", param=name)


def _prompt_of(body: Mapping[str, Any]) -> Any:
    return body.get("prompt", body.get("messages"))


# ---------------------------------------------------------------------------------- from a cluster


class _Cluster:
    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key or os.environ.get("MOONCAKE_LITE_API_KEY")

    def answer(self, kind: Kind, bodies: Sequence[Mapping[str, Any]]) -> list[RequestOutput]:
        import httpx

        limits = httpx.Timeout(ANSWER_LIMIT_S, connect=10.0)
        client = open_client(httpx.Client, self._url, self._api_key, limits)
        with ThreadPoolExecutor(PARALLEL) as threads, client:  # after an error no thread sends anything
            return list(threads.map(lambda body: self._one(client, kind, body), bodies))

    def hint(self, body: Mapping[str, Any]) -> types.HintAnswer:
        import httpx

        with open_client(httpx.Client, self._url, self._api_key, httpx.Timeout(60.0)) as client:
            answer: types.HintAnswer = self._post(client, "/v1/kv/hints", body, _HINT_ANSWER)
        return answer

    def _one(self, client: httpx.Client, kind: Kind, body: Mapping[str, Any]) -> RequestOutput:
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        answer = self._post(client, path, body, _ANSWER)
        outputs = [
            CompletionOutput(each.index, _text(each), (), each.finish_reason) for each in answer.choices
        ]
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return RequestOutput(_prompt_of(body), outputs, usage.prompt_tokens, cached)

    def _post(
        self, client: httpx.Client, path: str, body: Mapping[str, Any], decoder: msgspec.json.Decoder[Any]
    ) -> Any:
        """Return the answer to a body; send it again while the cluster is busy. Raises ClusterError."""
        import httpx

        deadline = time.monotonic() + ANSWER_LIMIT_S
        try:
            response = client.post(path, json=body)
            while response.status_code == BUSY and time.monotonic() < deadline:
                time.sleep(_seconds(response.headers.get("Retry-After", "")))
                response = client.post(path, json=body)
        except httpx.HTTPError as error:
            raise ClusterError(f"no answer from {self._url}: {one_line(error)}") from None
        if response.status_code != 200:
            raise ClusterError(problem_of(response))
        try:
            return decoder.decode(response.content)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ClusterError(f"{self._url} sent what is no answer: {one_line(error)}") from None


def _text(choice: types.ChatChoice | types.TextChoice) -> str:
    return choice.text if isinstance(choice, types.TextChoice) else choice.message.content or ""


def _seconds(retry_after: str) -> float:
    """Return how long to wait before a refused request is sent again."""
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdecimal() else 1.0


# ---------------------------------------------------------------------------------- in this process


@dataclass(frozen=True, slots=True)
class _Starting:
    """Shows which kernels are compiled. Nothing else takes long until the engine is ready."""

    compiling: Report

    def starting(self, what: str) -> None:
        """Show nothing."""


class _Open:
    """A request that is being answered: the texts of its answers, and the tokens in them."""

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared) -> None:
        (self.submit,) = prepared.submits
        self.left = self.submit.request.n
        self.tally = Tally(self.submit.request.num_tokens)
        self.answers = Answers(tokenizer, prepared, self.tally)
        self.shown: list[list[str]] = [[] for _ in self.answers.texts]
        self.token_ids: list[list[int]] = [[] for _ in self.answers.texts]

    @property
    def pages(self) -> int:
        """Return the most KV pages that this request may need."""
        request = self.submit.request
        return request.n * pages_for(request.num_tokens + max(1, request.max_tokens), PAGE_TOKENS)

    def push(self, message: m.Tokens) -> bool:
        """Add tokens. Tell whether a stop string has ended this answer, and more would be of no use."""
        text = self.answers.texts[message.branch]
        if text.finish is not None:
            return False
        self.answers.note(message)
        before = text.num_tokens
        self.shown[message.branch].append(text.push(message)[0])
        self.token_ids[message.branch] += message.token_ids[: text.num_tokens - before]
        return text.finish is not None and message.finish is None

    def output(self, prompt: Any) -> RequestOutput:
        """Return the answers, all of which have ended."""
        outputs = [
            CompletionOutput(index, "".join(shown), tuple(ids), str(text.finish))
            for index, (text, shown, ids) in enumerate(zip(self.answers.texts, self.shown, self.token_ids))
        ]
        cached = sum(self.tally.cached_tokens.values())
        return RequestOutput(prompt, outputs, self.tally.prompt_tokens, cached)


class _Process:
    """A gateway's work on bodies and one rank that prefills and decodes, without a conductor between them.

    A request begins when the pages that it may need at most are free, so that no request is preempted.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._config = config = config_from({"model": model, "mode": "colocated", **options}, "LLM()")
        threads = threads_for(config, usable_cores(), ROLE)

        from mooncake_lite.engine.build import build_engine
        from mooncake_lite.engine.compiling import console_compiling
        from mooncake_lite.engine.runner import Runner

        folder = resolve_visibly(config.model)
        self._model = load_config(folder)
        self._tokenizer = load_tokenizer(folder)
        self._work = PromptWork(self._settings(config, folder), self._tokenizer)
        with console_compiling() as report:
            engine = build_engine(config, folder, self._model, threads, _Starting(report))
        self._runner, self._pages = Runner(engine), engine.num_pages
        self._numbers = itertools.count()
        self._hints = PageHints(config.block_size)
        self._new_rank()

    def _settings(self, config: ServeConfig, folder: Path) -> Settings:
        length = context_length(config, self._model)
        return Settings(
            run_dir=Path(), config=config, model_folder=folder, fingerprint=b"this process",
            served_id=config.model, max_model_len=length, weights=config.weights,
        )  # fmt: skip

    def _new_rank(self) -> None:
        """Begin with an empty rank: nothing is in its pages."""
        duties, no_staging = DUTIES[ROLE], Staging(0, 0)
        self._rank = computing_rank(
            m.RankHello(0, "serve", 0), self._config, self._model, duties, self._pages, no_staging
        )

    def hint(self, body: Mapping[str, Any]) -> types.HintAnswer:
        hint = self._work.do("hint", "", msgspec.json.encode(body))
        assert isinstance(hint, m.HintArrived)
        kind: Kind = "chat" if "messages" in body else "completion"
        by_prompt = bool(hint.keys) or not hint.session
        named = self._prepare(kind, {**body, "max_tokens": 0}).submit if by_prompt else None
        told = self._hints.give(hint, named, self._rank.state, time.monotonic())
        return types.HintAnswer(hint.verb, *told)

    def answer(self, kind: Kind, bodies: Sequence[Mapping[str, Any]]) -> list[RequestOutput]:
        requests = [self._prepare(kind, body) for body in bodies]
        self._rank.state.pages.forget_retained(time.monotonic())
        for request in requests:
            self._hints.note_session(request.submit)
        try:
            self._run(requests)
        except BaseException:
            self._new_rank()  # Ctrl-C may have come in the middle of a step
            raise
        return [request.output(_prompt_of(body)) for request, body in zip(requests, bodies)]

    def _prepare(self, kind: Kind, body: Mapping[str, Any]) -> _Open:
        """Check a body as the gateway does. Raises RequestError, or ConfigError when it can never run."""
        prepared = self._work.do(kind, f"request-{next(self._numbers)}", msgspec.json.encode(body))
        assert isinstance(prepared, Prepared)
        opened = _Open(self._tokenizer, prepared)
        if opened.pages > self._pages:
            raise ConfigError(
                f"n={opened.left} answers may need {opened.pages * PAGE_TOKENS} tokens of KV, and "
                f"kv_cache_bytes={self._config.kv_cache_bytes} holds {self._pages * PAGE_TOKENS}; ask for "
                "fewer or shorter answers, or give more kv_cache_bytes"
            )
        return opened

    def _run(self, requests: list[_Open]) -> None:
        """Let the rank work until every request has ended."""
        waiting, running = deque(requests), dict[str, _Open]()
        while waiting or running:
            free = self._pages - sum(request.pages for request in running.values())
            while waiting and waiting[0].pages <= free:
                request = waiting.popleft()
                free -= request.pages
                running[request.submit.request.request_id] = request
                self._hear(self._rank.on(self._order(request.submit), time.monotonic()), running)
            result = self._runner.run(self._rank.step(time.monotonic()))
            self._hear(self._rank.ended(result, time.monotonic()), running)

    def _order(self, submit: m.Submit) -> m.Start:
        """Return the order that a conductor gives for a request where there is no pool."""
        order = m.StartServe(0, submit.request.request_id, 0, [], {}, 0.0, [])
        return OpenBody.of(submit, self._config.enable_prefix_caching, has_pool=False).start(order)

    def _hear(self, told: list[Told], running: dict[str, _Open]) -> None:
        for message, _, _ in told:
            if isinstance(message, m.Tokens):
                request = running.get(message.request_id)  # None: a stop string has ended it, before drafts
                if request is not None and request.push(message):
                    cancel = m.CancelOn(0, message.request_id, 0, message.branch)
                    self._hear(self._rank.on(cancel, time.monotonic()), running)
            elif isinstance(message, m.DecodeEnded):
                running[message.request_id].left -= 1
                if not running[message.request_id].left:
                    del running[message.request_id]
            elif isinstance(message, m.RequestFailed):
                raise ClusterError(f"the request failed: {message.reason}")
