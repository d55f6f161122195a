"""The gateway's lanes in a trace: a span for each prompt of a request, whatever ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.gateway.settings import Limits
from mooncake_lite.gateway.traced_view import TracedClusterView
from mooncake_lite.tracing.merge import merge
from tests.mooncake_lite.tracing.reading import read

pytestmark = pytest.mark.quick


def submit(name: str, n: int = 1) -> m.Submit:
    body = m.Body("gateway-0", [5] * 7, b"", m.Sampling(0.0), [])
    return m.Submit(m.RequestArrived(name, 7, 9, [], [], n=n), body)


async def a_request_of_two_prompts(settings: Any) -> None:
    view = TracedClusterView(settings, lambda reason, grace_s: None)
    view.sockets.send = lambda message: True  # type: ignore[method-assign]
    try:
        view._on_control(m.ClusterStatus(True, "ready"))
        request = view.admit("cmpl-1")
        view.admit_prompts(request, ["cmpl-1-1"])
        view.submit(request, submit("cmpl-1", n=2))
        view.submit(request, submit("cmpl-1-1"))
        view._on_tokens(m.Tokens("cmpl-1", 0, [7]))
        view._on_tokens(m.Tokens("cmpl-1", 0, [8], branch=1))
        view._on_tokens(m.Tokens("of-another-gateway", 0, [8]))
        view.close(request)
        view.close(request)
        view._on_tokens(m.Tokens("cmpl-1", 1, [9]))
        view._tracer.close()
    finally:
        view.sockets.close()


def test_each_prompt_of_a_request_is_a_span_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    settings: Any = SimpleNamespace(
        config=ServeConfig(trace=str(tmp_path / "run.json")), limits=Limits(), name="gateway-0", curve=None,
        control_endpoint=f"ipc://{tmp_path}/control", tokens_endpoint=f"ipc://{tmp_path}/tokens",
    )  # fmt: skip
    asyncio.run(a_request_of_two_prompts(settings))
    merge(tmp_path / "run.json")
    trace = read(tmp_path / "run.json")
    spans = {one.name: one for one in trace.of("gateway-0") if one.depth == 0}
    assert {name: one.args["answer tokens"] for name, one in spans.items()} == {"cmpl-1": 2, "cmpl-1-1": 0}
    stages = [one.name for one in trace.of("gateway-0") if one.depth and one.lane == spans["cmpl-1"].lane]
    assert stages == ["tokenise", "wait for the first token", "answer"]
    assert [[arrow["ph"] for arrow in arrows] for arrows in trace.arrows.values()] == [["s", "f"], ["s", "f"]]
    assert sum(one["name"] == "tokens" for one in trace.instants) == 2
