"""The places of work on bodies: two threads for short bodies, two processes for long ones.

Used by `endpoints`. Neither delays the event loop, and a crowd of prompts never takes more than four cores.
The work itself is in `prompt_work`. Knows no HTTP and no socket.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from mooncake_lite.gateway.long_prompts import LongPrompts, command
from mooncake_lite.gateway.prompt_work import Kind, Prepared, PromptWork
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.messages import HintArrived
from mooncake_lite.model.tokenizer import Tokenizer

THREADS = 2
"""Tokenising releases the interpreter's lock, but the cores belong to the ranks that compute."""

SHORT_BYTES = 32 * 1024
"""Bodies up to here are short: a thread keeps the interpreter's lock for a few milliseconds at most."""

MIDDLE_BYTES = 256 * 1024
"""Bodies up to here, 64,000 tokens of text, have a process of their own: an 8 MiB body may take seconds."""

MIDDLE_MEMORY_BYTES = 256 * 2**20
LONG_MEMORY_BYTES = 3 * 2**30
"""Memory for the work on one body. 8 MiB of words take 0.7 GB; 8 MiB of digits, a token each, 2.6 GB."""


class Prompts:
    """The work on all bodies of a gateway.

    tokenizer   of the model folder
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._work = PromptWork(settings, tokenizer)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")
        queue = settings.limits.open_requests
        self._middle = LongPrompts(command(settings.run_dir, MIDDLE_MEMORY_BYTES), queue)
        self._long = LongPrompts(command(settings.run_dir, LONG_MEMORY_BYTES), queue)

    async def prepare(self, kind: Kind, request_id: str, raw: bytes) -> Prepared:
        """The message that submits a request to generate, and more. Raises RequestError."""
        prepared = await self._do(kind, request_id, raw)
        assert isinstance(prepared, Prepared)
        return prepared

    async def hint(self, hint_id: str, raw: bytes) -> HintArrived:
        """The message that gives a hint. Raises RequestError."""
        hint = await self._do("hint", hint_id, raw)
        assert isinstance(hint, HintArrived)
        return hint

    async def answer(self, kind: Kind, raw: bytes) -> list[bytes]:
        """The JSON that answers /tokenize or /detokenize, in pieces. Raises RequestError."""
        answer = await self._do(kind, "", raw)
        assert isinstance(answer, list)
        return answer

    def close(self) -> None:
        """Drop what waits; what runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._middle.close()
        self._long.close()

    async def _do(self, kind: Kind, request_id: str, raw: bytes) -> Prepared | HintArrived | list[bytes]:
        if len(raw) > SHORT_BYTES:
            process = self._middle if len(raw) <= MIDDLE_BYTES else self._long
            return await process.do(kind, request_id, raw)
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._threads, self._work.do, kind, request_id, raw)
        return [done] if isinstance(done, bytes) else done
