"""A process that has no file descriptor left, for tests of what servers do then."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    """This process can open no file meanwhile, or only so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    gaps = [os.open(os.devnull, os.O_RDONLY)]
    while gaps[-1] <= highest + but:
        gaps.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1], hard))
    for _ in range(but):
        os.close(gaps.pop(-2))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in gaps:
            os.close(fd)
