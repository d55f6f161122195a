"""The choice of a path: a model of each path to each node, measured when the engine starts.

Used by `remote`. For each pair of nodes, one rank reads a few megabytes from one rank of the other, over
every path. The result is used by all ranks of the two nodes, in both directions. Explained in
docs/explain/transport.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from transport.errors import TransferError
from transport.world import World

BUDGET_S = 0.2
"""A rank begins no further measurement after this long. Nodes that were not measured are assumed to be
like the median of those that were."""

SMALL_BYTES, SMALL_RUNS = 4096, 9
LARGE_BYTES, LARGE_RUNS = 8 * 2**20, 4
"""Sizes and numbers of reads: small ones for the latency (their median), large ones for the bandwidth (the
best).

Any values work that leave a measurement at some 10 ms, and a large read far longer than the latency.
"""

SLOW_S = 0.02
"""A large read that takes this long is not repeated."""

WARM_BYTES = 2 * 2**20
"""Bytes that are read before the measurement: the first long read of a window over UCX takes 20 ms, the next
ones 1 ms."""

STREAMS_GAIN = 1.15
"""More connections are used when they are faster by this factor: each costs a thread on both sides."""

LIMIT_S = 2.0
"""Limit of one read; a path that takes longer is not used."""

PROBE = 0xFFFF_FFFF
"""Number of the segment for the measurement; it is withdrawn afterwards."""


class Link(msgspec.Struct, frozen=True):
    """The measured speed of a path between two nodes.

    latency_s     of a small read
    bytes_per_s   of a large one
    streams       connections that this bandwidth takes
    """

    path: str
    latency_s: float
    bytes_per_s: float
    streams: int = 1

    def seconds(self, nbytes: int) -> float:
        """Estimate the seconds of a transfer that is alone on this path."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The links from this rank's node to the others, measured or assumed.

    by_node     node -> links, the one with the most bytes per second first
    """

    by_node: Mapping[int, list[Link]]

    def ranked(self, node: int, nbytes: int) -> list[Link]:
        """Return the links to a node, the best for so many bytes first; the others are for a second try."""
        return sorted(self.by_node.get(node, []), key=lambda link: link.seconds(nbytes))


Read = Callable[[str, int, np.ndarray, int, float], None]
"""read(path, rank, buffer, streams, limit_s) from the probe segment. Raises TransferError."""


def measure_link(read: Read, path: str, rank: int, streams: tuple[int, ...] = (1,)) -> Link | None:
    """Measure a path to a rank in some 10 ms; return its link, None when it does not work there."""
    # Written before: entering 8 MiB of new pages takes longer than reading them.
    small, large = np.ones(SMALL_BYTES, np.uint8), np.ones(LARGE_BYTES, np.uint8)

    def seconds(buffer: np.ndarray, count: int) -> float:
        started = time.perf_counter()
        read(path, rank, buffer, count, LIMIT_S)
        return time.perf_counter() - started

    try:
        seconds(small, 1)  # connects
        seconds(large[:WARM_BYTES], 1)
        latency_s = statistics.median(seconds(small, 1) for _ in range(SMALL_RUNS))
        best: tuple[float, int] | None = None
        for count in streams:
            taken: list[float] = []
            while len(taken) < LARGE_RUNS and (not taken or min(taken) < SLOW_S):
                taken.append(seconds(large, count))
            if best is None or min(taken) * STREAMS_GAIN < best[0]:
                best = (min(taken), count)
    except TransferError:
        return None
    assert best is not None
    return Link(path, latency_s, LARGE_BYTES / best[0], best[1])


def measure(world: World, read: Read, paths: Mapping[str, tuple[int, ...]]) -> Links:
    """Measure the paths between nodes. Collective; takes BUDGET_S and one link more at most.

    paths   name -> numbers of connections to be tried
    """
    nodes = max(world.node_of) + 1
    here = world.node_of[world.rank]
    leaders = [world.node_of.index(node) for node in range(nodes)]
    found: dict[int, list[Link]] = {}
    if world.rank == leaders[here]:
        started = time.monotonic()
        for other in ring(here, nodes):
            if time.monotonic() - started > BUDGET_S:
                break
            links = [measure_link(read, path, leaders[other], streams) for path, streams in paths.items()]
            found[other] = [link for link in links if link is not None]
    answers = world.allgather_bytes(msgspec.msgpack.encode(found))
    of_node = [msgspec.msgpack.decode(answers[rank], type=dict[int, list[Link]]) for rank in leaders]
    known = [link for links in of_node for some in links.values() for link in some]
    usual = [typical for path in paths if (typical := _typical(path, known)) is not None]
    others = [node for node in range(nodes) if node != here]
    return Links({node: of_node[here].get(node) or of_node[node].get(here) or usual for node in others})


def ring(node: int, nodes: int) -> list[int]:
    """Return the nodes that this one measures, its neighbour first. One node of each pair measures it."""
    steps = range(1, (nodes - 1) // 2 + 1)
    opposite = [node + nodes // 2] if nodes % 2 == 0 and node < nodes // 2 else []
    return [*((node + step) % nodes for step in steps), *opposite]


def _typical(path: str, known: list[Link]) -> Link | None:
    """Return the median of all links of a path."""
    links = sorted((link for link in known if link.path == path), key=lambda link: link.bytes_per_s)
    return links[len(links) // 2] if links else None
