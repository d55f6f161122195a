"""`mooncake-lite chat`: a conversation with a running server, in the terminal.

Mounted by `mooncake_lite.cli`. Speaks the OpenAI API over HTTP and knows nothing of what lies behind the
port, so it talks to any such server. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mooncake_lite.config.options import API_KEY, URL, NumberRange
from mooncake_lite.errors import UserError
from mooncake_lite.tools.client import (
    CONTROL,
    AnswerFailed,
    StreamedAnswer,
    TooLong,
    one_line,
    open_client,
    problem_of,
    stream_answer,
)
from mooncake_lite.tools.repetition import repeated

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

CONNECT_LIMIT_S = 5.0
READ_LIMIT_S = 600.0
"""Longest silence inside an answer: as long as the server itself waits for a token."""

TEMPERATURE = 0.2
"""Used where neither the user nor the model names one. The API's own default is 1, at which a small model
answers with unrelated words; 0.2 is what the default model's authors use in their examples."""

MAX_TOKENS = 512
"""Longest answer where the user names none, or a quarter of the context if that is less. A small model may
not find an end: a whole context of repetitions takes minutes."""

STOPPED, LOOPED = "stopped", "stopped, because it repeats itself"
"""The finish of an answer that the user has interrupted, and of one that this command has."""


class _Looped(Exception):
    """An answer repeats itself."""


@click.command("chat")
@URL
@click.option("--model", default=None, help="Model id; left out, the server's own.")
@click.option("--system", default=None, help="A system message before everything.")
@click.option(
    "--temperature",
    type=NumberRange(0, 2),
    default=None,
    help=f"0 is greedy. Left out, the model's own, or {TEMPERATURE} where it names none.",
)
@click.option("--top-p", type=NumberRange(0, 1, min_open=True), default=None)
@click.option("--max-tokens", type=click.IntRange(min=1), help=f"Longest answer, {MAX_TOKENS} by default.")
@click.option("--seed", type=int, default=None)
@API_KEY
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

    Ctrl-C stops an answer. A second Ctrl-C, Ctrl-D or /quit ends the conversation. An answer that repeats
    itself is stopped. The oldest questions are left out when the conversation is longer than the context.
    """
    import httpx
    from rich.console import Console

    given = {
        "model": model, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed,
    }  # fmt: skip
    fields = {name: value for name, value in given.items() if value is not None}
    limits = httpx.Timeout(CONNECT_LIMIT_S, read=READ_LIMIT_S)
    console = Console(highlight=False, soft_wrap=True)
    with open_client(httpx.Client, url, api_key, limits) as client:
        card = model_card(client, url, model)
        if temperature is None and "temperature" not in (card.get("default_sampling") or {}):
            fields["temperature"] = TEMPERATURE
        messages = [{"role": "system", "content": system}] if system else []
        context = card.get("max_model_len")
        quarter = context // 4 if isinstance(context, int) else MAX_TOKENS
        fields.setdefault("max_tokens", max(1, min(MAX_TOKENS, quarter)))
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
        raise UserError(f"no server answers at {url} ({one_line(error)}); {where_else()}") from None
    if reply.status_code != 200:
        raise UserError(f"the server at {url} refuses: {problem_of(reply)}")
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
            answer = ask_what_fits(client, console, messages, fields)
        except AnswerFailed as error:
            # The question goes too: a history that the server refuses once would be refused for ever.
            messages.pop()
            console.print(f"error: {error}", style="red", markup=False)
            continue
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()  # two questions in a row are no conversation that a template knows
        console.print(summary(answer), style="dim", markup=False)


def ask_what_fits(
    client: httpx.Client, console: Console, messages: list[dict[str, str]], fields: dict[str, Any]
) -> StreamedAnswer:
    """Ask without the oldest questions that do not fit into the context, and remove them from `messages`.

    An answer may have what the last question leaves if that is less than max_tokens. Raises AnswerFailed.
    """
    first = 1 if messages[0]["role"] == "system" else 0
    for left_out in range(0, len(messages) - first, 2):
        kept = messages[:first] + messages[first + left_out :]
        try:
            answer = ask(client, console, {**fields, "messages": kept})
        except TooLong:
            continue
        if left_out:
            console.print(f"questions left out to fit into the context: {left_out // 2}", style="dim")
        messages[:] = kept
        return answer
    unlimited = {name: value for name, value in fields.items() if name != "max_tokens"}
    return ask(client, console, {**unlimited, "messages": messages[:first] + messages[-1:]})


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


def ask(client: httpx.Client, console: Console, fields: dict[str, Any]) -> StreamedAnswer:
    """Send the conversation and print the answer as it comes, until its end, Ctrl-C or a loop.

    Raises AnswerFailed.
    """
    answer = StreamedAnswer()

    def show(text: str) -> None:
        console.print(CONTROL.sub("", text), end="", markup=False)
        if length := repeated(answer.text):
            answer.text = answer.text[:-length]  # a history with a loop leads to the next one
            raise _Looped

    try:
        stream_answer(client, fields, answer, show)
    except KeyboardInterrupt:
        answer.finish = STOPPED  # the connection is closed, and so the work has ended
    except _Looped:
        answer.finish = LOOPED
    finally:
        if answer.text:
            console.print()
    return answer


def summary(answer: StreamedAnswer) -> str:
    """The line under an answer: tokens of the prompt, how many were cached, and the speed."""
    if answer.finish in (STOPPED, LOOPED):
        return answer.finish
    cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    parts = [
        f"{answer.prompt_tokens} prompt tokens, {cached} cached",
        f"first text after {answer.ttft_s:.2f} s",
    ]
    if answer.tpot_s > 0:
        parts.append(f"{1 / answer.tpot_s:.1f} tok/s")
    if answer.finish == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)
