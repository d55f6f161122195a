"""What goes wrong in a modelled cluster, and how often: probabilities, drawn with a seed.

Used by `world.py` and its models. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

LATE_WRITE_S = 119.0
"""How long after a failed transfer its last bytes may land. The control plane waits for 120 s."""

SLOW_STORE_S = (121.0, 220.0)
"""When a store rank that is too slow answers. The control plane gives an order up after 120 s, and waits for
late bytes for 120 s more."""


FIXED = (
    "slow_link_s", "may_still_write", "rank_lost", "unreachable", "unready", "conductor_lost", "flipped",
    "poisoned",
)  # fmt: skip
"""Not drawn anew for each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Probabilities by event, and rates.

    slow_link          a message takes up to slow_link_s
    slow_store         a store rank answers an order after the control plane has given it up
    unsent             an order cannot be sent
    dropped            a message of a rank, or an order, is lost
    reordered          a message of a rank may overtake, or be overtaken
    doubled            a message of a rank comes twice, at once or much later
    wrong_epoch        before a message of a rank comes the same one of another start of the rank
    read_fails, write_fails   a transfer of a computing rank fails
    copy_fails, load_fails    a transfer of a store rank fails
    may_still_write    a failed transfer may leave bytes under way
    tier_bad           a block on SSD has other bytes than were written
    dram_bad           a block in DRAM rots before it is saved or checked
    save_dropped       a save is given up at once, or when its file is sealed
    check_fails        a block cannot be read to be compared
    cancelled          a client goes away
    command            a pool command comes with a request; killed: it is killed while it runs
    rank_lost          in a run, up to three ranks or gateways are lost, or the cluster is told to stop
    unreachable        the end of a lost rank is not seen
    conductor_lost     what is lost is the conductor
    flipped            with a request, a block in DRAM gets other bytes; readers compare all blocks then
    unready            a client does not wait until the cluster has started
    poisoned           in a run, some requests cannot be computed
    """

    slow_link: float = 0.02
    slow_link_s: float = 8.0
    slow_store: float = 0.01
    unsent: float = 0.02
    dropped: float = 0.005
    reordered: float = 0.02
    doubled: float = 0.05
    wrong_epoch: float = 0.02
    read_fails: float = 0.02
    write_fails: float = 0.02
    copy_fails: float = 0.1
    load_fails: float = 0.05
    may_still_write: float = 0.5
    tier_bad: float = 0.05
    dram_bad: float = 0.01
    save_dropped: float = 0.05
    check_fails: float = 0.05
    cancelled: float = 0.15
    command: float = 0.08
    killed: float = 0.4
    rank_lost: float = 0.3
    unreachable: float = 0.1
    conductor_lost: float = 0.3
    flipped: float = 0.0
    unready: float = 0.02
    poisoned: float = 0.05

    @classmethod
    def none(cls) -> Faults:
        """Return the faults of a world in which nothing goes wrong."""
        return cls(**{field.name: 0.0 for field in fields(cls)})

    def drawn(self, random: Random) -> Faults:
        """Draw how frequent each kind of fault is: absent, rare, as it is here, or three times that."""
        factors = {
            field.name: min(0.5, getattr(self, field.name) * random.choice((0.0, 0.3, 1.0, 3.0)))
            for field in fields(self)
            if field.name not in FIXED
        }
        return replace(self, **factors)
