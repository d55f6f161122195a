"""Between a gateway and the conductor, and the tokens that compute ranks send to a gateway.

Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.control.events import RequestArrived
from mooncake_lite.messages.parts import Body, Logprobs, Message, Metric, Span


class GatewayHello(Message, frozen=True):
    """A gateway presents itself; `token_endpoints` are where ranks send it tokens (ipc first)."""

    gateway: str
    token_endpoints: list[str]


class Submit(Message, frozen=True):
    """A tokenised request, with the part of it that the control plane does not see.

    answers   tokens of request.answers
    """

    request: RequestArrived
    body: Body
    answers: list[list[int]] = []


class MetricsRequest(Message, frozen=True):
    """Ask the conductor for all metrics of the cluster. asked_at_s: by the clock of the gateway."""

    asked_at_s: float


class ClusterStatus(Message, frozen=True):
    """Sent when the state changes. `ready` turns true once, when every rank has registered.

    degraded   what does not work as it should although the cluster is ready, one line each
    serves     false: no rank is left for a duty. Requests wait for one, and are refused in the end
    """

    ready: bool
    detail: str
    degraded: list[str] = []
    serves: bool = True


class MetricsReply(Message, frozen=True):
    """All metrics of the cluster, in answer to the MetricsRequest of this time.

    problem   why there are none; "" otherwise
    """

    asked_at_s: float
    metrics: list[Metric]
    problem: str = ""


class OpenTokens(Message, frozen=True):
    """Some ranks are on other hosts: bind a TCP endpoint on `host` with CURVE, and say hello again."""

    host: str


class Tokens(Message, frozen=True):
    """Tokens `index .. index+len(token_ids)-1` of an answer to a request.

    finish          None while more will come, else "stop" (an end token, not included in
                    token_ids) or "length"
    cached_tokens   prompt tokens whose KV was reused, by tier: {"dram": n, "ssd": m}; only in
                    the message that carries index 0
    spans           where the time went; only in the first and in the last message
    logprobs        of each of token_ids, where the request asks for them
    branch          which of the request's answers; each has its own index and its own finish
    prompt_logprobs of the prompt's tokens but the first, where the request asks for them; only in the
                    message that carries index 0 of branch 0
    attempt         of the order that the rank was given: the gateway takes none from before a Recall
    end_token       the end token of an answer to a request with prompt_logprobs, which is not in token_ids:
                    the last one of logprobs is about it; None in other messages
    predicted       its one token was a draft from the request's prediction
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish: str | None = None
    cached_tokens: dict[str, int] = {}
    spans: list[Span] = []
    logprobs: list[Logprobs] = []
    branch: int = 0
    prompt_logprobs: list[Logprobs] = []
    end_token: int | None = None
    attempt: int = 0
    predicted: bool = False
