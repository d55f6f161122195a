"""From an Ask to token ids, prefix keys and a Submit: all the work on a prompt before the cluster sees it.

Used by `endpoints`. The slow part runs in two threads, so that a long prompt never holds up the event
loop, and a crowd of long prompts never holds more than two cores. Knows no HTTP and no socket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.bodies import COMPLETION_MAX_TOKENS, Ask
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.messages import Submit
from mooncake_lite.model import Tokenizer
from store.keys import block_digests, prefix_keys

THREADS = 2
"""Tokenising releases the interpreter lock, but the cores belong to the ranks that compute."""

T = TypeVar("T")


class Prompts:
    """The tokenizer of the served model, and what a prompt needs besides.

    tokenizer   of the model folder
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")

    async def submit_for(self, request_id: str, ask: Ask) -> Submit:
        """The message that submits this request. Raises RequestError when the prompt does not fit."""
        return await self._in_thread(lambda: self._submit_for(request_id, ask))

    async def token_ids(self, prompt: str | list[int] | list[dict[str, str]], chat: bool) -> list[int]:
        """The ids of a prompt, whatever its length. Raises RequestError."""
        return await self._in_thread(lambda: self._token_ids(prompt, chat))

    async def text(self, token_ids: list[int]) -> str:
        """The text of token ids. Raises RequestError for an id outside the vocabulary."""
        self._check_ids(token_ids, "tokens")
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids))

    def close(self) -> None:
        """Drop what waits; what runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _submit_for(self, request_id: str, ask: Ask) -> Submit:
        token_ids = self._token_ids(ask.prompt, ask.chat)
        max_tokens = self._max_tokens(ask, len(token_ids))
        config = self._settings.config
        salt = salt_of(self._settings.fingerprint, ask.cache_salt)
        reuse = config.enable_prefix_caching
        return Submit(
            request_id=request_id,
            gateway=self._settings.name,
            token_ids=token_ids,
            keys=prefix_keys(token_ids, config.block_size, salt) if reuse else [],
            digests=block_digests(token_ids, config.block_size) if reuse else [],
            salt=salt,
            sampling=ask.sampling,
            max_tokens=max_tokens,
            stop_ids=[] if ask.ignore_eos else list(self.tokenizer.eos_ids),
            wait_limit_s=self._settings.limits.token_timeout_s,
        )

    def _token_ids(self, prompt: str | list[int] | list[dict[str, str]], chat: bool) -> list[int]:
        field = "messages" if chat else "prompt"
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif chat:
            text = self.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = prompt  # type: ignore[assignment]
            self._check_ids(ids, field)
        if not ids:
            raise RequestError("the prompt has no tokens; at least one is needed", param=field)
        return ids

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        for index, token in enumerate(token_ids):
            if not 0 <= token < size:
                raise RequestError(
                    f"token id {token} is not in the vocabulary, 0 to {size - 1}", param=f"{field}[{index}]"
                )

    def _max_tokens(self, ask: Ask, prompt_tokens: int) -> int:
        """How long the answer may be. Raises RequestError when prompt and answer exceed the context."""
        length = self._settings.max_model_len
        room = length - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; the context is {length}, of which one is needed for "
                f"the answer: shorten the prompt by {1 - room} tokens or more",
                param="messages" if ask.chat else "prompt",
                code="context_length_exceeded",
            )
        if ask.max_tokens is None:
            return room if ask.chat else min(room, COMPLETION_MAX_TOKENS)
        if ask.max_tokens > room:
            raise RequestError(
                f"max_tokens={ask.max_tokens} and the prompt's {prompt_tokens} tokens exceed the context of "
                f"{length}; ask for at most {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return ask.max_tokens


def salt_of(fingerprint: bytes, cache_salt: str) -> bytes:
    """What a key chain starts from: the weights, and what a tenant adds to be alone with its KV."""
    if not cache_salt:
        return fingerprint
    return fingerprint + hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
