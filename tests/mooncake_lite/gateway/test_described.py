"""Requests that the OpenAPI document allows: their answers are described, and most are successes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mooncake_lite import messages as m
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, FakeCluster, GatewayProcess

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

SHARES = {
    "POST /v1/chat/completions": 10,
    "POST /v1/completions": 10,
    "POST /v1/kv/hints": 3,
    "POST /tokenize": 3,
    "POST /detokenize": 5,
    "GET /v1/models/{model}": 1,
    "the others": 1,
}
"""How many of 33 examples go to an endpoint."""

FEW = 8
"""Of fewer examples chance decides how many are accepted."""

ACCEPTED = {
    "POST /v1/chat/completions": 0.5,
    "POST /v1/completions": 0.8,
    "POST /v1/kv/hints": 0.2,
    "POST /tokenize": 0.8,
    "POST /detokenize": 0.9,
}
"""The least part of an endpoint's examples that are accepted, where there are FEW or more.

The others hold fields that contradict each other, which a schema cannot say. Hypothesis draws from the
constants of the modules that are loaded, so the part differs by what else the same process has tested.
"""


def scored(cluster: FakeCluster, submit: m.Submit) -> None:
    """Answer with the prompt's tokens, and with all logprobs that are asked for."""
    sampling, ids = submit.body.sampling, submit.body.token_ids

    def logprobs(count: int, best: int) -> list[m.Logprobs]:
        return [m.Logprobs(-float(k), [(ids[0], -0.5), (1, -float("inf"))][:best]) for k in range(count)] * (
            best >= 0
        )

    for branch in range(submit.request.n):
        answer = ids[: submit.request.max_tokens]
        cluster.tokens(
            1,
            m.Tokens(
                submit.request.request_id, 0, answer, "length", branch=branch,
                logprobs=logprobs(len(answer), sampling.logprobs),
                prompt_logprobs=logprobs(len(ids) - 1, sampling.prompt_logprobs) if branch == 0 else [],
            ),
        )  # fmt: skip


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def test_what_the_document_allows_gets_an_answer_that_it_describes(
    gateway: GatewayProcess, cluster: FakeCluster, session: requests.Session, soak: int
) -> None:
    cluster.behaviour = scored
    cluster.pool_answers = [m.PoolEnded(blocks=1)] * 1000 * soak
    document = schemathesis.openapi.from_dict(gateway.http.get("/openapi.json").json())
    strategies = {each.ok().label: each.ok().as_strategy() for each in document.get_all_operations()}
    others = st.one_of([strategies.pop(name) for name in list(strategies) if name not in SHARES])
    strategies["the others"] = others
    drawn = st.sampled_from([name for name, share in SHARES.items() for _ in range(share)])
    asked, accepted = Counter[str](), Counter[str]()

    @settings(
        max_examples=300 * soak, derandomize=soak == 1, phases=[Phase.generate], database=None,
        deadline=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=drawn.flatmap(strategies.__getitem__))
    def ask(case: Any) -> None:
        label = case.operation.label
        if label.endswith("completions"):
            case.body |= {"model": "default", "max_tokens": 2}
            case.body.pop("max_completion_tokens", None)  # it would contradict the 2, as would
            if (case.body.get("min_tokens") or 0) > 2:
                case.body["min_tokens"] = 2
        reply = case.call(base_url=gateway.url, session=session, timeout=LIMIT_S)
        case.validate_response(reply, checks=CHECKS)
        asked[label] += 1
        accepted[label] += reply.status_code == 200

    ask()

    for label, least in ACCEPTED.items():
        if asked[label] >= FEW:
            assert accepted[label] > least * asked[label], (accepted, asked)
