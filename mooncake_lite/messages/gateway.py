"""Between a gateway and the conductor, and the tokens that compute ranks send to a gateway.

Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import Logprobs, Message, Metric, Sampling, Span


class GatewayHello(Message, frozen=True):
    """A gateway presents itself; `token_endpoints` are where ranks send it tokens (ipc first)."""

    gateway: str
    token_endpoints: list[str]


class Submit(Message, frozen=True):
    """A tokenised request.

    token_ids    the whole prompt
    keys         prefix key of each full block of the prompt; empty when reuse is off
    digests      second digest of each full block's tokens, same length as keys
    salt         what the key chain started from; decode ranks continue the chain with it
    max_tokens   longest answer; 0: the prompt is computed into the pool, and nothing is answered
    stop_ids     token ids that end the answer (the model's end tokens, unless ignore_eos)
    wait_limit_s how long the gateway waits for the first token
    n            answers to the prompt; answer b, a branch, is drawn with the seed plus b
    class_id     service class: an index of the configured ones, 0 the highest; tenant: "" for none
    slo_ttft_s, slo_tbt_s   limits that the client asks for; inf: those of the class
    """

    request_id: str
    gateway: str
    token_ids: list[int]
    keys: list[int]
    digests: list[int]
    salt: bytes
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    wait_limit_s: float = float("inf")
    n: int = 1
    class_id: int = 0
    tenant: str = ""
    slo_ttft_s: float = float("inf")
    slo_tbt_s: float = float("inf")


class Cancel(Message, frozen=True):
    """Forget a request: the client left, or a stop string was found by the gateway.

    attempt   between conductor and rank: the only attempt that is meant
    branch    the only answer that is meant, the others go on; -1: all of them
    """

    request_id: str
    attempt: int = 0
    branch: int = -1


class MetricsRequest(Message, frozen=True):
    """Ask the conductor for all metrics of the cluster."""

    number: int


class ClusterStatus(Message, frozen=True):
    """Sent when the state changes. `ready` turns true once, when every rank has registered.

    degraded   what does not work as it should although the cluster is ready, one line each
    """

    ready: bool
    detail: str
    degraded: list[str] = []


class Rejected(Message, frozen=True):
    """A request is refused, and none of its tokens may be shown."""

    request_id: str
    reason: str
    retry_after_s: float


class Released(Message, frozen=True):
    """The tokens of a request may be shown. Sent where admission withholds them (after-prefill)."""

    request_id: str


class Failed(Message, frozen=True):
    """A request that had been accepted cannot be finished."""

    request_id: str
    reason: str


class MetricsReply(Message, frozen=True):
    """All metrics of the cluster, in answer to the MetricsRequest of this number."""

    number: int
    metrics: list[Metric]


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
    end_token       the end token of an answer to a request with prompt_logprobs, which is not in token_ids:
                    the last one of logprobs is about it; None in other messages
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
