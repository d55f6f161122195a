"""Which rank belongs where."""

from __future__ import annotations

import pytest

from mooncake_lite.control import ControlConfig
from mooncake_lite.control.members import Members

pytestmark = pytest.mark.quick

ROLES = ["steward", "prefill", "prefill", "decode", "decode", "store", "store"]


def test_lent_blocks_are_kept_by_a_store_rank_of_the_same_node_where_there_is_one() -> None:
    def keepers(nodes: list[int]) -> list[int]:
        members = Members(ControlConfig(layout=(2, 1, 64, 8, 4, "none"), roles=ROLES, nodes=nodes))
        return [members.keeper_of(rank) for rank in range(1, 7)]

    assert keepers([0, 0, 1, 0, 1, 0, 1]) == [5, 6, 5, 6, 5, 6]
    assert keepers([0, 0, 0, 0, 0, 1, 1]) == [6, 5, 6, 5, 5, 6]
