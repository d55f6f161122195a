"""`mooncake-lite replay`: a trace against a running server, and what came of it as a table and JSON.

Mounted by `mooncake_lite.cli`. Checks options and writes results; `replay_client.py` sends the requests.
Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from mooncake_lite.config.machine import now
from mooncake_lite.config.options import API_KEY, OUT_FILE, URL, write_out
from mooncake_lite.config.progress import counted
from mooncake_lite.errors import ClusterError
from mooncake_lite.tools.client import open_client
from mooncake_lite.tools.replay_client import CONNECT_LIMIT_S, POOL, Played, Player, accepted_fields
from mooncake_lite.workloads.metrics import spread_of, summary
from mooncake_lite.workloads.options import POSITIVE, chosen_trace, trace_options
from mooncake_lite.workloads.report import show
from mooncake_lite.workloads.text import check_distinct
from mooncake_lite.workloads.traces import Trace

LATE_S = 0.05
"""From here on the command says that requests were sent late."""


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@URL
@API_KEY
@click.option("--model", default=None, help="Model id; left out, the server's first.")
@trace_options
@click.option(
    "--patience-s", type=POSITIVE, default=600, show_default=True, help="Longest time until an answer ends."
)  # fmt: skip
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
@click.option("--save-requests", type=OUT_FILE, help="Write a line of JSON for each request to FILE.")
def replay(trace: Path, url: str, api_key: str | None, **options: Any) -> None:
    """Play TRACE against an OpenAI-compatible server, and measure latencies and goodput.

    TRACE is a file as Mooncake, Bailian, Azure, BurstGPT or ShareGPT publish them. Each request is sent at
    its time, whether or not earlier ones are answered. Prompts are words made from the ids of blocks, so that
    requests share the prefixes that the trace says.
    """
    read = chosen_trace(trace, options)
    check_distinct(read.requests, read.block_tokens, read.block_tokens * options["divide_lengths"])
    with open_client(httpx.Client, url, api_key, httpx.Timeout(CONNECT_LIMIT_S)) as client:
        fields = accepted_fields(client, url, options["model"])
    began_s = time.perf_counter()
    player = _play(read, url, api_key, fields, options["patience_s"])
    result = result_of(player.played, options["slo_ttft_ms"] / 1e3, options["slo_tbt_ms"] / 1e3)
    result["wall_s"] = time.perf_counter() - began_s
    json_file, save_requests = options.pop("json_file"), options.pop("save_requests")
    result["config"] = {"trace": trace.name, "url": url, **options, **fields}
    _tell(result)
    if json_file is not None:
        write_out("--json", json_file, (json.dumps(result, indent=2) + "\n").encode())
    if save_requests is not None:
        write_out("--save-requests", save_requests, _lines(player.played))
    _judge(player, result)


def _play(trace: Trace, url: str, api_key: str | None, fields: dict[str, Any], patience_s: float) -> Player:
    """Play a trace, with a bar that counts the requests that have ended."""

    async def run() -> Player:
        limits = httpx.Timeout(None, connect=CONNECT_LIMIT_S)
        async with open_client(httpx.AsyncClient, url, api_key, limits, limits=POOL) as client:
            with counted("requests", len(trace.requests)) as told:
                player = Player(client, trace, fields, patience_s, told)
                await player.play()
        return player

    return asyncio.run(run())


def result_of(played: Sequence[Played], slo_ttft_s: float, slo_tbt_s: float) -> dict[str, Any]:
    """Return the result as JSON has it, with the keys of a simulation.

    hit_rate        share of the prompt tokens that the server counted which were cached; None where unknown
    prompt_tokens   wanted: of the trace, counted: by the server, both of requests that the server counted
    sent_late_s     from the time of a request in the trace to when it was sent
    """
    counted_ones = [one for one in played if one.usage.prompt_tokens is not None]
    told = sum(one.usage.prompt_tokens or 0 for one in counted_ones)
    cached = [one.cached_tokens for one in counted_ones if one.cached_tokens is not None]
    late_s = [one.late_s for one in played]
    return {
        "date": now(),
        **summary([one.record for one in played], slo_ttft_s, slo_tbt_s),
        "hit_rate": {"all": sum(cached) / told if cached and told else None},
        "prompt_tokens": {"wanted": sum(one.request.input_length for one in counted_ones), "counted": told},
        "sent_late_s": {**spread_of(late_s), "max": max(late_s, default=None)},
    }


def _tell(result: dict[str, Any]) -> None:
    """Print the result."""
    show(result)
    tokens, hits, late_s = result["prompt_tokens"], result["hit_rate"]["all"], result["sent_late_s"]["p99"]
    if tokens["counted"]:
        known = "" if hits is None else f", {hits:.1%} of them cached"
        click.echo(f"prompt tokens: {tokens['wanted']:,} wanted, {tokens['counted']:,} counted{known}")
    if late_s is not None and late_s > LATE_S:
        click.echo(
            f"1 % of the requests were sent {late_s * 1e3:,.0f} ms late or more: the client is too busy"
        )


def _judge(player: Player, result: dict[str, Any]) -> None:
    """Raises KeyboardInterrupt after Ctrl-C, and ClusterError for a run without a server at its end."""
    if player.stopped == "interrupted":
        click.echo(f"interrupted; requests that had not ended: {player.sent - len(player.played)}", err=True)
        raise KeyboardInterrupt
    if player.stopped:
        raise ClusterError(f"{player.stopped}; requests sent: {player.sent} of {len(player.trace.requests)}")
    if not result["completed"]:
        causes = {**result["rejected"], **result["failed"]}
        raise ClusterError(f"no request was answered: {max(causes, key=lambda cause: causes[cause])}")


def _lines(played: Sequence[Played]) -> bytes:
    """Return a line of JSON for each request, in the order of sending: the fields of `Played`."""
    in_order = sorted(played, key=lambda one: one.record.arrived_s)
    return b"".join(msgspec.json.encode(one) + b"\n" for one in in_order)
