"""The control plane as a machine without I/O: `Control.on(event, now) -> [Effect]`.

Driven by the conductor role (live) and by `mooncake_lite.simulator.world` (virtual time). Composes
`scheduler` and `store.directory`. It knows no sockets, clocks, MPI or tokens. See docs/explain/control.md.
"""

from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.machine import Control
