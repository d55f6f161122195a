"""What a rank reports of itself for /metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.ranks.metrics import rank_stats

pytestmark = pytest.mark.quick


def test_a_rank_tells_what_it_moved_what_it_served_and_what_it_is_asked_for() -> None:
    engine: Any = SimpleNamespace(
        counters={"sockets": {"bytes_read": 7}},
        moved_bytes={(1, "read"): 10, (1, "write"): 20, (2, "read"): 5, (4, "read"): 1},
        serving_bytes=5,
        served_bytes={"read": 30, "written": 4},
        control_counters={"strangers": 1, "unsent": 2, "bytes_in": 99},
        socket_counters={"strangers": 3, "requests": 99},
    )
    roles = ["steward", "prefill", "prefill", "store", "store"]
    stats = rank_stats(3, roles, {"queued": 2.0}, engine, {"pages": 8})
    more = ("path", "peer", "op", "channel", "tier")
    found = {
        (m.name, m.kind, *(m.labels[of] for of in more if of in m.labels)): m.value for m in stats.metrics
    }
    assert found == {
        ("queued", "gauge"): 2.0,
        ("prefix_cache_hits_total", "counter", "pages"): 8.0,
        ("mpi_bytes_read_total", "counter", "sockets"): 7.0,
        ("moved_bytes_total", "counter", "prefill", "read"): 15.0,
        ("moved_bytes_total", "counter", "prefill", "write"): 20.0,
        ("moved_bytes_total", "counter", "store", "read"): 1.0,
        ("mpi_serving_bytes", "gauge"): 5.0,
        ("mpi_served_bytes_total", "counter", "read"): 30.0,
        ("mpi_served_bytes_total", "counter", "written"): 4.0,
        ("mpi_strangers_total", "counter", "zmq"): 1.0,
        ("mpi_unsent_total", "counter", "zmq"): 2.0,
        ("mpi_strangers_total", "counter", "sockets"): 3.0,
    }
    assert {(m.labels["rank"], m.labels["role"]) for m in stats.metrics} == {("3", "store")}
