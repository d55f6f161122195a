"""The metrics report that every working rank sends for `/metrics`.

Used by `conductor_link.py`; answered by `cluster_metrics.py`. Imports nothing
heavy: a store rank never loads torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from mooncake_lite.messages import Metric, RankStats
from transport.engine import TransferEngine

REPORT_EVERY_S = 0.25


def rank_stats(
    number: int,
    roles: Sequence[str],
    values: dict[str, float],
    transfers: TransferEngine,
    reused: Mapping[str, int] | None = None,
) -> RankStats:
    """Return the metrics of this rank: values, and the bytes that it and other ranks move.

    values  by name; the names of counters end in _total
    roles   of all ranks, by number. Bytes are added up by the role of the other rank, because one sample for
            each pair of ranks would be too many
    reused  prompt tokens by the tier that they came from
    """
    labels = {"rank": str(number), "role": roles[number]}

    def metric(name: str, value: float, **more: str) -> Metric:
        kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
        words = name.removesuffix("_total").replace("_", " ")
        return Metric(name, kind, words, {**labels, **more}, float(value))

    metrics = [metric(name, value) for name, value in values.items()]
    metrics += [metric("prefix_cache_hits_total", n, tier=tier) for tier, n in (reused or {}).items()]
    for path, moved in transfers.counters.items():
        metrics += [metric(f"mpi_{name}_total", value, path=path) for name, value in moved.items()]
    by_role: Counter[tuple[str, str]] = Counter()
    for (peer, op), nbytes in transfers.moved_bytes.items():
        by_role[roles[peer], op] += nbytes
    metrics += [metric("moved_bytes_total", n, peer=peer, op=op) for (peer, op), n in by_role.items()]
    metrics.append(metric("mpi_serving_bytes", transfers.serving_bytes))
    for op, nbytes in transfers.served_bytes.items():
        metrics.append(metric("mpi_served_bytes_total", nbytes, op=op))
    for channel, counters in (("zmq", transfers.control_counters), ("sockets", transfers.socket_counters)):
        for name in sorted({"strangers", "dropped", "refused", "unsent"} & counters.keys()):
            metrics.append(metric(f"mpi_{name}_total", counters[name], channel=channel))
    return RankStats(number, metrics)
