"""All the work on one request's body: from its bytes to a Submit, or to the JSON of an answer.

Run by `prompts` in a thread, and by `long_prompts_process` in a process of its own; the result is the same.
Knows the tokenizer and the settings, no event loop and no cluster.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal

import msgspec
from msgspec.structs import replace

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway import bodies
from mooncake_lite.gateway.answer_types import Text, TokenIds
from mooncake_lite.gateway.service import Service
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.messages import Body, HintArrived, RequestArrived, Sampling, Submit, Verb
from mooncake_lite.messages.parts import Message
from mooncake_lite.model.generation_config import default_sampling
from mooncake_lite.model.tokenizer import Tokenizer
from store.keys import block_digests, prefix_keys

Kind = Literal["chat", "completion", "tokenize", "detokenize", "hint"]
"""The kind of a request's body, which decides how it is processed."""

MESSAGE_CHARS = 2000
"""The longest error message: one that quotes its body could be as long as the body."""

ANSWER_BYTES = 64 * 2**20
"""The longest answer. That of /tokenize to a body of 8 MiB is shorter; of /detokenize it could be longer."""


MAX_ECHOED_LOGPROBS = 500_000
"""The most logprobs of prompt tokens in one answer. Those of one prompt fit into a message between two
processes, which has at most 8 MiB."""


class Prepared(Message, frozen=True):
    """A request to generate, ready to be sent to the conductor, and what its answer must be like.

    submits   one for each prompt; the first has the request's id, each has the same n
    echoes    the text that stands before the answers to each prompt, in pieces: where logprobs of the prompt
              are wanted, one for each of its tokens
    hints     to be given when all answers have ended
    """

    submits: list[Submit]
    echoes: list[list[str]]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    is_chat: bool
    hints: dict[Verb, float]


def served_as(prepared: Prepared, service: Service) -> Prepared:
    """The same request, which wants this service."""
    wanted = msgspec.structs.asdict(service)
    submits = [replace(each, request=replace(each.request, **wanted)) for each in prepared.submits]
    return replace(prepared, submits=submits)


