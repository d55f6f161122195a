"""Clients of a modelled cluster: requests, cancels, pool commands, and what becomes of each.

Used by `world.py`. Asserts that every request and every command has exactly one end. Explained in
docs/explain/control.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Literal

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.config.modes import DUTIES
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import BRANCH_MARK, client_id_of, first_attempt
from mooncake_lite.ranks.computing.machine import NewTerm
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.tokens import STOP, Opaque, digests_of
from mooncake_lite.simulator.workload import Block, Request, Source
from scheduler import ADMISSIONS
from store.keys import block_digests

What = Literal["get", "verify", "compact", "rm", "rm-all", "pin"]
COMMANDS: tuple[What, ...] = ("get", "verify", "compact", "rm", "rm", "rm-all", "pin", "pin")

SALT = b"salt"
MOST_LOSSES = 3
"""Ranks and gateways that are lost in one run, at most."""

OUTCOMES = {"rejected": ["Reject"], "failed": ["Fail"], "cancelled": [], "finished": []}
"""How a request may end, and what its client is told before."""


ToClient = fx.Reject | fx.Fail | fx.Forget | fx.Decided | fx.Release | fx.Moved | fx.Branched
"""Effects that a client hears of."""


class Clients:
    """Send the requests of a source, go away at random times, and keep what they are told.

    _open          requests that were sent and have not ended, and branches that go on alone
    last_sent_s    when the latest request was sent
    _commands      number of each pool command -> answers until it is killed; 0: it has ended, or is killed
    _alone         request -> its branches that go on as requests of their own
    _gateways      that were started so far; the last one lives
    """

    def __init__(self, world: Surroundings, source: Source, random: Random) -> None:
        self._world, self._source, self._random = world, source, random
        self._withholds = ADMISSIONS[world.shape.config.admission]().withholds
        self._block_tokens = world.shape.layout.block_tokens
        self._left, self._open = source.num_requests, 0
        self._commands: dict[int, float] = {}
        self._alone: dict[str, list[Request]] = {}
        self._gateways = 1
        self.last_sent_s = 0.0

    @property
    def done(self) -> bool:
        """Return whether all requests and all commands have come and ended."""
        return not (self._left or self._open or any(self._commands.values()))

    @property
    def all_sent(self) -> bool:
        """Return whether the last request has come."""
        return not self._left

    def begin(self) -> None:
        """Send the first request; a run may lose ranks at some time."""
        world, random = self._world, self._random
        self._send_later()
        if random.random() < world.faults.rank_lost:
            for _ in range(random.randint(1, MOST_LOSSES)):
                world.clock.after(random.random() * self._source.lasts_s, self._lose)

    @property
    def gateway(self) -> str:
        """Return the name of the gateway that lives."""
        return f"gateway-{self._gateways}"

    @property
    def hello(self) -> m.GatewayHello:
        """Return what the gateway that lives says to a conductor."""
        return m.GatewayHello(self.gateway, ["", ""])

    def known_blocks(self) -> list[Block]:
        """Draw the blocks that a tier holds from an earlier run."""
        return [block for block in self._source.known_blocks() if self._random.random() < 0.5]

    @staticmethod
    def indexed(rank: int, blocks: list[Block], *, last: bool) -> ev.TierIndexed:
        """Return what a store rank tells about its tier."""
        keys, digests = [block.key for block in blocks], [block.digest for block in blocks]
        return ev.TierIndexed(rank, 0, keys, digests, last)

    # ------------------------------------------------------------------------------ what they send

    def _send_later(self) -> None:
        request = self._source.next()
        self._world.clock.after(request.after_s, lambda: self._send(request))

    def _send(self, request: Request) -> None:
        world, random = self._world, self._random
        if world.stopped is not None:
            return
        if not world.ready and random.random() > world.faults.unready:
            world.clock.after(0.01, lambda: self._send(request))
            return
        self._left -= 1
        self._open += 1
        self.last_sent_s = request.sent_s = world.clock.now
        world.requests[request.request_id] = request
        if request.class_id is None:
            request.class_id = random.randrange(len(world.shape.config.classes))
        request.gateway = self.gateway
        world.from_clients(m.Submit(*self._submit_of(request)))
        if random.random() < world.faults.cancelled:
            seconds = random.choice((0.0, 0.01, 0.1, 1.0, 5.0)) * random.random()
            branch = random.randrange(-1, request.n) if request.n > 1 else -1
            world.clock.after(seconds, lambda: self._cancel(request, branch))
        if random.random() < world.faults.command:
            self._command(request)
        if world.dice.random() < world.faults.flipped:
            world.memory.flip(world.dice)
        if self._left:
            self._send_later()

    def _submit_of(self, request: Request) -> tuple[ev.RequestArrived, m.Body]:
        """Return what a gateway sends of a request."""
        assert request.class_id is not None
        request.term = self._world.term
        arrived = ev.RequestArrived(
            request.request_id, len(request.token_ids), request.max_tokens, request.keys, request.digests,
            request.class_id, request.wait_limit_s, request.n, gateway=request.gateway,
        )  # fmt: skip
        salt = SALT if request.digests else b""
        body = m.Body(request.gateway, request.token_ids, salt, request.sampling, [STOP])  # type: ignore[arg-type]
        return arrived, body

    def _cancel(self, request: Request, branch: int) -> None:
        if not all(one.ends for one in self._family(request.request_id)):
            request.left |= set(range(request.n)) if branch < 0 else {branch}
            self._world.from_clients(ev.RequestCancelled(request.request_id, branch))

    def _family(self, client_id: str) -> list[Request]:
        """Return a request, and those of its branches that go on alone."""
        return [self._world.requests[client_id], *self._alone.get(client_id, ())]

    def _command(self, request: Request) -> None:
        """Send a pool command, mostly about blocks of a request that is being served."""
        world, random = self._world, self._random
        number = len(self._commands) + 1
        what = random.choice(COMMANDS)
        keys: list[int] = []
        if what in ("get", "rm", "pin") and request.keys:
            keys = [random.choice(request.keys)] if what == "get" else request.keys[: random.randint(1, 3)]
        soft_s = random.choice((0.0, 5.0)) if what == "pin" else 0.0
        forced, hard = random.random() < 0.5, what == "pin" and random.random() < 0.1
        world.from_clients(
            m.PoolQuery(what, keys=keys, force=forced, hard=hard, soft_s=soft_s, number=number)
        )
        self._commands[number] = random.randint(1, 3) if random.random() < world.faults.killed else inf

    def take_over(self, news: NewTerm) -> None:
        """Send open requests to a new conductor again, with what their clients have."""
        world = self._world
        self._commands = dict.fromkeys(self._commands, 0)
        world.from_clients(self.hello)
        for request in [one for one in world.requests.values() if BRANCH_MARK not in one.request_id]:
            if request.term == news.number or all(one.ends for one in self._family(request.request_id)):
                continue
            for alone in self._alone.pop(request.request_id, ()):
                self._open -= not alone.ends
                request.dropped |= alone.dropped
                del world.requests[alone.request_id]
            request.dropped |= request.left
            self._open += len(request.ends)
            request.ends.clear()
            if not self._ends_here(request):
                self._send_again(request, first_attempt(news.number))

    def _ends_here(self, request: Request) -> bool:
        """Tell whether a request is over for its gateway: the client has everything, or has left."""
        shown = request.whole if request.released or not self._withholds else set()
        everything = len(shown | request.left) == request.n
        if request.told:
            outcome = "failed" if request.told == ["Fail"] else "rejected"
        elif everything and not request.cancelled:
            outcome = "finished"
        elif everything or request.gateway != self.gateway:
            outcome = "cancelled"
        else:
            return False
        request.ends.append(outcome)
        request.cancelled = request.cancelled or outcome == "cancelled"
        self._open -= 1
        if outcome == "finished":
            self._source.ended(request)
        return True

    def _send_again(self, request: Request, attempt: int) -> None:
        request.arrived = False
        answers, tokens = self._so_far(request, attempt, range(request.n))
        seconds = self._world.clock.now - request.sent_s
        arrived, body = self._submit_of(request)
        resumed = request.released if self._withholds else any(tokens)
        again = msgspec.structs.replace(arrived, answers=answers, waited_s=seconds, resumed=resumed)
        self._world.from_clients(m.Submit(again, body, tokens))

    def _lose(self) -> None:
        """Kill a rank, the gateway or the conductor, or rarely have the cluster stop."""
        world, random = self._world, self._random
        rank = random.randrange(len(world.shape.config.roles))
        if world.ready and random.random() < world.faults.conductor_lost:
            world.end_conductor()
        elif random.random() < 0.1:
            world.tell(m.StopRequested("asked to", 2.0))
        elif rank:
            world.kill(rank, ended=random.random() >= world.faults.unreachable)
        elif world.ready:
            self._lose_gateway()

    def _lose_gateway(self) -> None:
        """Replace the gateway. Its clients' connections break, and nobody waits for their answers."""
        world, lost = self._world, self.gateway
        self._gateways += 1
        world.from_clients(ev.GatewayLost(lost, "died"))
        world.from_clients(self.hello)

    # ------------------------------------------------------------------------------ what they are told

    def reached(self, event: ev.Event) -> None:
        """Note that an event of a client has reached the control plane."""
        if isinstance(event, ev.RequestArrived):
            self._world.requests[event.request_id].arrived = True
        elif isinstance(event, ev.RequestCancelled):
            first, *alone = self._family(event.request_id)
            own = {int(one.request_id.partition(BRANCH_MARK)[2]): one for one in alone}
            branches = set(range(first.n))
            for request in (first, *alone):
                request.dropped |= branches if event.branch < 0 else {event.branch}
            for branch, request in own.items():
                request.cancelled = request.cancelled or branch in request.dropped
            first.cancelled = first.cancelled or branches - own.keys() - first.whole <= first.dropped
        elif isinstance(event, ev.GatewayLost):
            for request in self._world.requests.values():
                request.cancelled = request.cancelled or request.gateway == event.gateway

    def on_tokens(self, tokens: m.Tokens, times_s: Sequence[float]) -> None:
        """Keep when a rank drew tokens, and exact ones themselves: one that comes again must be the same."""
        request = self._world.requests[tokens.request_id]
        if tokens.attempt <= request.fences.get(tokens.branch, 0) or request.gateway != self.gateway:
            return
        if tokens.token_ids or tokens.index == 0:
            request.token_times_s += times_s
        for index, token in enumerate(tokens.token_ids if self._world.exact else (), tokens.index):
            assert request.tokens.setdefault((tokens.branch, index), token) == token, (
                f"{tokens}: another token"
            )
        if tokens.finish is not None:
            request.ends_at[tokens.branch] = tokens.index + len(tokens.token_ids)
        if request.ends_at:
            self._look_whether_whole(request, tokens.branch)

    def _look_whether_whole(self, request: Request, branch: int) -> None:
        """Tell the control plane, once, that a client has a whole answer."""
        end = request.ends_at.get(branch)
        if end is None or branch in request.whole:
            return
        if not self._world.exact or len(request.answer(branch)) == end:
            request.whole.add(branch)
            received = ev.AnswerReceived(request.request_id, branch)
            if self._world.exact:
                self._world.from_clients(received)
            else:  # as the token itself, which takes no time
                self._world.tell(received)

    def on_recall(self, recall: fx.Recall) -> None:
        """Answer with what the client has, and take no older tokens from now on.

        Tokens that are withheld are forgotten: the client has not seen them.
        """
        request = self._world.requests[client_id_of(recall.request_id)]
        if request.gateway != self.gateway:
            return
        answers, tokens = self._so_far(request, recall.attempt, recall.branches)
        event = ev.Recalled(recall.request_id, recall.attempt, answers)
        self._world.from_clients(m.Report(event, tokens))

    def _so_far(
        self, request: Request, attempt: int, branches: Iterable[int]
    ) -> tuple[list[ev.AnswerSoFar], list[list[int]]]:
        """Return what a client has of branches. From now on tokens of this attempt or older are dropped."""
        withheld, answers, tokens = self._withholds and not request.released, [], []
        for branch in branches:
            answer = [] if withheld else self._answer(request, branch)
            for known, index in list(request.tokens):
                if known == branch and index >= len(answer):
                    del request.tokens[known, index]
            request.fences[branch] = max(attempt, request.fences.get(branch, 0))
            if withheld:
                request.whole.discard(branch)
            if branch not in request.whole:
                request.ends_at.pop(branch, None)
            keys, seconds = self._names(request, answer)
            whole = branch in request.whole | request.left
            answers.append(ev.AnswerSoFar(branch, len(answer), whole, keys, seconds))
            tokens.append(answer)
        return answers, tokens

    def _answer(self, request: Request, branch: int) -> list[int]:
        """Return the tokens of a branch that its client has."""
        return request.answer(branch) if self._world.exact else [0] * len(request.token_times_s)

    def _names(self, request: Request, answer: list[int]) -> tuple[list[int], list[int]]:
        """Return keys and second digests of the full blocks of a prompt and an answer."""
        size, prompt = self._block_tokens, request.token_ids
        if not request.digests:
            return [], []
        if isinstance(prompt, Opaque):
            keys = prompt.keys[: (len(prompt) + len(answer)) // size]
            return keys, [key ^ 1 for key in keys]
        so_far = [*prompt, *answer]
        return digests_of(so_far)[size - 1 :: size], block_digests(so_far, size)

    def answered(self, peer: str, answer: m.Message) -> bool:
        """Take an answer of a pool command. False: it was killed, and its connection is gone."""
        number = int(peer.removeprefix("pool-"))
        assert self._commands[number], f"{answer} to {peer}, which was gone before"
        self._commands[number] -= 1
        is_killed = not self._commands[number]
        if isinstance(answer, m.PoolEnded):
            self._commands[number] = 0
        return not is_killed

    def on(self, effect: ToClient) -> None:
        """Note what a client is told."""
        requests = self._world.requests
        request = requests[effect.request_id]
        if isinstance(effect, fx.Branched):
            assert effect.name not in requests
            self._open += 1
            alone = requests[effect.name] = replace(request, ends=[], told=[], cancelled=False)
            alone.request_id, alone.dropped = effect.name, set(request.dropped)
            self._alone.setdefault(request.request_id, []).append(alone)
            return
        assert not request.ends, f"{effect} after the end of {request.request_id}"
        if isinstance(effect, fx.Decided | fx.Moved):
            self._check_roles(effect)
        elif isinstance(effect, fx.Release):
            assert self._withholds, f"{effect}: nothing is withheld"
            assert not request.released or self._world.term, f"{effect} comes twice"
            request.released, request.released_s = True, self._world.clock.now
        elif isinstance(effect, fx.Forget):
            request.ends.append(effect.outcome)
            self._open -= 1
            assert request.told == OUTCOMES[effect.outcome], f"{effect} after {request.told}"
            if effect.outcome == "finished" and not request.cancelled:
                shown = requests[client_id_of(request.request_id)].released or not self._withholds
                assert shown, f"{request.request_id} is answered, and its client was not told"
                self._source.ended(request)
            if not self._world.exact:
                self._world.forget(request)
        else:
            request.told.append(type(effect).__name__)
            request.cause = getattr(effect, "code", "") or re.sub(r"\d[\d.,]*", "N", effect.reason)
            for sibling in self._family(client_id_of(request.request_id)):
                sibling.cancelled = sibling.cancelled or sibling is not request
            has_tokens = any(map(request.answer, range(request.n)))
            is_shown = has_tokens and (request.released or not self._withholds)
            assert not (isinstance(effect, fx.Reject) and is_shown), f"{effect} after a token"

    def _check_roles(self, effect: fx.Decided | fx.Moved) -> None:
        """Assert that a request is placed on ranks that do what is wanted of them."""
        roles = self._world.shape.config.roles
        duties = ["prefill"] * isinstance(effect, fx.Decided) + ["decode"]
        for duty in duties:
            assert duty in DUTIES[roles[getattr(effect, duty)]], f"{effect}: no rank that can {duty}"

    def _check_answers(self, request: Request) -> None:
        """Assert that a client has its whole answers, and no token of another one.

        Answers that are not wanted, or whose request failed, may end too soon. One with a token that cannot
        be computed ends there.
        """
        family = self._family(request.request_id)
        wanted = all(one.ends == ["finished"] and not one.cancelled for one in family)
        for branch in range(request.n):
            expected, answer = request.expected(branch), request.answer(branch)
            assert answer == expected[: len(answer)], f"{request.request_id}, branch {branch}: wrong tokens"
            if wanted and branch not in request.dropped:
                assert branch in request.whole, f"{request.request_id}, branch {branch} has no end"
                assert answer == expected, f"{request.request_id}, branch {branch}: tokens are missing"

        if (poison := request.poison) is not None and poison.answered >= 0:
            got = len(request.answer(poison.branch))
            whole = request.cause == poison.code and request.gateway == self.gateway and not self._world.dead
            assert poison.answered * whole <= got <= poison.answered, f"{got} tokens with {poison}"

    def check_ends(self) -> None:
        """Assert that every request has had one end, and every command that was not killed."""
        world = self._world
        for request in self._arrived(world.requests.values()):
            if world.exact and "#" not in request.request_id and world.stopped is None:
                self._check_answers(request)
            assert len(request.ends) == 1, (
                f"{request.request_id} has {len(request.ends)} ends: {request.ends}"
            )
            assert request.ends[0] != "cancelled" or request.cancelled, (
                f"{request.request_id} was not cancelled"
            )
        if world.stopped is not None:
            assert world.stopped.lost == ("died" in world.stopped.reason)
            assert world.stopped.lost or "asked to" in world.stopped.reason
            return
        for number, left in self._commands.items():
            assert not left, f"command {number} has no end"

    def _arrived(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that reached the control plane, if it has stopped the last one, before."""
        stopped, term = self._world.stopped is not None, self._world.term
        return [one for one in requests if one.arrived and (not stopped or one.term == term)]
