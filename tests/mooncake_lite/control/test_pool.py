"""What the scheduler's index is told about the pool."""

from __future__ import annotations

import pytest

from mooncake_lite.control import events as ev
from tests.mooncake_lite.control.plane import BLOCK, Plane, hash_free
from tests.scheduler.cluster import runs

pytestmark = pytest.mark.quick


def test_blocks_that_come_and_go_together_are_one_run_of_the_index() -> None:
    plane = Plane(blocks=16)
    index = plane.control.state.index
    plane.serve("a", 6 * BLOCK + 1)
    assert (len(index), len(runs(index))) == (6, 1)
    keys = [hash_free("a", block) for block in range(6)]
    plane.on(ev.BlocksSaved(3, 0, keys[::-1], "durable"))
    assert (len(index), len(runs(index))) == (6, 1)
    plane.serve("b", 12 * BLOCK + 1)
    assert index.leading(keys).by_node[0] == 3, "13 places are wanted, 10 were free"
    assert index.leading(keys).ssd_blocks == 3
    assert (len(index), len(runs(index))) == (18, 3), "two of request a, and one of b"
