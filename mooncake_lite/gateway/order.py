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
        """The messages whose turn has come, without tokens that were passed on before."""
        end = message.index + len(message.token_ids)
        if self.ended or message.index < 0 or end > self.max_tokens or message.attempt < self.least:
            return []
        known = self.waiting.get(message.index)
        if known is None or end >= known.index + len(known.token_ids):
            self.waiting[message.index] = message
        turn = []
        while (ready := self._take()) is not None:
            turn.append(ready)
        if self.ended:
            self.end()
        return turn

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

    def _take(self) -> Tokens | None:
        """The next message in order, cut to what is new; None when it has not come."""
        for index in sorted(self.waiting):
            if index > self.next:
                return None
            message = self.waiting.pop(index)
            skip = self.next - index
            new = message.token_ids[skip:]
            repeated = self.next > index + len(message.token_ids)
            if repeated or not (new or message.finish):
                continue
            first = index == self.next
            self.token_ids += new
            self.ended = message.finish is not None
            if first:
                return message
            return replace(
                message,
                index=self.next - len(new),
                token_ids=new,
                cached_tokens={},
                logprobs=message.logprobs[skip:],
                prompt_logprobs=[],
            )
        return None
