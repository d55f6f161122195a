"""Hints about the pages of one rank, in a process that has no pool and no conductor.

Used by `LLM`, while the rank computes nothing. Explained in docs/how-to/give-hints.md.
"""

from __future__ import annotations

from collections import OrderedDict

from mooncake_lite import messages as m
from scheduler.instance import State
from scheduler.instance.prefix import Chain

MOST_SESSIONS = 4096
"""Sessions that are remembered; the one that was quiet longest goes."""

NOT_HERE: dict[m.Verb, str] = {
    "share": "this process has one set of pages, and no stores",
    "prefetch": "this process has no SSD tier",
    "demote": "this process evicts pages by their last use",
    "pin": "a request of this process may need all of its pages; retain keeps blocks longest",
}
"""Verbs that cannot be carried out -> why."""


class PageHints:
    """Retains pages.

    _sessions   session -> its latest prompt, the longest quiet first
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sessions = OrderedDict[str, m.Submit]()

    def note_session(self, submit: m.Submit) -> None:
        """Note which prompt a session has."""
        if submit.request.session:
            self._sessions[submit.request.session] = submit
            self._sessions.move_to_end(submit.request.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def give(
        self, hint: m.HintArrived, submit: m.Submit | None, state: State, now: float
    ) -> tuple[m.HintOutcome, int, int, float, str]:
        """Carry out a hint. submit: its prompt; None: that of its session.

        Returns the fields of HintAnswered: outcome, blocks, affected, lasts_s and reason.
        """
        submit = submit or self._sessions.get(hint.session)
        if submit is None:
            return "rejected", 0, 0, 0.0, f"no request has had the session {hint.session!r}"
        keys, pages, prefix = submit.request.keys, state.pages, state.prefix
        if hint.verb != "retain":
            return "rejected", len(keys), 0, 0.0, NOT_HERE[hint.verb]
        chain, end = Chain(submit.body.salt or None, keys), len(keys) * self._block_tokens
        found = prefix.match(chain, submit.body.token_ids, end)
        affected = len(found) * pages.page_tokens // self._block_tokens
        if not affected or not hint.seconds:
            why = "no full block of the prefix is here" if hint.seconds else "retain needs seconds above 0"
            return "rejected", len(keys), 0, 0.0, why
        pages.retain(found, now + hint.seconds)
        outcome: m.HintOutcome = "accepted" if affected == len(keys) else "clipped"
        return (
            outcome,
            len(keys),
            affected,
            hint.seconds,
            "the blocks that are here are evicted after all others",
        )
