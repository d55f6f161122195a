"""The books of one control plane, which its parts share: members, requests, grants, and the pool.

Made by `machine.py`, and given to every part. Each book is explained in its own file.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.effects import Effect
from mooncake_lite.control.grants import Grants
from mooncake_lite.control.members import Members
from scheduler import Costs, State
from scheduler.classes import check_classes
from scheduler.queues import QUEUES, QueueConfig
from store.directory import Directory
from store.policies import policy_factory


class Books:
    """The shared books of one control plane.

    state       requests that wait or run, instances, costs: the books of `scheduler`
    directory   the truth about the pool
    members     ranks and gateways that have joined
    grants      what ranks have been given, and have not reported about
    emit        adds an effect to those of the event that is being applied
    """

    def __init__(self, config: ControlConfig, emit: Callable[[Effect], None]) -> None:
        """Open the books. Raises LayoutError, UnknownPolicy or ValueError for a wrong configuration."""
        check_classes(config.classes)
        self.config, self.emit = config, emit
        weights = [one.weight for one in config.classes]
        queue = QUEUES[config.queue](QueueConfig(weights, config.queue_ageing, config.trust))
        nbytes = config.block_layout.nbytes
        self.state = State(config.max_queue, Costs(config.costs), queue, nbytes, config.racks)
        self.directory = Directory(
            config.block_layout,
            policy=policy_factory(config.eviction, shares=config.cache_shares),
            copy_cold_s=config.copy_cold_s,
        )
        self.members = Members(config)
        self.directory.rack_of, self.directory.has_racks = self.members.racks.of, bool(config.racks)
        self.grants = Grants(emit)
