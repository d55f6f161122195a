"""What a gateway says of the answers so far when a rank is lost, and what it takes afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.open_request import OpenRequest, PromptAnswers
from mooncake_lite.gateway.settings import Limits
from store.keys import block_digests, prefix_keys
from tests.mooncake_lite.gateway.fake_cluster import SERVED_ID, FakeCluster
from transport.wire import Decoder, encode

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.quick

BLOCK = 4
PROMPT = [101, 102, 103, 104, 105, 106]


def submit(n: int = 1, salt: bytes = b"model") -> m.Submit:
    body = m.Body("gateway-0", PROMPT, salt, m.Sampling(0.0), [])
    return m.Submit(m.RequestArrived("a", len(PROMPT), 8, [], [], n=n), body)


def recall(*branches: int, attempt: int = 1, name: str = "a") -> m.Recall:
    return m.Recall(name, attempt, list(branches), "rank 2 is lost")


def so_far(branch: int, token_ids: list[int], whole: bool = False) -> m.AnswerSoFar:
    """An answer with the keys of the blocks that it fills together with the prompt."""
    tokens = [*PROMPT, *token_ids]
    keys, digests = prefix_keys(tokens, BLOCK, b"model"), block_digests(tokens, BLOCK)
    return m.AnswerSoFar(branch, len(token_ids), whole, keys, digests)


def test_the_answers_so_far_come_with_their_tokens_and_the_keys_of_prompt_and_answer() -> None:
    prompt = PromptAnswers(submit(n=3))
    prompt.push(m.Tokens("a", 0, [7, 8], branch=0, attempt=1))
    prompt.push(m.Tokens("a", 3, [10], branch=0, attempt=1))  # the one before it has not come
    prompt.push(m.Tokens("a", 0, [9], "stop", branch=2, attempt=1))
    report = prompt.recall(recall(0, 1, 2), BLOCK)
    assert report.event == m.Recalled("a", 1, [so_far(0, [7, 8]), so_far(1, []), so_far(2, [9], whole=True)])
    assert report.token_ids == [[7, 8], [], [9]]
    assert len(report.event.answers[0].keys) == 2, "the second block is of prompt and answer"
    assert prompt.push(m.Tokens("a", 2, [99], branch=0, attempt=1)) == []
    (new,) = prompt.push(m.Tokens("a", 2, [11], branch=0, attempt=2))
    assert (new.token_ids, prompt.orders[0].token_ids) == ([11], [7, 8, 11])


def test_only_the_branches_that_are_asked_for_are_recalled() -> None:
    prompt = PromptAnswers(submit(n=2))
    prompt.push(m.Tokens("a", 0, [7], attempt=1))
    prompt.push(m.Tokens("a", 0, [8], branch=1, attempt=1))
    report = prompt.recall(recall(1, name="a#1"), BLOCK)
    assert report == m.Report(m.Recalled("a#1", 1, [so_far(1, [8])]), [[8]])
    (more,) = prompt.push(m.Tokens("a", 1, [9], attempt=1))
    assert more.token_ids == [9], "branch 0 is decoded on by its own rank"


def test_an_answer_that_may_reuse_nothing_has_no_keys() -> None:
    prompt = PromptAnswers(submit(salt=b""))
    prompt.push(m.Tokens("a", 0, [7, 8], attempt=1))
    (found,) = prompt.recall(recall(0), BLOCK).event.answers
    assert found == m.AnswerSoFar(0, 2, False, [], [])


def test_withheld_tokens_are_forgotten_by_a_recall_and_come_again() -> None:
    prompt = PromptAnswers(submit(n=2), withheld=True)
    prompt.push(m.Tokens("a", 0, [7], branch=1, attempt=1))  # waits for the first of branch 0
    prompt.push(m.Tokens("a", 0, [8], "stop", branch=0, attempt=1))
    assert prompt.newly_whole() == [0]
    report = prompt.recall(recall(0, 1), BLOCK)
    assert report == m.Report(m.Recalled("a", 1, [so_far(0, []), so_far(1, [])]), [[], []])
    assert prompt.push(m.Tokens("a", 0, [8], "stop", branch=0, attempt=1)) == []
    assert prompt.newly_whole() == []
    prompt.push(m.Tokens("a", 0, [17], branch=1, attempt=2))
    prompt.push(m.Tokens("a", 0, [18], "stop", branch=0, attempt=2))
    assert prompt.newly_whole() == [0], "it is told again"
    assert [(one.branch, one.token_ids) for one in prompt.release()] == [(0, [18]), (1, [17])]


def test_tokens_that_were_released_are_not_forgotten() -> None:
    prompt = PromptAnswers(submit(), withheld=True)
    prompt.push(m.Tokens("a", 0, [7], attempt=1))
    assert [one.token_ids for one in prompt.release()] == [[7]]
    assert prompt.recall(recall(0), BLOCK).token_ids == [[7]]


def test_the_cluster_is_told_once_of_each_answer_that_is_whole() -> None:
    request = OpenRequest("a")
    request.expect(submit(n=2))
    assert request.deliver(m.Tokens("a", 1, [8], "stop", attempt=1)) == [], "the first token is missing"
    assert request.deliver(m.Tokens("a", 0, [7], attempt=1)) == [m.AnswerReceived("a", 0)]
    assert request.deliver(m.Tokens("a", 1, [8], "stop", attempt=1)) == []
    assert request.deliver(m.Tokens("a", 0, [9], "length", branch=1, attempt=1)) == [m.AnswerReceived("a", 1)]
    assert request.deliver(m.Tokens("of another", 0, [9], "length")) == []


def test_a_prompt_that_was_never_submitted_has_no_answer() -> None:
    assert OpenRequest("a").recall(recall(0), BLOCK) is None


# ------------------------------------------------------------------------------ the view of the cluster


def viewed(tmp_path: Path, of: Callable[[ClusterView], None]) -> list[m.Message]:
    """What a gateway sends while this is done to its view of a cluster that is ready."""
    settings: Any = SimpleNamespace(
        config=ServeConfig(block_size=16), limits=Limits(), name="gateway-0", curve=None,
        control_endpoint=f"ipc://{tmp_path}/control", tokens_endpoint=f"ipc://{tmp_path}/tokens",
    )  # fmt: skip
    sent: list[m.Message] = []

    def send(message: m.Message) -> bool:
        sent.append(Decoder(m.TO_CONDUCTOR).decode(encode(message)))
        return True

    async def play() -> None:
        view = ClusterView(settings, lambda reason, grace_s: None)
        view.sockets.send = send  # type: ignore[method-assign]
        try:
            view._on_control(m.ClusterStatus(True, "ready"))
            of(view)
        finally:
            view.sockets.close()

    asyncio.run(play())
    return sent


def test_a_recall_is_answered_for_an_open_request_and_tokens_are_acknowledged(tmp_path: Path) -> None:
    def play(view: ClusterView) -> None:
        view.submit(view.admit("a"), submit())
        view._on_tokens(m.Tokens("a", 0, [7], attempt=1))
        view._on_control(recall(0))
        view._on_tokens(m.Tokens("a", 1, [99], "stop", attempt=1))  # too late
        view._on_tokens(m.Tokens("a", 1, [8], "stop", attempt=2))

    _, report, received = viewed(tmp_path, play)
    assert isinstance(report, m.Report)
    assert (report.event.attempt, report.event.answers[0].num_tokens, report.token_ids) == (1, 1, [[7]])
    assert received == m.AnswerReceived("a", 0)


def test_a_recall_of_a_request_whose_client_has_left_says_that_every_answer_is_whole(tmp_path: Path) -> None:
    def play(view: ClusterView) -> None:
        request = view.admit("a")
        view.submit(request, submit(n=2))
        view._on_tokens(m.Tokens("a", 0, [7], attempt=1))
        view.close(request)
        view._on_control(recall(0, 1, attempt=3))
        view._on_control(recall(1, name="unknown#1"))

    _, cancelled, known, unknown = viewed(tmp_path, play)
    assert cancelled == m.RequestCancelled("a")
    gone = [m.AnswerSoFar(branch, 0, True) for branch in (0, 1)]
    assert known == m.Report(m.Recalled("a", 3, gone), [[], []])
    assert unknown == m.Report(m.Recalled("unknown#1", 1, gone[1:]), [[]])


def test_a_stream_goes_on_where_it_was_when_its_rank_is_lost(
    client: openai.OpenAI, cluster: FakeCluster
) -> None:
    def first_token(cluster: FakeCluster, submit: m.Submit) -> None:
        cluster.tokens(1, m.Tokens(submit.request.request_id, 0, submit.body.token_ids[:1], attempt=1))

    cluster.behaviour = first_token
    chunks = client.completions.create(model=SERVED_ID, prompt="one two three", stream=True, max_tokens=100)
    sent = cluster.wait_for(m.Submit)
    name, tokens = sent.request.request_id, sent.body.token_ids
    text = next(chunks).choices[0].text
    cluster.tell_gateway(m.Recall(name, 1, [0], "rank 2 is lost"))
    report = cluster.wait_for(m.Report)
    assert isinstance(report.event, m.Recalled)
    assert (report.event.answers[0].num_tokens, report.token_ids) == (1, [tokens[:1]])
    late = m.Tokens(name, 1, [tokens[0]] * 2, "stop", attempt=1)
    rest = m.Tokens(name, 1, tokens[1:], "stop", attempt=2)
    cluster.do(lambda: (cluster.tokens(2, late), cluster.tokens(2, rest)))
    assert text + "".join(chunk.choices[0].text for chunk in chunks) == "one two three"
    assert cluster.wait_for(m.AnswerReceived) == m.AnswerReceived(name, 0)


def test_a_whole_answer_is_acknowledged_for_each_branch(client: openai.OpenAI, cluster: FakeCluster) -> None:
    client.completions.create(model=SERVED_ID, prompt="one two", n=2, max_tokens=100)
    name = cluster.wait_for(m.Submit).request.request_id
    cluster.wait_for(m.AnswerReceived, lambda one: one == m.AnswerReceived(name, 0))
    cluster.wait_for(m.AnswerReceived, lambda one: one == m.AnswerReceived(name, 1))
    assert cluster.all_of(m.RequestCancelled) == []


def test_a_new_conductor_is_sent_the_open_prompts_again_with_the_answers_so_far() -> None:
    request = OpenRequest("a")
    request.expect(submit(n=2))
    request.deliver(m.Tokens("a", 0, [7, 8], branch=0, attempt=1))
    request.deliver(m.Tokens("a", 0, [9], "stop", branch=1, attempt=1))
    (again,) = request.again(m.first_attempt(1), BLOCK)
    assert again.request.answers == [so_far(0, [7, 8]), so_far(1, [9], whole=True)]
    assert (again.answers, again.body, again.request.resumed) == ([[7, 8], [9]], submit().body, True)
    assert 0.0 <= again.request.waited_s < 60.0
    assert request.deliver(m.Tokens("a", 2, [99], "stop", branch=0, attempt=7)) == []
    (received,) = request.deliver(m.Tokens("a", 2, [10], "stop", branch=0, attempt=m.first_attempt(1) + 1))
    assert received == m.AnswerReceived("a", 0)
    assert request.again(m.first_attempt(2), BLOCK) == []


@pytest.mark.parametrize(("released", "shown"), [(True, [[7]]), (False, [[]])])
def test_withheld_tokens_are_forgotten_when_a_conductor_dies_unless_they_were_released(
    released: bool, shown: list[list[int]]
) -> None:
    request = OpenRequest("a")
    request.expect(submit(), withheld=True)
    request.deliver(m.Tokens("a", 0, [7], attempt=1))
    if released:
        request.release("a")
    (again,) = request.again(m.first_attempt(1), BLOCK)
    assert (again.answers, again.request.resumed) == (shown, released)


def test_a_request_that_was_released_before_its_first_token_came_cannot_be_refused_by_a_new_conductor() -> (
    None
):
    request = OpenRequest("a")
    request.expect(submit(), withheld=True)
    request.release("a")
    (again,) = request.again(m.first_attempt(1), BLOCK)
    assert again.request.resumed
