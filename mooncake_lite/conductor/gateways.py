"""Gateways that have sent a hello, and how ranks reach them. It has no sockets."""

from __future__ import annotations

from mooncake_lite.messages import ClusterStatus, Degraded, GatewayAt, GatewayHello


class Gateways:
    """The gateways of one cluster.

    nodes          node number of each rank; the gateways run beside rank 0
    control_host   address at which other hosts reach the conductor's ("" on one node)
    _strangers     (rank, gateway) of each pair that does not know each other yet
    """

    def __init__(self, nodes: list[int], control_host: str) -> None:
        self._nodes = nodes
        self.control_host = control_host
        self._hello: dict[str, GatewayHello] = {}
        self._compute_ranks: set[int] = set()
        self._strangers: set[tuple[int, str]] = set()
        self._spans_hosts = len(set(nodes)) > 1
        self._degraded: dict[tuple[int, str], str] = {}
        self._broken: list[str] = []
        self._readiness = False, "waiting for the first rank", True

    @property
    def names(self) -> list[str]:
        """The names of all gateways."""
        return list(self._hello)

    @property
    def status(self) -> ClusterStatus:
        """Tells gateways whether the cluster takes requests, and what does not work as it should."""
        ready, detail, serves = self._readiness
        broken = [f"{name.replace('_', ' ')}: all have failed so far" for name in self._broken]
        return ClusterStatus(ready, detail, [*self._degraded.values(), *broken], serves)

    def set_readiness(self, ready: bool, detail: str, serves: bool) -> None:
        """Note whether the cluster takes requests, what is missing, and whether requests will be served."""
        self._readiness = ready, detail, serves

    def set_degraded(self, degraded: Degraded, role: str) -> None:
        """Note that a rank does not work as it should, or works again."""
        if degraded.text:
            line = f"rank {degraded.rank} ({role}): {degraded.text}"
            self._degraded[degraded.rank, degraded.kind] = line
        else:
            self._degraded.pop((degraded.rank, degraded.kind), None)

    def set_broken(self, names: list[str]) -> bool:
        """Note the mechanisms that never worked. Returns whether they are others than before."""
        before, self._broken = self._broken, names
        return names != before

    def lose_rank(self, rank: int, reason: str) -> None:
        """Note that a rank is lost: no gateway is introduced to it, and the cluster is degraded."""
        self._compute_ranks.discard(rank)
        self._strangers = {pair for pair in self._strangers if pair[0] != rank}
        self._degraded = {key: line for key, line in self._degraded.items() if key[0] != rank}
        self._degraded[rank, "lost"] = f"{reason}; it is missing until the next start"

    def lose(self, gateway: str) -> None:
        """Forget a gateway that has ended."""
        self._hello.pop(gateway, None)
        self._strangers = {pair for pair in self._strangers if pair[1] != gateway}

    def greet(self, hello: GatewayHello) -> bool:
        """Add a gateway, or update its endpoints. Returns whether every rank can reach it."""
        if hello.gateway not in self._hello:
            self._strangers |= {(rank, hello.gateway) for rank in self._compute_ranks}
        self._hello[hello.gateway] = hello
        return self._usable(hello)

    def add_compute_rank(self, rank: int) -> None:
        """Add a rank that sends tokens to gateways."""
        self._compute_ranks.add(rank)
        self._strangers |= {(rank, gateway) for gateway in self._hello}

    def _usable(self, hello: GatewayHello) -> bool:
        return len(hello.token_endpoints) > (1 if self._spans_hosts else 0)

    def new_introductions(self) -> list[tuple[int, GatewayAt]]:
        """Return (rank, gateway's address) for each pair that does not know each other yet, and can."""
        found = []
        for rank, name in sorted(pair for pair in self._strangers if self._usable(self._hello[pair[1]])):
            self._strangers.discard((rank, name))
            local = self._nodes[rank] == self._nodes[0]
            found.append((rank, GatewayAt(name, self._hello[name].token_endpoints[0 if local else 1])))
        return found
