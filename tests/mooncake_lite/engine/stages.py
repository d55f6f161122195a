"""A pipeline in this process: its stages share a model's weights, and messages are encoded on their way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.members import Leader, chained, part_of
from mooncake_lite.engine.pipeline import Neighbours, StageEngine
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.engine.telling import reports_of, step_of
from mooncake_lite.messages.members import TO_MEMBER
from mooncake_lite.model.forward import Model
from mooncake_lite.model.shares import Share, shares_of
from mooncake_lite.model.weights import Weights
from scheduler.instance import Result, Step
from store.layout import BlockLayout
from tests.mooncake_lite.engine.byte_pool import BytePool
from transport.bulk.batch import Transfer
from transport.wire import DEFAULT_MAX_BYTES, Decoder, encode

SLOTS, ROWS = 2, 1024
FIRST_RANK = 100
"""Rank number of the first stage; the pool's is 0."""


def stage_models(model: Model, count: int) -> list[Model]:
    """Return a model for each stage, without a copy of the weights."""
    return [_part(model, share) for share in shares_of(model.config, count)]


def _part(model: Model, share: Share) -> Model:
    layers, weights = share.layers, model.weights
    some = Weights(
        weights.embedding if share.is_first else None,
        weights.layers[layers.start : layers.stop],
        weights.norm if share.is_last else None,
        weights.head if share.is_last else None,
    )
    return Model(share.part_of(model.config), some, "float32", str(model.device), model.batch_invariant)


class StagedRunner:
    """All stages of a pipeline, each of which does what it can when the first one has done a step.

    models   of the stages; that of the last one may be wrapped
    """

    def __init__(
        self, models: Sequence[Any], num_pages: int, block_tokens: int, pool: BytePool, staged: int
    ) -> None:
        config = models[0].config
        self._memory = [np.zeros((SLOTS, ROWS, config.hidden_size * 4), np.uint8) for _ in models]
        self._pool, decoder = pool, Decoder(TO_MEMBER)
        boxes: list[deque[bytes]] = [deque() for _ in models]

        def receive(number: int, _wait_s: float) -> list[Any]:
            came, boxes[number] = boxes[number], deque()
            return [decoder.decode(data) for data in came]

        def tell(number: int, message: Any) -> None:
            boxes[number].append(encode(message, DEFAULT_MAX_BYTES))

        ranks = [FIRST_RANK + number for number in range(len(models))]
        self._stages = []
        windows = tuple(itertools.chain(*(one.config.windows for one in models)))
        whole = replace(config, layers=len(windows), windows=windows)
        sizes = config.kv_heads, block_tokens, config.head_dim, 4
        for number, (model, share) in enumerate(zip(models, shares_of(whole, len(models)))):
            layout = BlockLayout(model.config.layers, *sizes)
            engine = Engine(model, num_pages, block_tokens)
            blocks = StagingBlocks(np.zeros(staged * layout.nbytes, np.uint8), layout, engine)
            moves: Any = self
            near = Neighbours(ranks, number, partial(receive, number), tell, moves, self._memory[number], 0)
            computes = StageEngine(engine, near)
            part = part_of(share, BlockLayout(len(windows), *sizes), 0)
            runner = Runner(engine, blocks, moves, computes.compute, part)
            self._stages.append((near, runner))
            if number == 0:
                self.blocks = blocks
                self._first = Leader(runner, near, chained, computes.on_look, late=True)

    def submit(self, moves: Sequence[Transfer], label: object) -> Any:
        """Move hidden states, or blocks of the pool."""
        for move in moves:
            if move.rank >= FIRST_RANK:
                memory = self._memory[move.rank - FIRST_RANK].reshape(-1)
                move.local[: move.nbytes] = memory[move.offset : move.offset + move.nbytes]
        return self._pool.submit([move for move in moves if move.rank < FIRST_RANK], label)

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do a step on the first stage, and then on the others."""
        result = self._first.run(step, moved)
        for near, runner in self._stages[1:]:
            near.look()
            while (order := near.next_step()) is not None:
                self._report(near, runner.run(step_of(order, 0.0)))
            while runner.is_moving:
                self._report(near, runner.run(Step(0.0)))
        return result

    @staticmethod
    def _report(near: Neighbours, result: Result) -> None:
        for report in reports_of(near.number, result):
            near.tell(0, report)
