"""`mooncake-lite chat`: a conversation with a running server, in the terminal.

Mounted by `mooncake_lite.cli`. Speaks the OpenAI API over HTTP and knows nothing of what lies behind the
port, so it talks to any such server. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from mooncake_lite.errors import UserError
from mooncake_lite.event_stream import BrokenStream, chunks, error_message, finish_reason, texts
from mooncake_lite.options import NumberRange

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

CONNECT_LIMIT_S = 5.0
READ_LIMIT_S = 600.0
"""Longest silence inside an answer: as long as the server itself waits for a token."""

TEMPERATURE = 0.2
"""Used where neither the user nor the model names one. The API's own default is 1, at which a small model
answers with unrelated words; 0.2 is what the default model's authors use in their examples."""

STOPPED = "stopped"
"""The finish of an answer that the user has interrupted."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey: an answer must not move the cursor or set a title."""


class ChatFailed(Exception):
    """The server refused this turn or broke off; the conversation may go on."""


@dataclass(slots=True)
class Turn:
    """One answer, as far as it has come.

    first_s, last_s   seconds from the question to the first and the last piece of text
    """

    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    last_s: float = 0.0

    def summary(self) -> str:
        """The line under an answer: tokens of the prompt, how many were cached, and the speed."""
        prompt = self.usage.get("prompt_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens = self.usage.get("completion_tokens", 0)
        parts = [f"{prompt} prompt tokens, {cached} cached", f"first text after {self.first_s:.2f} s"]
        if tokens > 1 and self.last_s > self.first_s:
            parts.append(f"{(tokens - 1) / (self.last_s - self.first_s):.1f} tok/s")
        if self.finish == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts) if self.finish != STOPPED else "stopped"


@click.command("chat")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens.")
@click.option("--model", default=None, help="Model id; left out, the server's own.")
@click.option("--system", default=None, help="A system message before everything.")
@click.option(
    "--temperature",
    type=NumberRange(0, 2),
    default=None,
    help=f"0 is greedy. Left out, the model's own, or {TEMPERATURE} where it names none.",
)
@click.option("--top-p", type=NumberRange(0, 1, min_open=True), default=None)
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest answer.")
@click.option("--seed", type=int, default=None)
@click.option("--api-key", envvar="MOONCAKE_LITE_API_KEY", default=None, help="Also MOONCAKE_LITE_API_KEY.")
def chat(
    url: str,
    model: str | None,
    system: str | None,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    seed: int | None,
    api_key: str | None,
) -> None:
    """Talk to a running server.

    Ctrl-C stops an answer. A second Ctrl-C, Ctrl-D or /quit ends the conversation.
    """
    import httpx
    from rich.console import Console

    given = {
        "model": model, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed,
    }  # fmt: skip
    fields = {name: value for name, value in given.items() if value is not None}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Timeout(CONNECT_LIMIT_S, read=READ_LIMIT_S)
    console = Console(highlight=False, soft_wrap=True)
    try:
        client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=limits)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise UserError(f"--url {url!r} is no URL: {error}") from None
    with client:
        card = model_card(client, url, model)
        if temperature is None and "temperature" not in (card.get("default_sampling") or {}):
            fields["temperature"] = TEMPERATURE
        messages = [{"role": "system", "content": system}] if system else []
        try:
            converse(client, console, messages, fields)
        except KeyboardInterrupt:
            console.print()


def model_card(client: httpx.Client, url: str, model: str | None) -> dict[str, Any]:
    """What the server says of the model, by default of its first; empty when it says nothing of it.

    Raises UserError when no server answers at the URL, or when it does not list its models.
    """
    import httpx

    from mooncake_lite.launch.running import where_else

    try:
        reply = client.get("/v1/models", timeout=CONNECT_LIMIT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"no server answers at {url} ({_one_line(error)}); {where_else()}") from None
    if reply.status_code != 200:
        raise UserError(f"the server at {url} refuses: {problem_of(reply.status_code, reply.text)}")
    try:
        cards = [card for card in reply.json()["data"] if model in (None, card["id"])]
        return dict(cards[0]) if cards else {}
    except (ValueError, TypeError, KeyError):
        raise UserError(f"the server at {url} does not list its models as the OpenAI API does") from None


def converse(
    client: httpx.Client, console: Console, messages: list[dict[str, str]], fields: dict[str, Any]
) -> None:
    """Ask and answer until the user has had enough; `messages` is the history, and grows."""
    while True:
        question = read_question(console)
        if question is None:
            return
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            turn = ask(client, console, {**fields, "messages": messages})
        except ChatFailed as error:
            # The question goes too: a history that the server refuses once would be refused for ever.
            messages.pop()
            console.print(f"error: {error}", style="red", markup=False)
            continue
        if turn.text:
            messages.append({"role": "assistant", "content": turn.text})
        else:
            messages.pop()  # two questions in a row are no conversation that a template knows
        console.print(turn.summary(), style="dim", markup=False)


def read_question(console: Console) -> str | None:
    """What the user types; None at the end of input or for /quit."""
    try:
        question = console.input("[bold]> [/bold]") if sys.stdin.isatty() else input()
    except EOFError:
        if sys.stdin.isatty():
            console.print()
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"the input is not {error.encoding} text") from None
    question = question.strip()
    return None if question in ("/quit", "/exit") else question


def ask(client: httpx.Client, console: Console, fields: dict[str, Any]) -> Turn:
    """Send the conversation and print the answer as it comes; Ctrl-C ends it early. Raises ChatFailed."""
    import httpx

    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    turn, asked = Turn(), time.monotonic()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ChatFailed(problem_of(reply.status_code, reply.text))
            for text in texts_of(reply.iter_lines(), turn):
                turn.last_s = time.monotonic() - asked
                turn.first_s = turn.first_s or turn.last_s
                console.print(_CONTROL.sub("", text), end="", markup=False)
    except KeyboardInterrupt:
        turn.finish = STOPPED  # leaving the `with` above has closed the connection, and so ended the work
    except httpx.HTTPError as error:
        raise ChatFailed(f"the connection broke: {_one_line(error)}") from None
    finally:
        if turn.text:
            console.print()
    return turn


def texts_of(lines: Iterable[str], turn: Turn) -> Iterator[str]:
    """The pieces of text in a stream of events; fills `turn` on the way.

    Raises ChatFailed when the stream carries an error or breaks off.
    """
    try:
        for chunk in chunks(lines):
            turn.usage = chunk.get("usage") or turn.usage
            turn.finish = finish_reason(chunk) or turn.finish
            for text in texts(chunk):
                turn.text += text
                yield text
    except BrokenStream as error:
        raise ChatFailed(str(error)) from None


def problem_of(status: int, text: str) -> str:
    """One line from an answer that is not a success: OpenAI's message if there is one."""
    message = error_message(text) or text[:200] or "no reason given"
    return f"{_CONTROL.sub(' ', ' '.join(message.split()))} (HTTP {status})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
