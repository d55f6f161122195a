"""lm-eval, a program that scores models, against a running cluster: its requests, and the program itself.

`make test` replays the requests in lm_eval_requests.json. `make soak` runs lm-eval, if it is installed
(pip install -e '.[lm-eval]'), and compares what it sends with this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_lite.launch.serve_child import Cluster
from tests.cluster import lm_eval_tasks, reference

pytestmark = pytest.mark.cluster

REQUESTS = Path(__file__).with_name("lm_eval_requests.json")
BATCH = 4
LIMIT_S = 600.0


def test_the_requests_of_lm_eval_get_answers_that_it_reads_as_it_should(
    serving: Cluster, model_folder: Path
) -> None:
    bodies = json.loads(REQUESTS.read_text())
    assert {bool(body.get("echo")) for body in bodies} == {False, True}
    for body in bodies:
        assert isinstance(body["prompt"][0], list)
        reply = httpx.post(f"{serving.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(body["prompt"])))
        if not body.get("echo"):
            assert [choice["text"] for choice in choices] == texts(model_folder, body)
            continue
        for prompt, choice in zip(body["prompt"], choices):
            check_scores(model_folder, prompt, choice["logprobs"])


def check_scores(folder: Path, prompt: list[int], found: dict[str, Any]) -> None:
    """lm-eval leaves the last entry out: it is that of the one token that it lets the model answer."""
    expected = reference.logprobs(folder, prompt)
    values, best = found["token_logprobs"], found["top_logprobs"]
    assert len(values) == len(best) == len(prompt) + 1
    assert (values[0], best[0]) == (None, None)
    for value, top, token, row in zip(values[1:-1], best[1:-1], prompt[1:], expected, strict=True):
        assert value == pytest.approx(float(row[token]), abs=1e-3)
        first, second = row.topk(2).values.tolist()
        if first - second > 2e-3:
            assert (value == max(top.values())) == (int(row.argmax()) == token)


def texts(folder: Path, body: dict[str, Any]) -> list[str]:
    """The answers to a request, up to their first stop strings."""
    whole = reference.greedy_texts(folder, body["prompt"], body["max_tokens"])
    ends = [[text.index(stop) for stop in body["stop"] if stop in text] for text in whole]
    return [text[: min(cuts, default=None)] for text, cuts in zip(whole, ends)]


def test_lm_eval_scores_its_tasks_and_makes_these_requests(
    serving: Cluster, model_folder: Path, tmp_path: Path, soak: int
) -> None:
    if soak == 1:
        pytest.skip("takes a minute; run by make soak")
    program = shutil.which("lm_eval") or shutil.which("lm_eval", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("lm_eval is not installed: pip install -e '.[lm-eval]'")
    tasks = lm_eval_tasks.write_tasks(tmp_path)
    with lm_eval_tasks.recorder(serving.base_url) as (url, bodies):
        arguments = f"model=default,base_url={url}/v1/completions,tokenizer={model_folder},max_retries=1"
        command = [
            *(program, "run", "--model", "local-completions", "--model_args"),
            f"{arguments},tokenizer_backend=huggingface",
            *("--tasks", ",".join(tasks), "--include_path", str(tmp_path)),
            *("--batch_size", str(BATCH), "--output_path", str(tmp_path / "results")),
        ]
        offline = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(
            command, env=os.environ | offline, capture_output=True, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["ml_choices"]["acc,none"] == 1.0
    assert set(results) == set(tasks)
    made = tmp_path / "requests.json"
    made.write_text(as_text(bodies))
    assert made.read_text() == REQUESTS.read_text(), f"lm-eval makes other requests: {made}"


def as_text(bodies: list[dict[str, Any]]) -> str:
    """One body in a line."""
    return "[\n" + ",\n".join(json.dumps(body) for body in bodies) + "\n]\n"
