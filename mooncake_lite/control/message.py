"""The base of all messages between processes, which a recording holds too.

Used by `events.py`, `asked.py`, `effects.py` and `mooncake_lite.messages`. See docs/explain/control.md.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: a tagged, positional MessagePack array."""


class Event(Message, frozen=True):
    """Base of all events."""
