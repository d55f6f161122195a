"""The published OpenAI client, unchanged, against a real gateway process and a scripted cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from mooncake_lite import messages as m
from tests.mooncake_lite.gateway.fake_cluster import SERVED_ID, FakeCluster, answer

if TYPE_CHECKING:
    import openai


def test_a_chat_completion_has_the_template_around_it_and_tells_what_was_reused(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    reply = client.chat.completions.create(
        model=SERVED_ID, messages=[{"role": "user", "content": "hello world"}], seed=7, temperature=0
    )

    assert reply.object == "chat.completion"
    assert reply.model == SERVED_ID
    assert reply.id.startswith("chatcmpl-")
    assert reply.system_fingerprint
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "user\nhello world\nassistant\n"
    assert reply.choices[0].finish_reason == "stop"
    submit = cluster.wait_for(m.Submit)
    assert reply.usage.prompt_tokens == len(submit.body.token_ids) == reply.usage.completion_tokens
    assert reply.usage.total_tokens == 2 * len(submit.body.token_ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 20
    assert submit.body.sampling == m.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=7)
    assert submit.body.stop_ids == [1]


def test_a_completion_is_16_tokens_long_unless_asked_for_more(client: openai.OpenAI) -> None:
    prompt = "the quick brown fox jumps over the lazy dog, 0123456789 0123456789"

    short = client.completions.create(model=SERVED_ID, prompt=prompt)
    whole = client.completions.create(model="default", prompt=prompt, max_tokens=100)

    assert short.object == "text_completion"
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 16)
    assert prompt.startswith(short.choices[0].text)
    assert (whole.choices[0].finish_reason, whole.choices[0].text) == ("stop", prompt)


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_usage(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    stream = client.chat.completions.create(
        model=SERVED_ID,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}],
            }
        ],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "user\nhello world\nassistant\n"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(cluster.wait_for(m.Submit).body.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_completion_stream_has_no_usage_unless_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model=SERVED_ID, prompt="hello world", max_tokens=64, stream=True)
    )

    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_16_concurrent_streams_each_get_their_own_text(client: openai.OpenAI) -> None:
    prompts = [f"stream number {i}: " + f"{i} lazy dogs " * (i + 1) for i in range(16)]

    def read(prompt: str) -> tuple[str, str]:
        stream = client.completions.create(model=SERVED_ID, prompt=prompt, max_tokens=400, stream=True)
        chunks = list(stream)
        return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(read, prompts))

    assert [text for _, text in answers] == prompts
    assert len({request_id for request_id, _ in answers}) == 16


def test_a_refusal_is_429_with_the_time_to_come_back(client: openai.OpenAI, cluster: FakeCluster) -> None:
    import openai

    cluster.behaviour = lambda cluster, submit: cluster.to_gateway(
        m.Reject(submit.request.request_id, "64 requests are waiting, which is the limit", 2.5)
    )

    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=SERVED_ID, prompt="hello", stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
        assert "64 requests are waiting" in str(caught.value)


def test_a_failure_in_the_middle_of_a_stream_is_an_error_of_the_client(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    import openai

    def fail(cluster: FakeCluster, submit: m.Submit) -> None:
        cluster.tokens(1, m.Tokens(submit.request.request_id, 0, submit.body.token_ids[:1]))

    cluster.behaviour = fail
    stream = iter(client.completions.create(model=SERVED_ID, prompt="hello", stream=True))
    next(stream)
    request_id = cluster.wait_for(m.Submit).request.request_id
    cluster.tell_gateway(m.Fail(request_id, "rank 2 (decode) was lost"))

    with pytest.raises(openai.APIError, match=r"rank 2 \(decode\) was lost"):
        list(stream)


def test_a_failure_before_the_first_token_is_500(client: openai.OpenAI, cluster: FakeCluster) -> None:
    import openai

    cluster.behaviour = lambda cluster, submit: cluster.to_gateway(
        m.Fail(submit.request.request_id, "no page left")
    )

    with pytest.raises(openai.InternalServerError, match="no page left"):
        client.chat.completions.create(model=SERVED_ID, messages=[{"role": "user", "content": "hello"}])


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    import openai

    assert [model.id for model in client.models.list()] == [SERVED_ID]
    assert client.models.retrieve(SERVED_ID).owned_by == "mooncake-lite"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_an_end_token_at_once_is_an_empty_answer(client: openai.OpenAI, cluster: FakeCluster) -> None:
    cluster.behaviour = lambda cluster, submit: cluster.tokens(
        1, m.Tokens(submit.request.request_id, 0, [], "stop")
    )

    reply = client.completions.create(model=SERVED_ID, prompt="hello")

    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("", "stop")


def test_seeds_are_drawn_when_left_out_and_passed_on_when_given(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    cluster.behaviour = lambda cluster, submit: answer(cluster, submit, [5])
    for _ in range(2):
        client.completions.create(model=SERVED_ID, prompt="hello")
    client.completions.create(model=SERVED_ID, prompt="hello", seed=-(2**63))

    seeds = [message.body.sampling.seed for message in cluster.received if isinstance(message, m.Submit)]
    assert len(set(seeds[:2])) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def predicting(cluster: FakeCluster, submit: m.Submit) -> None:
    """Answer with the prediction up to its last token, then with a blank.

    The rank is lost after three tokens. The one that resumes the answer repeats two of them, and the last.
    """
    name, ids = submit.request.request_id, submit.body.predicted[:-1]
    blank = submit.body.token_ids[-1]
    for branch in range(submit.request.n):
        cluster.tokens(1, m.Tokens(name, 0, ids[:1], branch=branch))
        for index in (1, 2, 1, 2, *range(3, len(ids))):
            cluster.tokens(2, m.Tokens(name, index, [ids[index]], branch=branch, predicted=True))
        cluster.tokens(2, m.Tokens(name, len(ids), [blank], branch=branch))
        last = len(ids) - 1
        cluster.tokens(2, m.Tokens(name, last, [ids[last], blank], "stop", branch=branch, predicted=True))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_prediction_are_counted_once_for_each_answer(
    client: openai.OpenAI, cluster: FakeCluster, stream: bool, n: int
) -> None:
    cluster.behaviour = predicting
    code = "def area(width, height):\n    return width * height\n"
    asked: dict[str, Any] = {
        "model": SERVED_ID, "messages": [{"role": "user", "content": f"name it size:\n{code}"}], "n": n,
        "prediction": {"type": "content", "content": code},
    }  # fmt: skip
    if stream:
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        usage = chunks[-1].usage
    else:
        usage = client.chat.completions.create(**asked).usage

    body = cluster.wait_for(m.Submit).body
    assert body.speculates
    size = len(body.predicted)
    assert size > 10
    details = usage.completion_tokens_details
    # of size - 1 tokens the first came from prefill
    assert details.accepted_prediction_tokens == n * (size - 2)
    assert details.rejected_prediction_tokens == n * 2
    assert usage.completion_tokens == n * size
    assert usage.total_tokens == usage.prompt_tokens + n * size


def test_an_answer_that_repeats_its_prediction_twice_rejects_nothing(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    def twice(cluster: FakeCluster, submit: m.Submit) -> None:
        ids = submit.body.predicted * 2
        for index, token in enumerate(ids):
            finish = "stop" if index == len(ids) - 1 else None
            cluster.tokens(1, m.Tokens(submit.request.request_id, index, [token], finish, predicted=True))

    cluster.behaviour = twice
    reply = client.chat.completions.create(
        model=SERVED_ID,
        messages=[{"role": "user", "content": "again"}],
        prediction={
            "type": "content",
            "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}],
        },
    )

    assert reply.choices[0].message.content == "hello worldhello world"
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == reply.usage.completion_tokens
    assert details.rejected_prediction_tokens == 0


def test_drafts_are_switched_for_one_request_and_without_a_prediction_nothing_of_it_is_counted(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    for asked in (True, False):
        reply = client.completions.create(model=SERVED_ID, prompt="hello", extra_body={"speculate": asked})
        details = reply.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert [submit.body.speculates for submit in cluster.all_of(m.Submit)] == [True, False]


def test_a_prediction_that_a_request_switches_off_is_rejected_as_a_whole(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    reply = client.chat.completions.create(
        model=SERVED_ID,
        messages=[{"role": "user", "content": "hello"}],
        prediction={"type": "content", "content": "hello world"},
        extra_body={"speculate": False},
    )

    body = cluster.wait_for(m.Submit).body
    assert not body.speculates
    assert reply.usage.completion_tokens_details.rejected_prediction_tokens == len(body.predicted) > 0


def with_logprobs(cluster: FakeCluster, submit: m.Submit) -> None:
    """Answers with the first two tokens of the prompt, and with two best tokens for each."""
    ids = list(submit.body.token_ids[:2])
    best = [(ids[1], -0.25), (ids[0], -1.5)]
    for index, token in enumerate(ids):
        logprobs = [m.Logprobs(-float("inf") if index else -1.5, best)]
        finish = "length" if index else None
        cluster.tokens(1, m.Tokens(submit.request.request_id, index, [token], finish, logprobs=logprobs))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, cluster: FakeCluster, stream: bool) -> None:
    cluster.behaviour = with_logprobs
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {"model": SERVED_ID, "messages": messages, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        found = [entry for part in parts for entry in part.content]
    else:
        found = client.chat.completions.create(**asked).choices[0].logprobs.content

    assert cluster.wait_for(m.Submit).body.sampling.logprobs == 2
    assert [entry.logprob for entry in found] == [-1.5, -9999.0]
    assert [(best.token, best.logprob) for best in found[0].top_logprobs] == [
        (found[1].token, -0.25),
        (found[0].token, -1.5),
    ]
    assert found[0].bytes == list(found[0].token.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(client: openai.OpenAI, cluster: FakeCluster, stream: bool) -> None:
    cluster.behaviour = with_logprobs
    asked: dict[str, Any] = {"model": SERVED_ID, "prompt": "no\n", "logprobs": 2}
    if stream:
        chunks = client.completions.create(**asked, stream=True)
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    else:
        parts = [client.completions.create(**asked).choices[0].logprobs]
    tokens = [token for part in parts for token in part.tokens]

    assert tokens == ["n", "o"]
    assert [value for part in parts for value in part.token_logprobs] == [-1.5, -9999.0]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1]
    assert [best for part in parts for best in part.top_logprobs] == [
        {"o": -0.25, "n": -1.5},
        {"o": -0.25, "n": -1.5},
    ]


def test_no_logprobs_come_unasked(client: openai.OpenAI) -> None:
    assert client.completions.create(model=SERVED_ID, prompt="hello").choices[0].logprobs is None
