"""What ranks measure corrects the costs, and what must not change them."""

from __future__ import annotations

import pytest

from mooncake_lite import messages as m
from tests.mooncake_lite.conductor.test_conductor_role import Cluster
from tests.mooncake_lite.conductor.wording import prefilled

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("new_tokens", [0, 256])
def test_a_hit_that_loads_for_long_does_not_poison_the_rate(new_tokens: int) -> None:
    """The time of load and store was divided by the computed tokens, of which a full hit has one."""
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    costs = cluster.role.control.state.costs
    before = costs.prefill_s(1, 128, 0)
    assert before == pytest.approx(0.1), "what serve() reports"
    (job,) = cluster.submit("b", list(range(128 + new_tokens)))
    assert isinstance(job.order, m.StartPrefill)
    assert (len(job.order.load), len(job.order.store)) == (2, new_tokens // 64)
    compute_s = costs.prefill_s(1, 128, 128 - (new_tokens or 1))
    done = prefilled(
        job, compute_s=compute_s, load_s=30.0, store_s=20.0, computed_tokens=new_tokens or 1, loaded_blocks=2
    )
    cluster.tell("rank-1", done)
    assert costs.prefill_s(1, 128, 0) == pytest.approx(before)


def test_decode_steps_and_answers_are_measured_when_a_branch_ends() -> None:
    cluster = Cluster()
    costs = cluster.role.control.state.costs
    assert not costs.is_step_measured
    (job,) = cluster.submit("a", list(range(128)))
    cluster.prefill_done(job)
    cluster.says(2, m.DecodeLoaded, "a")
    steps = {"steps": 100, "sequences": 150, "context_tokens": 19_200, "steps_s": 2.0}
    cluster.says(2, m.DecodeEnded, "a", answer_tokens=9, **steps)
    assert costs.is_step_measured
    assert costs.step_s(2, 1, 128) == pytest.approx(0.02)
    assert costs.lengths.predicted(0, 130, 500) == 9
