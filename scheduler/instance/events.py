"""Events that change what a rank does next, other than the results of its steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from scheduler.instance.job import Job, JobId
from scheduler.instance.step import Late, TransferEnded


@dataclass(frozen=True, slots=True)
class Arrived:
    """A job has arrived."""

    job: Job


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client or the conductor has given this attempt of a request up, or one branch of it."""

    request_id: str
    attempt: int
    branch: int | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Prefixes in this rank's pages may not be reused any more. Running sequences go on."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The pool answers an offer: a place for each of its blocks, None where the block is not wanted."""

    put: int
    places: Seq[Any]


@dataclass(frozen=True, slots=True)
class SwapAnswered:
    """The pool answers SwapWanted.

    places   for each block of the job's KV: where it goes, None where the pool has it; None: it has no space
    """

    job: JobId
    places: Seq[Any] | None


@dataclass(frozen=True, slots=True)
class Moved:
    """Transfers of halves have ended, or tokens come late, while a step is under way.

    The only event that may come then.
    """

    ended: Seq[TransferEnded]
    late: Seq[Late] = ()


Event = Arrived | Moved | Cancelled | Forgotten | Granted | SwapAnswered
