"""A scrape over HTTP ends in time and in bounds, whatever the server sends."""

from __future__ import annotations

import asyncio
import gzip
import time
from http.server import BaseHTTPRequestHandler
from threading import Event

import httpx
import pytest

from mooncake_lite.tools.top import scrape as module
from mooncake_lite.tools.top.sample import NoAnswer, Sample
from mooncake_lite.tools.top.scrape import MOST_BYTES, scrape
from tests.mooncake_lite.tools.top.server import Answer, hang_up, serving, text

pytestmark = pytest.mark.quick


async def ask(url: str) -> Sample:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        return await scrape(client)


def scraped(*answers: Answer) -> Sample:
    """The sample of a server that answers like this."""
    with serving(*answers) as server:
        return asyncio.run(ask(server.url))


def test_a_scrape_reads_the_metrics() -> None:
    assert scraped(text("mooncake_lite_ready 1\nother 2\n")).total("ready") == 1


def test_a_sample_is_of_the_time_at_which_the_server_asked_its_conductor() -> None:
    began = time.monotonic()
    sample = scraped(text("mooncake_lite_cluster_metrics_age_seconds 100\n"))
    assert began - 100 <= sample.at_s <= time.monotonic() - 100


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (text("no", status=503), "HTTP 503"),
        (text("", status=302, location="http://127.0.0.1:1/"), "HTTP 302"),
        (text(gzip.compress(b"mooncake_lite_ready 1"), content_encoding="gzip"), "is compressed"),
        (text("x" * (MOST_BYTES + 1)), "larger than 4 MiB"),
        (text(b"\xff\xfe\x00"), "no mooncake-lite server"),
        (hang_up, "disconnected"),
    ],
)
def test_another_answer_is_an_error_in_words(answer: Answer, why: str) -> None:
    with pytest.raises(NoAnswer, match=why):
        scraped(answer)


def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_LIMIT_S", 0.2)
    given_up = Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not given_up.wait(0.02):
            handler.wfile.write(b"#\n")

    with serving(drip) as server:
        with pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
            asyncio.run(ask(server.url))
        given_up.set()


def test_nobody_listens() -> None:
    with pytest.raises(NoAnswer, match="connection"):
        asyncio.run(ask("http://127.0.0.1:1"))
