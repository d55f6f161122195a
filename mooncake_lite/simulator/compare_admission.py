"""Compare forms of admission under overload: goodput, wasted prefills, and how much the decode load swings.

Called by `experiment_commands.py`. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median, pstdev
from typing import Any

from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.costs import costs_of
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.experiment import SAMPLE_S, Experiment
from mooncake_lite.simulator.outcome import Loads, Outcome
from mooncake_lite.simulator.sessions import SessionMix

FORMS = ("none", "after-prefill", "early-rejection", "predictive")
RATE = 4.0
"""Requests per second: nearly twice what the one decode node can serve within the limit on TBT."""

DRAWN_S = 120.0
"""Seconds of the first seed's run that the figure shows."""

Told = Callable[[], None]


def cluster(profile: Profile, prefills: int, decodes: int, requests: int, rate: float) -> Experiment:
    """Return an experiment with long documents and short answers.

    A prefill then takes longer than a decode, so that the decode load now tells little about the decode load
    at the end of the prefill.
    """
    mix = SessionMix(
        documents=3_000, document_tokens=(20_000, 60_000), answer_tokens=100, spread=0.3, turns=1.0
    )
    return Experiment(
        seconds=profile.compute.seconds, costs=costs_of(profile), prefills=prefills, decodes=decodes,
        requests=requests, mix=mix, rate=rate, tbt_s=0.05, margin=0.85,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """The results of one form of admission, a number for each seed.

    goodput       requests per second within both limits
    refused       share of the requests
    wasted        share of the requests that were refused after their prefill
    decode_load   mean over time
    decode_swing  standard deviation of the decode load over time
    correlation   of prefill load and decode load
    """

    admission: str
    goodput: list[float]
    refused: list[float]
    wasted: list[float]
    decode_load: list[float]
    decode_swing: list[float]
    correlation: list[float]


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """A comparison. curves: the loads over time of the first seed, by form."""

    rate: float
    seeds: list[int]
    rows: list[AdmissionRow]
    curves: dict[str, Loads]

    def calmer(self, form: str, than: str) -> int | None:
        """Return for how many seeds the decode load of a form swings less; None if a form was not run."""
        swings = {row.admission: row.decode_swing for row in self.rows}
        if form not in swings or than not in swings:
            return None
        return sum(a < b for a, b in zip(swings[form], swings[than], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON file has: no curves."""
        return {"rate": self.rate, "seeds": self.seeds, "rows": [asdict(row) for row in self.rows]}


def compare(
    experiment: Experiment, forms: Sequence[str], seeds: Sequence[int], told: Told
) -> AdmissionResult:
    """Run every form with every seed. told: is called after each run. Raises ConfigError for a short run."""
    rows, curves = [], {}
    for form in forms:
        outcomes = []
        for seed in seeds:
            outcomes.append(replace(experiment, admission=form).run(seed))
            told()
        rows.append(_row(experiment, form, outcomes))
        loads = outcomes[0].loads
        curves[form] = loads.after(loads.times_s[0], loads.times_s[0] + DRAWN_S)
    return AdmissionResult(experiment.rate, list(seeds), rows, curves)


def _row(experiment: Experiment, form: str, outcomes: Sequence[Outcome]) -> AdmissionRow:
    if not all(one.loads.times_s for one in outcomes):
        raise ConfigError(
            f"the requests of a run come within {SAMPLE_S:g} s; raise --requests or lower --rate"
        )
    good = [one.share_within(experiment.ttft_s, experiment.tbt_s) for one in outcomes]
    return AdmissionRow(
        form,
        goodput=[share * experiment.rate for share in good],
        refused=[one.refused for one in outcomes],
        wasted=[one.wasted for one in outcomes],
        decode_load=[mean(one.loads.decode) for one in outcomes],
        decode_swing=[pstdev(one.loads.decode) for one in outcomes],
        correlation=[one.loads.correlation() for one in outcomes],
    )


def lines(result: AdmissionResult) -> list[list[str]]:
    """Return the rows of the table: medians over the seeds."""
    return [
        [
            row.admission,
            f"{median(row.goodput):.2f}",
            f"{median(row.refused):.3f}",
            f"{median(row.wasted):.3f}",
            f"{median(row.decode_load):.2f}",
            f"{median(row.decode_swing):.3f}",
            f"{median(row.correlation):+.2f}",
        ]
        for row in result.rows
    ]
