"""Asking a cluster many prompts at once, as the tests of shapes, families and users do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.cluster.reference import ANSWER_TOKENS


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
