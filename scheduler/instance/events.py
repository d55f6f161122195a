"""Events that change what a rank does next, other than the results of its steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from scheduler.instance.job import Job, JobId
from scheduler.instance.step import Late, TransferEnded


class Arrived(msgspec.Struct, frozen=True):
    """A job has arrived."""

    job: Job


class Cancelled(msgspec.Struct, frozen=True):
    """The client or the conductor has given this attempt of a request up, or one branch of it."""

    request_id: str
    attempt: int
    branch: int | None = None


class Forgotten(msgspec.Struct, frozen=True):
    """Prefixes in this rank's pages may not be reused any more. Running sequences go on."""


class Granted(msgspec.Struct, frozen=True):
    """The pool answers an offer: a place for each of its blocks, None where the block is not wanted."""

    put: int
    places: Seq[Any]


class SwapAnswered(msgspec.Struct, frozen=True):
    """The pool answers SwapWanted.

    places   for each block of the job's KV: where it goes, None where the pool has it; None: it has no space
    """

    job: JobId
    places: Seq[Any] | None


class Moved(msgspec.Struct, frozen=True):
    """Transfers of halves have ended, or tokens come late, while a step is under way.

    The only event that may come then.
    """

    ended: Seq[TransferEnded]
    late: Seq[Late] = ()


Event = Arrived | Moved | Cancelled | Forgotten | Granted | SwapAnswered
