"""A store driven by Hypothesis beside a model: puts, reads, pins, copies, eviction, and clients that die.

One process: the master's books are stepped by hand, clients speak to them through the real table and the
real memory, so that a step takes a fraction of a millisecond and a death happens exactly when it is drawn.
"""

from __future__ import annotations

import contextlib
import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from store.mooncake_store import messages as say
from store.mooncake_store.master.master import Master
from tests.conftest import examples
from tests.store.mooncake_store.running import address, new_store, rest

KIB = 1024
SEGMENT = 64 * KIB
LEASE_MS = 10_000
SIZES = [1 * KIB, 3 * KIB, 9 * KIB]

names = st.sampled_from([f"n{number}" for number in range(8)])
seats = st.integers(0, 2)


def content(name: str, version: int, nbytes: int) -> bytes:
    return (f"{name}:{version};".encode() * nbytes)[:nbytes]


class Lives(RuleBasedStateMachine):
    """Three seats, each with a store or empty.

    written    name -> the one value that may be read, if it is still there
    where      name -> seats that hold a replica
    leased     names that were read since their put: their lease is longer than a run of this machine
    hard       names that are pinned hard
    """

    @initialize()
    def start(self) -> None:
        self.master = Master("tcp://127.0.0.1:*", LEASE_MS)
        self.thread = threading.Thread(target=self.master.run)
        self.thread.start()
        self.stores: list[MooncakeDistributedStore | None] = [None, None, None]
        self.written: dict[str, bytes] = {}
        self.leased: set[str] = set()
        self.hard: set[str] = set()
        self.version = 0
        self.come(0)

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            if store is not None:
                store.close()
        if hasattr(self, "master"):
            self.master.stop()
            self.thread.join(10)

    def alive(self) -> list[MooncakeDistributedStore]:
        return [store for store in self.stores if store is not None]

    def some_store(self, seat: int) -> MooncakeDistributedStore:
        return self.stores[seat] or self.alive()[0]

    def replicas(self, name: str) -> set[str]:
        descriptors = self.alive()[0].get_replica_desc(name)
        return {one.get_memory_descriptor().buffer_descriptor.transport_endpoint_ for one in descriptors}

    def gone(self, name: str) -> None:
        self.written.pop(name, None)
        self.leased.discard(name)
        self.hard.discard(name)

    # ---------------------------------------------------------------------------- clients

    @precondition(lambda self: None in self.stores)
    @rule(seat=seats)
    def come(self, seat: int) -> None:
        if self.stores[seat] is None:
            self.stores[seat] = new_store(address(self.master), SEGMENT)

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(seat=seats, crash=st.booleans())
    def leave(self, seat: int, crash: bool) -> None:
        """An end on purpose, or as the master learns of a crash: without a word from the client."""
        store = self.stores[seat]
        if store is None:
            return
        here = store.get_hostname()
        lone = [name for name in list(self.written) if self.replicas(name) == {here}]
        self.stores[seat] = None
        if crash:
            client = store._client
            client._link.ask(say.Leave)  # what the master does when it sees the end of the process
        store.close()
        for name in lone:
            self.gone(name)

    # ------------------------------------------------------------------------------ objects

    @rule(
        seat=seats,
        name=names,
        nbytes=st.sampled_from(SIZES),
        copies=st.integers(1, 3),
        pin=st.sampled_from(["none", "none", "none", "soft", "hard"]),
        upsert=st.booleans(),
    )
    def put(self, seat: int, name: str, nbytes: int, copies: int, pin: str, upsert: bool) -> None:
        store = self.some_store(seat)
        config = ReplicateConfig()
        config.replica_num, config.with_hard_pin = copies, pin == "hard"
        if pin == "soft":
            config.soft_pin_action = SoftPinAction.ENABLE
        self.version += 1
        value = content(name, self.version, nbytes)
        exists = bool(self.replicas(name))
        code = (store.upsert if upsert else store.put)(name, value, config)
        assert code in (0, -200)
        if code == 0 and (upsert or not exists):
            self.written[name] = value
            self.hard.discard(name)
            if pin == "hard":
                self.hard.add(name)
            if not exists:
                self.leased.discard(name)
            assert 1 <= len(self.replicas(name)) <= min(copies, len(self.alive()))

    @rule(seat=seats, name=names)
    def get(self, seat: int, name: str) -> None:
        found = self.some_store(seat).get(name)
        if found:
            assert found == self.written[name], "bytes of another object, or of an older one"
            self.leased.add(name)
        else:
            assert name not in self.leased | self.hard
            self.gone(name)

    @rule(seat=seats, name=names)
    def exists(self, seat: int, name: str) -> None:
        if self.some_store(seat).is_exist(name):
            assert name in self.written
            self.leased.add(name)
        else:
            assert name not in self.leased | self.hard
            self.gone(name)

    @rule(seat=seats, name=names, force=st.booleans())
    def remove(self, seat: int, name: str, force: bool) -> None:
        there = bool(self.replicas(name))
        code = self.some_store(seat).remove(name, force)
        expected = -704 if not there else -706 if name in self.leased and not force else 0
        assert code == expected
        if code == 0:
            self.gone(name)

    @rule(seat=seats, force=st.booleans())
    def remove_all(self, seat: int, force: bool) -> None:
        there = {name for name in self.written if self.replicas(name)}
        assert self.some_store(seat).remove_all(force) == len(there if force else there - self.leased)
        for name in list(self.written):
            if force or name not in self.leased:
                self.gone(name)

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(seat=seats, goal=seats, name=names, move=st.booleans())
    def copy(self, seat: int, goal: int, name: str, move: bool) -> None:
        store, to = self.some_store(seat), self.some_store(goal).get_hostname()
        before = self.replicas(name)
        source = next(iter(sorted(before)), "none")
        if move:
            task, code = store.create_move_task(name, source, to)
        else:
            task, code = store.create_copy_task(name, [to])
        if not before:
            assert code in (-704, -600)
            return
        assert code in (0, -200, -600)
        if code == 0:
            while (found := store.query_task(task)[0]) is not None and found.status.name == "PROCESSING":
                with contextlib.suppress(IndexError):
                    store._copying._threads[-1].join(10)  # type: ignore[union-attr]
            assert found.status.name == "SUCCESS"
            assert self.replicas(name) == (before | {to}) - ({source} if move and source != to else set())
            if to not in before:
                self.leased.add(name)  # whoever copied has read it

    @rule(seat=seats)
    def crowd(self, seat: int) -> None:
        """Many small puts that are removed again: eviction, ranges that are used again."""
        store = self.some_store(seat)
        for number in range(30):
            store.put(f"crowd{number}", b"c" * 2 * KIB)
        for number in range(30):
            store.remove(f"crowd{number}")

    @invariant()
    def what_is_protected_is_there(self) -> None:
        if not hasattr(self, "master"):
            return
        rest(*self.alive())
        self.master.catalogue.check()
        found = self.alive()[0].batch_get_replica_desc([*self.leased, *self.hard])
        assert set(found) == self.leased | self.hard
        stats = self.master.catalogue.stats()
        assert stats["writing"] == 0
        assert stats["held"] == 0
        assert stats["capacity_bytes"] == len(self.alive()) * SEGMENT


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(25), stateful_step_count=40)
