"""The demo's rows, its table, and the judgement about them. Pure: no process, no network, no clock.

Called by `demo.story` and `demo.command`. TTFT is the time to the first token at the client, TPOT the mean
gap after it; "moved" counts every byte that MPI or the tier moved for the request.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from mooncake_lite.messages import Span
from mooncake_lite.tools.client import StreamedAnswer

MOVING_STAGES = ("promote", "load", "store")
"""Stages of a trace that move KV: tier -> pool, pool -> rank, rank -> pool."""

DRAM_SPEEDUP_WANTED = 10.0
TIER_SPEEDUP_WANTED = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One question asked in one cluster.

    question   "a", "b" or "c": rows with one letter have one prompt and must get the same tokens
    cluster    "first", "restarted", "2 prefill" or "reuse off"
    """

    question: str
    cluster: str
    answer: StreamedAnswer

    @property
    def cached(self) -> dict[str, int]:
        """Prompt tokens whose KV was reused, by tier ("pages" of the prefill rank, "dram", "ssd")."""
        return dict(self.answer.trace.get("cached_tokens", {}))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, whatever tier they came from."""
        return sum(self.cached.values())

    @property
    def spans(self) -> list[Span]:
        """Where the time went, as the ranks measured it."""
        return [Span(**span) for span in self.answer.trace.get("spans", [])]

    @property
    def prefill_rank(self) -> int:
        """The rank that computed the rest of the prompt; -1 if the answer does not say."""
        return next((span.rank for span in self.spans if span.stage == "compute"), -1)

    @property
    def transfer_s(self) -> float:
        """Seconds before the first token in which KV was fetched: from the tier, and from the pool."""
        return sum(
            span.seconds
            for span in self.spans
            if span.stage == "promote" or (span.stage == "load" and span.rank == self.prefill_rank)
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes of KV moved for this request over its whole life."""
        return sum(span.nbytes for span in self.spans if span.stage in MOVING_STAGES)

    @property
    def moved_gb_per_s(self) -> float:
        """moved_bytes over the seconds its transfers took; 0 when nothing moved."""
        seconds = sum(span.seconds for span in self.spans if span.stage in MOVING_STAGES)
        return self.moved_bytes / seconds / 1e9 if seconds > 0 else 0.0

    @property
    def source(self) -> str:
        """Cached tokens by tier, as the table shows them."""
        names = {"pages": "own pages", "dram": "DRAM", "ssd": "HDF5"}
        parts = [f"{n:,} {names.get(tier, tier)}" for tier, n in self.cached.items() if n]
        return " + ".join(parts) or "0"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for --json; seconds, bytes and tokens."""
        answer = self.answer
        return {
            "question": self.question,
            "cluster": self.cluster,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "prefill_rank": self.prefill_rank,
            "cached_tokens": self.cached,
            "ttft_s": answer.ttft_s,
            "tpot_s": answer.tpot_s,
            "transfer_s": self.transfer_s,
            "moved_bytes": self.moved_bytes,
            "moved_gb_per_s": self.moved_gb_per_s,
            "finish": answer.finish,
            "text": answer.text,
            "spans": [msgspec.structs.asdict(span) for span in self.spans],
        }


def table(rows: list[Row]) -> Table:
    """The closing table, at most 80 columns wide; `--json` has more of each row."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("question")
    result.add_column("cluster")
    numbers = "on\nrank", "prompt\ntokens", "cached tokens\nand their tier"
    for name in (*numbers, "TTFT\ns", "TPOT\nms", "moved\nMB"):
        result.add_column(name, justify="right")
    for row, following in zip(rows, [*rows[1:], None]):
        answer = row.answer
        result.add_row(
            row.question,
            row.cluster,
            str(row.prefill_rank),
            f"{answer.prompt_tokens:,}",
            row.source,
            f"{answer.ttft_s:.3f}",
            f"{answer.tpot_s * 1e3:.1f}",
            f"{row.moved_bytes / 1e6:.0f}",
            end_section=following is not None and following.cluster != row.cluster,
        )
    return result


def played(rows: list[Row], cluster: str) -> list[Row]:
    """The rows of one cluster, in the order in which they were asked."""
    return [row for row in rows if row.cluster == cluster]


def speedups(rows: list[Row]) -> dict[str, float]:
    """How many times shorter TTFT is than cold, by where the document's KV came from.

    cold         the median of the questions that reuse nothing: no single slow one makes reuse look better
    dram, hdf5   the pool; one prefill rank
    other_rank   the pool; the other one of two prefill ranks has computed it
    own_pages    the prefill rank's own pages
    """
    computed, other, own = played(rows, "2 prefill")
    nothing_reused = [played(rows, "first")[0], computed, *played(rows, "reuse off")]
    cold_s = statistics.median(row.answer.ttft_s for row in nothing_reused)
    return {
        "dram": cold_s / played(rows, "first")[1].answer.ttft_s,
        "hdf5": cold_s / played(rows, "restarted")[0].answer.ttft_s,
        "other_rank": cold_s / other.answer.ttft_s,
        "own_pages": cold_s / own.answer.ttft_s,
    }


def warnings(rows: list[Row]) -> list[str]:
    """What did not go as the demo says it goes; empty when all is well."""
    found = []
    ratio = speedups(rows)
    for tier, wanted in (("dram", DRAM_SPEEDUP_WANTED), ("hdf5", TIER_SPEEDUP_WANTED)):
        if ratio[tier] < wanted:
            found.append(
                f"TTFT from {tier.upper()} is {ratio[tier]:.1f}x shorter than cold; {wanted:.0f}x is expected"
            )
    first_a, first_b, first_c = played(rows, "first")
    computed, other, own = played(rows, "2 prefill")
    checks = [
        (first_a.cached_tokens == 0, "the first question was not cold"),
        (first_b.cached.get("dram", 0) > 0, "the second question took nothing from DRAM"),
        (
            first_c.cached_tokens > first_b.answer.prompt_tokens,
            "the follow-up did not reuse the answer's own KV",
        ),
        (played(rows, "restarted")[0].cached.get("ssd", 0) > 0, "nothing came from HDF5 after the restart"),
        (
            other.cached.get("dram", 0) > 0 and other.prefill_rank != computed.prefill_rank,
            "the pool gave nothing to the other prefill rank",
        ),
        (
            own.cached.get("pages", 0) > 0 and own.prefill_rank == computed.prefill_rank,
            "the rank that computed the document did not find it in its own pages",
        ),
        (
            all(row.cached_tokens == 0 for row in played(rows, "reuse off")),
            "something was reused although reuse is off",
        ),
    ]
    return found + [text for ok, text in checks if not ok]


def differences(rows: list[Row]) -> list[str]:
    """One line for each row whose tokens differ from the first row of the same question."""
    found = []
    firsts: dict[str, Row] = {}
    for row in rows:
        first = firsts.setdefault(row.question, row)
        if _said(row) != _said(first):
            place = _first_difference(first.answer.text, row.answer.text)
            found.append(
                f"question {row.question}: {row.cluster} differs from {first.cluster} at character {place}"
            )
    return found


def _said(row: Row) -> tuple[str, int, str]:
    """What two answers of the same tokens have in common."""
    return row.answer.text, row.answer.completion_tokens, row.answer.finish


def _first_difference(one: str, other: str) -> int:
    """Index of the first character that differs, or the length of the shorter text."""
    pairs = enumerate(zip(one, other))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
