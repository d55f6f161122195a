"""What must be true of a control plane when all requests have ended, and the world is silent.

Used by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from mooncake_lite.control import Control

UNDER_WAY = ("owners", "writing_bytes", "private_bytes", "quarantined_bytes", "unlisted_bytes", "saving")


def assert_at_rest(control: Control, *, may_hold: bool) -> None:
    """Assert that nothing is open or under way, and that the pool holds visible blocks alone.

    may_hold   a rank that cannot be reached may still write: its places stay in quarantine
    """
    control.check()
    assert control.open_requests == 0
    stats = control.directory.stats()
    for name in UNDER_WAY:
        assert stats[name] == 0 or may_hold, f"{name} is {stats[name]} at the end"
    assert not control.state.num_waiting
    assert not control.state.num_running
