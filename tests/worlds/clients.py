"""Clients of the fault world: they go away, send pool commands, lose their gateway, and check what they get.

Every request and every command must have exactly one end.

    MOST_LOSSES   ranks and gateways that are lost in one run, at most
    TOLD          how a request may end, and what its client is told before

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, get_args

from msgspec.structs import replace as change

from mooncake_lite import messages as m
from mooncake_lite.config.modes import DUTIES
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.asked import Verb
from mooncake_lite.control.request import BRANCH_MARK, client_id_of, first_attempt
from mooncake_lite.simulator.clients import LOOK_S, Clients, ToClient
from store.keys import block_digests
from tests.worlds.requests import STOP, Workload, digests_of
from tests.worlds.requests import DrawnRequest as Request

COMMANDS, MOST_LOSSES = ("get", "verify", "compact", "rm", "rm", "rm-all", "pin", "pin"), 3
VERBS, TENANTS = get_args(Verb), ("", "a")
TOLD = {"rejected": ["Reject"], "failed": ["Fail"], "cancelled": [], "finished": []}


class FaultyClients(Clients):
    """Go away at random times, and keep what they are told.

    gateway        that lives
    last_sent_s    when the latest request was sent
    commands       number of each pool command -> answers until it is killed; 0: it has ended, or is killed
    _alone         request -> its branches that go on as requests of their own
    """

    def __init__(self, world: Any, source: Workload, random: Random) -> None:
        super().__init__(world, source)
        self._random, self.last_sent_s = random, 0.0
        self.commands: dict[int, float] = {}
        self._alone: dict[str, list[Request]] = {}

    @property
    def done(self) -> bool:
        """Return whether all requests and all commands have come and ended."""
        return super().done and not any(self.commands.values())

    def begin(self) -> None:
        """Send the first request; a run may lose ranks at some time."""
        world, random = self._world, self._random
        super().begin()
        if random.random() < world.faults.rank_lost:
            for _ in range(random.randint(1, MOST_LOSSES)):
                world.clock.after(random.random() * self._source.lasts_s, self._lose)

    def known_blocks(self) -> list[Any]:
        """Draw the blocks that a tier holds from an earlier run."""
        return [block for block in self._source.known_blocks() if self._random.random() < 0.5]

    # ------------------------------------------------------------------------------ what they send

    def _come(self, request: Request) -> None:
        world, random = self._world, self._random
        if world.stopped is not None:
            return
        if not world.ready and random.random() > world.faults.unready:
            world.clock.after(LOOK_S, partial(self._come, request))
            return
        if request.class_id is None:
            request.class_id = random.randrange(len(world.shape.config.classes))
        request.gateway, self.last_sent_s = self.gateway, world.clock.now
        self._send(request)
        if random.random() < world.faults.cancelled:
            seconds = random.choice((0.0, 0.01, 0.1, 1.0, 5.0)) * random.random()
            branch = random.randrange(-1, request.n) if request.n > 1 else -1
            world.clock.after(seconds, lambda: self._cancel(request, branch))
        if random.random() < world.faults.command:
            self._command(request)
        if world.faults.hint and random.random() < world.faults.hint:
            self._say(request)
        if world.dice.random() < world.faults.flipped:
            world.memory.flip(world.dice)

    def _submit_of(self, request: Request) -> tuple[ev.RequestArrived, m.Body]:
        request.term = self._world.term
        arrived, body = super()._submit_of(request)
        if self._world.faults.hint:
            arrived = change(arrived, session=f"s{len(request.token_ids) % 5}", tenant=TENANTS[request.n % 2])
        return change(arrived, n=request.n), change(body, sampling=request.sampling, stop_ids=[STOP])

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
        number = len(self.commands) + 1
        what, keys = random.choice(COMMANDS), list[int]()
        if what in ("get", "rm", "pin") and request.keys:
            keys = [random.choice(request.keys)] if what == "get" else request.keys[: random.randint(1, 3)]
        soft_s = random.choice((0.0, 5.0)) if what == "pin" else 0.0
        forced, hard = random.random() < 0.5, what == "pin" and random.random() < 0.1
        query = m.PoolQuery(what, keys=keys, force=forced, hard=hard, soft_s=soft_s, number=number)
        world.from_clients(query)
        self.commands[number] = random.randint(1, 3) if random.random() < world.faults.killed else inf

    def _say(self, request: Request) -> None:
        """Say anything about the blocks of a request, or about the latest prompt of a session."""
        random, blocks = self._random, range(self._random.randint(0, len(request.keys)))
        keys, digests = [request.keys[n] for n in blocks], [request.digests[n] for n in blocks]
        seconds = random.choice((None, 0.0, 0.5, 5.0, 50.0))
        hint = ev.HintArrived(
            request.request_id, self.gateway, random.choice(VERBS), keys, digests, f"s{random.randrange(5)}",
            random.choice(TENANTS), request.class_id, seconds, random.randint(1, 3),
        )  # fmt: skip
        self._world.clock.after(random.choice((0.0, 1.0, 5.0)), partial(self._world.from_clients, hint))

    def take_over(self, news: Any) -> None:
        """Send open requests to a new conductor again (NewTerm), with what their clients have."""
        world = self._world
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
        waited_s, (arrived, body) = self._world.clock.now - request.sent_s, self._submit_of(request)
        resumed = request.released if self._withholds else any(tokens)
        again = change(arrived, answers=answers, waited_s=waited_s, resumed=resumed)
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
        elif world.ready:  # its clients' connections break, and they no longer want their answers
            world.from_clients(ev.GatewayLost(self.gateway, "died"))
            self.gateway = f"gateway-{int(self.gateway.partition('-')[2]) + 1}"
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
        """Keep tokens, unless their gateway is gone."""
        if self._world.requests[tokens.request_id].gateway == self.gateway:
            super().on_tokens(tokens, times_s)

    def _take(self, request: Request, tokens: m.Tokens) -> None:
        """Keep tokens: one that comes again is the same. Tell, once, that a client has a whole answer."""
        branch, whole = tokens.branch, request.whole
        for index, token in enumerate(tokens.token_ids, tokens.index):
            assert request.tokens.setdefault((branch, index), token) == token, f"{tokens}: another token"
        if tokens.finish is not None:
            request.ends_at[branch] = tokens.index + len(tokens.token_ids)
        end = request.ends_at.get(branch)
        if end is not None and branch not in whole and len(request.answer(branch)) == end:
            whole.add(branch)
            self._world.from_clients(ev.AnswerReceived(request.request_id, branch))

    def on_recall(self, recall: fx.Recall) -> None:
        """Answer with what the client has, if its gateway lives."""
        if self._world.requests[client_id_of(recall.request_id)].gateway == self.gateway:
            super().on_recall(recall)

    def _so_far(
        self, request: Request, attempt: int, branches: Iterable[int]
    ) -> tuple[list[ev.AnswerSoFar], list[list[int]]]:
        answers, tokens = super()._so_far(request, attempt, branches)
        whole = request.whole | request.left
        return [change(one, whole=one.branch in whole) for one in answers], tokens

    def _shown(self, request: Request, branch: int, withheld: bool) -> list[int]:
        answer = [] if withheld else request.answer(branch)
        for known, index in list(request.tokens):
            if known == branch and index >= len(answer):
                del request.tokens[known, index]
        if branch not in request.whole:
            request.ends_at.pop(branch, None)
        return answer

    def _names(self, request: Request, answer: list[int]) -> tuple[list[int], list[int]]:
        size, so_far = self._block_tokens, [*request.token_ids, *answer]
        return digests_of(so_far)[size - 1 :: size], block_digests(so_far, size)

    def answered(self, peer: str, answer: m.Message) -> bool:
        """Take an answer of a pool command. False: it was killed, and its connection is gone."""
        number = int(peer.removeprefix("pool-"))
        assert self.commands[number], f"{answer} to {peer}, which was gone before"
        self.commands[number] -= 1
        is_killed = not self.commands[number]
        if isinstance(answer, m.PoolEnded):
            self.commands[number] = 0
        return not is_killed

    def on(self, effect: ToClient) -> None:
        """Note what a client is told, and assert that it makes sense."""
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
            roles = self._world.shape.config.roles
            for duty in ["prefill"] * isinstance(effect, fx.Decided) + ["decode"]:
                assert duty in DUTIES[roles[getattr(effect, duty)]], f"{effect}: no rank that can {duty}"
        elif isinstance(effect, fx.Release):
            assert self._withholds, f"{effect}: nothing is withheld"
            assert not request.released or self._world.term, f"{effect} comes twice"
        elif isinstance(effect, fx.Reject | fx.Fail):
            request.told.append(type(effect).__name__)
            for sibling in self._family(client_id_of(request.request_id)):
                sibling.cancelled = sibling.cancelled or sibling is not request
            has_tokens = any(map(request.answer, range(request.n)))
            is_shown = has_tokens and (request.released or not self._withholds)
            assert not (isinstance(effect, fx.Reject) and is_shown), f"{effect} after a token"
        super().on(effect)

    def _end(self, request: Request, outcome: str) -> None:
        request.ends.append(outcome)
        assert request.told == TOLD[outcome], f"{outcome} after {request.told}"
        if outcome == "finished" and not request.cancelled:
            first = self._world.requests[client_id_of(request.request_id)]
            assert first.released or not self._withholds, f"{request.request_id}: its client was not told"
            self._source.ended(request)

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
        world, stop = self._world, self._world.stopped
        for request in world.requests.values():
            name, ends = request.request_id, request.ends
            if not request.arrived or (stop is not None and request.term != world.term):
                continue  # it did not reach the control plane, or did not reach it again
            if BRANCH_MARK not in name and stop is None:
                self._check_answers(request)
            assert len(ends) == 1, f"{name} has {len(ends)} ends: {ends}"
            assert ends[0] != "cancelled" or request.cancelled, f"{name} was not cancelled"
        if stop is not None:
            assert stop.lost == ("died" in stop.reason)
            assert stop.lost or "asked to" in stop.reason
            return
        assert not any(self.commands.values()), f"a command has no end: {self.commands}"
