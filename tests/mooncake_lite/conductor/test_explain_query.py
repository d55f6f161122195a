"""What a conductor says to `mooncake-lite explain` about its last decisions."""

from __future__ import annotations

import pytest

from mooncake_lite import messages as m
from tests.mooncake_lite.conductor.test_conductor_role import Cluster

pytestmark = pytest.mark.quick


def asked(cluster: Cluster, request_id: str) -> m.Explained:
    (answer,) = cluster.tell("pool-1", m.Explain(request_id))
    assert isinstance(answer, m.Explained)
    return answer


def test_a_request_that_was_placed_is_explained_after_it_has_ended() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(150)))
    cluster.serve("b", list(range(150)))
    found = asked(cluster, "b").explanation
    assert (found.policy, found.outcome, found.reason) == ("kvcache-centric", "placed", "")
    (row,) = found.candidates
    assert (row.prefill, row.decode) == (1, 2)
    assert (row.terms.near_blocks, row.terms.reused_blocks, row.terms.best_blocks) == (2, 2, 2)


def test_a_request_that_waits_or_was_refused_has_a_reason() -> None:
    cluster = Cluster(max_queue=1, max_num_seqs=1)
    for name in "abc":
        cluster.submit(name, list(range(150)))
    waits, refused = asked(cluster, "b").explanation, asked(cluster, "c").explanation
    assert (waits.outcome, waits.reason) == ("waits", "no decode instance has a free slot")
    assert (refused.outcome, refused.reason) == ("refused", "1 requests are waiting, the limit is 1")


def test_an_unknown_request_is_answered_with_those_that_are_kept() -> None:
    cluster = Cluster()
    for name in "ab":
        cluster.serve(name, list(range(150)))
    assert asked(cluster, "c") == m.Explained(None, ["a", "b"])
