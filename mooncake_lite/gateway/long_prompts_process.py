"""The process for long prompts: `python -m mooncake_lite.gateway.long_prompts_process RUN_DIR < SOCKET`.

Started by `long_prompts` and ended by it, or when the gateway dies. Works on one body at a time, and may hold
its interpreter's lock as long as it likes. Knows no HTTP. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from pathlib import Path

from mooncake_lite.errors import RequestError, UserError
from mooncake_lite.gateway.long_frames import LENGTH, TO_PROCESS, Answer, Problem, Task, frame
from mooncake_lite.gateway.problems import surprise
from mooncake_lite.gateway.prompt_work import PromptWork
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.model import load_tokenizer
from transport.errors import WireError

NICENESS = 5
"""The ranks that compute come first, and the gateway's other work."""


def serve(stream: io.BufferedRWPair, work: PromptWork) -> None:
    """Answer every Task until the gateway closes the stream."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        task: Task = TO_PROCESS.decode(stream.read(*LENGTH.unpack(head)))
        raw = stream.read(task.nbytes)
        if len(raw) == task.nbytes:
            stream.writelines(_reply(work, task, raw))
            stream.flush()


def _reply(work: PromptWork, task: Task, raw: bytes) -> list[bytes]:
    try:
        result = work.do(task.kind, task.request_id, raw)
        return [frame(Answer(len(result))), result] if isinstance(result, bytes) else [frame(result)]
    except RequestError as error:
        return [frame(Problem.of(error))]
    except WireError as error:
        problem = f"the prompts are too many for one request: {error}; send them in several requests"
        return [frame(Problem.of(RequestError(problem, param="prompt")))]
    except Exception as error:
        return [frame(Problem.of(surprise(error)))]


def main(arguments: list[str]) -> int:
    """Serve the socket that is stdin; returns the exit code."""
    os.nice(NICENESS)
    try:
        settings = read_settings(Path(arguments[0]))
        work = PromptWork(settings, load_tokenizer(settings.model_folder))
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
