"""What holds for every policy and queue in any cluster: where requests go, and that all are served."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as s
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES, QueueConfig
from tests.conftest import examples
from tests.scheduler.cluster import BLOCK_TOKENS

pytestmark = pytest.mark.quick

REQUESTS = 40


class Cluster:
    """Random instances, blocks and requests. Every request that came is held, placed or over.

    most   slots of the instance that decodes most
    """

    def __init__(self, policy: str, rng: random.Random) -> None:
        self.rng, self.policy = rng, POLICIES[policy]()
        nodes = rng.randint(1, 4)
        queue = QUEUES[rng.choice(list(QUEUES))](QueueConfig((4.0, 2.0, 1.0)))
        racks = [rng.randrange(2) for _ in range(nodes)] * rng.randrange(2)
        self.state = s.State(999, queue=queue, block_nbytes=1 << 20, racks=racks)
        duties = [["prefill"], ["decode"], *([["prefill", "decode"]] * rng.randrange(3))]
        duties += [rng.choice(duties) for _ in range(rng.randrange(5))]
        for number, some in enumerate(duties):
            self.state.add_instance(number, rng.randrange(nodes), some, rng.randint(1, 4))
        for node in range(nodes):
            self.state.index.add_holder(100 + node, node)
            self.state.index.stored_run(
                list(range(rng.randrange(9))), 0, 100 + node, rng.choice(["dram", "ssd"])
            )
        self.most = max(one.slots for one in self.state.decodes.values())
        self.open: list[str] = []
        self.over = 0
        self.now = 0.0

    def request(self, name: str) -> s.Request:
        rng = self.rng
        keys = tuple(range(rng.randrange(9)))
        return s.Request(
            name, len(keys) * BLOCK_TOKENS + rng.randrange(1, 64), keys, BLOCK_TOKENS, 16, rng.randrange(3),
            n=rng.choice([1, 1, 1, 2, 4, 5]), tenant=rng.choice(["", "t"]), arrived_s=self.now,
            slo_ttft_s=rng.choice([1.0, 9.0]), predicted_tokens=float(rng.randrange(100)),
        )  # fmt: skip

    def arrive(self, name: str) -> None:
        """Hold a request; `place` finds out whether there is a place for it."""
        self.open.append(name)
        self.state.wait_in_line(self.request(name), self.now)

    def place(self) -> None:
        """Place requests as long as one has its turn, and check each place."""
        state = self.state
        while (head := state.held.head()) is not None:
            choice = s.choose(self.policy, state, head, self.now)
            if isinstance(choice, s.Wait):
                assert all(one.free < head.n for one in state.decodes.values()), f"{head} waits in vain"
                return
            if isinstance(choice, s.Rejection):
                assert head.n > self.most
                self.end(head.request_id)
                continue
            decode = state.decodes[choice.decode]
            assert choice.prefill in state.prefills, "it does not prefill"
            assert decode.free >= head.n, "it has too few slots"
            assert choice.prefill not in state.decodes or choice.prefill == choice.decode
            state.place(head, choice, self.now)

    def work(self) -> None:
        """Begin what can begin; end a prefill or a decode."""
        state, rng = self.state, self.rng
        while (name := state.startable()) is not None:
            state.start(name, self.now)
        prefilling = [name for one in state.prefills.values() for name in one.running]
        decoding = [
            name
            for one in state.decodes.values()
            for name in one.taken
            if name not in prefilling and all(name not in other.queue for other in state.prefills.values())
        ]
        if prefilling and (not decoding or rng.random() < 0.5):
            state.end_prefill(rng.choice(prefilling), self.now)
        elif decoding:
            self.end(rng.choice(decoding))
        self.now += rng.random()
        state.check()

    def end(self, name: str) -> None:
        self.state.forget(name, self.now)
        self.open.remove(name)
        self.over += 1


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(12))
def test_every_request_is_served_on_instances_that_can_serve_it(policy: str, seed: int) -> None:
    cluster = Cluster(policy, random.Random(seed))
    for number in range(REQUESTS):
        cluster.arrive(f"r{number}")
        cluster.place()
        cluster.work()
        if cluster.rng.random() < 0.1 and cluster.open:
            cluster.end(cluster.rng.choice(cluster.open))  # its client has left
    for _ in range(4 * REQUESTS):
        cluster.place()
        cluster.work()
        assert all(name in cluster.state for name in cluster.open)
    assert (cluster.open, cluster.over) == ([], REQUESTS)
