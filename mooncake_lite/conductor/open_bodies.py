"""The part of each open request that only ranks need: tokens, sampling, and the time spent so far.

Used by the conductor role and the simulator, from Submit until the effect Forget. The control plane sees none
of it.
"""

from __future__ import annotations

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.control.effects import Branched, Order, Prefetch
from mooncake_lite.control.request import client_id_of


class OpenBody:
    """The body of one open request, and what changes in it.

    request_id     of the request, or of a branch that goes on alone; class_id: its service class
    prompt_tokens  of its token_ids, tokens of the prompt
    first_tokens   branch -> its first token, of several branches
    alone          branch -> its prompt and answer, until it goes on as a request of its own
    loaded, stored blocks that the present attempt reuses, and that it writes
    """

    def __init__(self, request_id: str, body: m.Body, class_id: int) -> None:
        self.request_id, self.class_id = request_id, class_id
        self.body = self._first = body
        self.prompt_tokens = len(body.token_ids) - body.answered
        self.first_tokens: dict[int, int] = {}
        self.alone: dict[int, OpenBody] = {}
        self.loaded = self.stored = 0

    @classmethod
    def of(cls, submit: m.Submit, reuse: bool, has_pool: bool) -> OpenBody:
        """Keep the body of a new request. reuse: prefixes are reused at all."""
        request, salt = submit.request, submit.body.salt if reuse else b""
        body = replace(
            submit.body, salt=salt, max_tokens=request.max_tokens, keys=request.keys, n=request.n,
            offers=has_pool and bool(salt),
        )  # fmt: skip
        return cls(request.request_id, body, request.class_id)

    @property
    def client_id(self) -> str:
        """Return the id under which the gateway knows this request."""
        return client_id_of(self.request_id)

    def decided(self, seconds: float) -> None:
        """Note how long a policy took to place the request."""
        self.body = replace(self.body, spans=[*self.body.spans, m.Span("decide", 0, seconds)])

    def start(self, order: m.StartOrder) -> m.Start:
        """Return an order with the body that its rank needs."""
        body = self.body
        if isinstance(order, m.StartDecode):
            if body.n > 1:
                answers = [m.BranchAnswer(branch, [self.first_tokens[branch]]) for branch in order.branches]
                body = replace(body, answers=answers)
            return m.Start(order, body)
        self.loaded = len(order.load)
        self.stored = len(order.store) if isinstance(order, m.StartPrefill) else 0
        return m.Start(order, body)

    def prefetch(self, order: Prefetch) -> m.PrefetchTokens:
        """Return a hint with the tokens of its blocks."""
        body = self.body
        keys = body.keys[: len(order.blocks)]
        return m.PrefetchTokens(order, body.token_ids[: order.num_tokens], body.salt, keys)

    def prefilled(self, report: m.Report) -> None:
        """Append the first token, or keep those of several branches."""
        body, first = self._first, [tokens[0] for tokens in report.token_ids]
        self.body = replace(body, spans=report.spans)
        if body.n > 1:
            self.first_tokens = dict(enumerate(first, body.branch))
        else:
            token_ids = body.token_ids[:]
            token_ids.extend(first)
            self.body = replace(self.body, token_ids=token_ids, answered=body.answered + len(first))

    def preempted(self, event: m.Preempted | m.Swapped, token_ids: list[int]) -> None:
        """Take over prompt and answer so far: of this request, or of a branch that may go on alone."""
        self._go_on(event.branch, token_ids, event.keys)

    def recalled(self, so_far: list[m.AnswerSoFar], answers: list[list[int]]) -> None:
        """Take over the answers so far: of this request, or of branches that may go on alone.

        Branches none of which has a token begin again together.
        """
        self.first_tokens, self.body = {}, self._first
        prompt = self.body.token_ids[: self.prompt_tokens]
        if self.body.n > 1 and not any(answers):
            return
        for one, answer in zip(so_far, answers, strict=True):
            token_ids = prompt[:]
            token_ids.extend(answer)
            self._go_on(one.branch, token_ids, one.keys)

    def _go_on(self, branch: int, token_ids: list[int], keys: list[int]) -> None:
        body = replace(
            self.body, token_ids=token_ids, answered=len(token_ids) - self.prompt_tokens, keys=keys, n=1,
            branch=branch, spans=[],
        )  # fmt: skip
        if self.body.n > 1:
            self.alone[branch] = OpenBody(self.request_id, body, self.class_id)
        else:
            self.body = self._first = body

    def branched(self, branch: int, name: str) -> OpenBody:
        """Return a preempted branch as a request of its own."""
        alone = self.alone.pop(branch)
        alone.request_id = name
        return alone

    def stored_blocks(
        self, block_tokens: int, first: int = 0, count: int = 1 << 30
    ) -> tuple[list[int], list[int], int | None]:
        """Return keys and tokens of blocks that this attempt wrote, from its `first` one on, and the key
        before them."""
        first, end, keys = self.loaded + first, self.loaded + min(first + count, self.stored), self.body.keys
        parent = keys[first - 1] if first and keys else None
        return keys[first:end], self.body.token_ids[first * block_tokens : end * block_tokens], parent


class OpenBodies(dict[str, OpenBody]):
    """The bodies of the open requests, by request id.

    reuse     prefixes are reused at all; has_pool: full blocks may be offered to a pool
    """

    def __init__(self, reuse: bool, has_pool: bool) -> None:
        super().__init__()
        self._reuse, self._has_pool = reuse, has_pool

    def add(self, submit: m.Submit) -> None:
        """Keep the body of a request, unless the message comes twice."""
        request_id, answers = submit.request.request_id, submit.request.answers
        if request_id not in self:
            self[request_id] = body = OpenBody.of(submit, self._reuse, self._has_pool)
            if answers:
                body.recalled(answers, submit.answers)

    def problem_of(self, report: m.Report) -> str:
        """Say how the tokens of a report differ from what its event says; "" for a sound report."""
        event, found = report.event, [len(token_ids) for token_ids in report.token_ids]
        if isinstance(event, m.PutsWanted) or (body := self.get(event.request_id)) is None:
            return ""
        if isinstance(event, m.Recalled):
            expected = [one.num_tokens for one in event.answers]
        else:
            expected = [1] * body.body.n if isinstance(event, m.PrefillEnded) else [event.num_tokens]
        return "" if found == expected else f"it has {found} tokens, and says {expected}"

    def keep(self, report: m.Report) -> None:
        """Keep the tokens of a report that the control plane has taken."""
        event = report.event
        if isinstance(event, m.Recalled):
            self[event.request_id].recalled(event.answers, report.token_ids)
        elif isinstance(event, m.PrefillEnded):
            self[event.request_id].prefilled(report)
        elif not isinstance(event, m.PutsWanted):
            self[event.request_id].preempted(event, report.token_ids[0])

    def message_of(self, order: Order) -> m.Message:
        """Return what a rank receives for an order."""
        if isinstance(order, Prefetch):
            return self[order.request_id].prefetch(order)
        return self[order.request_id].start(order) if isinstance(order, m.StartOrder) else order

    def branched(self, effect: Branched) -> None:
        """Let a branch go on as a request of its own."""
        self[effect.name] = self[effect.request_id].branched(effect.branch, effect.name)
