"""Logprobs of a prompt's tokens are those of transformers, in however many chunks the prompt is computed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.logprobs import ROWS
from mooncake_lite.engine.runner import Runner
from mooncake_lite.messages import Logprobs, Sampling
from mooncake_lite.model.forward import load_model
from scheduler.instance import (
    DECODE,
    PREFILL,
    Arrived,
    Job,
    Limits,
    Pages,
    Staging,
    State,
    begin,
    next_step,
    on,
)
from scheduler.instance.outcomes import Outcome, Scored, Token
from tests.mooncake_lite.model.conftest import tiny_model

DUTIES = frozenset({PREFILL, DECODE})


def answer(
    runner: Runner, prompt: list[int], sampling: Sampling, chunk_tokens: int
) -> tuple[list[int], list[Logprobs]]:
    """Two tokens of an answer, and the logprobs of its prompt."""
    pages = Pages(runner.engine.num_pages, PAGE_TOKENS)
    state = State(DUTIES, pages, Staging(0, 0), runner.engine.block_tokens, Limits(chunk_tokens))
    scored = sampling.prompt_logprobs >= 0
    on(state, Arrived(Job("a", 0, DUTIES, prompt, 0, 2, 512, sampling=sampling, scored=scored)), 0.0)
    said: list[Outcome] = []
    while state.busy:
        step = next_step(state, time.monotonic())
        begin(state, step)
        result = runner.run(step)
        said += on(state, result, time.monotonic())
    scores = [score for one in said if isinstance(one, Scored) for score in one.scores]
    return [one.token for one in said if isinstance(one, Token)], scores


def test_prompt_logprobs_are_those_of_transformers_and_their_logits_are_made_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    oracle = tiny_model("qwen2", tmp_path)
    prompt = [*range(20, 150), 7, 7, 3]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(dim=1)
    model = load_model(tmp_path, device=device)
    runner = Runner(Engine(model, 16, 4 * PAGE_TOKENS))
    plain, nothing = answer(runner, prompt, Sampling(0.0), 512)
    assert nothing == []

    rows: list[int] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda states: rows.append(len(states)) or logits(states))
    for chunk_tokens, top in ((512, 3), (50, 1), (7, 0)):
        sampling = Sampling(0.0, logprobs=top, prompt_logprobs=top)
        tokens, scores = answer(runner, prompt, sampling, chunk_tokens)

        assert tokens == plain
        assert len(scores) == len(prompt) - 1
        for row, target, score in zip(expected[:-1], prompt[1:], scores, strict=True):
            assert score.chosen == pytest.approx(float(row[target]), abs=1e-3)
            assert [value for _, value in score.best] == pytest.approx(
                row.topk(top).values.tolist(), abs=1e-3
            )
            for token, value in score.best:
                assert value == pytest.approx(float(row[token]), abs=1e-3)
                assert (token == target) == (value == score.chosen)  # lm-eval compares these as they are
    assert max(rows) == ROWS < len(prompt) - 1
