"""What goes wrong in the fault world, and how often: probabilities, drawn with a seed.

    LATE_WRITE_S   how long after a failed transfer its last bytes may land: the control plane waits for 120 s
    SLOW_STORE_S   when a store rank that is too slow answers: the control plane gives an order up after
                   120 s, and waits for late bytes for 120 s more
    DRAWN, FIXED   probabilities of Faults, those that are drawn anew for each run and the others
    POISONED       share of the requests that cannot be computed, in runs that have some

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from random import Random

from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE, Chunk

LATE_WRITE_S, SLOW_STORE_S = 119.0, (121.0, 220.0)
POISONED = 0.15
DRAWN = {
    "slow_link": 0.02, "slow_store": 0.01, "unsent": 0.02, "dropped": 0.005, "reordered": 0.02,
    "doubled": 0.05, "wrong_epoch": 0.02, "read_fails": 0.02, "write_fails": 0.02, "copy_fails": 0.1,
    "load_fails": 0.05, "tier_bad": 0.05, "dram_bad": 0.01, "save_dropped": 0.05, "check_fails": 0.05,
    "cancelled": 0.15, "command": 0.08, "killed": 0.4,
}  # fmt: skip
FIXED = {
    "slow_link_s": 8.0, "may_still_write": 0.5, "rank_lost": 0.3, "unreachable": 0.1, "conductor_lost": 0.3,
    "flipped": 0.0, "unready": 0.02, "poisoned": 0.05,
    "hint": 0.0,
}  # fmt: skip
ODDS = DRAWN | FIXED
Odds = make_dataclass("Odds", [(name, float, odds) for name, odds in ODDS.items()], frozen=True)


class Faults(Odds):
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
    hint               a hint of any kind comes with a request, right or wrong
    poisoned           in a run, some requests cannot be computed
    """

    @classmethod
    def none(cls) -> Faults:
        """Return the faults of a world in which nothing goes wrong."""
        return cls(**dict.fromkeys(ODDS, 0.0))

    def drawn(self, random: Random) -> Faults:
        """Draw how frequent each kind of fault is: absent, rare, as it is here, or three times that."""
        factors = {name: random.choice((0.0, 0.3, 1.0, 3.0)) for name in DRAWN}
        odds = {name: min(0.5, getattr(self, name) * factor) for name, factor in factors.items()}
        return replace(self, **odds)


@dataclass(frozen=True, slots=True)
class Poison:
    """A token of a request that an engine cannot compute, whatever rank it is on.

    code       ENGINE_ERROR: each pass over the token fails; LOGITS_NOT_FINITE: none can follow it
    position   of the token in prompt and answer
    branch     whose answer has it; the prompt is that of all branches
    answered   tokens of that answer before a rank meets it; below 0: it may meet it sooner
    """

    code: str
    position: int
    branch: int
    answered: int

    @classmethod
    def drawn(cls, random: Random, may_raise: bool, prompt: int, answer: int, n: int) -> Poison | None:
        """Draw what is wrong with a request of so many tokens and branches; None for most of them.

        may_raise   passes may fail: not in a pipeline, where an exception ends the rank
        """
        if random.random() >= POISONED:
            return None
        branch, raises = random.randrange(n), may_raise and random.random() < 0.5
        end = prompt + random.choice((0, random.randint(1, answer)))
        position = random.randrange(0 if raises else prompt - 1, end)
        return cls(ENGINE_ERROR if raises else LOGITS_NOT_FINITE, position, branch, position + 1 - prompt)

    def is_in(self, chunk: Chunk) -> bool:
        """Tell whether a chunk cannot be computed."""
        if self.code == LOGITS_NOT_FINITE:
            return chunk.end == self.position + 1 and any(draw.branch == self.branch for draw in chunk.draws)
        in_prompt = self.answered <= 0
        return chunk.start <= self.position < chunk.end and (in_prompt or chunk.job.branch == self.branch)
