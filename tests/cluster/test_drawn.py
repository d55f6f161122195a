"""Requests with drawn parameters, and tiny ones, to the default model: they are answered or refused.

`make test` draws 15, `make soak` 50 times as many. Other models: test_poison.py.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import load_config
from tests.cluster import judged, reference
from tests.cluster.drawn import CHAT, COMMON, COMPLETION, LENGTHS, Drawn, Vocabulary, drawn
from tests.mooncake_lite.engine.examples import a_random

DRAWN = 15

PLAIN: dict[str, Any] = {"count": 4, "temperatures": (0,)}
"""Greedy: the kernels for one or two rows round this model's activations, and others do not."""

TINY = (5e-324, 1e-320, 1e-300, 1e-46, 1e-45, 1e-40, 1e-38, 1e-7, 1e-6)
"""In float32 the first four are 0, and the next two are no normal numbers."""


@pytest.mark.quick
def test_a_seed_draws_the_same_requests_and_another_one_others() -> None:
    def some(seed: int) -> list[Drawn]:
        return list(itertools.islice(drawn(random.Random(seed), Vocabulary(199, 224, (7,))), 300))

    first = some(1)
    assert first == some(1)
    assert len({*first, *some(2)}) > 590
    names = {name for one in first for name in json.loads(one.body)}
    others = {"logit_bias", "stop_token_ids", "prompt", "messages", "stream"}
    assert names == {*COMMON, *CHAT, *COMPLETION, "max_tokens", *others}


@pytest.mark.cluster
def test_requests_with_drawn_parameters_cost_the_default_model_no_rank(
    serving: Cluster, serving_tier: Path, model_folder: Path, soak: int
) -> None:
    ids = reference.tokenizer(model_folder).vocab_size
    short = tuple(length for length in LENGTHS if length <= 65)
    requests = drawn(a_random(soak), Vocabulary(ids, load_config(model_folder).vocab_size, lengths=short))
    with judged.client(serving.base_url) as http:
        before = judged.plain_answers(http, judged.plain_requests("before", **PLAIN))
        found = judged.ask_drawn(serving.base_url, itertools.islice(requests, DRAWN * soak))
        print(dict(found))
        assert found["answered"] > found.total() / 3
        assert set(found) <= {"answered", "400", "left"}
        assert judged.plain_answers(http, judged.plain_requests("after", **PLAIN)) == before
        judged.assert_sound(http, serving_tier.with_name("log"))


@pytest.mark.cluster
def test_a_tiny_parameter_gives_an_answer_or_a_400(serving: Cluster, serving_tier: Path) -> None:
    how = {"prompt": "The capital of France is", "max_tokens": 2, "seed": 1}
    tries = [{"repetition_penalty": value, "temperature": t, "top_p": 0.9} for value in TINY for t in (0, 1)]
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"):
        tries += [{name: value} for value in TINY[::3]]
    tries += [{"logit_bias": {"5": value}} for value in TINY[::3]]
    requests = [Drawn("/v1/completions", json.dumps(how | one), stream=False) for one in tries]
    found = judged.ask_drawn(serving.base_url, requests)
    assert set(found) == {"answered", "400"}
    with judged.client(serving.base_url) as http:
        judged.assert_sound(http, serving_tier.with_name("log"))
