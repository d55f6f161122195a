"""Clients of a modelled cluster: requests, cancels, pool commands, and what becomes of each.

Used by `world.py`. Asserts that every request and every command has exactly one end. Explained in
docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Literal

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.modes import DUTIES
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Request, Source, digest_of
from scheduler import ADMISSIONS

What = Literal["get", "verify", "compact", "rm", "rm-all", "pin"]
COMMANDS: tuple[What, ...] = ("get", "verify", "compact", "rm", "rm", "rm-all", "pin", "pin")

OUTCOMES = {"rejected": ["Reject"], "failed": ["Fail"], "cancelled": [], "finished": []}
"""How a request may end, and what its client is told before."""


ToClient = (
    fx.Reject | fx.Fail | fx.Forget | fx.Decided | fx.Release | fx.Moved | fx.Branched | fx.AnswerCommand
)  # fmt: skip
"""Effects that a client hears of."""


class Clients:
    """Send the requests of a source, go away at random times, and keep what they are told.

    last_sent_s    when the latest request was sent
    _commands      number of each pool command -> how often it has ended
    _last_words    why the cluster ends before its time
    """

    def __init__(self, world: Surroundings, source: Source, random: Random) -> None:
        self._world, self._source, self._random = world, source, random
        self._withholds = ADMISSIONS[world.shape.config.admission]().withholds
        self._left = source.num_requests
        self._commands: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._last_words = ""
        self.last_sent_s = 0.0

    @property
    def done(self) -> bool:
        """Return whether all requests and all commands have come and ended."""
        ended = self._left == 0 and all(request.ends for request in self._world.requests.values())
        return ended and all(self._commands[n] or n in self._abandoned for n in self._commands)

    def begin(self) -> None:
        """Send the first request; a run may lose a rank at some time."""
        world, random = self._world, self._random
        self._send_later()
        if random.random() < world.faults.rank_lost:
            world.clock.after(random.random() * self._source.lasts_s, self._lose)

    def known_keys(self, rank: int) -> list[int]:
        """Draw the keys that the tier of a rank holds from an earlier run."""
        return [key for key in self._source.known_keys() if self._random.random() < 0.5]

    @staticmethod
    def indexed(rank: int, keys: list[int], *, last: bool) -> ev.TierIndexed:
        """Return what a store rank tells about its tier."""
        return ev.TierIndexed(rank, 0, keys, [digest_of(key) for key in keys], last)

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
        self.last_sent_s = request.sent_s = world.clock.now
        world.requests[request.request_id] = request
        keys = list(request.keys)
        world.from_clients(
            ev.RequestArrived(
                request.request_id,
                request.text.num_tokens,
                request.max_tokens,
                keys,
                [digest_of(key) for key in keys],
                random.randrange(len(world.shape.config.classes)),
                request.wait_limit_s,
                request.n,
            )
        )
        if random.random() < world.faults.cancelled:
            seconds = random.choice((0.0, 0.01, 0.1, 1.0, 5.0)) * random.random()
            branch = random.randrange(-1, request.n) if request.n > 1 else -1
            world.clock.after(seconds, lambda: self._cancel(request, branch))
        if random.random() < world.faults.command:
            self._command(request)
        if self._left:
            self._send_later()

    def _cancel(self, request: Request, branch: int) -> None:
        if not all(one.ends for one in self._family(request.request_id)):
            self._world.from_clients(ev.RequestCancelled(request.request_id, branch))

    def _family(self, client_id: str) -> list[Request]:
        """Return a request, and those of its branches that go on alone."""
        requests = self._world.requests
        parts = requests[client_id].parts.values()
        return [requests[client_id], *(part for part in parts if part.request_id in requests and part.n < 2)]

    def _command(self, request: Request) -> None:
        """Send a pool command, mostly about blocks of a request that is being served."""
        world, random = self._world, self._random
        number = len(self._commands) + 1
        self._commands[number] = 0
        what = random.choice(COMMANDS)
        keys: list[int] = []
        if what in ("get", "rm", "pin") and request.keys:
            keys = [random.choice(request.keys)] if what == "get" else request.keys[: random.randint(1, 3)]
        soft_s = random.choice((0.0, 5.0)) if what == "pin" else 0.0
        world.from_clients(
            ev.PoolCommand(
                number,
                what,
                keys,
                force=random.random() < 0.5,
                hard=what == "pin" and random.random() < 0.1,
                soft_s=soft_s,
            )
        )
        if random.random() < world.faults.abandoned:
            world.clock.after(random.random(), lambda: self._abandon(number))

    def _abandon(self, number: int) -> None:
        self._abandoned.add(number)
        self._world.from_clients(ev.CommandAbandoned(number))

    def _lose(self) -> None:
        world = self._world
        rank = self._random.randrange(-1, len(world.shape.config.roles))
        if rank < 0:
            world.tell(ev.StopRequested("asked to", 2.0))
        else:
            world.tell(ev.RankLost(rank, 0, "died") if rank else ev.GatewayLost("gateway", "died"))
        self._last_words = "asked to" if rank < 0 else "died"

    # ------------------------------------------------------------------------------ what they are told

    def reached(self, event: ev.Event) -> None:
        """Note that an event of a client has reached the control plane."""
        if isinstance(event, ev.RequestArrived):
            self._world.requests[event.request_id].arrived = True
        elif isinstance(event, ev.RequestCancelled):
            for request in self._family(event.request_id):
                branches = set(range(request.n)) if request.n > 1 else {request.branch}
                request.dropped |= branches if event.branch < 0 else {event.branch}
                left = request.live or branches
                request.cancelled = request.cancelled or left <= request.dropped

    def on(self, effect: ToClient) -> None:
        """Note what a client is told."""
        if isinstance(effect, fx.AnswerCommand):
            assert self._commands[effect.command] == 0, f"command {effect.command} has ended"
            self._commands[effect.command] += effect.ended
            return
        request = self._world.requests[effect.request_id]
        if isinstance(effect, fx.Branched):
            part = self._world.requests[effect.name] = request.parts[effect.branch]
            assert (part.request_id, part.branch) == (effect.name, effect.branch)
            return
        assert not request.ends, f"{effect} after the end of {request.request_id}"
        if isinstance(effect, fx.Decided | fx.Moved):
            self._check_roles(effect)
        elif isinstance(effect, fx.Release):
            assert self._withholds, f"{effect}: nothing is withheld"
            assert not request.released, f"{effect} comes twice"
            request.released = True
        elif isinstance(effect, fx.Forget):
            request.ends.append(effect.outcome)
            assert request.told == OUTCOMES[effect.outcome], f"{effect} after {request.told}"
            if effect.outcome == "finished" and not request.cancelled:
                self._finished(request)
        else:
            request.told.append(type(effect).__name__)
            for sibling in self._family(client_id_of(request.request_id)):
                sibling.cancelled = sibling.cancelled or sibling is not request
            is_shown = request.answered > 0 and (request.released or not self._withholds)
            assert not (isinstance(effect, fx.Reject) and is_shown), "refused after its first token"

    def _check_roles(self, effect: fx.Decided | fx.Moved) -> None:
        """Assert that a request is placed on ranks that do what is wanted of them."""
        roles = self._world.shape.config.roles
        duties = ["prefill"] * isinstance(effect, fx.Decided) + ["decode"]
        for duty in duties:
            assert duty in DUTIES[roles[getattr(effect, duty)]], f"{effect}: no rank that can {duty}"

    def _finished(self, request: Request) -> None:
        """Assert that every answer of a request is whole, but those that are not wanted or go on alone."""
        shown = self._world.requests[client_id_of(request.request_id)].released or not self._withholds
        assert shown, f"{request.request_id} is answered, and its client was not told"
        for branch, part in request.parts.items():
            alone = part is not request and part.request_id in self._world.requests
            if branch not in request.dropped and not alone:
                assert part.answered == part.answer_tokens, f"{part.request_id} ends too soon"
                self._source.ended(part)

    def check_ends(self) -> None:
        """Assert that every request has had one end, and every command that was not abandoned."""
        world = self._world
        for request in self._arrived(world.requests.values()):
            assert len(request.ends) == 1, (
                f"{request.request_id} has {len(request.ends)} ends: {request.ends}"
            )
            assert request.ends[0] != "cancelled" or request.cancelled, (
                f"{request.request_id} was not cancelled"
            )
        if world.stopped is not None:
            assert world.stopped.lost == (self._last_words == "died")
            assert self._last_words in world.stopped.reason
            return
        for number, ended in self._commands.items():
            assert ended or number in self._abandoned, f"command {number} has no end"

    def _arrived(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that reached the control plane before it stopped."""
        return [request for request in requests if request.arrived]
