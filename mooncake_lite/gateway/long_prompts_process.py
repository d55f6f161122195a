"""A process for long prompts: `python -m mooncake_lite.gateway.long_prompts_process RUN_DIR BYTES < SOCKET`.

BYTES is the memory that work on a body may take. Started by `long_prompts` and ended by it, or when the
gateway dies. Works on one body at a time, and may hold its interpreter's lock as long as it likes. Knows no
HTTP. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import socket
import sys
import time
from pathlib import Path

import psutil

from mooncake_lite.errors import RequestError, UserError
from mooncake_lite.gateway.long_frames import LENGTH, TO_PROCESS, Problem, PromptAnswer, PromptTask, frame
from mooncake_lite.gateway.problems import surprise
from mooncake_lite.gateway.prompt_work import PromptWork, too_much_memory
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.model.tokenizer import load_tokenizer
from transport.errors import WireError

NICENESS = 5
"""The ranks that compute come first, and the gateway's other work."""

AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of this process's session. Linux first shares the cores among sessions; the niceness of a
process counts only within its session."""


def serve(stream: io.BufferedRWPair, work: PromptWork) -> None:
    """Answer every PromptTask until the gateway closes the stream."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        task: PromptTask = TO_PROCESS.decode(stream.read(*LENGTH.unpack(head)))
        raw = stream.read(task.nbytes)
        if len(raw) == task.nbytes:
            stream.writelines(_reply(work, task, raw))
            stream.flush()


def _reply(work: PromptWork, task: PromptTask, raw: bytes) -> list[bytes]:
    try:
        result = work.do(task.kind, task.request_id, raw)
        return [frame(PromptAnswer(len(result))), result] if isinstance(result, bytes) else [frame(result)]
    except RequestError as error:
        return [frame(Problem.of(error))]
    except MemoryError:
        return [frame(Problem.of(too_much_memory(task.nbytes)))]
    except WireError as error:
        problem = f"the prompts are too many for one request: {error}; send them in several requests"
        return [frame(Problem.of(RequestError(problem, param="prompt")))]
    except Exception as error:
        return [frame(Problem.of(surprise(error)))]


def _give_way() -> None:
    """Lower the priority of this process and of its session, which has no other process."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # no Linux, or one without autogroups
        while True:
            try:
                AUTOGROUP.write_text(str(NICENESS))
                return
            except BlockingIOError:  # another process did the same within the last 0.1 s
                time.sleep(0.1)


def _limit_memory(nbytes: int) -> None:
    """Let every attempt to get more than so much further memory fail."""
    size = psutil.Process().memory_info().vms + nbytes
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main(arguments: list[str]) -> int:
    """Serve the socket that is stdin; returns the exit code."""
    _give_way()
    try:
        settings = read_settings(Path(arguments[0]))
        work = PromptWork(settings, load_tokenizer(settings.model_folder))
        _limit_memory(int(arguments[1]))
    except UserError as error:
        print(f"the process for long prompts: {error}", file=sys.stderr)
        return 2
    with (
        contextlib.suppress(ConnectionError),  # the gateway has gone
        socket.socket(fileno=0) as connection,
        connection.makefile("rwb") as stream,
    ):
        serve(stream, work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
