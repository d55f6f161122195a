"""The decode role where no cluster is needed: what happens when pages run out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.engine import OutOfPages, Sequence
from mooncake_lite.roles.decode import DecodeRole
from store.keys import PrefixChain, prefix_keys

pytestmark = pytest.mark.quick


class FullEngine:
    """An engine without a free page; it may free, it must not be asked to decode nothing."""

    block_tokens = 64

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        raise OutOfPages(1, 0)

    def free(self, sequence: Sequence) -> None:
        sequence.pages = []

    def decode_step(self, sequences: list[Sequence]) -> list[int]:
        assert sequences, "a step without a sequence"
        return [5] * len(sequences)


class FakeRank:
    """Keeps what the conductor is told."""

    number = 2

    def __init__(self) -> None:
        self.engine = FullEngine()
        self.staging = SimpleNamespace(puts=[1])
        self.told: list[m.Message] = []

    def new_sequence(self, job: m.Decode, token_ids: list[int], answered: int) -> Sequence:
        ids = list(token_ids)
        return Sequence(job.request_id, ids, job.sampling, job.max_tokens, frozenset(), 4096, answered)

    def tell(self, message: m.Message) -> None:
        self.told.append(message)

    def count_preemption(self) -> None:
        self.preempted = True


def test_a_block_that_goes_back_to_the_pool_is_offered_with_what_it_hangs_on() -> None:
    rank: Any = FakeRank()
    rank.engine = SimpleNamespace(block_tokens=64, store_blocks=lambda *where: None)
    layout = SimpleNamespace(checksums=lambda block: [1])
    rank.staging = SimpleNamespace(puts=[0, 1, 2], blocks=[None] * 3, layout=layout)
    role = DecodeRole(rank)
    tokens = [*range(192)]
    keys = prefix_keys(tokens, 64, b"model")
    for known in (0, 2):  # a first block, and one behind two others
        chain = PrefixChain(64, b"model", last_key=keys[known - 1] if known else None)
        sequence = SimpleNamespace(token_ids=tokens, num_computed=64 * (known + 1))
        running: Any = SimpleNamespace(chain=chain, sequence=sequence)
        role._offer([running])
    first, third = rank.told
    assert (first.keys, first.before) == ([keys[0]], [(None, 0)])
    assert (third.keys, third.before) == ([keys[2]], [(keys[1], 2)])


def test_the_only_running_request_steps_back_for_one_that_is_loading() -> None:
    rank: Any = FakeRank()
    role = DecodeRole(rank)
    sampling = m.Sampling(0.0)
    job = m.Decode("a", "gateway-0", [*range(80)], 3, [], None, [], b"", sampling, 16, [], [])
    role.running.append(role._arrive(job))
    role._iterate()
    assert rank.told == [m.Preempted("a", [*range(80)], 3)]
    assert role.running == []
