"""The settings of a conductor process: the file conductor.json in the run folder.

Read by `__main__`; written by the steward before it starts the process. The file holds secret keys, so it must
belong to its owner alone (mode 0600).
"""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.control.events import RankLost
from transport.curve import CurveKeys


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One conductor's settings.

    config      of the cluster, as ServeConfig.to_dict gives it
    name        at the steward's monitor
    term        how many conductors the cluster had before; lost: ranks that are lost already
    nodes       node number of each rank
    host        address at which other hosts reach this one; "" on one host
    endpoints   to bind; curve: keys for those over TCP
    parent_pid  of the steward
    """

    config: dict[str, Any]
    name: str
    term: int
    lost: list[RankLost]
    nodes: list[int]
    host: str
    endpoints: list[str]
    curve: CurveKeys
    parent_pid: int
