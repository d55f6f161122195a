"""An instance of members in this process: each in a thread, with its own loop and a real exchange."""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.engine.dealing import Dealing
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import use_threads
from mooncake_lite.engine.members import Leader, Peers, WholeBlocks, part_of
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages.members import TO_MEMBER
from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.shares import shares_of
from mooncake_lite.ranks.computing.members import FollowerLoop
from scheduler.instance import Result, Step
from store.layout import BlockLayout
from tests.mooncake_lite.engine.byte_pool import BytePool
from transport.exchange import SharedExchange
from transport.wire import DEFAULT_MAX_BYTES, Decoder, encode

LIMIT_S = 60.0
PIECE_BYTES = 4096
"""Of an exchange: what the members of these tests exchange needs several pieces now and then."""


class Lockstep:
    """The runner of the first member of an instance, beside which the others run.

    members, turns   one of them is above 1; unit: tokens of a unit
    wrap             around the model of the first one
    staged           blocks of the member with the largest share in the staging memory of each
    """

    def __init__(
        self,
        folder: Path,
        num_pages: int,
        block_tokens: int,
        pool: BytePool,
        staged: int,
        *,
        members: int = 1,
        turns: int = 1,
        unit: int = 256,
        batch_invariant: bool = True,
        wrap: Any = lambda model: model,
    ) -> None:
        config = load_config(folder)
        whole = BlockLayout(config.layers, config.kv_heads, block_tokens, config.head_dim, 4)
        shares = shares_of(config, members=members, turns=turns)
        count = len(shares)
        memory = np.zeros(SharedExchange.nbytes(count, PIECE_BYTES), np.uint8)
        self._exchanges = [SharedExchange(memory, number, count, LIMIT_S) for number in range(count)]
        self._boxes: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in shares]
        self._idle, self._lock = [threading.Event() for _ in shares], threading.Lock()
        self._decoder, self.error = Decoder(TO_MEMBER), list[BaseException]()
        self._stopping, moves = threading.Event(), self._moves(pool)

        self.engines, self._threads = list[Engine](), list[threading.Thread]()
        for number, share in enumerate(shares):
            exchange = self._exchanges[number]
            between = exchange if members > 1 else None
            model: Any = load_model(folder, batch_invariant=batch_invariant, share=share, exchange=between)
            dealing = Dealing(share.turn, turns, unit, exchange.gather) if turns > 1 else None
            if not number:
                model = wrap(model)
            engine = Engine(model, num_pages, block_tokens, dealing=dealing)
            engine.caches.fill_(float("nan"))
            self.engines.append(engine)
            layout = BlockLayout(config.layers, len(share.kv_heads), block_tokens, config.head_dim, 4)
            blocks = StagingBlocks(np.zeros(staged * layout.nbytes, np.uint8), layout, engine)
            own = Runner(engine, blocks, moves, engine.compute, part_of(share, whole, unit))
            peers = Peers(range(count), number, partial(self._receive, number), self._tell)
            if number:
                follow = threading.Thread(target=self._follow, args=(peers, own), daemon=True)
                self._threads.append(follow)
            else:
                self.blocks, self.peers = blocks, peers
                self._first = Leader(own, peers, WholeBlocks(moves, whole).sums_of)
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _moves(pool: BytePool) -> Any:
        """Return the pool as transfers to a node whose memory is not mapped here."""
        return SimpleNamespace(submit=pool.submit, mapped=lambda rank: None)

    def _tell(self, number: int, message: Any) -> None:
        data = encode(message, DEFAULT_MAX_BYTES)
        with self._lock:
            self._idle[number].clear()
            self._boxes[number].put(data)

    def _receive(self, number: int, wait_s: float) -> list[Any]:
        box, came = self._boxes[number], list[bytes]()
        with self._lock:
            if wait_s and box.empty():
                self._idle[number].set()
        try:
            came.append(box.get(timeout=wait_s) if wait_s else box.get_nowait())
            while True:
                came.append(box.get_nowait())
        except queue.Empty:
            return [self._decoder.decode(data) for data in came]

    def _follow(self, peers: Peers, own: Runner) -> None:
        """Be a member that is not the first one, until it is dismissed."""
        use_threads(1)
        conductor: Any = SimpleNamespace(
            new_term=lambda: 0, may_join=False, report_when_due=lambda values: False,
            receive=lambda wait_s: (), stopping=True,
        )  # fmt: skip
        watch: Any = SimpleNamespace(is_over=False)
        try:
            FollowerLoop(peers, own, own, conductor, watch).run()
        except BaseException as error:
            self.error.append(error)
            self._lose("a member has failed")
            self._idle[peers.number].set()
        finally:
            own.close()

    def _lose(self, why: str) -> None:
        for exchange in self._exchanges:
            exchange.lose(why)

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do a step on all members. Returns when the others have nothing to do, either."""
        try:
            result = self._first.run(step, moved)
            for idle in self._idle[1:]:
                assert idle.wait(LIMIT_S) or self.error, "a member does not come to its end"
            return result
        except BaseException as error:
            self._lose("the first member has failed")
            raise (self.error or [error])[0] from error

    def close(self) -> None:
        """Dismiss the others, and wait for their end."""
        self.peers.leave()
        until = time.monotonic() + LIMIT_S
        for thread in self._threads:
            thread.join(until - time.monotonic())
            assert not thread.is_alive(), "a member does not end"
        for exchange in self._exchanges:
            exchange.close()
        if self.error:
            raise self.error[0]
