"""The books of the cluster: instances, requests in lines and slots, the prefix index, the costs.

Kept by `mooncake_lite.control`; read by the policies in `scheduler.placement` and by `scheduler.admission`.
It makes no choices and reads no clock. Explained in docs/explain/conductor.md.

    wait_in_line() --> held line --+
                                   +--> place() --> queue --> start() --> running --> end_prefill() --> decode
    (new request) -----------------+      |           ^                      |
                                          |           +------ defer() -------+
                                          +-- takes decode slots, which forget() frees
    held line --> resume() --> decode, without a prefill

Rules. A method asserts what its caller owes; `check()` asserts the rest, and tests call it after every step.

  One place        A request is held, queued, running or decoding, and only one of these.
  Slots first      place() takes a decode slot per answer, all on one instance, before the prefill. Without
                   slots, the request would hold KV that no instance reads. They stay taken until forget();
                   keep_slots() frees those of ended answers, and move() exchanges the instance.
  Both duties      An instance of both duties decodes what it prefills, because the KV is in its pages.
  Queue order      start() takes the head of a queue, and only into a free prefill slot.
  Starting         startable() returns the same request until it is started, deferred or forgotten.
  Deferring        defer() returns a request to the head of its queue, with the key FIRST. startable() skips a
                   queue with a deferred head until retry(). The caller decides when to retry, because these
                   books do not know the pool.
  One key          A held request keeps its key when it is placed, so a queue counts each request once.
                   on_leave() may change the keys of others, but never the key FIRST.
  Lost instances   The caller forgets or moves all requests that need an instance before remove_instance().
  Forgetting       forget() accepts any id. A request that pauses between two tries is in none of these books.
  Columns          They repeat the books and change in the same call, because policies compare columns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from scheduler.columns import DecodeColumns, PrefillColumns
from scheduler.costs import CostConfig, Costs
from scheduler.decode_load import DecodeLoad
from scheduler.flows import Flows
from scheduler.held_line import HeldLine
from scheduler.instances import DUTIES_OF_INSTANCES, DecodeInstance, Placed, PrefillInstance
from scheduler.line import FIRST
from scheduler.prefix_index import PrefixIndex
from scheduler.queues import FCFS, Queue
from scheduler.racks import Racks
from scheduler.requests import Placement, Request


class State:
    """The books of the cluster, which policies read. The book that names a request tells its place.

    index             which blocks of the pool lie where
    pages             which blocks instances hold in their own pages: hints; each instance is a node there
    prefills          instance number -> prefill instance, ascending; read-only for policies
    decodes           the same for decode instances
    prefill_columns   what policies compare of prefill instances, as columns; decode_columns likewise
    costs             predicts how long work takes
    decode_load       when requests begin to decode, so far as that is known
    queue             the order in which waiting requests begin
    max_queue         most requests that may wait; `scheduler.admission` refuses more
    num_placed        number of requests that were placed so far
    held              accepted requests without a place
    decode_slots      of all decode instances together; freed_slots: how often some were freed, or joined
    block_nbytes      bytes of one block
    racks             which nodes are near each other
    flows             prefills that read from other nodes
    """

    def __init__(
        self,
        max_queue: int,
        costs: Costs | None = None,
        queue: Queue | None = None,
        block_nbytes: int = 0,
        racks: Sequence[int] = (),
    ) -> None:
        self.racks = Racks(racks)
        self.max_queue = max_queue
        self.block_nbytes = block_nbytes
        self.costs = costs or Costs(CostConfig())
        self.queue = queue or FCFS()
        self.index = PrefixIndex()
        self.pages = PrefixIndex()
        self.prefills: dict[int, PrefillInstance] = {}
        self.decodes: dict[int, DecodeInstance] = {}
        self._make_columns()
        self.num_placed = 0
        self.held = HeldLine(self.queue)
        self._placed: dict[str, Placed] = {}
        self._num_queued = 0
        self.decode_slots = self.freed_slots = 0
        self._free_decode_slots = 0
        self._may_start: OrderedDict[int, None] = OrderedDict()  # instances to look at in startable()
        self._deferred: OrderedDict[str, int] = OrderedDict()  # request -> its prefill instance
        self.decode_load = DecodeLoad()
        self.flows = Flows()

    # ------------------------------------------------------------------------------ instances

    def add_instance(self, instance: int, node: int, duties: Iterable[str], slots: int) -> None:
        """Add an instance with `slots` for each of these duties ("prefill", "decode").

        An instance whose duties have different numbers of slots is added once per duty.
        """
        wanted = frozenset(duties)
        assert wanted in DUTIES_OF_INSTANCES, f"instance {instance} has duties {sorted(wanted)}"
        assert slots >= 1, f"instance {instance} has {slots} slots"
        if "prefill" in wanted:
            assert instance not in self.prefills, f"instance {instance} prefills already"
            self.prefills[instance] = PrefillInstance(instance, node, slots)
            self.prefills = dict(sorted(self.prefills.items()))
            self.pages.add_holder(instance, instance)
        if "decode" in wanted:
            assert instance not in self.decodes, f"instance {instance} decodes already"
            self.decodes[instance] = DecodeInstance(instance, slots, free=slots, node=node)
            self.decodes = dict(sorted(self.decodes.items()))
            self.decode_slots += slots
            self._free_decode_slots += slots
            self.held.change_slots(slots)
        self.freed_slots += 1
        self._make_columns()

    def on_instance(self, instance: int) -> list[str]:
        """Return the requests that need an instance: it prefills them, or decodes them."""
        return [
            name
            for name, placed in self._placed.items()
            if placed.placement.decode == instance
            or (placed.placement.prefill == instance and not placed.decodes)
        ]

    def remove_instance(self, instance: int) -> None:
        """Remove an instance that is lost. No request may need it any more."""
        assert not self.on_instance(instance), f"requests need instance {instance}"
        self._may_start.pop(instance, None)
        self.prefills.pop(instance, None)
        if (decode := self.decodes.pop(instance, None)) is not None:
            self.decode_slots -= decode.slots
            self._free_decode_slots -= decode.slots
            self.held.change_slots(-decode.slots)
        for key, holder, tier in self.pages.places():
            if holder == instance:
                self.pages.removed(key, holder, tier)
        self._make_columns()

    def _make_columns(self) -> None:
        """Number the instances anew."""
        prefills, decodes = self.prefills.values(), self.decodes.values()
        decode_rows = {instance: row for row, instance in enumerate(self.decodes)}
        self.prefill_columns = PrefillColumns(
            list(self.prefills), [self.index.add_node(one.node) for one in prefills],
            [self.pages.add_node(one.instance) for one in prefills],
            [decode_rows.get(instance, -1) for instance in self.prefills],
            [self.racks.of(one.node) for one in prefills],
        )  # fmt: skip
        for row, prefill in enumerate(prefills):
            prefill.row = row
            self.prefill_columns.show(prefill)
        self.decode_columns = DecodeColumns(decodes, self.racks.of)
        for row, decode in enumerate(decodes):
            decode.row = row
            self.decode_columns.show(decode)

    def note_pages(self, instance: int, stored: list[int], removed: list[int]) -> None:
        """Note blocks that came into an instance's pages, and those that left them."""
        if instance in self.prefills:
            for key in stored:
                self.pages.stored(key, instance, "dram")
            self.pages.removed_run(removed[::-1], instance, "dram")  # pages lose the end of a prefix first

    def decode_of(self, prefill: int) -> DecodeInstance | None:
        """Return the only instance that may decode what this one prefills; None: any.

        An instance of both duties decodes what it prefills.
        """
        return self.decodes.get(prefill)

    def open_prefills(self, n: int = 1) -> np.ndarray:
        """Return the rows of the prefill instances whose requests would have n free decode slots.

        Policies choose among these, so that no policy has to know about instances of both duties.
        """
        free, columns = self.decode_columns.free, self.prefill_columns
        if self._free_decode_slots < n or (n > 1 and free.max() < n):
            return columns.row[:0]
        if not columns.num_both:
            return columns.row
        return columns.row[(columns.decode_row < 0) | (free[columns.decode_row] >= n)]

    def queue_s(self, now: float) -> np.ndarray:
        """Predict the seconds until each prefill instance could begin another prefill, by row."""
        columns = self.prefill_columns
        waiting_s = self.costs.slot_s(columns.instance, columns.waiting_s)
        return np.maximum(columns.ends_s - now, 0.0) + waiting_s  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------ the held line

    def wait_in_line(self, request: Request, now: float, *, front: bool = False) -> None:
        """Add an accepted request without a place to the held line, which all instances share."""
        assert request.request_id not in self, f"request {request.request_id} is tracked already"
        cached = request.cached_tokens(self.index.leading(request.keys).blocks)
        prefill_s = self._prefill_s(request, cached)
        self.held.add(request, prefill_s, now, front=front)

    # ------------------------------------------------------------------------------ a placed request

    def place(self, request: Request, placement: Placement, now: float, *, front: bool = False) -> None:
        """Queue a request, new or held, at its prefill instance and take a slot of its decode instance."""
        request_id = request.request_id
        assert request_id not in self._placed, f"request {request_id} has a place already"
        assert placement.request_id == request_id
        prefill, decode = self.prefills[placement.prefill], self.decodes[placement.decode]
        assert decode.free >= request.n, f"decode instance {decode.instance} has no free slot"
        assert self.decode_of(prefill.instance) in (None, decode), "another one decodes what it prefills"
        held = self.held.place(request, now)
        prefill_s = self._prefill_s(request, placement.cached_tokens)
        key = FIRST if front else held.key if held else self.queue.key(request, prefill_s, now)
        placed = self._placed[request_id] = Placed(request, placement, prefill_s, key)
        self._enqueue(prefill, placed, front)
        self._take_slots(decode, placed, request.n, now)
        self._look_at(prefill)
        self.decode_load.expects(request_id, request.n, now + placement.terms.ttft_s)
        self.num_placed += 1

    def resume(self, request: Request, placement: Placement, now: float) -> None:
        """Take a slot of a decode instance for a held request that needs no prefill."""
        request_id, decode = request.request_id, self.decodes[placement.decode]
        assert request_id not in self._placed, f"request {request_id} has a place already"
        assert decode.free >= request.n, f"decode instance {decode.instance} has no free slot"
        self.held.place(request, now)
        placed = self._placed[request_id] = Placed(request, placement, decodes=True)
        self._take_slots(decode, placed, request.n, now)
        self.decode_load.begins(request_id, request.n, now)

    def startable(self) -> str | None:
        """Return a request at the head of a queue whose instance has a free prefill slot.

        The same request is returned until it is started, deferred or forgotten. Only instances that may have
        become startable are looked at.
        """
        while self._may_start:
            prefill = self.prefills[next(iter(self._may_start))]
            if len(prefill.running) < prefill.slots:
                head = prefill.queue.head()
                if head is not None and head not in self._deferred:
                    return head
            del self._may_start[prefill.instance]
        return None

    def start(self, request_id: str, now: float) -> None:
        """Let the head of a queue occupy a prefill slot."""
        prefill, placed = self._prefill_of(request_id), self._placed[request_id]
        assert prefill.queue.head() == request_id, f"request {request_id} is not the head"
        assert len(prefill.running) < prefill.slots, f"prefill instance {prefill.instance} has no free slot"
        self._leave_queue(prefill, placed)
        prefill.pending_tokens += placed.uncached_tokens
        prefill.start(request_id, float(self.costs.slot_s(prefill.instance, placed.prefill_s)), now)
        self.prefill_columns.show(prefill)
        self._deferred.pop(request_id, None)
        self._stop_waiting(placed.request, started=True)

    def defer(self, request_id: str, now: float) -> None:
        """Put a request that could not start, or that must start again, back to the head of its queue.

        It stays there, and so do the requests behind it, until `retry`.
        """
        prefill, placed = self._prefill_of(request_id), self._placed[request_id]
        if request_id in prefill.running:
            self._leave_slot(prefill, placed, now, is_done=False)
        else:
            self._leave_queue(prefill, placed)
        placed.key = FIRST
        self._enqueue(prefill, placed, front=True)
        self._deferred[request_id] = prefill.instance

    @property
    def deferred(self) -> list[str]:
        """Return the deferred requests, the first one first."""
        return list(self._deferred)

    def retry(self, request_id: str) -> None:
        """Let a deferred request start again: what it waits for was freed."""
        self._may_start[self._deferred.pop(request_id)] = None

    def end_prefill(self, request_id: str, now: float) -> None:
        """Free the prefill slot of a request, if it has one still. Its decode slot stays taken."""
        placed = self._placed.get(request_id)
        if placed is None or placed.decodes:
            return
        prefill = self._prefill_of(request_id)
        self._leave_slot(prefill, placed, now, is_done=True)
        self._look_at(prefill)
        decode = self.decodes[placed.placement.decode]
        placed.decodes = True
        decode.begin(request_id, placed.request.context)
        self.decode_load.begins(request_id, decode.taken[request_id], now)

    def move(self, request_id: str, decode: int) -> None:
        """Give a request slots of another decode instance instead of those that it has."""
        placed = self._placed[request_id]
        old, new = self.decodes[placed.placement.decode], self.decodes[decode]
        slots = old.taken[request_id]
        assert new.free >= slots, f"decode instance {decode} has no free slot"
        old.take(request_id, 0, placed.request.context, coming=not placed.decodes)
        new.take(request_id, slots, placed.request.context, coming=not placed.decodes)
        placed.placement = msgspec.structs.replace(placed.placement, decode=decode)
        self.decode_columns.show(old)
        self.decode_columns.show(new)

    def _prefill_s(self, request: Request, cached: int) -> float:
        return float(self.costs.config.prefill.seconds(request.num_tokens, cached))

    def _enqueue(self, prefill: PrefillInstance, placed: Placed, front: bool) -> None:
        prefill.queue.add(placed.request.request_id, placed.key, front=front)
        prefill.waiting_s += placed.prefill_s
        prefill.pending_tokens += placed.uncached_tokens
        self._num_queued += 1
        self.prefill_columns.show(prefill)

    def _leave_queue(self, prefill: PrefillInstance, placed: Placed) -> None:
        """Take a request out of a queue. Sums of seconds begin anew at 0: rounding does not add up."""
        prefill.queue.remove(placed.request.request_id)
        prefill.pending_tokens -= placed.uncached_tokens
        prefill.waiting_s = prefill.waiting_s - placed.prefill_s if prefill.queue else 0.0
        self._num_queued -= 1
        self.prefill_columns.show(prefill)

    def _stop_waiting(self, request: Request, *, started: bool) -> None:
        """Tell the queue that a request waits no longer, and give others the keys that change with it."""
        for name, key in self.queue.on_leave(request, started=started).items():
            if name in self.held:
                self.held.change_key(name, key)
            elif (placed := self._placed[name]).key != FIRST:
                placed.key = key
                self._prefill_of(name).queue.change_key(name, key)

    def _leave_slot(self, prefill: PrefillInstance, placed: Placed, now: float, *, is_done: bool) -> None:
        prefill.leave(placed.request.request_id, now, is_done=is_done)
        prefill.pending_tokens -= placed.uncached_tokens
        self.flows.end(placed.request.request_id)
        self.prefill_columns.show(prefill)

    def keep_slots(self, request_id: str, slots: int, now: float) -> None:
        """Free all decode slots of a request but these: its other answers have ended."""
        placed = self._placed[request_id]
        self._take_slots(self.decodes[placed.placement.decode], placed, slots, now)
        self.decode_load.keeps(request_id, slots)

    def _take_slots(self, decode: DecodeInstance, placed: Placed, slots: int, now: float) -> None:
        """Give a request this many slots, more or fewer than it has."""
        name = placed.request.request_id
        more = decode.take(name, slots, placed.request.context, coming=not placed.decodes)
        self.held.keep(name, slots, now)
        self._free_decode_slots -= more
        self.freed_slots += more < 0
        self.decode_columns.show(decode)

    def forget(self, request_id: str, now: float) -> None:
        """Remove a request from all books. An unknown one changes nothing."""
        if held := self.held.leave(request_id, now):
            self._stop_waiting(held.request, started=False)
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self.decode_load.forget(request_id)
        self._deferred.pop(request_id, None)
        prefill = self.prefills.get(placed.placement.prefill)
        if prefill is None:
            assert placed.decodes  # its prefill instance was lost after the prefill
        elif request_id in prefill.queue:
            self._leave_queue(prefill, placed)
            self._stop_waiting(placed.request, started=False)
            self._look_at(prefill)
        elif request_id in prefill.running:
            self._leave_slot(prefill, placed, now, is_done=False)
            self._look_at(prefill)
        self._take_slots(self.decodes[placed.placement.decode], placed, 0, now)

    def placement_of(self, request_id: str) -> Placement:
        """Return the placement of a request that has one."""
        return self._placed[request_id].placement

    def request_of(self, request_id: str) -> Request:
        """Return a request that has a place."""
        return self._placed[request_id].request

    def decoding(self, instance: int) -> tuple[int, float]:
        """Return the sequences that an instance decodes now, and the tokens that they attend to."""
        decode = self.decodes[instance]
        return decode.slots - decode.free - decode.coming, decode.context - decode.coming_context

    def __contains__(self, request_id: str) -> bool:
        """Tell whether the request is held or has a place."""
        return request_id in self.held or request_id in self._placed

    @property
    def num_waiting(self) -> int:
        """Return the number of accepted requests whose prefill has not begun: held, or in a queue."""
        return len(self.held) + self._num_queued

    @property
    def num_running(self) -> int:
        """Return the number of requests in prefill or decode."""
        return len(self._placed) - self._num_queued

    @property
    def num_taken(self) -> int:
        """Return the number of decode slots that requests have: the sum of `decode_columns.batch`."""
        return self.decode_slots - self._free_decode_slots

    def _prefill_of(self, request_id: str) -> PrefillInstance:
        return self.prefills[self._placed[request_id].placement.prefill]

    def _look_at(self, prefill: PrefillInstance) -> None:
        """Let `startable` look at this instance when it has something to start."""
        if prefill.queue and len(prefill.running) < prefill.slots:
            self._may_start[prefill.instance] = None

    # ------------------------------------------------------------------------------ the invariants

    def check(self) -> None:
        """Assert that the books agree with each other."""
        self.index.check()
        self.pages.check()
        assert not any(name in self.held for name in self._placed)
        self.held.check()
        self.decode_load.check(sum(one.slots - one.free for one in self.decodes.values()))
        assert self.decode_load.running == sum(self.decoding(instance)[0] for instance in self.decodes)
        assert list(self.prefills) == sorted(self.prefills)
        assert list(self.decodes) == sorted(self.decodes)
        for prefill in self.prefills.values():
            prefill.check(self._placed)
            self.prefill_columns.check(prefill)
            head = prefill.queue.head()
            if head is not None and len(prefill.running) < prefill.slots and head not in self._deferred:
                assert prefill.instance in self._may_start, f"request {head} would never start"
        for decode in self.decodes.values():
            decode.check(self._placed)
            self.decode_columns.check(decode)
        self.flows.check()
        assert self._num_queued == sum(len(one.queue) for one in self.prefills.values())
        assert self.decode_slots == sum(one.slots for one in self.decodes.values())
        assert self._free_decode_slots == sum(one.free for one in self.decodes.values())
        assert len(self._placed) == sum(len(one.taken) for one in self.decodes.values())
        for request_id, instance in self._deferred.items():
            assert request_id in self.prefills[instance].queue
