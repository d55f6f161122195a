"""Hands long bodies to a separate process, so that other requests do not wait for them.

Used by `prompts`. Owns the process: starts it when the first long body comes, ends it when a body takes too
long or its client leaves, and starts another for the next. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.long_frames import LENGTH, TO_GATEWAY, Problem, PromptAnswer, PromptTask, frame
from mooncake_lite.gateway.problems import Broken, Refused
from mooncake_lite.gateway.prompt_work import Kind, Prepared, too_much_memory
from mooncake_lite.gateway.shortest_first import ShortestFirst
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.messages import HintArrived
from transport.errors import WireError

LIMIT_S = 30.0
"""The longest time for one body, the start of the process included."""

WAIT_S = 60.0
"""The longest wait for the process. Clients would rather hear of a queue than give up in it."""

KEEP_BYTES = 512 * 2**20
"""A process that has more memory after its work would keep it: the next body has another process."""

QUEUE_BYTES = 64 * 2**20
"""Bytes of all bodies that are in work or waiting: eight bodies of 8 MiB."""

PIECE_BYTES = 256 * 1024
"""Bodies and answers are copied in pieces of this size, between which the event loop does other things."""


def command(run_dir: Path, memory_bytes: int) -> list[str]:
    """Return the command of a process for this run folder, whose work may take so much memory."""
    program = "mooncake_lite.gateway.long_prompts_process"
    return [sys.executable, "-m", program, str(run_dir), str(memory_bytes)]


class LongPrompts:
    """A process for long prompts, one body at a time, and the bodies that wait for it.

    command      starts the process, whose stdin is a socket
    queue        bodies that may be here at once, the one in work included
    queue_bytes  of all these bodies
    limit_s      for one body
    keep_bytes   memory with which the process may wait for the next body

    Starting a process takes long on a busy machine, so a thread does it. That thread lives until close(): the
    kernel ends the process when the thread ends that started it.
    """

    def __init__(self, command: Sequence[str], queue: int, queue_bytes: int = QUEUE_BYTES):
        self._command = command
        self._queue = queue
        self._queue_bytes = queue_bytes
        self.limit_s = LIMIT_S
        self.keep_bytes = KEEP_BYTES
        self._here = 0
        self._here_bytes = 0
        self.turns = ShortestFirst(WAIT_S)
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="start-long-prompts")
        self._child: _Child | None = None

    async def do(self, kind: Kind, request_id: str, raw: bytes) -> Prepared | HintArrived | list[bytes]:
        """As PromptWork.do, with the JSON in pieces.

        Raises RequestError: what the work raises; Refused when too many bodies wait, or this one waits for
        too long; and when the work takes longer than its limit, or its process ends. A caller that is
        cancelled ends the work.
        """
        self._check_room(len(raw))
        self._here += 1
        self._here_bytes += len(raw)
        try:
            async with self.turns.turn(len(raw)):
                reply = await self._exchange(PromptTask(kind, request_id, len(raw)), raw)
        finally:
            self._here -= 1
            self._here_bytes -= len(raw)
        if isinstance(reply, Problem):
            raise reply.error()
        return reply

    def _check_room(self, nbytes: int) -> None:
        """Raises Refused. A body that is alone here always has room."""
        if self._here >= self._queue:
            what = f"{self._here} long prompts are waiting, which is the limit"
        elif self._here and self._here_bytes + nbytes > self._queue_bytes:
            what = (
                f"long prompts of {self._here_bytes} bytes are waiting; with this one of {nbytes} they would "
                f"exceed the limit of {self._queue_bytes}"
            )
        else:
            return
        raise Refused(f"{what}; come back later", self.turns.longest_wait_s())

    async def _exchange(self, task: PromptTask, raw: bytes) -> Prepared | HintArrived | list[bytes] | Problem:
        child = await self._living_child()
        try:
            async with asyncio.timeout(self.limit_s):
                reply = await child.exchange(task, raw)
            if child.memory_bytes() > self.keep_bytes:
                self._end(child)
            return reply
        except TimeoutError:
            self._end(child)
            raise RequestError(
                f"this body of {len(raw)} bytes was worked on for {self.limit_s:g} s, which is the limit; "
                "send a shorter prompt",
                code="prompt_too_slow",
            ) from None
        except (OSError, EOFError, WireError):
            if await self._end(child, unexpected=True) == -signal.SIGABRT:  # Rust's answer to a full memory
                raise too_much_memory(len(raw)) from None
            raise Broken("the process that tokenises long prompts ended; send the request again") from None
        except BaseException:  # cancelled: the reply would be taken for that to the next body
            self._end(child)
            raise

    async def _living_child(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._end(self._child, unexpected=True)
        if self._child is not None:
            return self._child
        try:
            return await asyncio.get_running_loop().run_in_executor(self._starter, self._start)
        except OSError as error:
            raise Broken(f"the process for long prompts cannot be started: {error.strerror}") from None

    def _start(self) -> _Child:
        """In the starter's thread: start the process, unless one was started for a caller that has left."""
        if self._child is None:
            self._child = _Child(self._command)
        return self._child

    def _end(self, child: _Child, unexpected: bool = False) -> asyncio.Future[int]:
        """Kill the process; the exit code to come. Its memory is taken back while others are served."""
        self._child = None
        child.kill()
        return asyncio.get_running_loop().run_in_executor(None, child.reap, unexpected)

    def close(self) -> None:
        """End the process and wait for its end; call it last."""
        self._starter.shutdown(cancel_futures=True)
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap(False)


class _Child:
    """One life of the process. Making it starts the process; a kill() at any later moment ends it."""

    def __init__(self, command: Sequence[str]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = start_child(command, new_session=True, stdin=theirs)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, task: PromptTask, raw: bytes) -> Prepared | HintArrived | list[bytes] | Problem:
        """Send a body and await the reply. Raises OSError, EOFError or WireError when the process ends."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket, limit=PIECE_BYTES)
        reader, writer = self._streams
        writer.write(frame(task))
        view = memoryview(raw)
        for start in range(0, len(raw), PIECE_BYTES):
            writer.write(view[start : start + PIECE_BYTES])
            await writer.drain()
        head = await reader.readexactly(LENGTH.size)
        reply: Any = TO_GATEWAY.decode(await reader.readexactly(*LENGTH.unpack(head)))
        if not isinstance(reply, PromptAnswer):
            return reply  # type: ignore[no-any-return]
        starts = range(0, reply.nbytes, PIECE_BYTES)
        return [await reader.readexactly(min(PIECE_BYTES, reply.nbytes - start)) for start in starts]

    def memory_bytes(self) -> int:
        """Return the memory that the process holds now; 0 when it has ended."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()

    def reap(self, unexpected: bool) -> int:
        """Wait for its end; the exit code. Report how it ended if that was unexpected."""
        code = self.process.wait()
        if unexpected:
            print(f"gateway: the process for long prompts {how_it_ended(code)}", file=sys.stderr, flush=True)
        return code
