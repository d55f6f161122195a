"""Hands long bodies to a separate process, so that other requests do not wait for them.

Used by `prompts`. Owns the process: starts it when the first long body comes, ends it when a body takes too
long or its client leaves, and starts another for the next. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.long_frames import LENGTH, TO_GATEWAY, Answer, Problem, Task, frame
from mooncake_lite.gateway.problems import Broken, Refused
from mooncake_lite.gateway.prompt_work import Kind, Prepared
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.processes import how_it_ended
from transport.errors import WireError

LIMIT_S = 30.0
"""The longest time for one body, the start of the process included."""

KEEP_BYTES = 512 * 2**20
"""A process that has more memory after its work would keep it: the next body has another
process. 8 MiB of text take 1 to 1.7 GB, other bodies less than 350 MB."""

PIECE_BYTES = 256 * 1024
"""Bodies and answers are copied in pieces of this size, between which the event loop does other things."""


def command(run_dir: Path) -> list[str]:
    """What starts the process of a gateway with this run folder."""
    return [sys.executable, "-m", "mooncake_lite.gateway.long_prompts_process", str(run_dir)]


class LongPrompts:
    """The process for long prompts, one body at a time, and the bodies that wait for it.

    command     starts the process, whose stdin is a socket
    queue       bodies that may be here at once, the one in work included
    limit_s     for one body
    keep_bytes  memory with which the process may wait for the next body

    Belongs to the first thread: the kernel ends the process when the thread ends that started it.
    """

    def __init__(self, command: Sequence[str], queue: int):
        self._command = command
        self._queue = queue
        self.limit_s = LIMIT_S
        self.keep_bytes = KEEP_BYTES
        self._here = 0
        self._turn = asyncio.Lock()
        self._child: _Child | None = None

    async def do(self, kind: Kind, request_id: str, raw: bytes) -> Prepared | list[bytes]:
        """As PromptWork.do, with the JSON in pieces.

        Raises RequestError: what the work raises; Refused when too many bodies wait; and when the work takes
        longer than its limit, or its process ends. A caller that is cancelled ends the work.
        """
        if self._here >= self._queue:
            raise Refused(f"{self._here} long prompts are waiting, which is the limit; come back later", 1.0)
        self._here += 1
        try:
            async with self._turn:
                reply = await self._exchange(Task(kind, request_id, len(raw)), raw)
        finally:
            self._here -= 1
        if isinstance(reply, Problem):
            raise reply.error()
        return reply

    async def _exchange(self, task: Task, raw: bytes) -> Prepared | list[bytes] | Problem:
        try:
            async with asyncio.timeout(self.limit_s):
                child = await self._living_child()
                reply = await child.exchange(task, raw)
            if child.memory_bytes() > self.keep_bytes:
                self._end_child()
            return reply
        except TimeoutError:
            self._end_child()
            raise RequestError(
                f"this body of {len(raw)} bytes was worked on for {self.limit_s:g} s, which is the limit; "
                "send a shorter prompt",
                code="prompt_too_slow",
            ) from None
        except (OSError, EOFError, WireError):
            self._end_child(unexpected=True)
            raise Broken("the process that tokenises long prompts ended; send the request again") from None
        except BaseException:  # cancelled: the reply would be taken for that to the next body
            self._end_child()
            raise

    async def _living_child(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._end_child(unexpected=True)
        if self._child is None:
            self._child = await _start(self._command)
        return self._child

    def _end_child(self, unexpected: bool = False) -> None:
        """Kill the process, if there is one. Its memory is taken back while others are served."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            asyncio.get_running_loop().run_in_executor(None, child.reap, unexpected)

    def close(self) -> None:
        """End the process and wait for its end; call it last."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap(False)


class _Child:
    """One life of the process."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ):
        self.process = process
        self._reader = reader
        self._writer = writer

    async def exchange(self, task: Task, raw: bytes) -> Prepared | list[bytes] | Problem:
        """Send a body and await the reply. Raises OSError, EOFError or WireError when the process ends."""
        self._writer.write(frame(task))
        view = memoryview(raw)
        for start in range(0, len(raw), PIECE_BYTES):
            self._writer.write(view[start : start + PIECE_BYTES])
            await self._writer.drain()
        head = await self._reader.readexactly(LENGTH.size)
        reply: Any = TO_GATEWAY.decode(await self._reader.readexactly(*LENGTH.unpack(head)))
        if not isinstance(reply, Answer):
            return reply  # type: ignore[no-any-return]
        starts = range(0, reply.nbytes, PIECE_BYTES)
        return [await self._reader.readexactly(min(PIECE_BYTES, reply.nbytes - start)) for start in starts]

    def memory_bytes(self) -> int:
        """What it holds now; 0 when it has ended."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """Kill it, whatever it does."""
        self._writer.transport.abort()
        self.process.kill()

    def reap(self, unexpected: bool) -> None:
        """Wait for its end. Report how it ended if that was unexpected."""
        code = self.process.wait()
        if unexpected:
            print(f"gateway: the process for long prompts {how_it_ended(code)}", file=sys.stderr, flush=True)


async def _start(command: Sequence[str]) -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_child(command, new_session=True, stdin=theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=PIECE_BYTES)
    return _Child(process, reader, writer)
