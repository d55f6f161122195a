"""`mooncake-lite top`: the options, the clock, the keys and the terminal around the picture.

Mounted by `mooncake_lite.cli`. Asks a server for its metrics again and again (`scrape.py`), and draws what
has changed (`screen.py`). Explained in docs/how-to/watch.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.live import Live

from mooncake_lite.config.options import API_KEY, OUT_FILE, URL, NumberRange, write_out
from mooncake_lite.errors import UserError
from mooncake_lite.launch.running import where_else
from mooncake_lite.tools.client import open_client
from mooncake_lite.tools.top.sample import NoAnswer, harmless
from mooncake_lite.tools.top.scrape import ANSWER_LIMIT_S, CONNECT_LIMIT_S, scrape
from mooncake_lite.tools.top.screen import picture
from mooncake_lite.tools.top.svg import as_svg
from mooncake_lite.tools.top.watch import Watch

REDRAW_S = 1.0
"""While nothing comes, the seconds of silence are counted on."""

SVG_SIZE = 100, 32
LIMITS = httpx.Timeout(ANSWER_LIMIT_S, connect=CONNECT_LIMIT_S)
PRINTED_HEIGHT = 40
"""Lines of a picture that goes to a file or a pipe: room for about 20 ranks."""


@click.command("top")
@URL
@click.option(
    "--interval",
    type=NumberRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two pictures.",
)
@click.option("--once", is_flag=True, help="Print one picture, of one interval, and exit.")
@click.option("--svg", type=OUT_FILE, help="With --once: also write the picture to this SVG file.")
@API_KEY
def top(url: str, interval: float, once: bool, svg: Path | None, api_key: str | None) -> None:
    """Watch a running cluster. q or Ctrl-C ends the watch.

    It shows ranks, requests by stage, the pool, and the KV that moves, from the server's /metrics alone.
    Where the output is no terminal, one picture is printed, as with --once.
    """
    if svg is not None and not once:
        raise UserError("--svg writes one picture: add --once")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a line still shows figures
    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            asyncio.run(_once(url, api_key, interval, svg, console))
        else:
            asyncio.run(_live(url, api_key, interval, console))


async def _once(url: str, api_key: str | None, interval_s: float, svg: Path | None, console: Console) -> None:
    """Print the picture of one interval, and write it to a file if there is one."""
    async with open_client(httpx.AsyncClient, url, api_key, LIMITS) as client:
        watch = await _begin(client, url, "")
        await asyncio.sleep(interval_s)
        try:
            watch.take(await scrape(client))
        except NoAnswer as error:
            raise UserError(f"the server at {harmless(url)} has gone away: {error}") from None
    figures, state = watch.figures(), watch.state(time.monotonic())
    height = console.height if console.is_terminal else PRINTED_HEIGHT
    console.print(picture(figures, state, console.width, height))
    if svg is not None:
        drawn = as_svg(picture(figures, state, *SVG_SIZE), SVG_SIZE[0], "mooncake-lite top")
        write_out("--svg", svg, drawn.encode())


async def _live(url: str, api_key: str | None, interval_s: float, console: Console) -> None:
    """Draw until a key or a signal ends it. The terminal is then as it was."""
    async with open_client(httpx.AsyncClient, url, api_key, LIMITS) as client:
        watch = await _begin(client, url, "q quit")
        news, ended = asyncio.Event(), asyncio.Event()

        def end() -> None:
            ended.set()
            news.set()

        polling = asyncio.create_task(_poll(client, watch, interval_s, news.set))
        try:
            screen = Live(console=console, screen=True, auto_refresh=False)
            with _signals(end, news.set), _keys(end), screen as live:
                while not ended.is_set() and not polling.done():
                    content = picture(watch.figures(), watch.state(time.monotonic()), *console.size)
                    live.update(content, refresh=True)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(news.wait(), REDRAW_S)
                    news.clear()
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling


async def _begin(client: httpx.AsyncClient, url: str, hint: str) -> Watch:
    """Ask for the first time. Raises UserError when no mooncake-lite server answers."""
    try:
        first = await scrape(client)
    except NoAnswer as error:
        raise UserError(f"no server can be watched at {url} ({error}); {where_else()}") from None
    return Watch(harmless(client.base_url.netloc.decode("ascii")), hint, first)


async def _poll(client: httpx.AsyncClient, watch: Watch, interval_s: float, tell: Callable[[], None]) -> None:
    """Ask the server once per interval, until cancelled. A question that takes longer delays the next one."""
    due = time.monotonic()
    while True:
        due = max(due + interval_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        try:
            watch.take(await scrape(client))
        except NoAnswer as error:
            watch.fail(str(error))
        tell()


@contextlib.contextmanager
def _signals(end: Callable[[], None], redraw: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, a request to end restores the terminal first, and another size is drawn at once."""
    loop = asyncio.get_running_loop()
    reactions = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGWINCH: redraw}
    for number, reaction in reactions.items():
        loop.add_signal_handler(number, reaction)
    try:
        yield
    finally:
        for number in reactions:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _keys(end: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, read single keys: q ends the watch, and so does the end of the terminal."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            pressed = os.read(terminal, 64)
        except OSError:
            pressed = b""
        if not pressed or b"q" in pressed:
            end()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
