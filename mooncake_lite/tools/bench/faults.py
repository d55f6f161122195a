"""Faults: ranks, conductors and gateways are killed under eight streams. How long do the streams pause?

Run by `bench.command`. All answers are compared with those of an undisturbed run. The ranks sleep for the
times of the shipped profile; one cluster computes with the model. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from mooncake_lite.config.progress import counted
from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.file import Profile
from mooncake_lite.tools.bench.cluster import model_folder, scaled_profile, started
from mooncake_lite.tools.bench.result import Other, Row
from mooncake_lite.tools.demo.document import document_text
from mooncake_lite.tools.streams import Prompt, Stream, play, process_of

STREAMS, PROMPT_TOKENS, PROMPT_CHARACTERS, NEW_TOKENS = 8, 300, 900, 128
COUNTS = {"prefill": 3, "decode": 4, "store": 3}
SIZES = ("--pool-bytes", "400MiB", "--max-model-len", "4096", "--max-num-seqs", "8")

ROUND = (
    "conductor", "decode", "prefill", "store", "decode", "prefill", "store", "suspended decode", "conductor",
    "gateway", "gateway",
)  # fmt: skip
"""What happens to each cluster, in this order. The last ranks of each role stay."""

HITS_S, SETTLES_S = 30.0, 10.0
"""The hit rate is measured so long before the death of a conductor, and so long from SETTLES_S after it."""

PREFIXES, PREFIX_TOKENS, CLIENTS = 16, 512, 4
"""Prompts of the hit rate share these prefixes."""

EARLY_S, LATER_S = 0.1, 0.2
"""A prefill rank is killed so long after the begin, others after half of all streams have a first token."""

DEAD_AFTER_S = 2
ANSWER_LIMIT_S = 20.0

NOT_PUBLISHED = "no other project publishes pauses of streams after the death of a process"


@dataclass(slots=True)
class Found:
    """What one kind of fault has led to. gaps_s, undisturbed_s: longest gap of each stream, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    undisturbed_s: list[float] = field(default_factory=list)
    wrong: int = 0
    faults: int = 0


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ConfigError, ModelError.

    folder   of the model; the default model where it is None
    """
    folder = model_folder(folder)
    clusters = 1 if quick else 10
    asleep: dict[str, Found] = {}
    awake: dict[str, Found] = {}
    emulated, profile = [str(folder), "--engine", "emulated"], scaled_profile(folder, 1.0)
    vocab_size, rows = load_config(folder).vocab_size, list[Row]()
    with counted("faults", len(ROUND) * (clusters + (not quick))) as told:
        for _ in range(clusters):
            _play_round(emulated, profile, random_prompts(vocab_size), asleep, told)
        if not quick:
            rows = [_hit_rates(emulated, profile, vocab_size)]
            _play_round([str(folder), "--batch-invariant"], None, text_prompts(), awake, told)
    return _rows("sleeping ranks", asleep) + rows + _rows("the default model", awake)


def _hit_rates(model: list[str], profile: Profile, vocab_size: int) -> Row:
    """Kill a conductor under prompts with shared prefixes; compare the share of reused tokens."""
    flags = [*model, "--prefill", "2", "--decode", "2", "--store", "2", *SIZES]
    with started(flags, profile) as cluster:
        ends_at = time.monotonic() + 2 * HITS_S + SETTLES_S
        with ThreadPoolExecutor(CLIENTS) as clients:
            asked = [clients.submit(_ask_until, ends_at, cluster, vocab_size, one) for one in range(CLIENTS)]
            time.sleep(HITS_S)
            before = _reused(cluster)
            process_of(cluster.pid, "conductor").kill()
            time.sleep(SETTLES_S)
            settled = _reused(cluster)
            time.sleep(HITS_S - 1.0)
            after = _reused(cluster)
            for one in asked:
                one.result()
    rate = (after[0] - settled[0]) / (after[1] - settled[1])
    title = "SIGKILL conductor, sleeping ranks: share of reused tokens from second 10 to 40 after it"
    return Row(title, "%", 100 * rate, Other("the 30 s before", 100 * before[0] / before[1]), None, 1)


def _ask_until(ends_at: float, cluster: Cluster, vocab_size: int, number: int) -> None:
    """Send one prompt after the other, each with one of the shared prefixes."""
    chosen = random.Random(number)
    while time.monotonic() < ends_at:
        prefix = random.Random(chosen.randrange(PREFIXES)).choices(range(1000, vocab_size), k=PREFIX_TOKENS)
        prompt = Prompt([*prefix, *chosen.choices(range(1000, vocab_size), k=64)], 4)
        body = prompt.body() | {"stream": False}
        httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60, trust_env=False)


def _reused(cluster: Cluster) -> tuple[float, float]:
    """Return how many tokens of prompts were reused so far, and how many there were."""
    text = httpx.get(f"{cluster.base_url}/metrics", timeout=10, trust_env=False).text
    totals = [
        sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"mooncake_lite_{name}"))
        for name in ("prefix_cache_hits_total", "prefix_cache_queries_total")
    ]
    return totals[0], totals[1]


def _play_round(
    model: list[str],
    profile: Profile | None,
    prompts: list[Prompt],
    found: dict[str, Found],
    told: Callable[[], None],
) -> None:
    """Start a cluster, and kill its processes one after the other.

    No run reuses the prompts of another one. After each fault an undisturbed run follows on the ranks that
    are left, so that the figures tell of the fault and not of fewer ranks.
    """
    counts = [word for role, count in COUNTS.items() for word in (f"--{role}", str(count))]
    flags = [*model, *counts, *SIZES, "--dead-after-s", str(DEAD_AFTER_S)]
    victims = {role: list(ranks) for role, ranks in _ranks().items()}
    with started(flags, profile) as cluster:
        undisturbed, began = play(cluster.base_url, prompts, salt="undisturbed")
        decodes_s = _half_began(undisturbed) - began
        for number, fault in enumerate(ROUND):
            what = found.setdefault(fault, Found())
            what.faults += 1
            if fault == "gateway":
                what.gaps_s.append(_gateway_gap_s(cluster, prompts[0]))
            else:
                role = fault.removeprefix("suspended ")
                name = "conductor" if role == "conductor" else str(victims[role].pop(0))
                process = process_of(cluster.pid, name)
                act = process.kill if role == fault else process.suspend
                at_s = EARLY_S if role == "prefill" else decodes_s + LATER_S
                streams, moment = play(cluster.base_url, prompts, act, at_s, str(number))
                is_early = role == "prefill"
                what.gaps_s += _gaps_s(streams, moment, is_early)
                calm, began = play(cluster.base_url, prompts, salt=f"calm {number}")
                what.undisturbed_s += _gaps_s(calm, began + at_s, is_early)
                decodes_s = _half_began(calm) - began
                what.wrong += sum(map(_differs, streams, undisturbed))
            told()


def _half_began(streams: Sequence[Stream]) -> float:
    """Return when half of the streams had their first token."""
    return statistics.median(stream.times[1] for stream in streams)


def _gaps_s(streams: Sequence[Stream], moment: float, first: bool) -> list[float]:
    """Return the longest gap from a moment on of each stream that had not ended then."""
    return [one.longest_gap_s(moment, first=first) for one in streams if one.times[-1] > moment]


def _differs(stream: Stream, undisturbed: Stream) -> bool:
    return bool(stream.error) or stream.text != undisturbed.text


def _ranks() -> dict[str, range]:
    """Return the ranks of each role, in the order in which they are numbered."""
    found, first = {}, 1
    for role, count in COUNTS.items():
        found[role] = range(first, first + count)
        first += count
    return found


def random_prompts(vocab_size: int) -> list[Prompt]:
    """Return prompts that share no prefix: greedy ones, and some whose tokens are drawn with a seed."""
    chosen = random.Random("faults")
    ids = range(vocab_size // 8, vocab_size)
    return _asked(chosen.choices(ids, k=PROMPT_TOKENS) for _ in range(STREAMS))


def text_prompts() -> list[Prompt]:
    """Return the same of a text.

    After random tokens, thousands of tokens are as likely as each other. The rounding of a tail that is
    computed again would decide between them.
    """
    text, size = document_text(), PROMPT_CHARACTERS
    return _asked(text[number * size : (number + 1) * size] for number in range(STREAMS))


def _asked(prompts: Iterable[str | list[int]]) -> list[Prompt]:
    return [Prompt(prompt, NEW_TOKENS, number % 2, number) for number, prompt in enumerate(prompts)]


def _gateway_gap_s(cluster: Cluster, prompt: Prompt) -> float:
    """Kill the gateway; return the seconds until the next request is answered. Raises ClusterError."""
    process_of(cluster.pid, "gateway").kill()
    killed = time.monotonic()
    short = prompt._replace(max_tokens=1)
    while time.monotonic() - killed < ANSWER_LIMIT_S:
        try:
            answer = httpx.post(
                f"{cluster.base_url}/v1/completions", json=short.body() | {"stream": False}, trust_env=False
            )
        except httpx.HTTPError:
            time.sleep(0.02)
            continue
        if answer.status_code == 200:
            return time.monotonic() - killed
        time.sleep(0.02)
    raise ClusterError(f"no gateway answered within {ANSWER_LIMIT_S:g} s of the death of the last one")


def _rows(where: str, found: dict[str, Found]) -> list[Row]:
    """Return the median and the 99th percentile of the pauses, and the answers that were not right."""
    rows = []
    for fault, what in found.items():
        title = (
            f"{'SIGSTOP' if 'suspended' in fault else 'SIGKILL'} {fault.removeprefix('suspended ')}, {where}"
        )
        is_gateway = fault == "gateway"
        figure = "next request answered" if is_gateway else "longest gap of a stream"
        for name, share in (("median", 0.5), ("99th percentile", 0.99)):
            beside = (
                Other("undisturbed", 1e3 * _quantile(what.undisturbed_s, share)) if not is_gateway else None
            )
            rows.append(
                Row(
                    f"{title}: {figure}, {name}", "ms", 1e3 * _quantile(what.gaps_s, share), beside, None,
                    what.faults, note=NOT_PUBLISHED if is_gateway else "",
                )
            )  # fmt: skip
        if not is_gateway:
            rows.append(
                Row(
                    f"{title}: answers that are not those of the undisturbed run", "answers", what.wrong,
                    None, None, what.faults, note=NOT_PUBLISHED,
                )
            )  # fmt: skip
    return rows


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
