"""Plays a company's work on a simulated cluster: the loads of task 9d, and the judge of the plan of task 9e.

Loaded by data.py, and by `labs check` and `labs grade`. It knows no answers. It does what
`mooncake-lite simulate cluster` does with the files in data/.
"""

import tomllib
from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake_lite.errors import ClusterError, ConfigError
from mooncake_lite.profiles.file import parse_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest

COMPANY, WORK, MACHINE, BEST = "company.toml", "work.jsonl", "machine.json", "best.json"
"""Files of a class. The last one, with the best plan of the grid, is not in the student's folder."""

QUESTIONS = ("prefill_nodes", "decode_nodes", "dram_gb")
SHARE = 0.9
"""Of the requests that must keep a limit."""

WITHIN, WASTE = 1.25, 2.0
"""A plan may cost so many times the best of the grid; one that costs WASTE times as much is not played."""

ENOUGH = 0.9
"""A pool that reuses this share of what is possible is large enough."""

MOST_NODES, MOST_DRAM_GB = 64, 100_000


class Limits(msgspec.Struct, frozen=True):
    """Limits on TTFT and TBT, in ms."""

    ttft_ms: float
    tbt_ms: float


class Prices(msgspec.Struct, frozen=True):
    """Prices of an hour, in dollars: of a node, and of each GB that a prefill node lends to the pool."""

    prefill_node_hour: float
    decode_node_hour: float
    dram_gb_hour: float


