"""Requests to a cluster, many at once or long ones without an end; and what emulated ranks answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests import emulation
from tests.patience import patient

ANSWER_TOKENS = 32
"""Of each answer."""


def ask_all(url: str, prompts: list[list[int]], at_once: int = 20) -> tuple[list[str], list[int]]:
    """Greedy answers and cached tokens, by prompt."""

    def ask(prompt: list[int]) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        answer = response.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(ask, prompts))
    return [text for text, _ in found], [cached for _, cached in found]


def emulated_texts(prompts: list[list[int]]) -> list[str]:
    """The answers of emulated ranks, up to a token that ends them; special tokens have no text."""
    found = []
    for prompt in prompts:
        tokens = [*emulation.answer(prompt, ANSWER_TOKENS), emulation.EOS]
        said = tokens[: tokens.index(emulation.EOS)]
        found.append("".join(f"<{token}>" for token in said if token != 1))
    return found


def full_blocks(prompts: list[list[int]]) -> list[int]:
    """The tokens of each prompt that lie in full blocks."""
    return [len(prompt) // 64 * 64 for prompt in prompts]


class Busy:
    """Keeps an answer of max_tokens running on a cluster, one after the other, until one fails.

    last   the last line that has come
    """

    def __init__(self, url: str, max_tokens: int) -> None:
        self._url = f"{url}/v1/completions"
        self._max_tokens = max_tokens
        self._first = threading.Event()
        self.last = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._first.wait(60)

    def last_line(self) -> str:
        """The last line of the last answer, once the cluster takes no request any more."""
        self._thread.join(patient(10))
        assert not self._thread.is_alive(), "the client waits on"
        return self.last

    def _run(self) -> None:
        body = {"prompt": [5] * 70, "max_tokens": self._max_tokens, "stream": True, "ignore_eos": True}
        try:
            while '"error"' not in self.last:
                with httpx.stream("POST", self._url, json=body, timeout=60) as response:
                    for line in response.iter_lines():
                        self.last = line or self.last
                        self._first.set()
        except httpx.HTTPError:
            self._first.set()
