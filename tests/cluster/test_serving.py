"""A running cluster as its clients see it: the openai package unchanged, right text, right counts."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch

from mooncake_lite import LLM, SamplingParams
from mooncake_lite.cli import main
from mooncake_lite.gateway.settings import Limits
from mooncake_lite.launch.serve_child import Cluster
from tests.cluster import machine, reference
from tests.cluster.conftest import SMALL
from tests.mooncake_lite.workloads.made import made_trace, write
from tests.patience import patient, wait_until
from tests.test_examples import run

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(serving: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="none", max_retries=0, timeout=120)


def metrics(cluster: Cluster) -> dict[str, float]:
    """Every sample of /metrics, by name and labels as written."""
    found = {}
    for line in machine.scraped(cluster.base_url).splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def total(values: dict[str, float], pattern: str) -> float:
    """Sum over all samples whose name and labels match."""
    return sum(value for name, value in values.items() if re.search(pattern, name))


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        temperature=0,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_greedy_answers_equal_those_of_one_process_cold_and_from_dram(
    client: openai.OpenAI, model_folder: Path
) -> None:
    """20 prompts x 32 tokens, all at once; the second round reuses every full block."""

    def ask(prompt: list[int]) -> tuple[str, int]:
        answer = client.completions.create(model="default", prompt=prompt, max_tokens=32, temperature=0)
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    prompts = reference.prompts(model_folder)
    expected = reference.greedy_texts(model_folder, prompts)
    with ThreadPoolExecutor(20) as pool:
        cold = list(pool.map(ask, prompts))
        from_dram = list(pool.map(ask, prompts))
    assert [text for text, _ in cold] == expected
    assert [text for text, _ in from_dram] == expected
    assert [cached for _, cached in from_dram] == [len(prompt) // 64 * 64 for prompt in prompts]


def test_the_library_sends_more_requests_than_may_wait_and_gets_every_answer(
    serving: Cluster, model_folder: Path
) -> None:
    prompts = reference.prompts(model_folder)
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs = LLM(cluster=serving.base_url).generate(prompts * 3, params)
    assert [each.outputs[0].text for each in outputs] == 3 * reference.greedy_texts(model_folder, prompts, 8)
    assert [each.num_prompt_tokens for each in outputs] == 3 * [len(prompt) for prompt in prompts]


def test_the_example_about_reuse_finds_its_document_in_the_pool(serving: Cluster) -> None:
    first, second, third = run("reuse.py", serving.base_url)
    assert first.startswith("0 of ")
    assert int(second.split()[0]) == int(third.split()[0]) // 64 * 64 > 0


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model="default", prompt="Once upon a time", max_tokens=12, temperature=1.0, top_p=0.95, seed=seed
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(5) as pool:
        samples = list(pool.map(sample, [3, 3, 0, 1, 2]))
    assert samples[0] == samples[1]
    assert len(set(samples)) > 1


def test_logprobs_and_penalties_are_those_of_transformers_on_the_answer(
    client: openai.OpenAI, model_folder: Path
) -> None:
    """The first token comes from the prefill rank and the others from the decode rank."""
    prompt = reference.prompts(model_folder)[3]
    answer = client.completions.create(
        model="default", prompt=prompt, max_tokens=8, temperature=0, logprobs=3,
        frequency_penalty=1.5, extra_body={"repetition_penalty": 1.3, "ignore_eos": True},
    ).choices[0]  # fmt: skip
    assert answer.logprobs is not None
    tokenizer = reference.tokenizer(model_folder)
    oracle = reference.oracle(model_folder)
    ids = list(prompt)
    for text, logprob, best in zip(
        answer.logprobs.tokens, answer.logprobs.token_logprobs, answer.logprobs.top_logprobs, strict=True
    ):
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0, -1]
        expected = logits.log_softmax(0)
        said = torch.tensor(sorted(set(ids)))
        logits[said] = torch.where(logits[said] > 0, logits[said] / 1.3, logits[said] * 1.3)
        for token in ids[len(prompt) :]:
            logits[token] -= 1.5
        ids.append(int(logits.argmax()))
        assert text == tokenizer.decode([ids[-1]])
        assert logprob == pytest.approx(float(expected[ids[-1]]), abs=1e-3)
        top = sorted(best.values(), reverse=True)[:3]
        assert top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-3)
    assert len(ids) == len(prompt) + 8


def test_an_echo_of_two_prompts_has_the_logprobs_of_transformers_and_reuses_nothing(
    client: openai.OpenAI, model_folder: Path
) -> None:
    """The longer prompt is computed in two chunks. The same prompts come twice."""
    prompts = [reference.prompts(model_folder)[9] * 3, reference.prompts(model_folder)[2]]
    assert len(prompts[0]) > 256
    for _ in range(2):
        answer = client.completions.create(
            model="default", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True
        )
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    tokenizer = reference.tokenizer(model_folder)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        expected = reference.logprobs(model_folder, prompt)
        found = choice.logprobs
        assert choice.text.startswith(tokenizer.decode(prompt))
        assert found.tokens[:-1] == [tokenizer.decode([token], skip_special_tokens=False) for token in prompt]
        assert found.token_logprobs[0] is None
        chosen = [float(row[token]) for row, token in zip(expected, prompt[1:])]
        assert found.token_logprobs[1:-1] == pytest.approx(chosen, abs=1e-3)
        best = [max(one.values()) for one in found.top_logprobs[1:-1]]
        assert best == pytest.approx(expected.max(1).values.tolist(), abs=1e-3)


def test_a_follow_up_turn_reuses_the_answers_own_blocks(client: openai.OpenAI, model_folder: Path) -> None:
    """Decode gives its full blocks back: the prompt ends, and the answer fills, the second block."""
    prompt = reference.prompts(model_folder)[5]
    (answer,) = reference.greedy_ids(model_folder, [prompt])
    assert len(prompt) // 64 == 1
    assert len([*prompt, *answer]) // 64 == 2

    def ask(prompt: list[int], max_tokens: int) -> tuple[str, int | None]:
        found = client.completions.create(
            model="default", prompt=prompt, max_tokens=max_tokens, temperature=0,
            extra_body={"cache_salt": "follow-up turn"},
        )  # fmt: skip
        return found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens

    text = reference.tokenizer(model_folder).decode(answer)
    assert ask(prompt, len(answer)) == (text, 0)
    assert ask([*prompt, *answer], 1)[1] == 128


def test_a_reset_of_the_prefix_cache_leaves_nothing_to_reuse(
    serving: Cluster, client: openai.OpenAI, model_folder: Path
) -> None:
    """Neither in DRAM nor on SSD, although the last blocks of an answer are written after its end.

    A request for no token fills the cache.
    """
    prompt = reference.prompts(model_folder)[9]
    blocks = len(prompt) // 64

    def ask(max_tokens: int) -> tuple[str, int, int | None]:
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=max_tokens, extra_body={"cache_salt": "reset"}
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens
        return answer.choices[0].finish_reason, answer.usage.completion_tokens, cached

    for _ in range(2):
        assert ask(0) == ("length", 0, 0)
        reply = httpx.post(f"{serving.base_url}/reset_prefix_cache", timeout=60).json()
        assert reply["removed_blocks"] >= blocks
        assert reply["kept_blocks"] == 0
    assert ask(0) == ("length", 0, 0)
    assert wait_until(lambda: ask(0) == ("length", 0, 64 * blocks), patient(5.0))


def test_each_hint_is_answered_and_changes_no_token(
    serving: Cluster, client: openai.OpenAI, model_folder: Path
) -> None:
    """Alone, in a request, and about a session. There is one store, and no block is on SSD alone."""
    prompt = reference.prompts(model_folder)[9]
    blocks = len(prompt) // 64
    (expected,) = reference.greedy_texts(model_folder, [prompt])

    def ask(**more: object) -> tuple[str, list[tuple[str, str]], int | None]:
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=32, temperature=0,
            extra_body={"cache_salt": "hints", "session": "agent", **more},
        )  # fmt: skip
        told = [(hint["verb"], hint["outcome"]) for hint in getattr(answer, "kv_hints", [])]
        return answer.choices[0].text, told, answer.usage.prompt_tokens_details.cached_tokens

    llm = LLM(cluster=serving.base_url)
    assert "session 'agent' has sent no prompt" in llm.retain(session="agent", seconds=9).reason
    assert ask() == (expected, [], 0)
    before = total(metrics(serving), r"^mooncake_lite_hints_total")
    told = [
        llm.retain(session="agent", seconds=60),
        llm.pin(session="agent", seconds=30),
        llm.prefetch(session="agent", seconds=1),
        llm.share(session="agent"),
        llm.pin(session="agent", seconds=0),
    ]
    assert [(hint.outcome, hint.affected, hint.lasts_s) for hint in told] == [
        *(("accepted", blocks, 60), ("accepted", blocks, 30), ("accepted", 0, 0)),
        *(("rejected", 0, 0), ("accepted", blocks, 0)),
    ]
    assert ask(kv_hints={"retain": 20, "pin": 5}) == (
        expected,
        [("pin", "accepted"), ("retain", "accepted")],
        64 * blocks,
    )
    assert ask(kv_hints={"demote": True})[:2] == (expected, [("demote", "accepted")])
    assert llm.demote(prompt, session="agent").affected == 0  # these blocks have another salt
    assert ask() == (expected, [], 64 * blocks)
    assert wait_until(
        lambda: total(metrics(serving), r"^mooncake_lite_hints_total") == before + 9, patient(5.0)
    )


def test_no_kv_byte_travels_over_zeromq(serving: Cluster, client: openai.OpenAI, model_folder: Path) -> None:
    """A cold prompt moves its KV twice over MPI; all ZeroMQ channels together carry under 2 % of it.

    Asking for the metrics takes about 90 kB each time, of what is counted here too.
    """

    def counts() -> tuple[float, float]:
        values = metrics(serving)
        zeromq = total(values, r"^mooncake_lite_(control|gateway)_.*bytes")
        return zeromq, total(values, r"^mooncake_lite_mpi_bytes_")

    machine.settled(lambda: counts()[1])
    zeromq_before, mpi_before = counts()
    prompt = reference.prompts(model_folder)[19] * 2
    client.completions.create(
        model="default", prompt=prompt, max_tokens=8, extra_body={"cache_salt": "only this test"}
    )
    kv_bytes = 46_080 * len(prompt)
    # Each rank reports its own bytes, one after the other.
    wait_until(lambda: counts()[1] - mpi_before >= 2 * kv_bytes, patient(5.0))
    zeromq, mpi = (after - before for after, before in zip(counts(), (zeromq_before, mpi_before)))
    assert mpi >= 2 * kv_bytes
    assert 0 < zeromq < 0.02 * kv_bytes


def test_a_replayed_trace_has_the_tokens_and_the_shared_prefixes_that_it_says(
    serving: Cluster, tmp_path: Path
) -> None:
    """A block of the pool has 64 tokens, as one of the trace has when its lengths are divided by 8."""
    trace, result = write(tmp_path / "trace.jsonl", made_trace(12)), tmp_path / "result.json"
    flags = ["--divide-lengths", "8", "--speed", "2", "--json", str(result)]
    assert main(["replay", str(trace), "--url", serving.base_url, *flags]) == 0
    found = json.loads(result.read_text())
    assert (found["requests"], found["completed"], found["output_tokens"]) == (12, 12, 12)
    assert found["prompt_tokens"]["counted"] == found["prompt_tokens"]["wanted"] > 1000
    assert found["hit_rate"]["all"] > 0.1
    assert found["config"]["ignore_eos"] is True


def test_a_client_that_leaves_frees_its_pages_within_a_second(serving: Cluster) -> None:
    def pages() -> float:
        return total(metrics(serving), r"kv_cache_pages_used")

    body = {"prompt": "Once upon a time", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{serving.base_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        assert wait_until(lambda: pages() > 0, 10.0)
    assert wait_until(lambda: pages() == 0, patient(1.0) + Limits().metrics_kept_s)


def test_a_tier_folder_in_use_is_refused_in_one_line_and_its_cluster_goes_on(
    serving: Cluster, serving_tier: Path, free_port: int
) -> None:
    command = [*machine.SERVE, *SMALL, "--ssd-dir", str(serving_tier), "--port", str(free_port)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert second.returncode == 2
    assert "in use" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    assert machine.healthy(serving.base_url)


def test_the_ranks_fit_in_four_gib(serving: Cluster) -> None:
    assert machine.resident_bytes(machine.family(serving.pid)) < 4 * 2**30
