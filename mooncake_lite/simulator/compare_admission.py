"""Compare forms of admission under overload: goodput, wasted prefills, and how much the decode load swings.

Called by `experiment_commands.py`. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, pstdev

from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.compare import Columns, Comparison, Measure, Told, of_seeds
from mooncake_lite.simulator.compare import compare as compare_values
from mooncake_lite.simulator.experiment import Experiment
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import SAMPLE_S
from mooncake_lite.simulator.sessions import SessionMix

FORMS = ("none", "after-prefill", "early-rejection", "predictive")
RATE = 4.0
"""Requests per second: nearly twice what the one decode node can serve within the limit on TBT."""

STEP_S, TBT_S = 0.05, 0.1
"""What admission may let a mean step take, and the limit that goodput counts with, on the mean of a request's
slowest tenth of gaps. These have to wait for the KV of others that arrives, which no step does."""


def _goodput(experiment: Experiment, outcome: Outcome) -> float:
    return experiment.rate * outcome.share_within(experiment.cluster.ttft_s, TBT_S)


def _decode_loads(outcome: Outcome) -> list[float]:
    if not outcome.loads.decode:
        raise ConfigError(
            f"the requests of a run come within {SAMPLE_S:g} s; raise --requests or lower --rate"
        )
    return outcome.loads.decode


MEASURES: dict[str, Measure] = {
    "goodput": _goodput,
    "refused": lambda experiment, outcome: outcome.refused,
    "wasted": lambda experiment, outcome: outcome.wasted,
    "decode_load": lambda experiment, outcome: mean(_decode_loads(outcome)),
    "decode_swing": lambda experiment, outcome: pstdev(_decode_loads(outcome)),
    "correlation": lambda experiment, outcome: outcome.loads.correlation(),
}
"""Requests per second within both limits, shares of all requests that were refused, or refused after their
prefill, mean and standard deviation of the decode load over time, its correlation with the prefill load."""

COLUMNS: Columns = {
    "goodput, requests/s": of_seeds("goodput", ".2f"),
    "refused": of_seeds("refused", ".3f"),
    "wasted": of_seeds("wasted", ".3f"),
    "decode load": of_seeds("decode_load", ".2f"),
    "its swing": of_seeds("decode_swing", ".3f"),
    "correlation": of_seeds("correlation", "+.2f"),
}


def experiment_of(profile: Profile, prefills: int, decodes: int, requests: int, rate: float) -> Experiment:
    """Return an experiment with long documents and short answers.

    A prefill then takes longer than a decode, so that the decode load now tells little about the decode load
    at the end of the prefill.
    """
    mix = SessionMix(
        documents=3_000, document_tokens=(20_000, 60_000), answer_tokens=100, spread=0.3, turns=1.0
    )
    nodes = {"prefill": prefills, "decode": decodes}
    cluster = Cluster(profile=profile, nodes=nodes, tbt_s=STEP_S, margin=0.85)
    return Experiment(cluster=cluster, requests=requests, mix=mix, rate=rate)


def compare(experiment: Experiment, forms: Sequence[str], seeds: Sequence[int], told: Told) -> Comparison:
    """Run every form with every seed. Raises ConfigError for a short run."""
    return compare_values(experiment, "admission", forms, seeds, MEASURES, told)
