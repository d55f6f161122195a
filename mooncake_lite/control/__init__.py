"""The control plane as a machine without I/O: `Control.on(event, now) -> [Effect]`.

Driven by the conductor role (live) and by `mooncake_lite.simulator.world` (virtual time). Composes
`scheduler` and `store.directory`. It knows no sockets, clocks, MPI or tokens. See docs/explain/control.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_lite.control.config import ControlConfig
    from mooncake_lite.control.machine import Control

_HOMES = {"Control": "machine", "ControlConfig": "config"}


def __getattr__(name: str) -> Any:
    """Import the machine when it is asked for: who sends its events and effects needs no NumPy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mooncake_lite.control' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mooncake_lite.control.{_HOMES[name]}"), name)
