"""One request of a client while it is open: its prompts, and the tokens that have come for their answers.

Filled by `cluster_view`, emptied by `answer`. Each prompt is a Submit of its own, with one answer (branch) or
several. Knows no socket and no text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.gateway.order import InOrder
from mooncake_lite.gateway.problems import Broken
from store.keys import block_digests, prefix_keys


class PromptAnswers:
    """The answers to one prompt, each put in order.

        submit    what was sent to the cluster
        orders    one per branch
        told      branches of which the cluster knows that every token has come
        early     messages of other branches that came before the first one of branch 0
        withheld  messages whose turn has come, while the cluster may still refuse; None: it may not

    The first message of branch 0 is passed on before all others: it also tells about the prompt.
    """

    def __init__(self, submit: m.Submit, *, withheld: bool = False):
        self.submit = submit
        self.told: set[int] = set()
        self.orders = [InOrder(submit.request.max_tokens) for _ in range(submit.request.n)]
        self.early: list[m.Tokens] = []
        self.withheld: list[m.Tokens] | None = [] if withheld else None
        self._withholds, self._came_at = withheld, time.monotonic()
        self._began = False

    @property
    def ended(self) -> bool:
        """Tell whether every answer has ended and may be shown."""
        return self.withheld is None and all(order.ended for order in self.orders)

    def push(self, message: m.Tokens) -> list[m.Tokens]:
        """Return the messages whose turn has come; none while they are withheld."""
        ready = self._in_order(message)
        if self.withheld is None:
            return ready
        self.withheld += ready
        return []

    def newly_whole(self) -> list[int]:
        """Return the branches of which every token has come since the last call."""
        whole = [
            branch for branch, order in enumerate(self.orders) if order.ended and branch not in self.told
        ]
        self.told.update(whole)
        return whole

    def recall(self, recall: m.Recall, block_tokens: int) -> m.Report:
        """Return the answers so far, and take no older tokens from now on."""
        answers, tokens = self._so_far(recall.attempt, recall.branches, block_tokens)
        return m.Report(m.Recalled(recall.request_id, recall.attempt, answers), tokens)

    def again(self, attempt: int, block_tokens: int) -> m.Submit:
        """Return what a new conductor is sent, and take no tokens of this attempt or older from now on."""
        was_shown = self.withheld is None and self._withholds
        answers, tokens = self._so_far(attempt, range(len(self.orders)), block_tokens)
        seconds = time.monotonic() - self._came_at
        request = replace(
            self.submit.request, answers=answers, waited_s=seconds, resumed=was_shown or any(tokens)
        )
        return m.Submit(request, self.submit.body, tokens)

    def _so_far(
        self, attempt: int, branches: Iterable[int], block_tokens: int
    ) -> tuple[list[m.AnswerSoFar], list[list[int]]]:
        """Return the answers so far of branches, and their tokens.

        What is withheld is forgotten: the client has not seen it, and the cluster may still refuse.
        """
        if self.withheld is not None:
            self._forget_withheld()
        answers, tokens = [], []
        for branch in branches:
            order = self.orders[branch]
            order.recall(attempt)
            keys, digests = self._named(order.token_ids, block_tokens)
            answers.append(m.AnswerSoFar(branch, order.next, order.ended, keys, digests))
            tokens.append(order.token_ids)
        return answers, tokens

    def left(self, block_tokens: int) -> m.RequestArrived:
        """Return the request, with keys and digests of the full blocks that it and its first answer leave.

        The last token of an answer has no KV: it was never an input.
        """
        keys, digests = self._named(self.orders[0].token_ids[:-1], block_tokens)
        return replace(self.submit.request, keys=keys, digests=digests)

    def _named(self, answer: list[int], block_tokens: int) -> tuple[list[int], list[int]]:
        body = self.submit.body
        tokens = [*body.token_ids, *answer] if body.salt else []
        return prefix_keys(tokens, block_tokens, body.salt), block_digests(tokens, block_tokens)

    def _forget_withheld(self) -> None:
        self.orders = [InOrder(self.submit.request.max_tokens) for _ in self.orders]
        self.withheld, self.early, self.told, self._began = [], [], set(), False

    def release(self) -> list[m.Tokens]:
        """Withhold nothing more. Returns what was withheld."""
        withheld, self.withheld = self.withheld, None
        return withheld or []

    def _in_order(self, message: m.Tokens) -> list[m.Tokens]:
        if not 0 <= message.branch < len(self.orders):
            return []
        ready = self.orders[message.branch].push(message)
        if self._began or not ready:
            return ready
        if message.branch:
            self.early += ready
            return []
        self._began, early, self.early = True, self.early, []
        return ready + early

    def end(self) -> None:
        """Expect no more tokens."""
        self.withheld = None
        for order in self.orders:
            order.end()


class OpenRequest:
    """One request of a client from its admission to its end: the cluster fills it, its handler empties it.

    ids      of its prompts: each is a request of its own to the cluster, and has a place of its own
    """

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.ids = [request_id]
        self._prompts: dict[str, PromptAnswers] = {}
        self._ready: list[m.Tokens] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def expect(self, submit: m.Submit, *, withheld: bool = False) -> None:
        """A prompt is being submitted. withheld: its tokens are kept back until `release`."""
        self._prompts[submit.request.request_id] = PromptAnswers(submit, withheld=withheld)

    def deliver(self, message: m.Tokens) -> list[m.AnswerReceived]:
        """Tokens from a rank, in any order. Returns what the cluster is told: which answers are whole."""
        prompt = self._prompts.get(message.request_id)
        if prompt is None or self._error is not None:
            return []
        self._show(prompt.push(message))
        return [m.AnswerReceived(message.request_id, branch) for branch in prompt.newly_whole()]

    def recall(self, recall: m.Recall, block_tokens: int) -> m.Report | None:
        """Return the answers so far to a prompt. None: it was never submitted."""
        prompt = self._prompts.get(m.client_id_of(recall.request_id))
        return prompt.recall(recall, block_tokens) if prompt is not None else None

    def again(self, attempt: int, block_tokens: int) -> list[m.Submit]:
        """Return what a new conductor is sent: the prompts with answers that have not ended."""
        if self._error is not None:
            return []
        return [prompt.again(attempt, block_tokens) for prompt in self._prompts.values() if not prompt.ended]

    def left(self, block_tokens: int) -> m.RequestArrived:
        """Return the first prompt's request, with the names of the blocks that it leaves."""
        return self._prompts[self.request_id].left(block_tokens)

    def release(self, request_id: str) -> None:
        """The cluster will not refuse one of the prompts any more."""
        if request_id in self._prompts and self._error is None:
            self._show(self._prompts[request_id].release())

    def _show(self, messages: list[m.Tokens]) -> None:
        self._ready += messages
        if self._ready:
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """No more tokens will come; next() raises this after what has come before."""
        ended = bool(self._prompts) and all(prompt.ended for prompt in self._prompts.values())
        if self._error is None and not ended:
            self._error = error
            self._wake.set()

    def give_up(self, request_id: str, error: Exception) -> None:
        """The cluster has refused or failed one of the prompts, and with it the request."""
        self.fail(error)
        if request_id in self._prompts:
            self._prompts[request_id].end()

    def drop(self, request_id: str, branch: int) -> m.RequestCancelled | None:
        """No more tokens of one answer are wanted. Returns what the cluster must be told, if anything."""
        prompt = self._prompts[request_id]
        if prompt.orders[branch].ended:
            return None
        prompt.orders[branch].end()
        return m.RequestCancelled(request_id, -1 if prompt.ended else branch, answered=True)

    def unfinished(self) -> list[str]:
        """The prompts that were submitted and have answers that have not ended."""
        return [request_id for request_id, prompt in self._prompts.items() if not prompt.ended]

    def raise_if_failed(self) -> None:
        """Raises the error given to fail()."""
        if self._error is not None:
            raise self._error

    async def next(self, limit_s: float) -> list[m.Tokens]:
        """At least one message, each answer's in order and without gaps.

        Raises what fail() was given, or Broken when nothing comes for limit_s.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            raise Broken(f"no token came for {limit_s:g} s") from None
        if not self._ready:
            self.raise_if_failed()
        ready, self._ready = self._ready, []
        if self._error is None:
            self._wake.clear()
        return ready
