"""The ranks and gateways of the cluster that have joined, and their epochs.

Used by `machine.py`. Books only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mooncake_lite.config.modes import COMPUTE_ROLES, DUTIES
from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.events import RankJoined
from scheduler.racks import Racks


class Members:
    """The ranks of one cluster.

        roles      of each rank, rank 0 first
        _joined    rank -> its RankJoined
        _missing   ranks that have not joined, or that have not listed everything they hold
        _unlisted  rank -> what it has not listed: its "tier", its "inventory"
        was_ready  every rank and a gateway have joined this conductor or an earlier one
        lost       rank -> why it was lost after the cluster was ready
        _stores_on node -> its store ranks, whether they have joined or not
        racks      of the nodes
        _keepers   rank -> the store rank that saves and checks the blocks in its segment

    An instance is a rank, or the ranks of a pipeline, and has the number of its first one.
    """

    def __init__(self, config: ControlConfig) -> None:
        self.roles, self._instance_of = config.roles, config.instance_of
        self._nodes = config.nodes
        self.racks = Racks(config.racks)
        self._joined: dict[int, RankJoined] = {}
        self._missing = set(range(1, len(config.roles)))
        self._unlisted: dict[int, set[str]] = {}
        self._inherits = self.was_ready = config.term > 0
        self.gateways: set[str] = set()
        self.lost: dict[int, str] = {}
        self.stores = config.ranks_of("store")
        self._stores_on = defaultdict[int, list[int]](list)
        for rank in self.stores:
            self._stores_on[self._nodes[rank]].append(rank)
        self.computes = [rank for role in COMPUTE_ROLES if DUTIES[role] for rank in config.ranks_of(role)]
        self.spans_nodes = len(set(config.nodes)) > 1
        self._keepers = [self._keeper(rank) for rank in range(len(config.roles))]
        for lost in config.lost:
            self.lose(lost.rank, f"rank {lost.rank} ({self.roles[lost.rank]}) {lost.reason}")

    def _keeper(self, rank: int) -> int:
        """Return the rank itself if it is a store rank, else a store rank, of the same node if possible."""
        if rank in self.stores or not self.stores:
            return rank
        nodes = self._nodes
        near = [store for store in self.stores if nodes[store] == nodes[rank]] or self.stores
        return near[rank % len(near)]

    def join(self, event: RankJoined) -> None:
        """Add a rank."""
        self._joined[event.rank] = event
        lists = {"tier": event.tier, "inventory": self._inherits and event.rank in self.stores}
        self._unlisted[event.rank] = {name for name, comes in lists.items() if comes}
        self.listed(event.rank)

    def has(self, rank: int) -> bool:
        """Tell whether a rank has joined, in any epoch. A lost one does not join again."""
        return rank in self._joined or rank in self.lost

    def lose(self, rank: int, reason: str) -> None:
        """Remove a rank that is lost. Other store ranks keep what it kept."""
        self.lost[rank] = reason
        self._joined.pop(rank, None)
        self._missing.discard(rank)
        self.stores = [one for one in self.stores if one != rank]
        self.computes = [one for one in self.computes if one != rank]
        self._keepers = [
            self._keeper(one) if keeper == rank else keeper for one, keeper in enumerate(self._keepers)
        ]

    def why_lost(self, rank: int) -> str:
        """Return why an instance is lost: the first of its ranks took the others along. "": it is not."""
        ranks = self._instance_of(rank)
        return next((reason for one, reason in self.lost.items() if one in ranks), "")

    def listed(self, rank: int, what: str = "") -> None:
        """Note that a rank has listed everything in its tier, or in its inventory."""
        self._unlisted[rank].discard(what)
        if not self._unlisted[rank]:
            self._missing.discard(rank)

    def knows(self, rank: int, epoch: int) -> bool:
        """Tell whether this epoch of a rank has joined."""
        joined = self._joined.get(rank)
        return joined is not None and joined.epoch == epoch

    def node_of(self, rank: int) -> int:
        """Return the node number of a rank."""
        return self._nodes[rank]

    def nbytes_from(self, refs: Iterable[BlockRef], reader: int) -> tuple[int, int, int]:
        """Return the bytes on the node of a reader, those in other racks, and those on nodes of its rack."""
        here, rack_of, nbytes = self._nodes[reader], self.racks.of, [0, 0, 0]
        for ref in refs:
            node = self._nodes[ref.rank]
            nbytes[0 if node == here else 1 if rack_of(node) != rack_of(here) else 2] += ref.nbytes
        return nbytes[0], nbytes[1], nbytes[2]

    def rack_of(self, rank: int) -> int:
        """Return the rack of the node of a rank."""
        return self.racks.of(self._nodes[rank])

    def keeper_of(self, rank: int) -> int:
        """Return the store rank that saves, loads and checks the blocks in this rank's segment."""
        return self._keepers[rank]

    def stores_on(self, node: int) -> list[int]:
        """Return the store ranks of a node that have joined."""
        return [rank for rank in self._stores_on.get(node, ()) if rank in self._joined]

    def stores_in(self, rack: int) -> list[int]:
        """Return the store ranks of a rack that have joined."""
        return [rank for rank in self.stores if rank in self._joined and self.rack_of(rank) == rack]

    def missing(self) -> list[int]:
        """Return the ranks that have not joined, or that have not listed everything they hold."""
        return sorted(self._missing)

    @property
    def ready(self) -> bool:
        """Tell whether every rank and a gateway have joined."""
        return bool(self.gateways) and not self._missing
