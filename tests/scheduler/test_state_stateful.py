"""The books of the cluster under any legal sequence of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import scheduler as s
from tests.scheduler.cluster import choose, cluster, request


class AnyCalls(RuleBasedStateMachine):
    """Calls in any legal order, beside a model: where each request is, and the order of the held line."""

    def __init__(self) -> None:
        super().__init__()
        self.state = cluster(prefill=3, decode=2, slots=3)
        self.where: dict[str, str] = {}
        self.line: list[str] = []
        self.deferred: set[str] = set()
        self.next_instance = 31
        self.made = 0
        self.now = 0.0

    def names(self, *stages: str) -> list[str]:
        return [name for name, stage in self.where.items() if stage in stages]

    @rule(tokens=st.integers(1, 900), blocks=st.integers(0, 3), front=st.booleans())
    def arrive(self, tokens: int, blocks: int, front: bool) -> None:
        """A request is placed, or held behind those that wait."""
        self.made += 1
        name = f"r{self.made}"
        wanted = request(name, tokens, tuple(range(blocks)))
        choice = choose(self.state, wanted, self.now)
        if isinstance(choice, s.Placement):
            self.state.place(wanted, choice, self.now, front=front)
            self.where[name] = "queued"
        else:
            self.state.wait_in_line(wanted, self.now, front=front)
            self.where[name] = "held"
            self.line.insert(0 if front else len(self.line), name)

    @rule(front=st.booleans())
    def place_the_head_of_the_line(self, front: bool) -> None:
        head = self.state.held.head()
        assert (head.request_id if head else None) == (self.line[0] if self.line else None)
        if head is None:
            return
        choice = choose(self.state, head, self.now)
        if isinstance(choice, s.Placement):
            self.state.place(head, choice, self.now, front=front)
            self.where[self.line.pop(0)] = "queued"

    @rule(has_room=st.booleans())
    def start_one(self, has_room: bool) -> None:
        name = self.state.startable()
        if name is None:
            return
        assert self.where[name] == "queued"
        assert name not in self.deferred
        if has_room:
            self.state.start(name, self.now)
            self.where[name] = "running"
        else:
            self.state.defer(name, self.now)
            self.deferred.add(name)

    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        if running := self.names("running"):
            name = data.draw(st.sampled_from(running))
            self.state.defer(name, self.now)
            self.where[name] = "queued"
            self.deferred.add(name)

    @rule(seconds=st.floats(0.0, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def free_capacity(self) -> None:
        for name in self.state.deferred:
            self.state.retry(name)
        self.deferred.clear()

    @rule(data=st.data())
    def end_a_prefill(self, data: st.DataObject) -> None:
        if running := self.names("running"):
            name = data.draw(st.sampled_from(running))
            self.state.end_prefill(name, self.now)
            self.where[name] = "decoding"

    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        if self.where:
            name = data.draw(st.sampled_from([*self.where]))
            self.state.forget(name, self.now)
            if self.where.pop(name) == "held":
                self.line.remove(name)
            self.deferred.discard(name)

    @rule(duties=st.sampled_from([["prefill"], ["decode"], ["prefill", "decode"]]), slots=st.integers(1, 3))
    def join(self, duties: list[str], slots: int) -> None:
        if self.next_instance < 36:
            self.state.add_instance(self.next_instance, self.next_instance % 2, duties, slots)
            self.next_instance += 1

    @rule(key=st.integers(0, 3), holder=st.sampled_from([21, 22]), there=st.booleans())
    def change_a_block(self, key: int, holder: int, there: bool) -> None:
        (self.state.index.stored if there else self.state.index.removed)(key, holder, "dram")

    @invariant()
    def the_books_agree(self) -> None:
        self.state.check()
        assert all(name in self.state for name in self.where)
        assert self.state.num_waiting == len(self.names("held", "queued"))
        assert self.state.num_running == len(self.names("running", "decoding"))
        for prefill, queue_s in zip(self.state.prefills.values(), self.state.queue_s(self.now)):
            work_s = sum(one.seconds for one in prefill.running.values()) + prefill.waiting_s
            assert 0.0 <= queue_s <= work_s + 1e-6, "more work than the requests here have"
        self.state.forget("never heard of", self.now)


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(stateful_step_count=50)
