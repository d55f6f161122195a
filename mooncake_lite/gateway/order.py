"""Puts the tokens of one answer in order: they come from a prefill rank and then from decode ranks.

Used by `cluster` for each open request. Pure. Two ranks send over two sockets, so the first token may
be overtaken; a request that is tried again on another rank sends its first tokens again.
"""

from __future__ import annotations

from msgspec.structs import replace

from mooncake_lite.messages import Tokens


class InOrder:
    """Tokens messages in, the same without gaps and repetitions out.

        token_ids  those that were passed on, in order
        next       index of the first one that was not
        least      attempt of the oldest tokens that are taken; older ones come from before a Recall
        waiting    index -> message that came before its turn

    Invariant: after each push every waiting message begins beyond `next` and ends within max_tokens.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.least = 0
        self.waiting: dict[int, Tokens] = {}
        self.ended = False

    @property
    def next(self) -> int:
        """The index of the first token that was not passed on."""
        return len(self.token_ids)

    def push(self, message: Tokens) -> list[Tokens]:
        """Take a message, and return those whose turn has come, in order, with new tokens only.

        Dropped: a message after the end, one that begins below 0 or ends beyond max_tokens, and one of an
        attempt below `least`. A message that begins beyond `next` waits in `waiting`; of two that begin at
        one index the longer one waits, and of two of one length the one that came last. Those that begin at
        `next` or before it have their turn, by index. Such a message is passed on `_without` the tokens that
        were passed on before, and the others join `token_ids`. If it has no other tokens it is dropped,
        unless it has a `finish` and ends at `next`. A message with a `finish` is the last one: the answer is
        at its `end` then.
        """
        # labs:begin 8d
        end = message.index + len(message.token_ids)
        if self.ended or message.index < 0 or end > self.max_tokens or message.attempt < self.least:
            return []
        known = self.waiting.get(message.index)
        if known is None or end >= known.index + len(known.token_ids):
            self.waiting[message.index] = message
        turn: list[Tokens] = []
        for index in sorted(self.waiting):
            if index > self.next or self.ended:
                break
            ready = self.waiting.pop(index)
            known_tokens = self.next - index
            is_old = known_tokens > len(ready.token_ids)
            if is_old or not (ready.token_ids[known_tokens:] or ready.finish):
                continue
            self.token_ids += ready.token_ids[known_tokens:]
            self.ended = ready.finish is not None
            turn.append(_without(ready, known_tokens))
        if self.ended:
            self.end()
        return turn
        # labs:end 8d

    def recall(self, attempt: int) -> None:
        """Take no more tokens of this attempt or an earlier one, and forget those that wait for others."""
        self.least = max(self.least, attempt + 1)
        self.waiting.clear()

    def end(self) -> None:
        """Expect no more tokens: what comes from now on is dropped."""
        self.ended = True
        self.waiting.clear()

    def check(self) -> None:
        """Asserts the invariant."""
        for index, message in self.waiting.items():
            assert self.next < index == message.index
            assert index + len(message.token_ids) <= self.max_tokens


def _without(message: Tokens, known_tokens: int) -> Tokens:
    """Return a message without its first tokens, which were passed on before, and what is said about them."""
    if not known_tokens:
        return message
    return replace(
        message,
        index=message.index + known_tokens,
        token_ids=message.token_ids[known_tokens:],
        cached_tokens={},
        logprobs=message.logprobs[known_tokens:],
        prompt_logprobs=[],
    )
