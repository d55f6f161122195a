"""A rank of an instance of several: its connections to the others, and the loop of one that follows.

Used by `assemble.py`. What is told and reported stands in `engine/members.py`. The first rank is driven by
`loop.py`, as a rank that is alone. See docs/explain/several-ranks.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.contract import ComputeEngine
from mooncake_lite.engine.members import Leader, Peers, WholeBlocks, chained, part_of
from mooncake_lite.engine.pipeline import Neighbours, StageEngine
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.engine.telling import halves_of, reports_of, step_of
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.messages.members import LateTokens, MemberMail, MemberStep, PartEnded
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.shares import Share
from mooncake_lite.model.sizes import block_layout, exchange_bytes, hidden_nbytes, pool_bytes, stage_bytes
from mooncake_lite.ranks.computing.loop import StepRunner
from mooncake_lite.ranks.conductor_link import ConductorLink
from scheduler.instance import Late, TransferEnded
from store.layout import BlockLayout
from transport.channel import Hub, Spoke
from transport.engine import TransferEngine
from transport.errors import MemberLost
from transport.exchange import Exchange, MpiExchange, SharedExchange
from transport.messaging.address import reachable_address, tcp_endpoint
from transport.messaging.curve import CurveKeys
from transport.wire import Decoder
from transport.world import World

IDLE_WAIT_S = 0.1
"""Longest wait for the other ranks, in which the conductor's Stop waits too."""

PATIENCE_S = 5.0
"""After a Stop and its grace, how much longer a rank waits for the first one of its instance."""

NOTHING = MemberStep()


class Links:
    """Messages between the ranks of an instance.

    ranks        of the instance, the first one first; number: of this one
    in_lockstep  they compute each pass together; otherwise they are the stages of a pipeline

    They exchange addresses over MPI, so all other ranks have to call `world.allgather_bytes` meanwhile.
    """

    def __init__(
        self, world: World, ranks: list[int], in_lockstep: bool, run_dir: RunDir, keys: CurveKeys
    ) -> None:
        self.ranks, self.number, self.in_lockstep = ranks, ranks.index(world.rank), in_lockstep
        self._spokes: dict[int, Spoke] = {}
        self._sent, self._heard = Counter[int](), Counter[str]()
        decoder, keys = Decoder(MemberMail), CurveKeys.generate(keys)
        self._hub = Hub([_endpoint(world, self.ranks, run_dir)], decoder, keys)
        mine = self._hub.endpoints[0], keys.server_public
        found = world.allgather_bytes(msgspec.msgpack.encode(mine))
        for number, rank in enumerate(self.ranks):
            if rank != world.rank:
                endpoint, public = msgspec.msgpack.decode(found[rank], type=tuple[str, str])
                name, theirs = f"member-{self.number}", keys.for_server(public)
                self._spokes[number] = Spoke(endpoint, name, decoder, theirs, context=self._hub.context)

    def receive(self, wait_s: float) -> list[Any]:
        """Return messages of the other ranks. Waits wait_s at most. Raises RuntimeError when one was lost.

        What ranks do belongs together by its order: without one message, all else would be wrong.
        """
        mail = self._hub.receive(wait_s)
        for peer, one in mail:
            if one.number != self._heard[peer]:
                raise RuntimeError(f"message {self._heard[peer]} of {peer} of the instance is lost")
            self._heard[peer] += 1
        return [one.message for _, one in mail]

    def tell(self, number: int, message: Any) -> None:
        """Send to another rank. Raises RuntimeError when it takes nothing any more."""
        mail = MemberMail(self._sent[number], message)
        self._sent[number] += 1
        if not self._spokes[number].send(mail):
            raise RuntimeError(f"rank {self.ranks[number]} of the instance does not read its messages")

    def close(self) -> None:
        """Close the connections."""
        for spoke in self._spokes.values():
            spoke.close()
        self._hub.close()


def _endpoint(world: World, ranks: Sequence[int], run_dir: RunDir) -> str:
    """Return where the other ranks of an instance reach this one."""
    others = [world.hostnames[rank] for rank in ranks if world.node_of[rank] != world.node_of[world.rank]]
    return tcp_endpoint(reachable_address(others), "*") if others else run_dir.member(world.rank)


class RankMemory:
    """A rank's segment behind what it lends.

    staging   for blocks of `layout`, as many as on the rank with the largest share
    slots     of a stage, for hidden states: (count, rows, nbytes), `offset` bytes from the segment's start
    """

    def __init__(
        self, config: ServeConfig, model: ModelConfig, role: str, share: Share, segment: np.ndarray
    ) -> None:
        lent, slots = pool_bytes(config, model, role), stage_bytes(config, model, role)
        end = len(segment) - exchange_bytes(config, role)
        self.offset, self.layout = end - slots, block_layout(config, share.part_of(model))
        count = (self.offset - lent) // block_layout(config, share.largest(model).part_of(model)).nbytes
        self.staging = segment[lent : lent + count * self.layout.nbytes]
        rows = config.max_num_batched_tokens
        self.slots = segment[self.offset : end].reshape(-1, rows, hidden_nbytes(config, model))


