"""Tracing of the gateway: each request from its arrival to its last token.

Made by `__main__` under --trace. It watches the calls between the endpoints and the view of the cluster.
See docs/how-to/trace.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.open_request import OpenRequest
from mooncake_lite.gateway.settings import Settings
from mooncake_lite.messages import Submit, Tokens
from mooncake_lite.tracing.lanes import Spans
from mooncake_lite.tracing.tracer import FLUSH_S, PartFile, Tracer, share_nbytes


class TracedClusterView(ClusterView):
    """A view of the cluster that adds each prompt to a trace. Its number follows that of the last rank."""

    def __init__(self, settings: Settings, on_stop: Callable[[str, float], None]):
        super().__init__(settings, on_stop)
        number = settings.config.ranks
        sink = PartFile(Path(settings.config.trace), number, again=settings.name != "gateway-0")
        self._tracer = Tracer(number, settings.name, sink, share_nbytes(number + 1))
        self._spans = Spans(self._tracer, "requests")
        self._num_tokens: dict[str, int] = {}

    def admit(self, request_id: str) -> OpenRequest:
        """As ClusterView.admit. The request's body has been read, and its prompt is tokenised next."""
        request = super().admit(request_id)
        self._begin(request_id)
        self._spans.stage(request_id, "tokenise")
        return request

    def admit_prompts(self, request: OpenRequest, ids: Sequence[str]) -> None:
        """As ClusterView.admit_prompts. All prompts of the request have been tokenised."""
        super().admit_prompts(request, ids)
        for request_id in ids:
            self._begin(request_id)

    def _begin(self, request_id: str) -> None:
        self._num_tokens[request_id] = 0
        self._spans.open(request_id, request_id)
        self._spans.follow(request_id, request_id, first=True)

    def submit(self, request: OpenRequest, message: Submit) -> None:
        """As ClusterView.submit."""
        asked = message.request
        details = {"prompt tokens": asked.num_tokens, "max_tokens": asked.max_tokens}
        self._spans.stage(asked.request_id, "wait for the first token", details)
        super().submit(request, message)

    def close(self, request: OpenRequest) -> None:
        """As ClusterView.close."""
        super().close(request)
        for name in request.ids:
            self._spans.follow(name, name, last=True)
            self._spans.close(name, {"answer tokens": self._num_tokens.pop(name, 0)})

    def _on_tokens(self, message: Tokens) -> None:
        name = message.request_id
        if name in self._num_tokens:
            self._num_tokens[name] += len(message.token_ids)
            self._spans.stage(name, "answer")
            self._spans.instant(name, "tokens", {"index": message.index, "count": len(message.token_ids)})
        super()._on_tokens(message)

    async def run(self) -> None:
        """As ClusterView.run. The trace ends with it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._flush())
                await super().run()
        finally:
            self._tracer.close()

    async def _flush(self) -> None:
        while True:
            self._tracer.flush_when_due()
            await asyncio.sleep(FLUSH_S)
