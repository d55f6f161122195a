"""The settings of a conductor process, the file conductor.json in the run folder, and of its control plane.

Read by `__main__`; written by the steward before it starts the process. The file holds secret keys, so it
must belong to its owner alone (mode 0600).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import ControlConfig
from mooncake_lite.control.events import RankLost
from scheduler.costs import CostConfig
from store.layout import BlockLayout
from transport.messaging.curve import CurveKeys

GUESS = CostConfig()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One conductor's settings.

    config      of the cluster, as ServeConfig.to_dict gives it
    name        at the steward's monitor
    term        how many conductors the cluster had before; lost: ranks that are lost already
    nodes       node number of each rank
    host        address at which other hosts reach this one; "" on one host
    endpoints   to bind; curve: keys for those over TCP
    parent_pid  of the steward
    """

    config: dict[str, Any]
    name: str
    term: int
    lost: list[RankLost]
    nodes: list[int]
    host: str
    endpoints: list[str]
    curve: CurveKeys
    parent_pid: int


def control_config(
    config: ServeConfig, layout: BlockLayout, nodes: list[int], costs: CostConfig = GUESS, term: int = 0,
    lost: Sequence[RankLost] = (),
) -> ControlConfig:  # fmt: skip
    """Return the part of a configuration that the control plane needs. nodes: node number of each rank."""
    return ControlConfig(
        layout=astuple(layout),
        roles=config.roles,
        nodes=nodes,
        racks=parse_racks(config.racks, len(set(nodes))),
        eviction=config.eviction,
        copy_cold_s=config.copy_cold_s,
        max_queue=config.max_queue,
        policy=config.policy,
        balancing_threshold=config.balancing_threshold,
        admission=config.admission,
        queue=config.queue,
        queue_ageing=config.queue_ageing,
        trust=config.trust,
        saves=bool(config.ssd_dir),
        mode=config.mode,
        survives=config.mpi_profile == "ft",
        wait_for_rank_s=config.wait_for_rank_s,
        verify=config.verify == "dram",
        prefetches=config.overlap_transfers
        and config.prefix_sharing != "off"
        and config.decode_context_parallel_size == 1,
        classes=config.service_classes,
        costs=costs,
        term=term,
        lost=list(lost),
    )
