"""TPOT through a cluster of four ranks, beside the same in one process.

Run by `bench.engine`. The cluster and its clients share the cores with nothing else: the other sides wait.
A decode step of the cluster passes a rank, the gateway and HTTP.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_sides import Prompts, in_turns, random_prompts
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.demo.cluster import Cluster
from mooncake_lite.errors import ClusterError

START_LIMIT_S = 180.0
READ_LIMIT_S = 300.0


def run(
    ours: Ours, folder: Path, threads: int, streams: Sequence[int], shape: tuple[int, int], runs: int
) -> list[Row]:
    """Measure some numbers of streams at once. Raises ClusterError.

    shape   tokens of a prompt, and of its answer
    """
    flags = [str(folder), *("--prefill", "1", "--decode", "1", "--store", "1"), "--threads", str(threads)]
    flags += ["--max-num-seqs", str(max(streams))]
    temporary = tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-")
    with temporary as place, Cluster(flags, Path(place) / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        stream_times(cluster.port, [[1] * 32], 2)
        return [_row(ours, cluster.port, count, *shape, runs) for count in streams]


def _row(ours: Ours, port: int, count: int, tokens: int, new: int, runs: int) -> Row:
    prompts = random_prompts(count, tokens, ours.model.config.vocab_size)
    stream_times(port, prompts, 2)  # from now on the pool has the prompts
    through, alone = in_turns(
        runs,
        lambda: 1e3 * tpot_s(stream_times(port, prompts, new), new),
        lambda: 1e3 * tpot_s(ours.token_times(prompts, new), new),
    )
    name = f"TPOT through 1+1+1+1 ranks, {count} stream{'s' * (count > 1)} of {tokens} + {new} tokens"
    limit = Other("the same in one process", statistics.median(alone))
    return Row(name, "ms", statistics.median(through), None, limit, runs)


def tpot_s(times: list[list[float]], new: int) -> float:
    """Return the mean gap between a sequence's tokens while all sequences are decoded.

    times   when each piece of each answer came; a piece is a token, or a few where a character needs several
    new     tokens of each answer

    Only the time counts from the last sequence's first piece to the first end: before, prompts are computed
    as well, by the same process or by another one on the same cores. Where a sequence ends before another one
    begins, all the time of each counts.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if begin >= end:
        return statistics.fmean((each[-1] - each[0]) / (new - 1) for each in times)
    pieces = [sum(begin < moment <= end for moment in each) * (new - 1) / (len(each) - 1) for each in times]
    return (end - begin) * len(times) / sum(pieces)


def stream_times(port: int, prompts: Prompts, new: int) -> list[list[float]]:
    """Ask for all answers at once, each over a connection of its own; return when their pieces came.

    Raises ClusterError when one breaks off, or ends early.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(_stream, port, prompt, new) for prompt in prompts]
    try:
        return [each.result() for each in asked]
    except (OSError, http.client.HTTPException, ClusterError) as error:
        raise ClusterError(f"an answer of the cluster broke off: {error}") from None


def _stream(port: int, prompt: list[int], new: int) -> list[float]:
    """Return when each piece of one greedy answer came, on this process's clock.

    The events are not parsed beyond what tells a piece from the end: the client's work would take a share of
    the cores.
    """
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_LIMIT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ClusterError(f"HTTP {response.status}: {response.read()[:200]!r}")
        times, ended = [], False
        for line in response:
            if line.startswith(b"data: {"):
                if b'"error"' in line[:12]:
                    raise ClusterError(line[6:200].decode(errors="replace"))
                times.append(time.perf_counter())
            ended = ended or line.startswith(b"data: [DONE]")
        if not ended or len(times) < 2:
            raise ClusterError(f"{len(times)} pieces came, and the end {'came' if ended else 'did not'}")
        return times
    finally:
        connection.close()
