"""What a class gets in lab 9, and the answers. It belongs to no release, because it has the formulas.

Used by `labs start`, `release` and `grade`. The formulas are those of tutorial 09, with its names. The loads
of 9d are simulated, and the best plans of 9e are stored in grid.json, which a test computes again.
"""

import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite.labs.child import load
from mooncake_lite.profiles.compute import ComputeCost, PassLoad, PassTerms
from mooncake_lite.profiles.file import (
    VERSION,
    ComputeSection,
    EngineUsed,
    MovesSection,
    OverheadsSection,
    Profile,
    ProfiledModel,
)
from mooncake_lite.profiles.fit import FitError, MeasuredPass
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest, write_trace

HEAD_DIM, ITEMSIZE = 128, 2
"""Numbers of a head, and bytes of a number, of every model of this lab."""

PLENTY_GB = 1000.0
"""Of a node in task 9d: nothing is evicted."""

SETTLED_S = 2.0
"""After its first request a document is asked about again: until then it is not in the pool."""

trial = load(str(Path(__file__).with_name("trial.py")))
GRID = Path(__file__).with_name("grid.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Napkin:
    """One model on one kind of node, with the formulas of tutorial 09. FLOPs, bytes and seconds.

    peak, memory, link   FLOP/s, and bytes/s of the node's memory and of its link
    memory_bytes         of the node
    compute, read        shares of peak and of memory that the program reaches
    heads, kv_heads      of queries, and of keys and values
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    peak: float
    memory: float
    memory_bytes: float
    link: float
    compute: float
    read: float

    @property
    def hidden(self) -> int:
        """Return the width of the hidden states."""
        return self.heads * HEAD_DIM

    @property
    def kv(self) -> int:
        """Return the bytes of a token's KV."""
        return self.layers * 2 * self.kv_heads * HEAD_DIM * ITEMSIZE

    @property
    def weights(self) -> float:
        """Return the bytes of all weights."""
        return ITEMSIZE * self.parameters

    def prefill(self, tokens: float, cached: float = 0) -> tuple[float, float]:
        """Return FLOPs and bytes of a prompt, without its cached prefix."""
        new = tokens - cached
        attention = self.layers * 2 * (tokens**2 - cached**2) * self.hidden
        return 2 * self.parameters * new + attention, self.weights + tokens * self.kv

    def decode(self, batch: float, context: float) -> tuple[float, float]:
        """Return FLOPs and bytes of one step."""
        flops = batch * (2 * self.parameters + self.layers * 4 * context * self.hidden)
        return flops, self.weights + batch * context * self.kv

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Return the seconds of a prompt, without its cached prefix."""
        return self.prefill(tokens, cached)[0] / (self.compute * self.peak)

    @property
    def base_s(self) -> float:
        """Return the seconds of a step without sequences: all weights are read."""
        return self.weights / (self.read * self.memory)

    @property
    def sequence_s(self) -> float:
        """Return what the linear layers of one more sequence add to a step."""
        return 2 * self.parameters / (self.compute * self.peak)

    @property
    def key_s(self) -> float:
        """Return the seconds to read one token's KV."""
        return self.kv / (self.read * self.memory)

    def each_s(self, context: float) -> float:
        """Return what one more sequence adds to a step."""
        return self.sequence_s + context * self.key_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Firm:
    """A company of tasks 9d and 9e, and its machine.

    about         what it does, in a few words
    rate          requests per second; requests: of the trace
    every         each so many requests there is a new document; all others are about an old one
    document, question, answer   tokens of each
    ttft_ms, tbt_ms   limits that nine of ten requests must keep
    node, dram_gb     dollars an hour of a node of each kind, and of a GB that is lent to the pool
    given         nodes of each kind in task 9d
    """

    about: str
    napkin: Napkin
    rate: float
    requests: int
    every: int
    document: int
    question: int
    answer: int
    ttft_ms: int
    tbt_ms: int
    node: tuple[float, float]
    dram_gb: float
    given: tuple[int, int]

    def documents(self) -> list[tuple[float, int]]:
        """Return when each request comes, in s, and its document. No new one is asked about again at once."""
        draw = random.Random(self.about)
        gaps_s = [0.0, SETTLED_S, *(draw.uniform(0.5, 1.5) / self.rate for _ in range(self.requests - 2))]
        now_s, made, first_s = 0.0, [], list[float]()
        for number, gap_s in enumerate(gaps_s):
            now_s += gap_s
            if number % self.every == 0:
                made.append((now_s, len(first_s)))
                first_s.append(now_s)
            else:
                old = [one for one, at_s in enumerate(first_s) if at_s <= now_s - SETTLED_S]
                made.append((now_s, draw.choice(old)))
        return made

    def trace(self) -> Trace:
        """Return the requests: a document, and a question of its own."""
        blocks, count = self.document // BLOCK_TOKENS, -(-self.question // BLOCK_TOKENS)
        made = []
        for number, (at_s, document) in enumerate(self.documents()):
            first, own = document * blocks, 10**6 + number * count
            ids = [*range(first, first + blocks), *range(own, own + count)]
            made.append(TraceRequest(round(1e3 * at_s), self.document + self.question, self.answer, ids))
        return Trace(made)


FIRMS = {
    1: Firm(
        about="an insurer, whose clerks ask about policies",
        napkin=Napkin(parameters=32e9, layers=64, heads=40, kv_heads=8, peak=2 * 600e12, memory=2 * 3.0e12,
                      memory_bytes=2 * 96e9, link=200e9 / 8, compute=0.5, read=0.5),
        rate=12.0, requests=150, every=6, document=6144, question=768, answer=100,
        ttft_ms=800, tbt_ms=50, node=(10.0, 8.0), dram_gb=0.02, given=(4, 2),
    ),
    2: Firm(
        about="a law office, which searches long contracts",
        napkin=Napkin(parameters=70e9, layers=80, heads=64, kv_heads=8, peak=8 * 400e12, memory=8 * 2.0e12,
                      memory_bytes=8 * 80e9, link=400e9 / 8, compute=0.5, read=0.4),
        rate=9.0, requests=150, every=8, document=12288, question=1024, answer=100,
        ttft_ms=1500, tbt_ms=55, node=(16.0, 14.0), dram_gb=0.03, given=(5, 2),
    ),
    3: Firm(
        about="a publisher, whose readers chat with books",
        napkin=Napkin(parameters=14e9, layers=48, heads=40, kv_heads=8, peak=600e12, memory=2.5e12,
                      memory_bytes=96e9, link=200e9 / 8, compute=0.5, read=0.6),
        rate=12.0, requests=160, every=8, document=4608, question=1024, answer=100,
        ttft_ms=900, tbt_ms=50, node=(5.0, 4.0), dram_gb=0.01, given=(5, 2),
    ),
    4: Firm(
        about="a help desk, which answers from manuals",
        napkin=Napkin(parameters=36e9, layers=64, heads=48, kv_heads=4, peak=2 * 900e12, memory=2 * 3.2e12,
                      memory_bytes=2 * 96e9, link=200e9 / 8, compute=0.45, read=0.4),
        rate=16.0, requests=160, every=6, document=5120, question=640, answer=100,
        ttft_ms=800, tbt_ms=60, node=(12.0, 9.0), dram_gb=0.03, given=(5, 2),
    ),
}  # fmt: skip


def profile_of(napkin: Napkin) -> Profile:
    """Return the napkin's machine as a profile, so that simulate and plan can play it."""
    layers = napkin.layers
    pair_s = layers * 4 * napkin.hidden / (napkin.compute * napkin.peak)
    fit = ComputeCost(
        PassTerms(0.0, napkin.sequence_s, pair_s),
        PassTerms(napkin.base_s, napkin.sequence_s, napkin.key_s),
    )
    loads = [PassLoad(16_384, 16_384**2 // 2), PassLoad(0, 0, 1024, 1024 * 16_384)]
    passes = [MeasuredPass(one, fit.seconds(one)) for one in loads]
    engine = EngineUsed("bfloat16", "cuda", "auto", 0)
    errors = {"prefill": FitError(0.0, 0.0), "decode": FitError(0.0, 0.0)}
    moves = MovesSection(napkin.link, 1e-4, napkin.link, napkin.link)
    sections = {
        name: msgspec.Raw(msgspec.json.encode(section))
        for name, section in (
            ("compute", ComputeSection(engine, fit, errors, passes)),
            ("moves", moves),
            ("overheads", OverheadsSection(1e-4, 3e-4, 1e-3)),
        )
    }
    model = ProfiledModel("made up", "made up", [layers, napkin.kv_heads, HEAD_DIM, ITEMSIZE])
    return Profile(VERSION, model, {"cpu": "made up"}, "2026-01-01T00:00:00+00:00", sections)


def company_toml(firm: Firm) -> str:
    """Return the file with all that a student knows of a company."""
    one, requests = firm.napkin, firm.documents()
    new = len({document for _, document in requests})
    return f"""# The company of tasks 9d and 9e: {firm.about}.

[model]
parameters_billion = {one.parameters / 1e9:g}
layers = {one.layers}
query_heads = {one.heads}
kv_heads = {one.kv_heads}
numbers_per_head = {HEAD_DIM}
bytes_per_number = {ITEMSIZE}

[node]
tflops = {one.peak / 1e12:g}            # peak
memory_gb_per_s = {one.memory / 1e9:g}
memory_gb = {one.memory_bytes / 1e9:g}
link_gbit_per_s = {8 * one.link / 1e9:g}
prefill_percent = {100 * one.compute:g}      # of the peak, that a prefill reaches
read_percent = {100 * one.read:g}         # of memory_gb_per_s, that a decode step reaches

[work]
requests = {firm.requests}
requests_per_s = {firm.rate:g}        # from the second one on, which comes {SETTLED_S:g} s after the first
documents = {new}           # each of them is new once; all other requests are about one that came before
document_tokens = {firm.document}  # a prompt is a document, and then a question of its own
question_tokens = {firm.question}
answer_tokens = {firm.answer}

[given]                  # the cluster of task 9d
prefill_nodes = {firm.given[0]}
decode_nodes = {firm.given[1]}

[limits]                 # of task 9e; nine of ten requests must keep each of them
ttft_ms = {firm.ttft_ms}
tbt_ms = {firm.tbt_ms}

[prices]                 # dollars an hour: of a node, and of each GB that a prefill node lends to the pool
prefill_node_hour = {firm.node[0]:g}
decode_node_hour = {firm.node[1]:g}
dram_gb_hour = {firm.dram_gb:g}
"""


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: a company, its requests, its machine and prices."""
    firm = FIRMS[sizes["company"]]
    prices = company_toml(firm).partition("[prices]")[2].partition("\n")[2]
    return {
        trial.COMPANY: company_toml(firm).encode(),
        trial.WORK: write_trace(firm.trace()),
        trial.MACHINE: msgspec.json.format(msgspec.json.encode(profile_of(firm.napkin)), indent=1),
        "prices.toml": f'currency = "USD"\n{prices}'.encode(),
    }


def files(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of what a check plays: the data, and the best plan of the grid."""
    plan = [answers(seed, sizes)[name] for name in trial.QUESTIONS]
    return data(seed, sizes) | {trial.BEST: msgspec.json.encode(plan)}


def napkin_of(sizes: dict[str, int]) -> Napkin:
    """Return the model and the node of tasks 9a to 9c."""
    return Napkin(
        parameters=sizes["parameters"] * 1e9, layers=sizes["layers"], heads=sizes["query_heads"],
        kv_heads=sizes["kv_heads"], peak=sizes["tflops"] * 1e12, memory=sizes["memory_rate"] * 1e9,
        memory_bytes=sizes["memory"] * 1e9, link=sizes["link"] * 1e9 / 8,
        compute=sizes["prefill_percent"] / 100, read=sizes["read_percent"] / 100,
    )  # fmt: skip


def answers(seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return {question: answer}. Those of 9d and 9e are stored: simulated loads, and the best plan."""
    stored = msgspec.json.decode(GRID.read_bytes())[str(sizes["company"])]
    best = dict(zip(trial.QUESTIONS, stored["best"], strict=True))
    return napkin_answers(napkin_of(sizes), sizes) | stored["loads"] | best


def simulated(company: int) -> dict[str, float]:
    """Simulate the loads of task 9d."""
    firm = FIRMS[company]
    seen = trial.played(data(0, {"company": company}), trial.Plan(*firm.given, PLENTY_GB))
    return {
        "prefill_load": seen.prefill_load,
        "decode_load": 1 - firm.napkin.base_s / seen.step_s,
        "step_ms": 1e3 * seen.step_s,
        "pool_gb": seen.pool_blocks * BLOCK_TOKENS * firm.napkin.kv / 1e9,
    }


def napkin_answers(one: Napkin, sizes: dict[str, int]) -> dict[str, float]:
    """Return the answers of tasks 9a to 9c."""
    tokens, batch, context = sizes["prompt_tokens"], sizes["batch"], sizes["context"]
    (prompt_flops, prompt_bytes), step = one.prefill(tokens), one.decode(batch, context)
    limit_s, each_s = sizes["tbt_limit"] / 1e3, one.each_s(context)
    most = (limit_s - one.base_s) / each_s
    return {
        "kv_token_bytes": one.kv,
        "prompt_kv_gb": tokens * one.kv / 1e9,
        "ridge": one.peak / one.memory,
        "prefill_tflop": prompt_flops / 1e12,
        "prefill_intensity": prompt_flops / prompt_bytes,
        "step_intensity": step[0] / step[1],
        "compute_s": one.prefill_s(tokens),
        "load_s": tokens * one.kv / one.link,
        "break_even_gbit": 8e-9 * tokens * one.kv / one.prefill_s(tokens),
        "rest_s": one.prefill_s(tokens, sizes["cached_tokens"]),
        "base_ms": 1e3 * one.base_s,
        "sequence_ms": 1e3 * each_s,
        "most_sequences": most,
        "memory_sequences": (one.memory_bytes - one.weights) / (context * one.kv),
        "requests_per_s": most / (sizes["answer_tokens"] * limit_s),
    }


def hand(firm: Firm) -> dict[str, float]:
    """Return task 9d as a student works it out by hand, from company.toml alone."""
    one, (prefill, decode) = firm.napkin, firm.given
    new = len({document for _, document in firm.documents()}) / firm.requests
    tokens = firm.document + firm.question
    mean_s = new * one.prefill_s(tokens) + (1 - new) * one.prefill_s(tokens, firm.document)
    load = firm.rate / decode * firm.answer * one.each_s(tokens + firm.answer / 2)
    full = tokens // BLOCK_TOKENS * BLOCK_TOKENS - firm.document
    kept = firm.requests * (new * firm.document + full)
    return {
        "prefill_load": firm.rate * mean_s / prefill,
        "decode_load": load,
        "step_ms": 1e3 * one.base_s / (1 - load),
        "pool_gb": kept * one.kv / 1e9,
    }


def slips(seed: int, sizes: dict[str, int]) -> dict[str, list[tuple[float, str]]]:
    """Return {question: [(wrong number, what a student who gets it should look at)]}."""
    one, firm = napkin_of(sizes), FIRMS[sizes["company"]]
    known = load(str(Path(__file__).with_name("slips.py")))
    count = len({document for _, document in firm.documents()})
    found = known.napkin_slips(one, sizes, napkin_answers(one, sizes))
    found |= known.load_slips(firm, count, hand(firm))
    return {
        name: [*found[name], *known.units(name, real)]
        for name, real in answers(seed, sizes).items()
        if name in found
    }


GRID_NODES = range(2, 7), range(1, 6)
GRID_GB = (5, 10, 15, 20, 30, 45, 60)
"""Prefill nodes, decode nodes and GB of the plans that are simulated for grid.json."""


def grid(company: int) -> tuple[list[float], list[list[float]]]:
    """Simulate plans from the cheapest on, until one keeps both limits.

    Returns the best plan, and rows: of each plan prefill nodes, decode nodes, GB, cost, and the shares of
    requests that keep the limit on TTFT and on TBT. Plans are left out whose nodes fail with the most memory.
    """
    files = data(0, {"company": company})
    prices = trial.company_of(files).prices
    rows: dict[Any, list[float]] = {}

    def holds(plan: Any) -> bool:
        if plan not in rows:
            seen = trial.played(files, plan)
            shares = [round(seen.ttft, 4), round(seen.tbt, 4)]
            rows[plan] = [plan.prefill, plan.decode, plan.dram_gb, round(plan.cost(prices), 4), *shares]
        return bool(min(rows[plan][4:]) >= trial.SHARE)

    plans = [trial.Plan(*nodes, gb) for nodes in product(*GRID_NODES) for gb in GRID_GB]
    for plan in sorted(plans, key=lambda plan: plan.cost(prices)):
        if holds(replace(plan, dram_gb=GRID_GB[-1])) and holds(plan):
            return rows[plan][:3], list(rows.values())
    raise AssertionError(f"no plan of the grid keeps the limits of company {company}")


if __name__ == "__main__":
    made = {}
    for one in FIRMS:
        best, rows = grid(one)
        made[str(one)] = {"loads": simulated(one), "best": best, "rows": rows}
    GRID.write_bytes(msgspec.json.encode(made) + b"\n")
