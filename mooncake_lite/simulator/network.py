"""A network of links, which flows share max-min fairly.

Used by `profiled.py`. `scheduler.costs.TransferCost` predicts how long a transfer takes when it begins.
Here other flows that begin or end meanwhile change that. Explained in docs/explain/experiments.md.

When a flow begins or ends, rates change in its component alone: among the flows that share links with it,
directly or over other flows.

    link      0   1   2   3
    flow a    +---+           a, b and c are one component
    flow b        +---+
    flow c            +
    flow d                +   d keeps its rate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heapreplace
from math import inf

from mooncake_lite.simulator.clock import Action, Clock

Link = int


def max_min(flows: Sequence[Sequence[Link]], capacities: Mapping[Link, float]) -> list[float]:
    """Return the rate of each flow, by progressive filling.

    All rates grow together until a link is full. The flows on that link keep their rates, and the others grow
    on. Afterwards no rate can grow unless one that is not higher shrinks.

    flows        the links that each flow passes, each link once
    capacities   bytes per second of each link
    """
    members: dict[Link, list[int]] = {}
    for number, links in enumerate(flows):
        for link in links:
            if link in members:
                members[link].append(number)
            else:
                members[link] = [number]
    growing = {link: len(numbers) for link, numbers in members.items()}
    left = {link: capacities[link] for link in members}
    rates, without = [0.0] * len(flows), len(flows)
    # A share may have grown since it was noted here, but never shrinks.
    shares = [(left[link] / growing[link], order, link) for order, link in enumerate(members)]
    heapify(shares)
    while without:
        noted, order, link = shares[0]
        if not growing[link]:
            heappop(shares)
        elif (share := left[link] / growing[link]) > noted:
            heapreplace(shares, (share, order, link))
        else:
            without -= growing[link]
            for number in members[link]:
                if not rates[number]:
                    rates[number] = noted
                    for other in flows[number]:
                        left[other] -= noted
                        growing[other] -= 1
    return rates


@dataclass(slots=True, eq=False)
class _Flow:
    """Bytes on their way.

    number      of the flow, in the order in which flows were sent
    left        bytes that were left at since_s; from then on the rate has been the present one
    ends_s      when the last byte leaves at the present rate
    alarm_s     when the flow is looked at again; inf: no such event is on the clock
    """

    number: int
    links: Sequence[Link]
    left: float
    done: Action
    latency_s: float
    since_s: float = 0.0
    rate: float = 0.0
    ends_s: float = inf
    alarm_s: float = inf

    def set_rate(self, rate: float, now: float) -> None:
        """Note what has been sent at the last rate, and go on at another one."""
        self.left = max(0.0, self.left - (now - self.since_s) * self.rate)
        self.since_s, self.rate, self.ends_s = now, rate, now + self.left / rate


class Network:
    """Flows under way.

    capacity   bytes per second of a link, above 0

    _on        link -> number -> flow that passes it
    _landing   time -> flows whose last bytes arrive then

    Of each component, the flows that end first have an event on the clock, at their ends or earlier. An event
    that comes too early is set anew, so that a flow which others slow down has one event and not many.
    """

    def __init__(self, clock: Clock, capacity: Callable[[Link], float]) -> None:
        self._clock, self._capacity = clock, capacity
        self._capacities: dict[Link, float] = {}
        self._on: dict[Link, dict[int, _Flow]] = {}
        self._landing: dict[float, list[_Flow]] = {}
        self._sent = 0

    def send(
        self, links: Sequence[Link], nbytes: int, done: Action, latency_s: float = 0.0, most: float = inf
    ) -> None:
        """Send bytes over links, each named once, and call `done` when the last ones have arrived.

        latency_s   between the departure of a byte and its arrival
        most        bytes per second at which the bytes become ready: such a flow also passes a link of its
                    own, whose number is -1 or below

        Of flows that end at the same time with the same latency, the one that was sent first is done first.
        """
        self._sent += 1
        if most < inf:
            links, self._capacities[-self._sent] = (*links, -self._sent), most
            self._on[-self._sent] = {}
        flow = _Flow(self._sent, links, nbytes, done, latency_s)
        if not nbytes:
            self._land(flow)
            return
        is_alone = True
        for link in links:
            if link not in self._on:
                self._on[link], self._capacities[link] = {}, self._capacity(link)
            is_alone = is_alone and not self._on[link]
            self._on[link][flow.number] = flow
        if is_alone:
            flow.set_rate(min([self._capacities[link] for link in links]), self._clock.now)
            self._set_alarm(flow)
        else:
            self._share(links[0])

    def _share(self, first: Link) -> set[Link]:
        """Set the rates of the component that passes a link. Returns all links that it passes."""
        links, flows, queue = {first}, dict[int, _Flow](), [first]
        for link in queue:
            for number, flow in self._on[link].items():
                if number not in flows:
                    flows[number] = flow
                    for other in flow.links:
                        if other not in links:
                            links.add(other)
                            queue.append(other)
        now, found, first_end_s = self._clock.now, list(flows.values()), inf
        for flow, rate in zip(found, max_min([flow.links for flow in found], self._capacities)):
            if rate != flow.rate and flow.ends_s > now:  # one that ends now has its event already
                flow.set_rate(rate, now)
            if flow.ends_s < first_end_s:
                first_end_s = flow.ends_s
        for flow in found:
            if flow.ends_s == first_end_s:
                self._set_alarm(flow)
        return links

    def _set_alarm(self, flow: _Flow) -> None:
        """Look at a flow again at its end, unless an earlier event does so."""
        if flow.alarm_s > flow.ends_s:
            flow.alarm_s = flow.ends_s
            self._clock.at(flow.ends_s, partial(self._ring, flow))

    def _ring(self, flow: _Flow) -> None:
        """End a flow, unless it has become slower, or this event is outdated."""
        now = self._clock.now
        if flow.alarm_s != now:
            return
        flow.alarm_s = inf
        if flow.ends_s > now:
            self._set_alarm(flow)
            return
        for link in flow.links:
            del self._on[link][flow.number]
            if link < 0:
                del self._on[link], self._capacities[link]
        self._land(flow)
        shared: set[Link] = set()
        for link in flow.links:
            if link not in shared and self._on.get(link):
                shared |= self._share(link)

    def _land(self, flow: _Flow) -> None:
        """Call `done` after the latency, after all flows have ended that end now."""
        time = self._clock.now + flow.latency_s
        if time not in self._landing:
            self._landing[time] = []
            self._clock.at(time, partial(self._landed, time))
        self._landing[time].append(flow)

    def _landed(self, time: float) -> None:
        for flow in sorted(self._landing.pop(time), key=lambda flow: flow.number):
            flow.done()
