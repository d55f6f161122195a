"""The books of the cluster: instances, requests in lines and slots, the prefix index, the prefill rate.

Kept by `mooncake_lite.control`; read by the policies in `scheduler.placement` and by `scheduler.admission`.
It makes no choices and reads no clock. Explained in docs/explain/paper.md, "Scheduling".

    hold() --> held line --+
                           +--> place() --> queue --> start() --> running --> end_prefill() --> decode slot
    (new request) ---------+      |           ^                      |
                                  |           +------ defer() -------+
                                  +-- takes a slot of its decode instance, which forget() frees
    held line --> resume() --> decode slot, without a prefill
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from scheduler.prefill_rate import PrefillRate
from scheduler.prefix_index import Leading, PrefixIndex
from scheduler.requests import Placement, Request

DUTIES = frozenset({"prefill"}), frozenset({"decode"}), frozenset({"prefill", "decode"})
"""What an instance can do: one of the two, or both."""


@dataclass(slots=True)
class PrefillInstance:
    """One instance that prefills.

    queue            requests placed on it, in the order in which they will start
    running          requests that occupy one of its prefill slots
    pending_tokens   uncached tokens of both
    """

    instance: int
    node: int
    slots: int
    queue: OrderedDict[str, None] = field(default_factory=OrderedDict)
    running: dict[str, None] = field(default_factory=dict)
    pending_tokens: int = 0


@dataclass(slots=True)
class DecodeInstance:
    """One instance that decodes.

    free    slots that no request has
    taken   request placed on it -> its slots, one per answer, from `place` until it is forgotten
    """

    instance: int
    node: int
    slots: int
    free: int
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Placed:
    """A request that has a place."""

    request: Request
    placement: Placement

    @property
    def uncached_tokens(self) -> int:
        return self.request.num_tokens - self.placement.cached_tokens


class State:
    """What policies know. The book that names a request tells where the request is.

    index        which blocks of the pool lie where
    pages        which blocks instances hold in their own pages: hints; each instance is a node of its own
    prefills     instance number -> prefill instance, ascending; read-only for policies
    decodes      the same for decode instances
    max_queue    most requests that may wait; `scheduler.admission` refuses more
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.index = PrefixIndex()
        self.pages = PrefixIndex()
        self.prefills: dict[int, PrefillInstance] = {}
        self.decodes: dict[int, DecodeInstance] = {}
        self.held_tokens = 0
        self._rate = PrefillRate()
        self._held: OrderedDict[str, tuple[Request, int]] = OrderedDict()  # and its uncached tokens
        self._placed: dict[str, _Placed] = {}
        self._num_queued = 0
        self._free_decode_slots = 0
        self._num_both = 0  # instances of both duties
        self._may_start: OrderedDict[int, None] = OrderedDict()  # instances to look at in startable()
        self._deferred: OrderedDict[str, int] = OrderedDict()  # request -> its prefill instance

    # ------------------------------------------------------------------------------ instances

    def add_instance(self, instance: int, node: int, duties: Iterable[str], slots: int) -> None:
        """Add an instance with `slots` for each of these duties ("prefill", "decode").

        An instance whose duties have different numbers of slots is added once per duty.
        """
        wanted = frozenset(duties)
        assert wanted in DUTIES, f"instance {instance} has duties {sorted(wanted)}"
        assert slots >= 1, f"instance {instance} has {slots} slots"
        if "prefill" in wanted:
            assert instance not in self.prefills, f"instance {instance} prefills already"
            self.prefills[instance] = PrefillInstance(instance, node, slots)
            self.prefills = dict(sorted(self.prefills.items()))
            self.pages.add_holder(instance, instance)
        if "decode" in wanted:
            assert instance not in self.decodes, f"instance {instance} decodes already"
            self.decodes[instance] = DecodeInstance(instance, node, slots, free=slots)
            self.decodes = dict(sorted(self.decodes.items()))
            self._free_decode_slots += slots
        self._num_both = len(self.prefills.keys() & self.decodes.keys())

    def holds(self, instance: int, stored: list[int], removed: list[int]) -> None:
        """Note blocks that came into an instance's pages, and those that left them."""
        if instance in self.prefills:
            for key in stored:
                self.pages.stored(key, instance, "dram")
            self.pages.removed_run(removed[::-1], instance, "dram")  # pages lose the end of a prefix first

    @property
    def has_decode_place(self) -> bool:
        """Tell whether some decode instance has a free slot."""
        return self._free_decode_slots > 0

    def decodes_for(self, prefill: int) -> Collection[DecodeInstance]:
        """Return where a request may be decoded that is prefilled on this instance.

        An instance of both duties decodes what it prefills. Others leave the choice to the policy.
        """
        own = self.decodes.get(prefill)
        return self.decodes.values() if own is None else (own,)

    def open_prefills(self, n: int = 1) -> Collection[PrefillInstance]:
        """Return the prefill instances whose requests would have n free decode slots, ascending.

        Policies choose among these, so that no policy has to know about instances of both duties.
        """
        if self._free_decode_slots < n or (n > 1 and all(one.free < n for one in self.decodes.values())):
            return ()
        if not self._num_both:
            return self.prefills.values()
        full = {one.instance for one in self.decodes.values() if one.free < n}
        return [one for one in self.prefills.values() if one.instance not in full]

    # ------------------------------------------------------------------------------ the held line

    def hold(self, request: Request, *, front: bool = False) -> None:
        """Keep an accepted request without a place, in one first-come line for all instances."""
        assert request.request_id not in self, f"request {request.request_id} is tracked already"
        uncached = request.num_tokens - cached_tokens(request, self.index.leading(request.keys))
        self._held[request.request_id] = request, uncached
        self.held_tokens += uncached
        if front:
            self._held.move_to_end(request.request_id, last=False)

    def next_held(self) -> Request | None:
        """Return the head of the held line."""
        return next(iter(self._held.values()))[0] if self._held else None

    # ------------------------------------------------------------------------------ a placed request

    def place(self, request: Request, placement: Placement, *, front: bool = False) -> None:
        """Queue a request, new or held, at its prefill instance and take a slot of its decode instance."""
        request_id = request.request_id
        assert request_id not in self._placed, f"request {request_id} has a place already"
        assert placement.request_id == request_id
        prefill, decode = self.prefills[placement.prefill], self.decodes[placement.decode]
        assert decode.free >= request.n, f"decode instance {decode.instance} has no free slot"
        assert decode in self.decodes_for(prefill.instance), f"{prefill.instance} decodes what it prefills"
        self._leave_line(request_id)
        placed = self._placed[request_id] = _Placed(request, placement)
        prefill.queue[request_id] = None
        if front:
            prefill.queue.move_to_end(request_id, last=False)
        prefill.pending_tokens += placed.uncached_tokens
        self._num_queued += 1
        self._take_slots(decode, request_id, request.n)
        self._look_at(prefill)

    def resume(self, request: Request, placement: Placement) -> None:
        """Take a slot of a decode instance for a held request that needs no prefill."""
        request_id, decode = request.request_id, self.decodes[placement.decode]
        assert request_id not in self._placed, f"request {request_id} has a place already"
        assert decode.free >= request.n, f"decode instance {decode.instance} has no free slot"
        self._leave_line(request_id)
        self._placed[request_id] = _Placed(request, placement)
        self._take_slots(decode, request_id, request.n)

    def startable(self) -> str | None:
        """Return a request at the head of a queue whose instance has a free prefill slot.

        The same request is returned until it is started, deferred or forgotten. Only instances that may have
        become startable are looked at.
        """
        while self._may_start:
            prefill = self.prefills[next(iter(self._may_start))]
            if prefill.queue and len(prefill.running) < prefill.slots:
                head = next(iter(prefill.queue))
                if head not in self._deferred:
                    return head
            del self._may_start[prefill.instance]
        return None

    def start(self, request_id: str) -> None:
        """Let the head of a queue occupy a prefill slot."""
        prefill = self._prefill_of(request_id)
        assert next(iter(prefill.queue), None) == request_id, f"request {request_id} is not the head"
        assert len(prefill.running) < prefill.slots, f"prefill instance {prefill.instance} has no free slot"
        del prefill.queue[request_id]
        prefill.running[request_id] = None
        self._num_queued -= 1
        self._deferred.pop(request_id, None)

    def defer(self, request_id: str) -> None:
        """Put a request that could not start, or that must start again, back to the head of its queue.

        It stays there, and so do the requests behind it, until `retry`.
        """
        prefill = self._prefill_of(request_id)
        if request_id in prefill.running:
            del prefill.running[request_id]
            prefill.queue[request_id] = None
            self._num_queued += 1
        assert request_id in prefill.queue, f"request {request_id} has ended its prefill"
        prefill.queue.move_to_end(request_id, last=False)
        self._deferred[request_id] = prefill.instance

    def retry(self) -> None:
        """Let deferred requests start again: capacity was freed."""
        while self._deferred:
            _, instance = self._deferred.popitem(last=False)
            self._may_start[instance] = None

    def end_prefill(self, request_id: str) -> None:
        """Free the prefill slot of a request. Its decode slot stays taken."""
        prefill = self._prefill_of(request_id)
        assert request_id in prefill.running, f"request {request_id} is not being prefilled"
        del prefill.running[request_id]
        prefill.pending_tokens -= self._placed[request_id].uncached_tokens
        self._look_at(prefill)

    def keep_slots(self, request_id: str, slots: int) -> None:
        """Free all decode slots of a request but these: its other answers have ended."""
        self._take_slots(self.decodes[self._placed[request_id].placement.decode], request_id, slots)

    def _take_slots(self, decode: DecodeInstance, request_id: str, slots: int) -> None:
        """Give a request this many slots, more or fewer than it has."""
        more = slots - decode.taken.get(request_id, 0)
        decode.taken[request_id] = slots
        decode.free -= more
        self._free_decode_slots -= more

    def forget(self, request_id: str) -> None:
        """Remove a request from all books. An unknown one changes nothing."""
        self._leave_line(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self._deferred.pop(request_id, None)
        prefill = self.prefills[placed.placement.prefill]
        if request_id in prefill.queue or request_id in prefill.running:
            self._num_queued -= request_id in prefill.queue
            prefill.queue.pop(request_id, None)
            prefill.running.pop(request_id, None)
            prefill.pending_tokens -= placed.uncached_tokens
            self._look_at(prefill)
        decode = self.decodes[placed.placement.decode]
        self._take_slots(decode, request_id, 0)
        del decode.taken[request_id]

    def placement_of(self, request_id: str) -> Placement:
        """Return the placement of a request that has one."""
        return self._placed[request_id].placement

    def __contains__(self, request_id: str) -> bool:
        """Tell whether the request is held or has a place."""
        return request_id in self._held or request_id in self._placed

    @property
    def num_waiting(self) -> int:
        """Return the number of accepted requests whose prefill has not begun: held, or in a queue."""
        return len(self._held) + self._num_queued

    @property
    def num_running(self) -> int:
        """Return the number of requests in prefill or decode."""
        return len(self._placed) - self._num_queued

    def _leave_line(self, request_id: str) -> None:
        _, uncached = self._held.pop(request_id, (None, 0))
        self.held_tokens -= uncached

    def _prefill_of(self, request_id: str) -> PrefillInstance:
        return self.prefills[self._placed[request_id].placement.prefill]

    def _look_at(self, prefill: PrefillInstance) -> None:
        """Let `startable` look at this instance when it has something to start."""
        if prefill.queue and len(prefill.running) < prefill.slots:
            self._may_start[prefill.instance] = None

    # ------------------------------------------------------------------------------ the rate of prefill

    def measured_prefill(self, computed_tokens: int, compute_s: float) -> None:
        """Add one measurement. compute_s includes neither loads nor stores."""
        self._rate.measured(computed_tokens, compute_s)

    @property
    def prefill_s_per_token(self) -> float:
        """Return the recent computing time per prefilled token; a guess before any measurement."""
        return self._rate.s_per_token

    @property
    def knows_prefill_rate(self) -> bool:
        """Tell whether the rate was measured."""
        return self._rate.is_measured

    # ------------------------------------------------------------------------------ the invariants

    def check(self) -> None:
        """Assert that the books agree with each other."""
        self.index.check()
        self.pages.check()
        assert not self._held.keys() & self._placed.keys()
        assert self.held_tokens == sum(uncached for _, uncached in self._held.values())
        assert list(self.prefills) == sorted(self.prefills)
        assert list(self.decodes) == sorted(self.decodes)
        for prefill in self.prefills.values():
            self._check_prefill(prefill)
        for decode in self.decodes.values():
            assert all(self.placement_of(name).decode == decode.instance for name in decode.taken)
            assert decode.free == decode.slots - sum(decode.taken.values()) >= 0
            assert all(1 <= slots <= self._placed[name].request.n for name, slots in decode.taken.items())
        assert self._num_queued == sum(len(one.queue) for one in self.prefills.values())
        assert self._free_decode_slots == sum(one.free for one in self.decodes.values())
        assert len(self._placed) == sum(len(one.taken) for one in self.decodes.values())
        for request_id, instance in self._deferred.items():
            assert request_id in self.prefills[instance].queue

    def _check_prefill(self, prefill: PrefillInstance) -> None:
        here = [*prefill.queue, *prefill.running]
        assert len(set(here)) == len(here), "a request is queued and running"
        for request_id in here:
            assert self.placement_of(request_id).prefill == prefill.instance
        assert len(prefill.running) <= prefill.slots
        assert prefill.pending_tokens == sum(self._placed[name].uncached_tokens for name in here)
        head = next(iter(prefill.queue), None)
        if head is not None and len(prefill.running) < prefill.slots and head not in self._deferred:
            assert prefill.instance in self._may_start, f"request {head} would never start"


def cached_tokens(request: Request, leading: Leading) -> int:
    """Return the tokens of the request that the pool holds anywhere. The last token is always computed."""
    return min(leading.blocks * request.block_tokens, request.num_tokens - 1)