class PromptWork:
    """The work of a gateway on bodies.

    tokenizer   of the model folder
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._settings = settings
        self._defaults = Sampling(**default_sampling(settings.model_folder))

    def do(self, kind: Kind, request_id: str, raw: bytes) -> Prepared | HintArrived | bytes:
        """A Prepared for kinds that generate, a hint, else the answer's JSON. Raises RequestError."""
        try:
            if kind == "hint":
                return self._hint(request_id, raw)
            if kind == "tokenize":
                return self._tokenize(raw)
            if kind == "detokenize":
                return self._detokenize(raw)
            return self._prepare(kind, request_id, raw)
        except RequestError as error:
            if len(error.message) > MESSAGE_CHARS:
                error.message = f"{error.message[:MESSAGE_CHARS]} ..."
            raise

    def _prepare(self, kind: Kind, request_id: str, raw: bytes) -> Prepared:
        parse = bodies.parse_chat if kind == "chat" else bodies.parse_completion
        ask = parse(raw, self._defaults)
        check_model(ask.model, self._settings.served_id)
        self._check_count(ask)
        submits = [self._submit(request_id, ask, number) for number in range(len(ask.prompts))]
        self._check_echo(submits)
        echoes = [self._echo(ask, prompt) if ask.echo else [] for prompt in ask.prompts]
        return Prepared(submits, echoes, ask.stops, ask.stream, ask.include_usage, ask.chat, ask.hints)

    def _hint(self, hint_id: str, raw: bytes) -> HintArrived:
        """A hint. Its prompt has the blocks that it has in a request."""
        body = bodies.parse_hint(raw)
        check_model(body.model, self._settings.served_id)
        keys, digests, session = list[int](), list[int](), body.session or ""
        if body.prompt is not None or body.messages is not None:
            kind: Kind = "completion" if body.messages is None else "chat"
            request = self._prepare(kind, hint_id, raw).submits[0].request
            keys, digests, session = request.keys, request.digests, session if request.keys else ""
        return HintArrived(
            hint_id, self._settings.name, body.verb, keys, digests, session,
            seconds=body.seconds, copies=body.copies or 1,
        )  # fmt: skip

    def _tokenize(self, raw: bytes) -> bytes:
        """The token ids of a text or a chat, also of one that is too long."""
        body, prompt = bodies.parse_tokenize(raw)
        check_model(body.model, self._settings.served_id)
        if isinstance(prompt, str):
            ids = self._encode(prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
        else:
            text = self.tokenizer.apply_chat_template(prompt)
            ids = self._encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))
        names = [self.tokenizer.name_of(token_id) for token_id in ids] if body.return_token_strs else None
        return msgspec.json.encode(TokenIds(len(ids), self._settings.max_model_len, ids, names))

    def _detokenize(self, raw: bytes) -> bytes:
        body = bodies.parse_detokenize(raw)
        check_model(body.model, self._settings.served_id)
        ids = body.tokens
        self._check_ids(ids, "tokens")
        text = self.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))
        answer = msgspec.json.encode(Text(text))
        if len(answer) > ANSWER_BYTES:
            raise RequestError(
                f"the text of these {len(ids)} tokens has {len(answer)} bytes, the limit is {ANSWER_BYTES}; "
                "send them in parts",
                param="tokens",
            )
        return answer

    def _submit(self, request_id: str, ask: bodies.Ask, number: int) -> Submit:
        """The message that submits a prompt of this request. Raises RequestError when it does not fit.

        A prompt whose logprobs are wanted reuses no KV: cached tokens have no logits. It also leaves none.
        """
        field = _prompt_field(ask, number)
        token_ids = self._token_ids(ask.prompts[number], field, ask.add_special_tokens)
        max_tokens = self._max_tokens(ask, len(token_ids), field)
        self._check_sampling(ask, max_tokens)
        config = self._settings.config
        scored = ask.sampling.prompt_logprobs >= 0
        reuse = config.enable_prefix_caching and not scored
        salt = salt_of(self._settings.fingerprint, ask.cache_salt) if reuse else b""
        fresh = not ask.seeded and number > 0  # equal prompts of one request get different answers
        usual = config.speculate != "off" or ask.prediction is not None
        request = RequestArrived(
            request_id=f"{request_id}-{number}" if number else request_id,
            num_tokens=len(token_ids),
            max_tokens=max_tokens,
            keys=prefix_keys(token_ids, config.block_size, salt) if reuse else [],
            digests=block_digests(token_ids, config.block_size) if reuse else [],
            wait_limit_s=self._settings.limits.token_timeout_s,
            n=ask.n,
            gateway=self._settings.name,
            session=ask.session,
        )
        body = Body(
            gateway=self._settings.name,
            token_ids=token_ids,
            salt=salt,
            sampling=replace(ask.sampling, seed=secrets.randbits(63)) if fresh else ask.sampling,
            stop_ids=[*ask.stop_ids, *([] if ask.ignore_eos else self.tokenizer.eos_ids)],
            speculates=usual if ask.speculate is None else ask.speculate,
            predicted=self._predicted(ask.prediction or ""),
        )
        return Submit(request, body)

    def _check_count(self, ask: bodies.Ask) -> None:
        """Raises RequestError for more prompts than may wait, and more answers than a rank runs at once."""
        config = self._settings.config
        if len(ask.prompts) > config.max_queue:
            raise RequestError(
                f"prompt has {len(ask.prompts)} prompts, and {config.max_queue} requests may wait; send at "
                f"most {config.max_queue} at once, or start the server with a larger --max-queue",
                param="prompt",
            )
        if ask.n > config.max_num_seqs:
            raise RequestError(
                f"n={ask.n} is more than the {config.max_num_seqs} answers that a rank computes at once; ask "
                f"for at most {config.max_num_seqs}, or start the server with a larger --max-num-seqs",
                param="n",
            )

    def _check_echo(self, submits: list[Submit]) -> None:
        """Raises RequestError for more logprobs of prompts than an answer may have."""
        per_token = 1 + submits[0].body.sampling.prompt_logprobs
        tokens = sum(submit.request.num_tokens * submit.request.n for submit in submits)
        if tokens * per_token > MAX_ECHOED_LOGPROBS:
            raise RequestError(
                f"echo would tell {per_token} logprobs of each of {tokens} tokens, the limit is "
                f"{MAX_ECHOED_LOGPROBS} in all; send fewer or shorter prompts, or a smaller logprobs",
                param="logprobs",
            )

    def _echo(self, ask: bodies.Ask, prompt: bodies.Prompt) -> list[str]:
        """A prompt as text, in pieces."""
        if isinstance(prompt, str):
            scored = ask.sampling.prompt_logprobs >= 0
            add = ask.add_special_tokens
            return self.tokenizer.pieces(prompt, add_special_tokens=add) if scored else [prompt]
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=False)
        return [*detokenizer.texts(prompt), *detokenizer.rest()]  # type: ignore[arg-type]

    def _check_sampling(self, ask: bodies.Ask, max_tokens: int) -> None:
        """Raises RequestError for ids outside the vocabulary, for more tokens than there may be, and for
        logprobs of an engine that has none."""
        if ask.sampling.logprobs >= 0 and self._settings.config.engine == "emulated":
            raise RequestError(
                "logprobs are not available: this server runs with --engine emulated", param="logprobs"
            )
        self._check_ids(list(ask.stop_ids), "stop_token_ids")
        self._check_ids(list(ask.sampling.logit_bias), "logit_bias")
        if ask.sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens={ask.sampling.min_tokens} is more than the answer may have, {max_tokens}",
                param="min_tokens",
            )

    def _token_ids(self, prompt: bodies.Prompt, field: str, add_special_tokens: bool) -> list[int]:
        """The ids of a prompt that may fit: what cannot is refused by its length, before the long work."""
        if isinstance(prompt, str):
            self._check_length(prompt, field)
            return self._encode(prompt, field, add_special_tokens=add_special_tokens)
        if isinstance(prompt[0], dict):
            text = self.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
            self._check_length(text, field)
            return self._encode(text, field, add_special_tokens=add_special_tokens)
        ids: list[int] = prompt  # type: ignore[assignment]
        self._check_room(len(ids), field)
        self._check_ids(ids, field)
        return ids

    def _predicted(self, text: str) -> list[int]:
        """Return the ids of a predicted answer. Raises RequestError for more of them than the context has."""
        self._check_length(text, "prediction")
        ids = self.tokenizer.encode(text, add_special_tokens=False, param="prediction")
        self._check_room(len(ids), "prediction")
        return ids

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=field)
        if not ids:
            raise RequestError("the prompt has no tokens; at least one is needed", param=field)
        return ids

    def _check_length(self, text: str, field: str) -> None:
        """Raises RequestError for a text that cannot fit, however it is tokenised."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= self._settings.max_model_len:
            nbytes, (what, other) = len(text.encode(errors="replace")), _parts(field)
            raise self._too_long(
                f"the {what} has {nbytes} bytes, at least {fewest} tokens, and one is needed for the "
                f"{other}; shorten the {what}",
                field,
            )

    def _check_room(self, num_tokens: int, field: str) -> None:
        """Raises RequestError when a prompt leaves no room for an answer, or a predicted answer for it."""
        length = self._settings.max_model_len
        if num_tokens >= length:
            what, other = _parts(field)
            raise self._too_long(
                f"the {what} has {num_tokens} tokens, and one is needed for the {other}; shorten the "
                f"{what} by {1 + num_tokens - length} tokens or more",
                field,
            )

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        for index, token in enumerate(token_ids):
            if not 0 <= token < size:
                raise RequestError(
                    f"token id {token} is not in the vocabulary, 0 to {size - 1}", param=f"{field}[{index}]"
                )

    def _max_tokens(self, ask: bodies.Ask, prompt_tokens: int, field: str) -> int:
        """Return the longest answer. Raises RequestError when prompt and answer exceed the context."""
        self._check_room(prompt_tokens, field)
        room = self._settings.max_model_len - prompt_tokens
        if ask.max_tokens is None:
            return room if ask.chat else min(room, bodies.COMPLETION_MAX_TOKENS)
        if ask.max_tokens > room:
            raise self._too_long(
                f"you requested {prompt_tokens + ask.max_tokens} tokens, {prompt_tokens} in the prompt and "
                f"max_tokens={ask.max_tokens} for the answer; ask for at most {room}",
                "max_tokens",
            )
        return ask.max_tokens

    def _too_long(self, why: str, field: str) -> RequestError:
        """The refusal of what exceeds the context. Clients such as LiteLLM know OpenAI's first words."""
        length = self._settings.max_model_len
        message = f"This model's maximum context length is {length} tokens. However, {why}"
        return RequestError(message, param=field, code="context_length_exceeded")


def _prompt_field(ask: bodies.Ask, number: int) -> str:
    """Return the field of a body that has this prompt."""
    if ask.chat:
        return "messages"
    return f"prompt[{number}]" if len(ask.prompts) > 1 else "prompt"


def _parts(field: str) -> tuple[str, str]:
    """Return what a field has of the context, and what else is in the context."""
    return ("prediction", "prompt") if field == "prediction" else ("prompt", "answer")


def check_model(model: str | None, served_id: str) -> None:
    """Left out, the served id and "default" mean the one model there is. Raises RequestError for others."""
    if model not in (None, "default", served_id):
        raise RequestError(
            f"the model {model!r} does not exist; {served_id!r} is served here",
            param="model",
            status=404,
            code="model_not_found",
        )


def too_much_memory(nbytes: int) -> RequestError:
    """The error for a body whose work needs more memory than its process may have."""
    return RequestError(
        f"the work on this body of {nbytes} bytes needs more memory than it may have; send a shorter prompt",
        code="prompt_too_large",
    )


def salt_of(fingerprint: bytes, cache_salt: str) -> bytes:
    """Return the start of a key chain: the weights, and a tenant's salt, which keeps its KV apart."""
    if not cache_salt:
        return fingerprint
    return fingerprint + hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