class Watch:
    """Ends a wait for other members that cannot end otherwise.

    conductor   of this rank; reads: whether this rank may take its messages, which a first rank may not
    """

    def __init__(self, conductor: ConductorLink, reads: bool) -> None:
        self._conductor, self._reads = conductor, reads
        self._stopped_at = 0.0

    def __call__(self) -> None:
        """Raise MemberLost if the cluster has ended, or has to end and the first rank does not say so."""
        if self.is_over:
            raise MemberLost(f"while it waited for other members: {self._conductor.reason}")

    @property
    def is_over(self) -> bool:
        """Tell whether the first rank can have nothing more to say."""
        link = self._conductor
        if self._reads:
            for _ in link.receive(0.0):
                pass  # the first rank hears of the work
        if link.stop is None:
            return link.is_gone
        self._stopped_at = self._stopped_at or time.monotonic()
        return link.is_gone or time.monotonic() > self._stopped_at + link.stop.grace_s + PATIENCE_S


def exchange_of(
    links: Links, config: ServeConfig, world: World, transfers: TransferEngine, watch: Watch
) -> Exchange:
    """Return the exchange of members: through memory of the first one where all are on its node."""
    first, number, count = links.ranks[0], links.number, len(links.ranks)
    if len({world.node_of[rank] for rank in links.ranks}) > 1:
        return MpiExchange(world.comm_of(links.ranks), waits=watch)
    segment = transfers.mapped(first)
    assert segment is not None
    nbytes = exchange_bytes(config, config.role_of(first))
    return SharedExchange(segment[-nbytes:], number, count, waits=watch)


class Instance:
    """The parts of a rank's runner that know of the other ranks.

    share     of the model that this rank holds; layout: of whole blocks; unit_tokens: of a unit, see Dealing

    peers     what it hears from them
    runner    carries out steps; own: this rank's part of them
    """

    def __init__(
        self,
        links: Links,
        memory: RankMemory,
        engine: ComputeEngine,
        blocks: StagingBlocks,
        transfers: TransferEngine,
        share: Share,
        layout: BlockLayout,
        unit_tokens: int,
    ) -> None:
        part = part_of(share, layout, unit_tokens)
        heard = links.ranks, links.number, links.receive, links.tell
        self.peers: Peers
        if links.in_lockstep:
            self.peers = Peers(*heard)
            self.own = Runner(engine, blocks, transfers, engine.compute, part)
            self._first = Leader(self.own, self.peers, WholeBlocks(transfers, layout).sums_of)
        else:
            self.peers = near = Neighbours(*heard, transfers, memory.slots, memory.offset)
            stage = StageEngine(engine, near)
            self.own = Runner(engine, blocks, transfers, stage.compute, part)
            self._first = Leader(self.own, near, chained, stage.on_look, late=True)

    @property
    def runner(self) -> StepRunner:
        """Return what carries out the steps of this rank."""
        return self.own if self.peers.number else self._first


class FollowerLoop:
    """The loop of a rank that is not the first: does what that one tells, in its order, and reports.

    runner      own, or one around it; own: the runner of this rank
    conductor   takes part in nothing but starts, ends and losses
    watch       of a member, which ends when the first rank says so: that one may be in its last pass
    """

    def __init__(
        self,
        peers: Peers,
        runner: StepRunner,
        own: Runner,
        conductor: ConductorLink,
        watch: Watch | None,
    ) -> None:
        self._peers, self._runner, self._own = peers, runner, own
        self._conductor, self._watch = conductor, watch

    def run(self) -> None:
        """Serve until told to stop, or until the conductor is gone."""
        while not self._is_over:
            self.turn()
        self._peers.leave()

    @property
    def _is_over(self) -> bool:
        if self._watch is not None:
            return (self._conductor.stopping and self._peers.dismissed) or self._watch.is_over
        return self._conductor.stopping

    def turn(self) -> None:
        """Read, compute, tell."""
        self._read_conductor()
        idle = not (self._own.is_moving or self._peers.can_begin)
        self._peers.look(IDLE_WAIT_S if idle else 0.0)
        order = self._peers.next_step()
        if order is None and not self._own.is_moving:
            return
        step = step_of(order or NOTHING, time.monotonic())
        self._tell(reports_of(self._peers.number, self._runner.run(step, self._moved)))

    def _moved(self, halves: Sequence[TransferEnded], late: Sequence[Late] = ()) -> None:
        self._tell(halves_of(self._peers.number, halves))

    def _tell(self, reports: Iterable[PartEnded | LateTokens]) -> None:
        for report in reports:
            self._peers.tell(0, report)

    def _read_conductor(self) -> None:
        """Hear of ends and losses; join a new conductor after what an earlier one wanted."""
        self._conductor.new_term()
        if self._conductor.may_join and not (self._own.is_moving or self._peers.steps):
            self._conductor.join()
        self._conductor.report_when_due(dict)
        for _ in self._conductor.receive(0.0):
            pass  # the first rank hears of the work