class Company(msgspec.Struct, frozen=True):
    """What company.toml says of limits and prices; its other sections are for the student."""

    limits: Limits
    prices: Prices


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes of each kind, and GB of DRAM that each prefill node lends."""

    prefill: int
    decode: int
    dram_gb: float

    @property
    def pool_gb(self) -> float:
        """Return the GB that all prefill nodes lend together."""
        return self.prefill * self.dram_gb

    def cost(self, prices: Prices) -> float:
        """Return dollars an hour."""
        prefill = prices.prefill_node_hour + self.dram_gb * prices.dram_gb_hour
        return self.prefill * prefill + self.decode * prices.decode_node_hour


@dataclass(frozen=True, slots=True)
class Played:
    """A plan that was played. ttft, tbt: share of the requests that kept each limit."""

    outcome: Outcome
    plan: Plan
    ttft: float
    tbt: float

    @property
    def holds(self) -> bool:
        """Tell whether both limits are kept."""
        return min(self.ttft, self.tbt) >= SHARE

    @property
    def prefill_load(self) -> float:
        """Return the share of time in which a prefill node computes, from the second request to the last."""
        records = self.outcome.records
        return self.outcome.prefill_s / (records[-1].arrived_s - records[1].arrived_s) / self.plan.prefill

    @property
    def step_s(self) -> float:
        """Return the mean step of the middle of the run: without the first and last fifth, and first gaps."""
        records = self.outcome.records
        middle = records[len(records) // 5 : -len(records) // 5]
        times_s = [one.token_times_s for one in middle]
        return float(np.mean([(one[-1] - one[1]) / (len(one) - 2) for one in times_s]))

    @property
    def pool_blocks(self) -> int:
        """Return the blocks in the pool, copies not counted, when the last request had come."""
        return sum(self.outcome.copies.values())


def company_of(files: dict[str, bytes]) -> Company:
    """Return the limits and prices of the files of a class."""
    return msgspec.convert(tomllib.loads(files[COMPANY].decode()), Company)


def trace_of(files: dict[str, bytes]) -> Trace:
    """Return the requests of the files of a class."""
    return Trace(msgspec.json.Decoder(TraceRequest).decode_lines(files[WORK]))


def played(files: dict[str, bytes], plan: Plan) -> Played:
    """Play the work of a company on a plan. Raises ConfigError and ClusterError for one that cannot serve."""
    cluster = Cluster(
        profile=parse_profile(files[MACHINE], MACHINE),
        nodes={"prefill": plan.prefill, "decode": plan.decode},
        node_bytes=int(plan.dram_gb * 1e9),
        block_tokens=BLOCK_TOKENS,
    )
    outcome = play(cluster, TraceSource(trace_of(files)), seed=0)
    limits, records = company_of(files).limits, outcome.records
    if lost := [one.cause for one in records if len(one.token_times_s) == 0]:
        raise ConfigError(f"{len(lost)} requests get no token ({lost[0]}); give the pool more memory")
    ttft = np.mean([one.ttft_s <= limits.ttft_ms / 1e3 for one in records])
    tbt = np.mean([one.tbt_s <= limits.tbt_ms / 1e3 for one in records])
    return Played(outcome, plan, float(ttft), float(tbt))


def verdicts(files: dict[str, bytes], numbers: dict[str, float]) -> dict[str, str]:
    """Return {question: what is wrong with this number of a plan; empty when it is right}.

    numbers   of QUESTIONS
    """
    wrong = {}
    for name, most in zip(QUESTIONS, (MOST_NODES, MOST_NODES, MOST_DRAM_GB), strict=True):
        if name != QUESTIONS[2] and numbers[name] % 1:
            wrong[name] = "not right. Write a whole number of nodes"
        elif not 1 <= numbers[name] <= most:
            wrong[name] = f"not right. Write a number from 1 to {most:,}"
    if wrong:
        return dict.fromkeys(QUESTIONS, "simulated once the other numbers of the plan are possible") | wrong
    plan = Plan(int(numbers[QUESTIONS[0]]), int(numbers[QUESTIONS[1]]), numbers[QUESTIONS[2]])
    best = Plan(*msgspec.json.decode(files[BEST], type=tuple[int, int, float]))
    prices = company_of(files).prices
    if plan.cost(prices) > WASTE * best.cost(prices):
        words = f"not right. The plan costs {plan.cost(prices):.2f} dollars an hour"
        words += f", more than {WASTE:g} times the best one, and is not simulated"
        where = f"most of the difference is in {dearest(plan, best, prices)}"
        return dict.fromkeys(QUESTIONS, f"{words}. Look at this: {where}")
    try:
        seen = played(files, plan)
    except (ConfigError, ClusterError) as error:
        return dict.fromkeys(QUESTIONS, f"not right. This cluster cannot serve: {str(error)[:200]}")
    few = late(files, seen)
    if few:
        few = fewer(plan, best) | few
    return dict.fromkeys(QUESTIONS, "") | few | dear(plan, best, prices)


def fewer(plan: Plan, best: Plan) -> dict[str, str]:
    """Return which numbers are below those of the best plan: in a plan that is late they are not right.

    Otherwise a plan of one node and 1 GB would have only one wrong number.
    """
    lenders = max(plan.prefill, best.prefill)  # more nodes may lend less each
    parts = (plan.prefill, plan.decode, lenders * plan.dram_gb), (best.prefill, best.decode, best.pool_gb)
    words = "not right. The plan does not keep its limits, and the best one has more of this"
    return {name: words for name, mine, most in zip(QUESTIONS, *parts, strict=True) if mine < most}


def late(files: dict[str, bytes], seen: Played) -> dict[str, str]:
    """Return what is wrong with a plan that does not keep the limits, and with which of its numbers."""
    limits, found = company_of(files).limits, dict[str, str]()
    if seen.ttft < SHARE:
        words = f"not right. {seen.ttft:.0%} of first tokens keep {limits.ttft_ms:g} ms, not {SHARE:.0%}"
        trace = trace_of(files)
        possible = sum(cached_tokens(trace)) / sum(one.input_length for one in trace.requests)
        reused = sum(seen.outcome.reused.values()) / seen.outcome.prompt_tokens
        if reused < ENOUGH * possible:
            found[QUESTIONS[2]] = (
                f"{words}. The pool had {reused:.0%} of the prompts' tokens, and one that keeps all "
                f"documents has {possible:.0%}. Look at this: the GB of all documents, and the nodes that "
                "lend memory"
            )
        else:
            found[QUESTIONS[0]] = (
                f"{words}. Prefill nodes are busy for {seen.prefill_load:.0%} of the time. Look at this: a "
                "prompt waits when all nodes are busy, and a new document takes a whole prefill"
            )
    if seen.tbt < SHARE:
        found[QUESTIONS[1]] = (
            f"not right. {seen.tbt:.0%} of answers keep {limits.tbt_ms:g} ms, not {SHARE:.0%}; the mean step "
            f"takes {1e3 * seen.step_s:.0f} ms. Look at this: TBT is the mean of the slowest tenth of the "
            "gaps, and the first gap also waits for the KV"
        )
    return found


def dearest(plan: Plan, best: Plan, prices: Prices) -> str:
    """Return which number of a plan adds most to its cost, beside the best plan."""
    parts = (
        (plan.prefill - best.prefill) * prices.prefill_node_hour,
        (plan.decode - best.decode) * prices.decode_node_hour,
        (plan.pool_gb - best.pool_gb) * prices.dram_gb_hour,
    )
    return QUESTIONS[parts.index(max(parts))]


def dear(plan: Plan, best: Plan, prices: Prices) -> dict[str, str]:
    """Return what is wrong with a plan that costs too much, and the number that adds most to it."""
    ratio = plan.cost(prices) / best.cost(prices)
    if ratio <= WITHIN:
        return {}
    words = f"not right. The plan costs {ratio:.2f} times the best one, and {WITHIN:g} times is allowed"
    return {dearest(plan, best, prices): f"{words}. Look at this: most of the difference is here"}
