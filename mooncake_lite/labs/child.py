"""The child: imports a student's code, gets inputs and returns observations. It knows no expected value.

    python -m mooncake_lite.labs.child DRIVER

DRIVER is a driver of the lab. A line on stdin is a call, `{"call": ..., "inputs": ...}`. A line on the stream
that was stdout is its answer; prints of the student's code go to stderr.
Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

GPU = "MOONCAKE_LITE_LABS_GPU"
"""Variable of a child that runs kernels on a GPU, in place of Numba's simulator."""

PACKAGES = f"{os.sep}site-packages{os.sep}"
"""Where installed packages lie, perhaps inside the tree."""

Driver = dict[str, Callable[[Any], Any]]


class Call(msgspec.Struct, frozen=True):
    """An input: which function of the driver to call, and with what."""

    call: str
    inputs: Any


class Raised(msgspec.Struct, frozen=True):
    """An exception: its type, its message, and (file, line, function) of each frame inside the tree."""

    type: str
    message: str
    where: list[tuple[str, int, str]] = []


class CallAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came back. files: digests of the tree's files that are loaded, told once."""

    value: Any = None
    raised: Raised | None = None
    files: dict[str, str] = {}


def raised(error: BaseException) -> Raised:
    """Describe an exception for the parent."""
    root = os.getcwd() + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    where = [
        (frame.filename.removeprefix(root), frame.lineno or 0, frame.name)
        for frame in frames
        if frame.filename.startswith(root) and frame.filename != __file__ and PACKAGES not in frame.filename
    ]
    if isinstance(error, SyntaxError) and (error.filename or "").startswith(root):
        where.append(((error.filename or "").removeprefix(root), error.lineno or 0, ""))
    try:
        message = str(error)
    except Exception:  # a student's own exception
        message = "its message cannot be read"
    return Raised(type(error).__name__, message[:2000], where[-20:])


def load(path: str) -> Any:
    """Import the module in a file. Raises what it raises when it is imported."""
    specification = importlib.util.spec_from_file_location("loaded", path)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def file_digest(path: Path) -> str:
    """Return a short digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def loaded_files() -> dict[str, str]:
    """Return {file: digest} of the modules that come from this tree, but for an environment within it."""
    root = Path.cwd()
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and PACKAGES not in path and Path(path).is_relative_to(root):
            found[str(Path(path).relative_to(root))] = file_digest(Path(path))
    return found


def answer(driver: Driver, line: bytes) -> CallAnswer:
    """Make one call. What it raises is an observation too."""
    try:
        call = msgspec.json.decode(line, type=Call)
        return CallAnswer(driver[call.call](call.inputs))
    except Exception as error:
        return CallAnswer(raised=raised(error))


def main() -> None:
    """Answer calls until stdin is closed."""
    sys.path.insert(0, os.getcwd())
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()

    def reply(said: CallAnswer) -> None:
        try:
            line = encoder.encode(said)
        except (TypeError, ValueError, RecursionError) as error:
            line = encoder.encode(CallAnswer(raised=raised(error)))
        replies.write(line + b"\n")
        replies.flush()

    try:
        driver: Driver = load(sys.argv[1]).CALLS
    except Exception as error:
        reply(CallAnswer(raised=raised(error), files=loaded_files()))
        return
    reply(CallAnswer(files=loaded_files()))
    for line in sys.stdin.buffer:
        said = answer(driver, line)
        sys.stdout.flush()
        reply(said)


if __name__ == "__main__":
    main()
