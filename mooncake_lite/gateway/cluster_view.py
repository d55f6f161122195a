"""The gateway's view of its cluster: its state, and the open requests.

Used by `endpoints` (open, submit, close) and `__main__` (run). Talks messages/gateway.py to the conductor and
takes tokens from ranks; knows no HTTP and no text. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.errors import ConfigError
from mooncake_lite.gateway.open_request import OpenRequest
from mooncake_lite.gateway.problems import Broken, Refused, Unavailable
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.gateway.sockets import Sockets
from mooncake_lite.launch.verdict import STEWARD
from scheduler.admission import ADMISSIONS
from transport.membership import Heart

TICK_S = 0.1
"""Pause between two looks at the clock; the conductor is missed at most this much too late."""

HELLO_S = 0.5
"""Pause between two hellos while the cluster is not ready: each is answered by its status, and by a
wish for a TCP endpoint once a rank on another host has come."""


class ClusterState(Enum):
    """The state of a gateway for its clients. Requests are taken while it is READY or UNAVAILABLE.

    UNAVAILABLE: no rank is left for a duty, so /health is 503. The conductor lets requests wait for such a
    rank as long as --wait-for-rank-s says, and then refuses them.
    """

    STARTING = "starting"
    READY = "ready"
    UNAVAILABLE = "unavailable"
    LOST = "lost"
    STOPPING = "stopping"


class ClusterView:
    """A gateway's view of the processes behind it. One event loop owns it.

    on_stop        called once, with the reason and the seconds left, when the cluster is to end
    block_tokens   of the pool
    heart          to the steward, which tells of new conductors; None: there is only one conductor
    report         the conductor's last answer to a question for metrics
    """

    def __init__(self, settings: Settings, on_stop: Callable[[str, float], None]):
        self._settings = settings
        self._limits = settings.limits
        self._withholds = ADMISSIONS[settings.config.admission]().withholds
        self._silence_s = settings.config.dead_after_s
        self._on_stop = on_stop
        self.block_tokens = settings.config.block_size
        self.heart: Heart | None = None
        self.sockets = Sockets(
            settings.name, settings.control_endpoint, settings.tokens_endpoint, settings.curve
        )
        self._status: m.ClusterStatus | None = None
        self._heard_at: float | None = None
        self._stopping = ""
        self._open: dict[str, OpenRequest] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._asked_at_s = -math.inf
        self._news = asyncio.Event()
        self._num_removals = 0
        self._asked: dict[int | str, asyncio.Future[Any]] = {}
        self._term = 0
        self._unsent: list[m.Submit] = []
        self.report = m.MetricsReply(-math.inf, [])

    # ------------------------------------------------------------------ is it there?

    @property
    def state(self) -> ClusterState:
        """Return the present state: the conductor's last report, unless it has been silent for too long."""
        if self._stopping:
            return ClusterState.STOPPING
        if self._status is None or self._heard_at is None:
            return ClusterState.STARTING
        if self._silent_for_s > self._silence_s:
            return ClusterState.LOST
        if not self._status.ready:
            return ClusterState.STARTING
        return ClusterState.READY if self._status.serves else ClusterState.UNAVAILABLE

    @property
    def _silent_for_s(self) -> float:
        """Return since when the steward has not answered, or without one the conductor."""
        if self.heart is not None:
            return self.heart.seconds_since_monitor()
        return time.monotonic() - (self._heard_at or 0.0)

    @property
    def detail(self) -> str:
        """Return the state in words."""
        state = self.state
        if state is ClusterState.STOPPING:
            return f"the service is stopping: {self._stopping}"
        if state is ClusterState.LOST:
            silent = STEWARD if self.heart is not None else "the conductor"
            return f"{silent} has been silent for more than {self._silence_s:g} s"
        if self._status is None:
            return "waiting for the conductor"
        return self._status.detail or state.value

    @property
    def degraded(self) -> list[str]:
        """Return the troubles in the conductor's last report, one line each."""
        return self._status.degraded if self._status is not None else []

    @property
    def open_requests(self) -> int:
        """Return the number of prompts between admit and close."""
        return len(self._open)

    # ------------------------------------------------------------------ requests

    def admit(self, request_id: str) -> OpenRequest:
        """Take a place for one more request, until `close`.

        Raises Unavailable when the cluster takes none, Refused when too many requests are open.
        """
        self._raise_unless_taken()
        request = OpenRequest(request_id)
        self._take_place(request_id, request)
        return request

    def _raise_unless_taken(self) -> None:
        if self.state not in (ClusterState.READY, ClusterState.UNAVAILABLE):
            raise Unavailable(self.detail)

    def admit_prompts(self, request: OpenRequest, ids: Sequence[str]) -> None:
        """Take places for more prompts of an admitted request. Raises Refused when too many are open."""
        for request_id in ids:
            self._take_place(request_id, request)
            request.ids.append(request_id)

    def _take_place(self, request_id: str, request: OpenRequest) -> None:
        if len(self._open) >= self._limits.open_requests:
            raise Refused(f"{len(self._open)} requests are open, which is the limit; come back later", 1.0)
        self._open[request_id] = request

    def submit(self, request: OpenRequest, message: m.Submit) -> None:
        """Send a prompt of an admitted request to the conductor, or to the next one."""
        request.raise_if_failed()
        request.expect(message, withheld=self._withholds)
        if not self.sockets.send(message):
            self._unsent.append(message)

    def drop(self, request: OpenRequest, request_id: str, branch: int) -> None:
        """End the work on one answer; the request's others continue. Does nothing if it has ended."""
        cancel = request.drop(request_id, branch)
        if cancel is not None:
            self.sockets.send(cancel)

    def close(self, request: OpenRequest) -> None:
        """Forget a request; its work is cancelled unless it has ended. Does nothing the second time."""
        known = [self._open.pop(request_id, None) for request_id in request.ids]
        if any(known):
            for request_id in request.unfinished():
                self.sockets.send(m.RequestCancelled(request_id))

    def fail_all(self, reason: str) -> None:
        """Fail every open request, and every question to the conductor, with this reason."""
        for request in set(self._open.values()):
            request.fail(Unavailable(reason))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Unavailable(reason))

    def stop(self, reason: str) -> None:
        """Refuse new requests from now on, and end the open ones."""
        self._stopping = self._stopping or reason
        self.fail_all(f"the service is stopping: {reason}")

    def disconnect(self) -> None:
        """Close the connections."""
        if self.heart is not None:
            self.heart.stop()
        self.sockets.close()

    async def renew_metrics(self, limit_s: float = 1.0) -> None:
        """Wait at most limit_s for the answer to the last MetricsRequest.

        Send one first if the last is older than `Limits.metrics_kept_s`. All callers share its answer, so a
        crowd of them does not delay the conductor. Raises Broken when it could not answer.
        """
        if time.monotonic() - self._asked_at_s >= self._limits.metrics_kept_s:
            self._ask_for_metrics()
        wanted = self._asked_at_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.report.asked_at_s < wanted:
                    self._news.clear()
                    await self._news.wait()
        if self.report.problem:
            raise Broken(self.report.problem)

    async def remove_all_blocks(self, limit_s: float) -> m.PoolEnded:
        """Remove every block of the pool that is not being written; return the conductor's answer.

        Raises Unavailable when the cluster takes no requests, or the answer does not come within limit_s.
        """
        self._num_removals += 1
        number = self._num_removals
        query = m.PoolQuery("rm-all", force=True, number=number)
        ended: m.PoolEnded = await self.ask(number, query, limit_s)
        return ended

    async def ask(self, name: int | str, question: m.Message, limit_s: float) -> Any:
        """Return the conductor's answer to a question of this name, for which it must be the only one.

        Raises as `remove_all_blocks` does.
        """
        self._raise_unless_taken()
        answer = self._asked[name] = asyncio.get_running_loop().create_future()
        try:
            if not self.sockets.send(question):
                raise Unavailable("the conductor cannot be reached")
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the conductor has not answered for {limit_s:g} s") from None
        finally:
            del self._asked[name]

    # ------------------------------------------------------------------ messages

    async def run(self) -> None:
        """Read all sockets and watch the conductor, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.sockets.read_control(self._on_control))
            tasks.create_task(self.sockets.read_tokens(self.sockets.routers[0], self._on_tokens))
            tasks.create_task(self._watch())

    async def _watch(self) -> None:
        """Send GatewayHello until ready, ping, and fail open requests when the conductor falls silent."""
        hello_at = 0.0
        pause_s = min(self._limits.ping_s, self._silence_s / 4)
        looked_at = time.monotonic()
        while True:
            now = time.monotonic()
            self._forgive(now - looked_at - TICK_S)
            looked_at = now
            state = self.state
            self._look_for_conductor()
            if now >= hello_at and state in (ClusterState.STARTING, ClusterState.LOST):
                self._say_hello()
                hello_at = now + HELLO_S
            if now - self._asked_at_s >= pause_s:
                self._ask_for_metrics()
            if state is ClusterState.LOST and (self._open or self._asked):
                self.fail_all(self.detail)
            await asyncio.sleep(TICK_S)

    def _look_for_conductor(self) -> None:
        """Present this gateway and its open requests to a new conductor, and send what could not be sent."""
        if self.heart is not None and self.heart.term != self._term:
            self._term = self.heart.term
            first, size = m.first_attempt(self._term), self.block_tokens
            self._unsent = [again for one in {*self._open.values()} for again in one.again(first, size)]
            self._say_hello()
        self._unsent = [
            message
            for message in self._unsent
            if message.request.request_id in self._open and not self.sockets.send(message)
        ]

    def _forgive(self, late_s: float) -> None:
        """Extend limits by a stall of this process (a suspended laptop, a debugger)."""
        if self._heard_at is not None and late_s > 1.0:
            self._heard_at += late_s

    def _say_hello(self) -> None:
        self.sockets.send(m.GatewayHello(self._settings.name, self.sockets.endpoints))

    def _ask_for_metrics(self) -> None:
        self._asked_at_s = time.monotonic()
        self.sockets.send(m.MetricsRequest(self._asked_at_s))

    def _on_tokens(self, message: m.Tokens) -> None:
        request = self._open.get(message.request_id)
        if request is not None:
            for received in request.deliver(message):
                self.sockets.send(received)

    def _on_control(self, message: m.Message) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, m.ClusterStatus):
            self._status = message
        elif isinstance(message, m.MetricsReply):
            self.report = message
            self._news.set()
        elif isinstance(message, m.PoolEnded | m.HintAnswered):
            name = message.number if isinstance(message, m.PoolEnded) else message.hint_id
            if (answer := self._asked.get(name)) is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, m.Reject):
            kind = Unavailable if message.kind == "unavailable" else Refused
            self._give_up(message.request_id, kind(message.reason, message.retry_after_s))
        elif isinstance(message, m.Release):
            if (request := self._open.get(message.request_id)) is not None:
                request.release(message.request_id)
        elif isinstance(message, m.Fail):
            self._give_up(message.request_id, Broken(message.reason, message.code))
        elif isinstance(message, m.Recall):
            self._recall(message)
        elif isinstance(message, m.OpenTokens):
            self._open_tcp(message.host)
        elif isinstance(message, m.Stop):
            self.stop(message.reason)
            self._on_stop(message.reason, message.grace_s)

    def _give_up(self, request_id: str, error: Exception) -> None:
        request = self._open.get(request_id)
        if request is not None:
            request.give_up(request_id, error)

    def _recall(self, recall: m.Recall) -> None:
        """Tell the conductor what a client has. A client that has left wants no more of any answer."""
        request = self._open.get(m.client_id_of(recall.request_id))
        report = request.recall(recall, self.block_tokens) if request is not None else None
        if report is None:
            gone = [m.AnswerSoFar(branch, 0, whole=True) for branch in recall.branches]
            report = m.Report(m.Recalled(recall.request_id, recall.attempt, gone), [[] for _ in gone])
        self.sockets.send(report)

    def _open_tcp(self, host: str) -> None:
        assert self._tasks is not None
        if len(self.sockets.routers) == 1:
            try:
                router = self.sockets.open_tcp(host)
            except ConfigError as error:
                print(f"{self._settings.name}: {error}", file=sys.stderr, flush=True)
            else:
                self._tasks.create_task(self.sockets.answer_door())
                self._tasks.create_task(self.sockets.read_tokens(router, self._on_tokens))
        self._say_hello()
