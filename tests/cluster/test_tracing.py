"""A run with --trace: what the file tells of a cluster and of its requests."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import httpx

from mooncake_lite.launch.serve_child import Cluster
from tests import emulation
from tests.cluster import asking, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.test_modes import replayed, same_answers
from tests.cluster.test_recording import kinds
from tests.mooncake_lite.tracing.reading import Slice, Trace, read

PROCESSES = ["rank 0 conductor", "rank 1 prefill", "rank 2 decode", "rank 3 store", "gateway-0"]
ANSWER_TOKENS = 6


def ask(url: str, prompt: list[int]) -> str:
    """Have a prompt answered, and return the id of the request."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def test_a_trace_tells_what_each_rank_did_and_follows_each_request_through_them_and_answers_are_swapped(
    tmp_path: Path,
) -> None:
    """Two requests one after the other, and one whose answers lose their pages, and go on where they were.

    That is recorded, and replays.
    """
    prompt = tiny.prompts(8)[-1]
    other = (tiny.prompts(1)[0] * 5)[:300]
    flags = [*emulation.flags(tmp_path / "model"), *tiny.SIZES, "--ssd-dir", str(tmp_path / "tier")]
    flags += ["--prefix-sharing", "off", "--trace", str(tmp_path / "run.json")]
    flags += ["--preemption", "swap", "--record", str(tmp_path / "record")]
    flags += ["--kv-cache-bytes", str(tiny.CONTEXT * tiny.TOKEN_NBYTES)]  # 6 answers need more pages
    began_s = time.monotonic()
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        requests = [ask(cluster.base_url, prompt) for _ in range(2)]
        assert same_answers(cluster.base_url, other, 6) == asking.emulated_texts([other]) * 6
    ended_s = time.monotonic()
    assert replayed(tmp_path / "record") >= 3
    found = kinds(tmp_path / "record")
    assert found["Swapped"] > 0
    assert found["SwapWanted"] > 0

    trace = read(tmp_path / "run.json")
    assert trace.processes == PROCESSES
    assert trace.labels == {}, "nothing was dropped"
    assert all(began_s < one.began_s <= one.ended_s < ended_s for one in trace.slices)
    for process in PROCESSES[:4]:
        steps = sorted(trace.of(process, "steps"), key=lambda one: one.began_s)
        assert steps
        assert all(a.ended_s <= b.began_s + 1e-6 for a, b in itertools.pairwise(steps)), (
            f"{process} does two at once"
        )
    for request in requests:
        check_request(trace, request, len(prompt))
    cold, hit = (bytes_of(trace, "rank 1 prefill", "load KV", request) for request in requests)
    assert (cold, hit) == (0, len(prompt) // 64 * 64 * tiny.TOKEN_NBYTES)
    assert {one.name for one in trace.of("rank 3 store", "SSD")} >= {"write block", "seal file"}
    assert {one.name for one in trace.of("rank 3 store", "orders")} == {"save to SSD"}


def check_request(trace: Trace, request: str, num_tokens: int) -> None:
    """Each stage of a request lies in the life that the gateway saw, and its KV moves from rank to rank."""
    (life,) = [one for one in trace.of("gateway-0") if one.name == request]
    spans = [one for one in trace.slices if request in one.name and one is not life]
    assert [span.process for span in sorted(spans, key=lambda one: one.began_s)] == PROCESSES[:3]
    inner = [one for span in spans for one in trace.slices if inside(one, span)]
    assert {one.name for one in inner} >= {
        "prefilling",
        "loading",
        "decoding",
        "load",
        "compute",
        "store",
        "decode",
    }
    for span in spans:
        assert life.began_s <= span.began_s, "work for a request that has not come"
    arrows = [arrow for found in trace.arrows.values() for arrow in found if near(arrow, life)]
    assert [arrow["ph"] for arrow in sorted(arrows, key=lambda arrow: arrow["ts"])][:4] == [
        "s",
        "t",
        "t",
        "t",
    ]
    tail_and_blocks = num_tokens * tiny.TOKEN_NBYTES
    assert bytes_of(trace, "rank 2 decode", "load KV", request) >= tail_and_blocks
    steps = [one for one in trace.of("rank 2 decode", "steps") if request in one.args.get("requests", [])]
    assert sum(one.args["decode tokens"] for one in steps) == ANSWER_TOKENS - 1, "prefill draws the first one"
    assert life.args["answer tokens"] == ANSWER_TOKENS


def bytes_of(trace: Trace, process: str, name: str, request: str) -> int:
    """Bytes of a rank's transfers for a request."""
    found = [one for one in trace.of(process, "transfers") if one.name == name]
    return sum(one.args["bytes"] for one in found if one.args["request"] == request)


def inside(one: Slice, span: Slice) -> bool:
    """Whether a slice is a stage of a span."""
    same = one.process == span.process and one.lane == span.lane and one.depth > span.depth
    return same and span.began_s <= one.began_s and one.ended_s <= span.ended_s


def near(arrow: dict[str, float], life: Slice) -> bool:
    """Whether an arrow is of the time of a request; they come one after the other here."""
    return life.began_s <= arrow["ts"] / 1e6 <= life.ended_s
