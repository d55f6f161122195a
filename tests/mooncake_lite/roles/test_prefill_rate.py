"""The measured prefill rate: what it is made of, and what must not change it."""

from __future__ import annotations

import pytest

from mooncake_lite import messages as m
from tests.mooncake_lite.roles.test_conductor_role import SUMS, Cluster

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("new_tokens", [0, 256])
def test_a_hit_that_loads_for_long_does_not_poison_the_rate(new_tokens: int) -> None:
    """The time of load and store was divided by the computed tokens, of which a full hit has one."""
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    rate = cluster.role.control.state.prefill_s_per_token
    (job,) = cluster.submit("b", list(range(128 + new_tokens)))
    assert isinstance(job, m.Prefill)
    assert (len(job.load), len(job.store)) == (2, new_tokens // 64)
    compute_s = rate * (new_tokens or 1)
    checksums = [SUMS] * len(job.store)
    done = m.PrefillDone("b", [7], [None], checksums, [], compute_s, load_s=30.0, store_s=20.0)
    cluster.tell("rank-1", done)
    assert cluster.role.control.state.prefill_s_per_token == pytest.approx(rate)
