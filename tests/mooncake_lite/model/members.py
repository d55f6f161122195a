"""Members of a tensor parallel group in this process: a thread each, which meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import Model, load_model
from mooncake_lite.model.shares import shares_of

T = TypeVar("T")
LIMIT_S = 20.0


class Meeting:
    """Where members meet. calls: (kind, bytes of what each member brought), in order."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LIMIT_S)
        self.brought: list[Any] = [None] * count
        self.calls: list[tuple[str, tuple[int, ...]]] = []


class MetExchange:
    """An exchange between threads."""

    def __init__(self, meeting: Meeting, member: int) -> None:
        self.member, self._meeting = member, meeting

    def sum(self, x: np.ndarray) -> None:
        assert x.dtype == np.float32
        assert x.flags.c_contiguous
        first, *others = self._met("sum", x)
        assert all(one.shape == x.shape for one in others)
        np.copyto(x, first)
        for other in others:
            x += other

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        assert x.ndim == 1
        return self._met("gather", x)

    def _met(self, kind: str, x: np.ndarray) -> list[np.ndarray]:
        meeting = self._meeting
        meeting.brought[self.member] = (kind, x.copy())
        meeting.barrier.wait()
        kinds, found = zip(*meeting.brought)
        assert set(kinds) == {kind}, f"member {self.member} asks for {kind}, all for {kinds}"
        if self.member == 0:
            meeting.calls.append((kind, tuple(one.nbytes for one in found)))
        meeting.barrier.wait()
        return list(found)


class Group:
    """The members of a group.

    each   (what to do with something of each member, one of them per member) -> what came of each
    """

    def __init__(self, folder: Path, members: int, **options: Any) -> None:
        self.meeting = Meeting(members)
        self.models: list[Model] = [
            load_model(folder, share=share, exchange=MetExchange(self.meeting, share.member), **options)
            for share in shares_of(load_config(folder), members=members)
        ]

    def each(self, do: Callable[..., T], *of_each: Sequence[Any]) -> list[T]:
        def one(*given: Any) -> T:
            try:
                return do(*given)
            except BaseException:
                self.meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.models)) as threads:
            futures = [threads.submit(one, *given) for given in zip(*of_each, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
