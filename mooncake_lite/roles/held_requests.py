"""Held requests: what the control plane may not see (tokens, sampling, salt, gateway), and messages made of
it.

Used by the conductor role, from Submit until the effect Forget. No decisions.
"""

from __future__ import annotations

from copy import copy

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from store.keys import PrefixChain, block_digests


class HeldRequest:
    """One open request.

    token_ids   the prompt, and the part of the answer that the conductor knows
    keys        prefix key of each full block of token_ids; empty when nothing may be reused
    salt        start of the key chain; empty when nothing may be reused
    answered    number of token_ids that belong to the answer; with n > 1, answers are not kept here
    n           answers to the prompt; branch: number of the first one
    first_tokens   that prefill has drawn for n > 1 branches
    alone       branch -> what goes on as a request of its own once the control plane agrees
    attempt     of the last StartPrefill, StartServe or StartDecode
    loaded, stored   blocks that this attempt reuses, and that it writes
    offers      full blocks that have no place in the pool yet are offered to it
    spans       time of each stage so far
    """

    def __init__(self, submit: m.Submit, reuse: bool, has_pool: bool) -> None:
        self.submit = submit
        self.salt = submit.salt if reuse else b""
        self.offers = has_pool and bool(self.salt)
        self.request_id = submit.request_id
        self.gateway = submit.gateway
        self.token_ids = submit.token_ids
        self.keys = list(submit.keys)
        self.answered = 0
        self.n, self.branch = submit.n, 0
        self.first_tokens: list[int] = []
        self.alone: dict[int, HeldRequest] = {}
        self.attempt = 0
        self.loaded = 0
        self.stored = 0
        self.spans: list[m.Span] = []

    def decided(self, seconds: float) -> None:
        """Record how long a policy took to place the request."""
        self.spans.append(m.Span("decide", 0, seconds))

    def prefill_message(self, order: fx.StartPrefill) -> m.Prefill:
        """Return the message that tells a prefill rank what to load, compute and store."""
        self._started(order)
        self.stored = len(order.store)
        submit = self.submit
        return m.Prefill(
            self.request_id, submit.gateway, self.token_ids, order.load, order.store, order.tail,
            submit.sampling, submit.max_tokens, submit.stop_ids, self.answered,
            {} if self.answered else order.cached, self.spans, order.attempt, self.keys, self.salt,
            self.n, self.branch,
        )  # fmt: skip

    def serve_message(self, order: fx.StartServe) -> m.Serve:
        """Return the message that tells a rank to compute the prompt and to decode on."""
        self._started(order)
        submit = self.submit
        return m.Serve(
            self.request_id, submit.gateway, self.token_ids, order.load, self.offers, submit.sampling,
            submit.max_tokens, submit.stop_ids, self.answered, {} if self.answered else order.cached,
            self.spans, order.attempt, self.keys, self.salt, self.n, self.branch,
        )  # fmt: skip

    def _started(self, order: fx.StartPrefill | fx.StartServe) -> None:
        self.attempt, self.loaded = order.attempt, len(order.load)
        self.spans.append(m.Span("queue", 0, order.queued_s))
        self.spans += [m.Span("promote", *load) for load in order.promoted]

    def first_token(self, done: m.PrefillDone) -> None:
        """Append the token that prefill sampled, or keep those of several branches."""
        self.spans = done.spans
        if self.n > 1:
            self.first_tokens = done.first_tokens
            return
        self.token_ids = [*self.token_ids, *done.first_tokens]
        self.answered += 1

    def decode_message(self, order: fx.StartDecode) -> m.Decode:
        """Return the message that tells a decode rank where the KV is."""
        self.attempt, submit = order.attempt, self.submit
        answers = [m.Answer(branch, [self.first_tokens[branch]]) for branch in order.branches if self.n > 1]
        return m.Decode(
            self.request_id, submit.gateway, self.token_ids, self.answered, order.blocks, order.tail,
            self.keys, self.salt, submit.sampling, submit.max_tokens, submit.stop_ids, self.spans,
            order.attempt, self.branch, answers, self.offers,
        )  # fmt: skip

    @property
    def client_id(self) -> str:
        """Return the id under which the gateway knows this request."""
        return self.submit.request_id

    def branched(self, branch: int, name: str) -> HeldRequest:
        """Return a preempted branch as a request of its own."""
        alone = self.alone.pop(branch)
        alone.request_id = name
        return alone

    def preempted(self, message: m.Preempted | m.Swapped, block_tokens: int) -> tuple[list[int], list[int]]:
        """Take over prompt and answer so far. Returns keys and digests of their full blocks."""
        if self.n > 1:
            alone = self.alone[message.branch] = copy(self)
            alone.n, alone.branch, alone.attempt, alone.keys, alone.alone = (
                1, message.branch, 0, list(self.keys), {},
            )  # fmt: skip
            return alone.preempted(message, block_tokens)
        token_ids = message.token_ids
        self.token_ids, self.answered, self.spans = token_ids, message.answered, []
        if not self.salt:
            return [], []
        known = len(self.keys)
        last_key = self.keys[-1] if self.keys else None
        chain = PrefixChain(block_tokens, self.salt, last_key=last_key)
        self.keys += chain.extend(token_ids[known * block_tokens :])
        return list(self.keys), block_digests(token_ids, block_tokens)

    def stored_blocks(self, block_tokens: int) -> tuple[list[int], list[int], int | None]:
        """Return keys and tokens of the blocks that this attempt wrote, and the key before them."""
        first = self.loaded
        parent = self.keys[first - 1] if first and self.keys else None
        return self.keys[first : first + self.stored], self.token_ids[first * block_tokens :], parent
