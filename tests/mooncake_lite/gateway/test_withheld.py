"""Tokens that are withheld while the cluster may still refuse the request (admission after-prefill)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mooncake_lite import messages as m
from mooncake_lite.gateway.open_request import OpenRequest
from mooncake_lite.gateway.problems import Refused, Unavailable
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import SERVED_ID, FakeCluster, answer

pytestmark = pytest.mark.quick


def opened(n: int = 1) -> OpenRequest:
    """A request whose one prompt is submitted."""
    request = OpenRequest("a")
    body = m.Body("gateway-0", [1], b"", m.Sampling(0.0), [])
    submit = m.Submit(m.RequestArrived("a", 1, 4, [], [], n=n), body)
    request.expect(submit, withheld=True)
    return request


def now(request: OpenRequest) -> list[m.Tokens]:
    """What its handler would get at once. Raises what ended it."""

    async def first() -> list[m.Tokens]:
        return await asyncio.wait_for(request.next(1.0), 0.01)

    try:
        return asyncio.run(first())
    except TimeoutError:
        return []


def test_withheld_tokens_come_in_their_order_when_they_are_released() -> None:
    request = opened(n=2)
    first = [m.Tokens("a", 0, [7], branch=branch) for branch in (1, 0)]
    for message in (m.Tokens("a", 1, [8]), *first):
        request.deliver(message)
    assert now(request) == []
    request.release("a")
    assert [(one.branch, one.index) for one in now(request)] == [(0, 0), (0, 1), (1, 0)]
    request.deliver(m.Tokens("a", 2, [9]))
    assert [one.index for one in now(request)] == [2]


def test_a_release_may_overtake_the_tokens() -> None:
    request = opened()
    request.release("a")
    request.deliver(m.Tokens("a", 0, [7], "stop"))
    assert [one.finish for one in now(request)] == ["stop"]


@pytest.mark.parametrize("error", [Refused("too slow", 2.0), Unavailable("the conductor is silent")])
def test_what_was_withheld_is_never_shown_after_a_refusal(error: Exception) -> None:
    request = opened()
    request.deliver(m.Tokens("a", 0, [7], "stop"))  # the whole answer, but it may not be shown
    assert request.unfinished() == ["a"]
    request.give_up("a", error)
    request.release("a")
    with pytest.raises(type(error)):
        now(request)
    assert request.unfinished() == []


def test_a_request_whose_prompt_is_not_yet_submitted_fails_with_the_reason() -> None:
    request = OpenRequest("a")
    request.fail(Unavailable("the conductor is silent"))
    with pytest.raises(Unavailable, match="the conductor is silent"):
        now(request)


def test_a_refusal_after_the_prefill_is_a_429_for_a_stream_too(start: Start) -> None:
    import openai

    def prefilled(then: Callable[[str], m.Message]) -> Callable[[FakeCluster, m.Submit], None]:
        def behave(cluster: FakeCluster, submit: m.Submit) -> None:
            answer(cluster, submit, submit.body.token_ids)
            cluster.to_gateway(then(submit.request.request_id))

        return behave

    gateway, cluster = start(admission="after-prefill", slo_tpot_ms=50.0)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    cluster.behaviour = prefilled(lambda name: m.Reject(name, "it would decode too slowly", 7.2))
    with pytest.raises(openai.RateLimitError, match="too slowly") as refused:
        client.completions.create(model=SERVED_ID, prompt="one", stream=True)
    assert refused.value.response.headers["Retry-After"] == "8"
    cluster.behaviour = prefilled(m.Release)
    chunks = client.completions.create(model=SERVED_ID, prompt="one", stream=True, max_tokens=100)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one"
    client.close()
