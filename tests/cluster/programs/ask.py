"""Run inside a node: wait for a server, ask it every prompt of standard input, tell what moved.

ask.py URL MAX_TOKENS MOVED < [[token ids], ...]; prints JSON [[answers], bytes between nodes], once more than
MOVED have been reported, or ten seconds after the last answer.
"""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

url, max_tokens, expected = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prompts = json.load(sys.stdin)
deadline = time.monotonic() + 120
with httpx.Client(timeout=60, trust_env=False) as client:
    while True:
        try:
            if client.get(f"{url}/health").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            sys.exit("the server did not get ready")
        time.sleep(0.2)

    def ask(prompt: list[int]) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return client.post(f"{url}/v1/completions", json=body)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    if refused := [answer.text for answer in answers if answer.status_code != 200]:
        sys.exit(refused[0])
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    moved, deadline = 0.0, time.monotonic() + 10
    while moved <= expected and time.monotonic() < deadline:  # ranks report a few times a second
        lines = client.get(f"{url}/metrics").text.splitlines()
        pattern = r".*mpi_bytes_.*(two_sided|sockets)"
        moved = sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))
        time.sleep(0.1)
print(json.dumps([texts, moved]))
