"""Queues: the order in which waiting requests begin. One form per file, behind `contract.Queue`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from scheduler.queues.aged_srpt import AGEING, AgedSRPT
from scheduler.queues.contract import Queue
from scheduler.queues.deadline import EarliestDeadline
from scheduler.queues.fair import FairShares
from scheduler.queues.fcfs import FCFS
from scheduler.queues.predicted import TRUST, Predicted
from scheduler.queues.srpt import SRPT


class QueueConfig(NamedTuple):
    """The configuration of all forms of a queue.

    weights   of the service classes, by class_id
    ageing    seconds of prefill that a second of waiting is worth (aged-srpt)
    trust     part of the decode slots that go by predicted length (predicted)
    """

    weights: Sequence[float] = (1.0,)
    ageing: float = AGEING
    trust: float = TRUST


QUEUES: dict[str, Callable[[QueueConfig], Queue]] = {
    FCFS.name: lambda config: FCFS(),
    SRPT.name: lambda config: SRPT(),
    AgedSRPT.name: lambda config: AgedSRPT(config.ageing),
    EarliestDeadline.name: lambda config: EarliestDeadline(),
    Predicted.name: lambda config: Predicted(config.trust),
    FairShares.name: lambda config: FairShares(config.weights),
}
"""By the names that configurations use."""
