"""Clients of a simulated cluster: their requests, and what becomes of each.

Used by `world.py`. In the fault world of the tests they also go away and send commands. Explained in
docs/explain/control.md.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.simulator.hints import Said
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.tokens import Opaque
from mooncake_lite.simulator.workload import Request, Source
from mooncake_lite.workloads.metrics import COMPLETED, FAILED, REJECTED, Record
from scheduler import ADMISSIONS

SALT = b"salt"

LOOK_S = 0.01
"""Until a client looks again whether the cluster is ready."""

OUTCOMES = {"finished": COMPLETED, "rejected": REJECTED}

ToClient = fx.Reject | fx.Fail | fx.Forget | fx.Decided | fx.Release | fx.Moved | fx.Branched
"""Effects that a client hears of."""


class Clients:
    """Send the requests of a source, and keep what they are told.

    gateway        that they talk to
    _left, _open   requests that were not sent yet, and that were sent and have not ended
    """

    gateway = "gateway-1"

    def __init__(self, world: Surroundings, source: Source) -> None:
        self._world, self._source = world, source
        self._withholds = ADMISSIONS[world.shape.config.admission]().withholds
        self._block_tokens = world.shape.layout.block_tokens
        self._left, self._open = source.num_requests, 0

    @property
    def hello(self) -> m.GatewayHello:
        """Return what their gateway says to a conductor."""
        return m.GatewayHello(self.gateway, ["", ""])

    @property
    def done(self) -> bool:
        """Return whether all requests have come and ended."""
        return not (self._left or self._open)

    @property
    def all_sent(self) -> bool:
        """Return whether the last request has come."""
        return not self._left

    # ------------------------------------------------------------------------------ what they send

    def begin(self) -> None:
        """Send the first request at its time; others follow."""
        self._next()

    def _next(self) -> None:
        request = self._source.next()
        self._world.clock.after(request.after_s, partial(self._come, request))

    def _come(self, request: Request) -> None:
        """Send a request once the cluster is ready."""
        if self._world.ready:
            self._send(request)
        else:
            self._world.clock.after(LOOK_S, partial(self._come, request))

    def _send(self, request: Request) -> None:
        world = self._world
        self._left -= 1
        self._open += 1
        request.sent_s = world.clock.now
        world.requests[request.request_id] = request
        world.from_clients(m.Submit(*self._submit_of(request)))
        world.skip(1)
        if self._left:
            self._next()

    def _submit_of(self, request: Request) -> tuple[ev.RequestArrived, m.Body]:
        """Return what a gateway sends of a request."""
        arrived = ev.RequestArrived(
            request.request_id, len(request.token_ids), request.max_tokens, request.keys, request.digests,
            request.class_id, request.wait_limit_s, gateway=self.gateway,
        )  # fmt: skip
        salt = SALT if request.digests else b""
        return arrived, m.Body(self.gateway, request.token_ids, salt, m.Sampling(), [])  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------ what they are told

    def on_tokens(self, tokens: m.Tokens, times_s: Sequence[float]) -> None:
        """Keep when a rank drew tokens, unless they are of an attempt that was recalled."""
        request = self._world.requests[tokens.request_id]
        if tokens.attempt <= request.fences.get(tokens.branch, 0):
            return
        if tokens.token_ids or tokens.index == 0:
            request.token_times_s += times_s
        self._take(request, tokens)

    def _take(self, request: Request, tokens: m.Tokens) -> None:
        """Tell the control plane, once, that a client has a whole answer. That takes no time."""
        if tokens.finish is not None and tokens.branch not in request.whole:
            request.whole.add(tokens.branch)
            self._world.tell(ev.AnswerReceived(request.request_id, tokens.branch))

    def on_recall(self, recall: fx.Recall) -> None:
        """Answer with what the client has, and take no older tokens from now on.

        Tokens that are withheld are forgotten: the client has not seen them.
        """
        request = self._world.requests[client_id_of(recall.request_id)]
        answers, tokens = self._so_far(request, recall.attempt, recall.branches)
        event = ev.Recalled(recall.request_id, recall.attempt, answers)
        self._world.from_clients(m.Report(event, tokens))

    def _so_far(
        self, request: Request, attempt: int, branches: Iterable[int]
    ) -> tuple[list[ev.AnswerSoFar], list[list[int]]]:
        """Return what a client has of branches. From now on tokens of this attempt or older are dropped."""
        withheld, answers, tokens = self._withholds and not request.released, [], []
        for branch in branches:
            request.whole -= {branch} if withheld else set()
            answer = self._shown(request, branch, withheld)
            request.fences[branch] = max(attempt, request.fences.get(branch, 0))
            names = self._names(request, answer) if request.digests else ([], [])
            answers.append(ev.AnswerSoFar(branch, len(answer), branch in request.whole, *names))
            tokens.append(answer)
        return answers, tokens

    def _shown(self, request: Request, branch: int, withheld: bool) -> list[int]:
        """Return the tokens of a branch that its client has seen."""
        return [] if withheld else [0] * len(request.token_times_s)

    def _names(self, request: Request, answer: list[int]) -> tuple[list[int], list[int]]:
        """Return keys and second digests of the full blocks of a prompt and an answer."""
        prompt = request.token_ids
        assert isinstance(prompt, Opaque)
        keys = prompt.keys[: (len(prompt) + len(answer)) // self._block_tokens]
        return keys, [key ^ 1 for key in keys]

    def on(self, effect: ToClient) -> None:
        """Note what a client is told."""
        request = self._world.requests[effect.request_id]
        if isinstance(effect, fx.Release):
            request.released, request.released_s = True, self._world.clock.now
        elif isinstance(effect, fx.Reject | fx.Fail):
            request.cause = getattr(effect, "code", "") or re.sub(r"\d[\d.,]*", "N", effect.reason)
        elif isinstance(effect, fx.Forget):
            self._open -= 1
            self._end(request, effect.outcome)

    def _end(self, request: Request, outcome: str) -> None:
        """Keep of a request that has ended when its client had its tokens."""
        times_s, released_s = array("d", request.token_times_s), request.released_s
        if times_s and min(times_s) < released_s:
            times_s = array("d", [max(at, released_s) for at in times_s])
        ended = Record(request.sent_s, times_s, OUTCOMES.get(outcome, FAILED), request.cause)
        self._world.records.append(ended)
        del self._world.requests[request.request_id]
        if request.hints is not None and outcome == "finished":
            self._hint(request, request.hints(self._world.clock.now))

    def _hint(self, request: Request, said: Iterable[Said]) -> None:
        """Say how the blocks of a request will be used. The answers are counted by the control plane."""
        for verb, blocks, seconds, alone in said:
            keys, digests = request.keys[:blocks], request.digests[:blocks]
            session = request.request_id if alone else ""
            self._world.from_clients(
                ev.HintArrived("h", self.gateway, verb, keys, digests, session, "", 0, seconds)
            )
