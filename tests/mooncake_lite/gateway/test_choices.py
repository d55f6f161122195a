"""Several prompts, several answers to each, and echoes of prompts: a live gateway and a scripted cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mooncake_lite import messages as m
from mooncake_lite.gateway.logprobs import Scored, TokenLogprobs, in_text_shape
from mooncake_lite.model.tokenizer import Tokenizer
from mooncake_lite.tracing.tracer import parts_folder
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import (
    SERVED_ID,
    FakeCluster,
    GatewayProcess,
    answer,
    posted,
)

if TYPE_CHECKING:
    import openai

PROMPTS = ["hello world", "the lazy dog", "stream number one"]
HELLO: Any = [{"role": "user", "content": "hello"}]


def cancels(client: openai.OpenAI, cluster: FakeCluster) -> set[tuple[str, int]]:
    """(request id, branch) of every Cancel so far."""
    client.models.list()
    httpx.get(str(client.base_url).replace("/v1/", "/metrics"), trust_env=False)  # the conductor answers it
    return {(message.request_id, message.branch) for message in cluster.all_of(m.RequestCancelled)}


def texts(stream: Any) -> dict[int, str]:
    """The text of each choice of a stream of a text completion."""
    found: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return found


def test_several_prompts_have_one_answer_with_a_choice_for_each(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    reply = client.completions.create(model=SERVED_ID, prompt=PROMPTS, max_tokens=100)

    assert [(choice.index, choice.text) for choice in reply.choices] == list(enumerate(PROMPTS))
    assert [message.request.request_id for message in cluster.all_of(m.Submit)] == [
        reply.id,
        f"{reply.id}-1",
        f"{reply.id}-2",
    ]
    tokens = sum(len(message.body.token_ids) for message in cluster.all_of(m.Submit))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (tokens, tokens)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3 * 20
    assert cancels(client, cluster) == set()


def test_a_stream_of_several_prompts_mixes_their_texts_and_ends_each_once(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    """The last prompt is answered first."""
    waiting: list[m.Submit] = []

    def backwards(cluster: FakeCluster, submit: m.Submit) -> None:
        waiting.append(submit)
        if len(waiting) == len(PROMPTS):
            for one in reversed(waiting):
                answer(cluster, one, one.body.token_ids)

    cluster.behaviour = backwards
    chunks = list(
        client.completions.create(
            model=SERVED_ID, prompt=PROMPTS, max_tokens=100, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip

    assert texts(chunks) == dict(enumerate(PROMPTS))
    assert chunks[0].choices[0].index == 2
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(one.body.token_ids) for one in waiting)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [m.Reject("", "64 requests are waiting", 2.5), m.Fail("", "no page")])
def test_a_prompt_that_is_refused_or_fails_ends_the_request_and_cancels_the_others(
    client: openai.OpenAI, cluster: FakeCluster, message: Any, stream: bool
) -> None:
    import openai

    def not_the_second(cluster: FakeCluster, submit: m.Submit) -> None:
        if submit.request.request_id.endswith("-1"):
            kind = type(message)
            rest = [getattr(message, name) for name in kind.__struct_fields__[1:]]
            cluster.to_gateway(kind(submit.request.request_id, *rest))

    cluster.behaviour = not_the_second
    expected = openai.RateLimitError if isinstance(message, m.Reject) else openai.InternalServerError
    with pytest.raises(expected, match=message.reason):
        client.completions.create(model=SERVED_ID, prompt=PROMPTS, stream=stream)

    cancelled = cancels(client, cluster)  # the fake cluster has read all that was sent before
    first, _, third = (one.request.request_id for one in cluster.all_of(m.Submit))
    assert cancelled == {(first, -1), (third, -1)}


def test_a_client_that_leaves_cancels_all_prompts_that_are_not_answered(
    gateway: GatewayProcess, client: openai.OpenAI, cluster: FakeCluster
) -> None:
    def only_the_first(cluster: FakeCluster, submit: m.Submit) -> None:
        if "-1" not in submit.request.request_id[-2:]:
            answer(cluster, submit, submit.body.token_ids)

    cluster.behaviour = only_the_first
    body = json.dumps({"prompt": ["a", "b"], "stream": True}).encode()
    with gateway.connect() as connection:
        connection.sendall(posted("/v1/completions", body))
        while b'"finish_reason":"stop"' not in connection.recv(65536):
            pass

    cluster.wait_for(m.RequestCancelled)
    assert {name[-2:] for name, _ in cancels(client, cluster)} == {"-1"}


def test_each_prompt_takes_a_place_among_the_open_requests(start: Start) -> None:
    gateway, cluster = start({"open_requests": 3})
    assert gateway.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 200
    refused = gateway.http.post("/v1/completions", json={"prompt": ["a", "b", "c", "d"]})
    assert (refused.status_code, "3 requests are open" in refused.text) == (429, True)
    assert gateway.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 200
    assert len(cluster.all_of(m.Submit)) == 6


def test_each_prompt_of_a_request_is_in_a_trace(start: Start, run_dir: Path) -> None:
    trace = run_dir / "trace.json"
    gateway, cluster = start(trace=str(trace))
    reply = gateway.http.post("/v1/completions", json={"prompt": ["a", "b"]}).json()
    gateway.close()

    (part,) = parts_folder(trace).iterdir()
    events = [json.loads(line.rstrip(",")) for line in part.read_text().splitlines()]
    begun = [event.get("name") for event in events if event["ph"] == "B"]
    assert [begun.count(name) for name in (reply["id"], f"{reply['id']}-1", "answer")] == [1, 1, 2]
    assert len(begun) == len([event for event in events if event["ph"] == "E"])
    assert len(cluster.all_of(m.Submit)) == 2


def test_n_answers_to_one_prompt_are_n_choices_and_the_prompt_counts_once(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    def numbered(cluster: FakeCluster, submit: m.Submit) -> None:
        for branch in reversed(range(submit.request.n)):
            answer(cluster, submit, submit.body.token_ids[: 2 + branch], branch=branch)

    cluster.behaviour = numbered
    reply = client.completions.create(model=SERVED_ID, prompt="0123456789", n=3, temperature=0)
    chat = client.chat.completions.create(model=SERVED_ID, messages=HELLO, n=2)
    chunks = list(client.chat.completions.create(model=SERVED_ID, messages=HELLO, n=2, stream=True))

    text, submit = "0123456789", cluster.all_of(m.Submit)[0]
    assert submit.request.n == 3
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert all(text.startswith(choice.text) for choice in reply.choices)
    assert len({choice.text for choice in reply.choices}) == 3
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        len(submit.body.token_ids),
        2 + 3 + 4,
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    roles = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks[:2]]
    assert roles == [(0, "assistant"), (1, "assistant")]
    for choice in chat.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]


def test_the_choices_of_a_prompt_follow_those_of_the_prompt_before_it(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=SERVED_ID, prompt=PROMPTS, n=2, max_tokens=100)

    assert [choice.text for choice in reply.choices] == [text for text in PROMPTS for _ in range(2)]
    assert reply.usage.completion_tokens == 2 * reply.usage.prompt_tokens


def test_a_stop_string_ends_one_choice_and_its_branch_alone(
    client: openai.OpenAI, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    """The second branch finds it, the first goes on to its end."""

    def talk(cluster: FakeCluster, submit: m.Submit) -> None:
        for index, token in enumerate(tokenizer.encode("one END two three")):
            cluster.tokens(2, m.Tokens(submit.request.request_id, index, [token], branch=1))
        answer(cluster, submit, tokenizer.encode("no stop"))

    cluster.behaviour = talk
    reply = client.completions.create(model=SERVED_ID, prompt="x", n=2, stop="END", max_tokens=50)

    assert [choice.text for choice in reply.choices] == ["no stop", "one "]
    assert reply.usage.completion_tokens < len(tokenizer.encode("one END two three" + "no stop"))
    assert cancels(client, cluster) in ({(reply.id, 1)}, {(reply.id, -1)})  # -1: if it is the last to end


def test_a_stop_string_in_the_first_of_two_branches_leaves_the_other_running(
    client: openai.OpenAI, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    def talk_on(cluster: FakeCluster, submit: m.Submit, branch: int = 0) -> None:
        for index, token in enumerate(tokenizer.encode("a END b")):
            cluster.tokens(1, m.Tokens(submit.request.request_id, index, [token], branch=branch))

    cluster.behaviour = talk_on
    stream = iter(
        client.completions.create(model=SERVED_ID, prompt="x", n=2, stop="END", max_tokens=50, stream=True)
    )
    while not (chunk := next(stream)).choices[0].finish_reason:
        pass
    assert cancels(client, cluster) == {(chunk.id, 0)}
    submit = cluster.all_of(m.Submit)[0]
    cluster.do(lambda: talk_on(cluster, submit, branch=1))
    assert texts(stream) == {1: "a "}
    assert cancels(client, cluster) == {(chunk.id, 0), (chunk.id, -1)}


def test_each_choice_has_its_own_logprobs(client: openai.OpenAI, cluster: FakeCluster) -> None:
    def scored(cluster: FakeCluster, submit: m.Submit) -> None:
        for branch in range(submit.request.n):
            logprobs = [m.Logprobs(-1.0 - branch, [(submit.body.token_ids[0], -0.5)])]
            tokens = m.Tokens(
                submit.request.request_id,
                0,
                submit.body.token_ids[:1],
                "length",
                logprobs=logprobs,
                branch=branch,
            )
            cluster.tokens(1, tokens)

    cluster.behaviour = scored
    reply = client.completions.create(model=SERVED_ID, prompt="x", n=2, logprobs=1)

    found = [choice.logprobs for choice in reply.choices]
    assert [one.token_logprobs for one in found if one is not None] == [[-1.0], [-2.0]]


# ---------------------------------------------------------------------------------------- echo


def scored_prompt(cluster: FakeCluster, submit: m.Submit) -> None:
    """The prompt's logprobs, then each branch answers with the prompt's last token; the last branch first."""
    ids = submit.body.token_ids
    prompt = [m.Logprobs(-float(index), [(ids[0], -0.125)]) for index in range(1, len(ids))]
    one = [m.Logprobs(-0.5, [(ids[-1], -0.5)])]
    for branch in reversed(range(submit.request.n)):
        about = prompt if branch == 0 and submit.body.sampling.prompt_logprobs >= 0 else []
        token = ids[-1:] if submit.request.max_tokens else []
        tokens = m.Tokens(
            submit.request.request_id, 0, token, "length", logprobs=one if token else [], branch=branch,
            prompt_logprobs=about,
        )  # fmt: skip
        cluster.tokens(1, tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_stands_before_each_answer(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": SERVED_ID,
        "prompt": PROMPTS[:2],
        "echo": True,
        "max_tokens": 100,
        "n": 2,
    }
    if stream:
        found = texts(client.completions.create(**asked, stream=True))
    else:
        found = {one.index: one.text for one in client.completions.create(**asked).choices}

    assert found == {index: PROMPTS[index // 2] * 2 for index in range(4)}


def test_no_stop_string_is_looked_for_in_an_echo(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=SERVED_ID, prompt="hello world", echo=True, stop="wor", max_tokens=50
    )

    assert reply.choices[0].text == "hello world" + "hello "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_has_those_of_the_prompt_and_the_first_token_has_none(
    client: openai.OpenAI, cluster: FakeCluster, tokenizer: Tokenizer, stream: bool, max_tokens: int
) -> None:
    cluster.behaviour = scored_prompt
    ids = tokenizer.encode("hello world")
    asked: dict[str, Any] = {
        "model": SERVED_ID, "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens,
    }  # fmt: skip
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    else:
        choices = client.completions.create(**asked).choices
    parts: list[Any] = [choice.logprobs for choice in choices if choice.logprobs]

    told = [tokenizer.decode([token]) for token in (ids + ids[-1:])[: len(ids) + max_tokens]]
    assert "".join(choice.text for choice in choices) == "".join(told)
    assert [token for part in parts for token in part.tokens] == told
    values = [value for part in parts for value in part.token_logprobs]
    assert values == [None, *(-float(index) for index in range(1, len(ids))), -0.5][: len(told)]
    best = [one for part in parts for one in part.top_logprobs]
    assert best[:2] == [None, {told[0]: -0.125, told[1]: -1.0}]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [len("".join(told[:index])) for index in range(len(told))]
    submit = cluster.all_of(m.Submit)[0]
    assert (submit.body.sampling.prompt_logprobs, submit.request.keys, submit.body.salt) == (1, [], b"")


def test_the_prompt_of_an_answer_that_comes_before_its_first_branch_is_told_too(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    cluster.behaviour = scored_prompt
    reply = client.completions.create(
        model=SERVED_ID, prompt=[70, 71], echo=True, logprobs=1, n=2, max_tokens=1
    )

    found = [choice.logprobs for choice in reply.choices]
    assert [one.token_logprobs for one in found if one is not None] == [[None, -1.0, -0.5]] * 2


def test_of_best_tokens_with_the_same_text_each_is_told() -> None:
    """Parts of characters are all written as U+FFFD. Whether a token is the best one must still be seen."""
    half, other, a = (
        Scored(7, "\ufffd", b"\xe7", -0.5),
        Scored(9, "\ufffd", b"\xe9", -3.0),
        Scored(1, "a", b"a", -1.0),
    )
    token = TokenLogprobs(Scored(8, "\ufffd", b"\xe8", -2.0), 0, (half, a, other))

    (best,) = in_text_shape([token])["top_logprobs"]

    assert best == {"\ufffd": -2.0, "token_id:7": -0.5, "a": -1.0, "token_id:9": -3.0}


def test_an_end_token_after_an_echo_has_its_logprob_and_no_text(
    client: openai.OpenAI, cluster: FakeCluster, tokenizer: Tokenizer
) -> None:
    """So each token of the prompt is followed by another one, as programs that score prompts expect."""

    def ends(cluster: FakeCluster, submit: m.Submit) -> None:
        tokens = m.Tokens(
            submit.request.request_id, 0, [], "stop", logprobs=[m.Logprobs(-0.25, [(1, -0.25)])],
            prompt_logprobs=[m.Logprobs(-1.0, [(5, -0.5)])], end_token=1,
        )  # fmt: skip
        cluster.tokens(1, tokens)

    cluster.behaviour = ends
    choice = client.completions.create(model=SERVED_ID, prompt=[70, 71], echo=True, logprobs=1).choices[0]

    assert choice.logprobs.token_logprobs == [None, -1.0, -0.25]
    assert choice.logprobs.tokens == [*(tokenizer.decode([token]) for token in (70, 71)), ""]
    assert choice.logprobs.text_offset[-1] == len(choice.text)
    assert choice.text == tokenizer.decode([70, 71])
