"""Checks the options about scheduling: policies by their names, and the numbers that these take.

Used by `serve.py` when a configuration is made; racks once more by the conductor, which knows the nodes.
Knows no cluster. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from mooncake_lite.config.modes import mode_of
from mooncake_lite.errors import ConfigError
from scheduler.admission import ADMISSIONS, DEFAULT, NEED_LIMITS
from scheduler.classes import ServiceClass
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES


def check_scheduling(options: Mapping[str, Any], classes: Sequence[ServiceClass]) -> None:
    """Raise ConfigError for policies that there are not, and for numbers of theirs out of range.

    options   fields of ServeConfig by name; classes: its service classes, with limits of their own
    """
    parse_racks(options["racks"])
    for name, known in (("policy", POLICIES), ("admission", ADMISSIONS), ("queue", QUEUES)):
        if options[name] not in known:
            raise ConfigError(f"{name}={options[name]!r}: use one of {', '.join(known)}")
    for name, is_right, right in _RANGES:
        if not is_right(options[name]):
            raise ConfigError(f"{name}={options[name]:g}: give {right}")
    is_limited = options["slo_ttft_ms"] or options["slo_tpot_ms"] or any(one.has_limit for one in classes)
    _check_admission(options["admission"], options["mode"], is_limited)


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("slo_ttft_ms", lambda value: 0 <= value < inf, "a number above 0, or leave it out"),
    ("slo_tpot_ms", lambda value: 0 <= value < inf, "a number above 0, or leave it out"),
    ("queue_ageing", lambda value: 0 < value < inf, "a number above 0"),
    ("balancing_threshold", lambda value: 1 <= value < inf, "a number, 1 or more"),
    ("trust", lambda value: 0 <= value <= 1, "a part of the decode slots, 0 to 1"),
)
"""Numbers, and what is right for each."""


def _check_admission(admission: str, mode: str, is_limited: bool) -> None:
    """Check the form of admission. is_limited: there is a limit on latency, of a class or of all requests."""
    if admission in NEED_LIMITS - {DEFAULT} and not is_limited:
        raise ConfigError(
            f"admission={admission} refuses by limits on latency, and there are none; "
            "set slo_ttft_ms or slo_tpot_ms, or a limit of a service class"
        )
    if ADMISSIONS[admission]().withholds and mode_of(mode).handover == "none":
        raise ConfigError(
            f"admission={admission} refuses between prefill and decode, and in mode={mode} one "
            "rank does both without a pause; use admission=early-rejection or mode=pooled"
        )


def parse_racks(text: str, nodes: int | None = None) -> list[int]:
    """Return the rack of each node, of "0,0,1"; nothing of "". nodes: how many there are, once that is known.

    Raises ConfigError for what is no number, or when there is not one rack for each node.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise ConfigError(f"racks={text!r}: give the rack of each node as a number, as in 0,0,1,1")
    racks = [int(word) for word in words]
    if racks and nodes is not None and len(racks) != nodes:
        raise ConfigError(
            f"racks={text!r} are those of {len(racks)} nodes, and the ranks are on {nodes}; "
            f"give one rack for each node, as in {','.join(['0'] * nodes)}"
        )
    return racks
