"""Between `mooncake-lite explain` and the conductor. Explained in docs/explain/conductor.md."""

from __future__ import annotations

from mooncake_lite.messages.parts import Message
from scheduler.placement.explanation import Explanation


class Explain(Message, frozen=True):
    """The command -> conductor: ask what was compared when this request was placed or refused."""

    request: str


class Explained(Message, frozen=True):
    """The answer. Without an explanation, `last` names the requests that have one, the last one last."""

    explanation: Explanation | None
    last: list[str]
