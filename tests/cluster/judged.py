"""Requests of any kind to a cluster from several clients, and what each answer must be like.

Used with `drawn`, which makes requests, and with plain ones, whose answers are known.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.cluster import machine
from tests.cluster.drawn import MAX_TOKENS, Drawn
from tests.patience import patient

CODES_OF_500 = ("logits_not_finite", "engine_error", "ranks_lost")
"""Why a request may fail that was accepted. A client can tell its own fault from the cluster's by them."""

AT_ONCE = 8
LEAVES_S = 0.02
"""How long a client waits for a whole answer that it gives up."""

Plain = list[tuple[str, list[str]]]
"""Text and tokens of each plain answer."""


class Wrong(AssertionError):
    """An answer is not what it must be; the message has what repeats it."""


def client(base_url: str) -> httpx.Client:
    """A client for many threads."""
    return httpx.Client(base_url=base_url, timeout=patient(60), limits=machine.KEEP_ALL, trust_env=False)


def ask(http: httpx.Client, request: Drawn) -> tuple[int, Any]:
    """(status, the answer or a stream's events). (0, None): the client has left. Raises Wrong."""
    sent = {"content": request.body.encode(), "headers": {"Content-Type": "application/json"}}
    try:
        if not request.stream or not request.lines:
            limits: Any = {"timeout": LEAVES_S} if request.lines else {}
            response = http.post(request.path, **sent, **limits)
            return response.status_code, _events(response) if _is_stream(response) else response.json()
        with http.stream("POST", request.path, **sent) as response:  # type: ignore[arg-type]
            if not _is_stream(response):
                response.read()
                return response.status_code, response.json()
            list(itertools.islice(response.iter_lines(), request.lines))
            return 0, None
    except httpx.TimeoutException:
        if request.lines:
            return 0, None
        raise Wrong("no answer came") from None
    except (httpx.HTTPError, ValueError) as error:
        raise Wrong(f"the answer cannot be read: {error!r}") from None


def _is_stream(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def _events(response: httpx.Response) -> list[Any]:
    """The events of a stream; [DONE] as a text. Texts may have separators of lines that are no newlines."""
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def error_of(answer: Any) -> dict[str, Any] | None:
    """The error object that an answer is, or with which a stream ends."""
    last = answer[-1] if isinstance(answer, list) and answer else answer
    return last.get("error") if isinstance(last, dict) else None


def judged(http: httpx.Client, request: Drawn) -> str:
    """What an answer was: "left", "400", "answered", or the code of a failure. Raises Wrong for others."""
    return _judged(request, *ask(http, request))


def _judged(request: Drawn, status: int, answer: Any) -> str:
    error = error_of(answer)
    if status == 0:
        return "left"
    if status == 400 and error and (error["param"] or len(error["message"]) > 10):
        return "400"
    if status in (200, 500) and error:
        if error["code"] not in CODES_OF_500 or (status == 200) is not isinstance(answer, list):
            raise Wrong(f"status {status} with {error}")
        return str(error["code"])
    if status != 200:
        raise Wrong(f"status {status} with {answer}")
    _check_whole(answer, request.choices)
    return "answered"


def _check_whole(answer: Any, choices: int) -> None:
    """Raises Wrong unless every choice of an answer has its end, and a stream has its own."""
    chunks = answer[:-1] if isinstance(answer, list) else [answer]
    if isinstance(answer, list) and answer[-1:] != ["[DONE]"]:
        raise Wrong(f"a stream ends with {answer[-1:]}")
    ends: dict[int, list[str]] = defaultdict(list)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ends[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    if sorted(ends) != list(range(choices)):
        raise Wrong(f"choices {sorted(ends)} of {choices}")
    if any(each not in (["stop"], ["length"]) for each in ends.values()):
        raise Wrong(f"choices end with {dict(ends)}")
    usage = chunks[-1].get("usage")
    if usage and not 0 <= usage["completion_tokens"] <= MAX_TOKENS * choices:
        raise Wrong(f"usage {usage}")


def ask_drawn(base_url: str, requests: Iterable[Drawn]) -> Counter[str]:
    """Ask all from AT_ONCE clients. Returns how many answers were what; see `judged`.

    Raises Wrong at the first answer that is not what it must be, with its request.
    """
    found: Counter[str] = Counter()
    wrong: list[str] = []
    with client(base_url) as http, ThreadPoolExecutor(AT_ONCE) as pool:

        def one(request: Drawn) -> None:
            if wrong:
                return
            try:
                found[judged(http, request)] += 1
            except Wrong as error:
                wrong.append(f"{error}\nafter {found.total()} others: POST {request.path}\n{request.body}")

        for _ in pool.map(one, requests):
            pass
    if wrong:
        raise Wrong("\n\n".join(wrong))
    return found


def plain_requests(
    salt: str, never: Iterable[int] = (), count: int = 8, temperatures: tuple[int, ...] = (0, 1)
) -> list[dict[str, Any]]:
    """Bodies of greedy and seeded requests in turns, of 20 to 130 tokens of ids that every model has.

    salt    reuse no KV of requests with another one
    never   ids that no answer has
    """
    bias = {str(token): -100 for token in never}
    how = {"max_tokens": 24, "ignore_eos": True, "logprobs": 0, "stream": True, "logit_bias": bias}
    return [
        {
            "prompt": [3 + (7 * i + k * k) % 180 for k in range(20 + 16 * i)],
            **how, "temperature": temperatures[i % len(temperatures)], "seed": i, "cache_salt": salt,
        }
        for i in range(count)
    ]  # fmt: skip


def plain_answers(http: httpx.Client, bodies: list[dict[str, Any]]) -> Plain:
    """The answers to plain requests, which are asked at once and must be whole."""

    def one(body: dict[str, Any]) -> tuple[str, list[str]]:
        request = Drawn("/v1/completions", json.dumps(body), stream=True)
        status, answer = ask(http, request)
        if _judged(request, status, answer) != "answered":
            raise Wrong(f"a plain request got {answer[-1]}")
        choices = [choice for chunk in answer[:-1] for choice in chunk["choices"]]
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        return "".join(choice["text"] for choice in choices), tokens

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def assert_sound(http: httpx.Client, log: Path) -> None:
    """Assert that every rank is there, and that none has told of an exception."""
    health = http.get("/health")
    assert health.status_code == 200, health.text
    assert health.json()["degraded"] == []
    text = log.read_text(errors="replace")
    assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
    assert "this is a bug" not in text, text
