"""Who belongs to the cluster, and who has said hello. Kept by the conductor role; no sockets here."""

from __future__ import annotations

from mooncake_lite.config import ServeConfig
from mooncake_lite.messages import ClusterStatus, GatewayAt, GatewayHello, RankHello


class Members:
    """The ranks and gateways of one cluster.

    node_of_rank   node number of each rank, from MPI
    control_host   address at which other hosts reach the conductor's ("" on one node)
    gateways       how many gateways have to be there before the cluster is ready
    """

    def __init__(self, config: ServeConfig, node_of_rank: list[int], control_host: str) -> None:
        self._config = config
        self._nodes = node_of_rank
        self.control_host = control_host
        self.ranks: dict[int, RankHello] = {}
        self.gateways: dict[str, GatewayHello] = {}
        self._indexed: set[int] = set()
        self._introduced: set[tuple[int, str]] = set()

    @property
    def spans_hosts(self) -> bool:
        """Ranks are on more than one node."""
        return len(set(self._nodes)) > 1

    def node_of(self, rank: int) -> int:
        """Number of the node that this rank is on."""
        return self._nodes[rank]

    def role_of(self, rank: int) -> str:
        """The role that this rank plays."""
        return self._config.role_of(rank)

    def store_ranks(self) -> list[int]:
        """All store ranks, there or not."""
        return self._config.ranks_of("store")

    def keeper_of(self, rank: int) -> int:
        """The store rank that saves and checks the blocks in this rank's segment: itself, or for a rank that
        only lends one of its node where there is one, taken in turn."""
        stores = self.store_ranks()
        if rank in stores:
            return rank
        near = [store for store in stores if self._nodes[store] == self._nodes[rank]] or stores
        return near[rank % len(near)]

    def add_rank(self, hello: RankHello) -> None:
        """A rank has loaded and registered."""
        self.ranks[hello.rank] = hello

    def add_gateway(self, hello: GatewayHello) -> None:
        """A gateway is there; one that says hello again may have more endpoints."""
        self.gateways[hello.gateway] = hello

    def add_index(self, rank: int) -> None:
        """A store rank has told all that its tier holds."""
        self._indexed.add(rank)

    def _is_ready(self, rank: int) -> bool:
        hello = self.ranks.get(rank)
        return hello is not None and (not hello.tier or rank in self._indexed)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._config.ranks) if not self._is_ready(rank)]

    def _usable(self, hello: GatewayHello) -> bool:
        return len(hello.token_endpoints) > (1 if self.spans_hosts else 0)

    @property
    def ready(self) -> bool:
        """Every rank has loaded, compiled and registered, and a gateway can be reached by all of them."""
        return not self._missing() and any(map(self._usable, self.gateways.values()))

    def status(self) -> ClusterStatus:
        """What gateways are told; names the ranks that are still missing."""
        missing = [f"{rank} ({self._config.role_of(rank)})" for rank in self._missing()]
        detail = f"waiting for rank {', '.join(missing)}" if missing else "ready"
        return ClusterStatus(self.ready, detail)

    def new_introductions(self) -> list[tuple[int, GatewayAt]]:
        """(rank, where a gateway is) for each compute rank and gateway that do not know each other yet."""
        found = []
        for rank, hello in self.ranks.items():
            if hello.role == "store":
                continue
            for name, gateway in self.gateways.items():
                if (rank, name) in self._introduced or not self._usable(gateway):
                    continue
                self._introduced.add((rank, name))
                local = self._nodes[rank] == self._nodes[0]
                endpoint = gateway.token_endpoints[0 if local else 1]
                found.append((rank, GatewayAt(name, endpoint)))
        return found
