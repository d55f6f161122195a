"""Events in which clients and operators ask something of the pool: hints and commands. See `events.py`.

Explained in docs/explain/hints.md and docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from typing import Literal

from mooncake_lite.control.message import Event

Verb = Literal["share", "prefetch", "demote", "pin", "retain"]


class HintArrived(Event, frozen=True):
    """A client says how a prefix will be used. HintAnswered answers under its hint_id.

    keys, digests   of the first full blocks of the prefix; empty: those of the latest prompt of `session`
    session         of the tenant; "": none
    seconds         from now on. retain, pin: how long (pin 0: no longer; None: as long as it may); prefetch:
                    until the prefix is needed (None: now); share, demote: not used
    copies          share: stores that are to have the prefix besides those that have it
    """

    hint_id: str
    gateway: str
    verb: Verb
    keys: list[int]
    digests: list[int]
    session: str = ""
    tenant: str = ""
    class_id: int = 0
    seconds: float | None = None
    copies: int = 1


class PoolCommand(Event, frozen=True):
    """A command about the pool that changes it or needs a store rank; AnswerCommand answers under its number.

    keys    blocks of rm, pin and get: all or none
    path    get: the file that a store rank writes the bytes of the block to
    force   rm and rm-all: remove leased blocks too
    hard    pin: never evict
    soft_s  pin: seconds in which the blocks are evicted last; 0.0 without hard removes pins
    """

    command: int
    what: Literal["get", "verify", "compact", "rm", "rm-all", "pin"]
    keys: list[int] = []
    path: str = ""
    force: bool = False
    hard: bool = False
    soft_s: float = 0.0


class CommandAbandoned(Event, frozen=True):
    """The sender of this pool command is gone."""

    command: int
