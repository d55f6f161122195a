"""A forward pass over prompts and decoding sequences together."""

from __future__ import annotations

from pathlib import Path

from mooncake_lite.engine.engine import Engine
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from scheduler.instance.step import Chunk, Draw, JobId
from tests.mooncake_lite.model.conftest import tiny_model


def chunk(name: str, token_ids: list[int], start: int, pages: tuple[int, ...]) -> Chunk:
    draw = Draw(Sampling(0.0), token_ids, len(token_ids), frozenset())
    return Chunk(JobId(name, 0, 0), token_ids, start, pages, (draw,), prompt=start == 0)


def test_tokens_come_in_the_order_of_the_chunks_whichever_are_computed_first(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    engine = Engine(load_model(tmp_path), 8, 64)
    running = [chunk("a", [*range(5, 25)], 0, (0, 1)), chunk("b", [*range(90, 60, -1)], 0, (2, 3))]
    engine.compute(running)
    step = [
        chunk("c", [*range(40, 57)], 0, (4, 5)),
        chunk("a", [7], 20, (0, 1)),
        chunk("d", [*range(100, 103)], 0, (6,)),
        chunk("b", [8], 30, (2, 3)),
    ]

    together = [one.token for one in engine.compute(step)[0]]

    assert together == [engine.compute([each])[0][0].token for each in step]
    assert len(set(together)) > 1
