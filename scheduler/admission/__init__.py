"""Admission: the refusal of requests before work is wasted on them. One form per file."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.admission.after_prefill import AfterPrefill
from scheduler.admission.bounded_queue import BoundedQueue
from scheduler.admission.contract import Admission
from scheduler.admission.early import Early
from scheduler.admission.predicted import predicted_wait_s
from scheduler.admission.predictive import Predictive
from scheduler.admission.shed import Shed

ADMISSIONS: dict[str, Callable[[], Admission]] = {
    Admission.name: Admission,
    BoundedQueue.name: BoundedQueue,
    AfterPrefill.name: AfterPrefill,
    Early.name: Early,
    Predictive.name: Predictive,
    Shed.name: Shed,
}
"""By the names that configurations use."""

DEFAULT = Predictive.name
"""The form with the best goodput that every mode can have: see docs/explain/conductor.md. A request without
limits passes it as it passes a bounded queue."""

NEED_LIMITS = frozenset({AfterPrefill.name, Early.name, Predictive.name, Shed.name})
"""Forms that refuse by limits on latency."""
