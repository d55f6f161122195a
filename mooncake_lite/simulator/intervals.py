"""How wrong a simulated figure may be: the same requests on machines that are not quite as profiled.

Used by `simulate cluster --runs N`. The first run has the profile as it is. Each further one has another
seed, and factors on its times that are drawn as wide as the errors of the profile. From these follows in
which interval a live run lies with a probability of 90 %. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, inf, sqrt
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import Any

from msgspec.structs import replace as changed

from mooncake_lite.profiles.file import OverheadsSection, Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.workload import mixed

Result = dict[str, Any]

FIGURES: dict[str, Callable[[Result], float | None]] = {
    "ttft_s": lambda result: result["ttft_s"]["mean"],
    "tbt_s": lambda result: result["tbt_s"]["mean"],
    "tpot_s": lambda result: result["tpot_s"]["mean"],
    "e2e_s": lambda result: result["e2e_s"]["mean"],
    "goodput_rps": lambda result: result["goodput_rps"],
    "hit_rate": lambda result: result["hit_rate"]["all"],
}
"""What an interval is given for: the means, by their names in the JSON."""

MOST = {"hit_rate": 1.0}
PROBABILITY = 0.9

OUTSIDE = 0.2
"""Standard deviation of the relative error of passes that lie outside what the profile measured: assumed."""

HOST = 0.03
"""The same of all passes of a run: what a host does besides. Assumed."""

GUESSED, MEASURED = 0.7, 0.5
"""The same of the overheads, where a profile lacks them and where it has them: they depend on the host."""

FROM_MEAN = 1.2533
"""Standard deviation of a normal error over its mean absolute value: sqrt(pi / 2)."""


def drawn(cluster: Cluster, outside: dict[str, float], seed: int) -> Cluster:
    """Return a cluster whose machines differ from their profile as its errors allow.

    outside   share of the passes of a kind, prefill or decode, that the profile does not cover

    The control plane still begins with the costs of the profile.
    """
    dice, profile = Random(mixed(seed, 7)), cluster.profile
    prefill, decode = (
        _factor(dice, _deviation(profile, kind, outside.get(kind, 0.0))) for kind in ("prefill", "decode")
    )
    spread = GUESSED if profile.overheads is None else MEASURED
    return replace(cluster, machines=scaled(profile, prefill, decode, _factor(dice, spread)))


def _factor(dice: Random, deviation: float) -> float:
    """Draw a factor with this standard deviation, about, and with a mean of 1."""
    return exp(dice.gauss(-(deviation**2) / 2, deviation))


def _deviation(profile: Profile, kind: str, outside: float) -> float:
    """Return the standard deviation of the relative error of a kind of pass."""
    error = profile.compute.error.get(kind)
    whole = profile.prefill.error if kind == "prefill" and profile.prefill is not None else None
    residual = FROM_MEAN * max((one.mean for one in (error, whole) if one is not None), default=0.0)
    return sqrt(HOST**2 + residual**2 + (outside * OUTSIDE) ** 2)


def scaled(profile: Profile, prefill: float, decode: float, overheads: float) -> Profile:
    """Return a profile with factors on its times."""
    compute, whole, besides = profile.compute, profile.prefill, profile.overheads or OverheadsSection()
    base_s = compute.fit.mixed_base_s  # reading the weights, as in a pass of a prompt
    fit = changed(compute.fit, prefill=_times(compute.fit.prefill, prefill, KEPT),
                  decode=_times(compute.fit.decode, decode, KEPT),
                  mixed_base_s=base_s and base_s * prefill)  # fmt: skip
    found = profile.with_section("compute", changed(compute, fit=fit))
    if whole is not None:
        found = found.with_section("prefill", changed(whole, fit=_times(whole.fit, prefill, KEPT)))
    return found.with_section("overheads", _times(besides, overheads))


KEPT = ("short_tokens",)
"""Fields of costs that are no times."""


def _times(costs: Any, factor: float, kept: Sequence[str] = ()) -> Any:
    """Return costs with a factor on all their fields but some."""
    names = [name for name in costs.__struct_fields__ if name not in kept]
    return changed(costs, **{name: factor * getattr(costs, name) for name in names})


def intervals(results: Sequence[Result]) -> dict[str, list[float]]:
    """Return {figure: [low, high]}, in which one more run lies with PROBABILITY.

    results   of machines that were drawn, two at least

    A figure that some run lacks, because nothing was answered in it, has no interval.
    """
    found = {}
    for name, figure in FIGURES.items():
        values = [figure(result) for result in results]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            half = student(len(known) - 1) * stdev(known) * sqrt(1 + 1 / len(known))
            found[name] = [max(0.0, fmean(known) - half), min(MOST.get(name, inf), fmean(known) + half)]
    return found


FEW = {1: 6.314, 2: 2.920}
"""Quantiles for which the expansion is no good."""


def student(freedom: int) -> float:
    """Return the two-sided quantile of Student's t at PROBABILITY: Cornish and Fisher's expansion.

    Within 0.5 % from three degrees of freedom on; below, it is a table's.
    """
    if freedom in FEW:
        return FEW[freedom]
    z = NormalDist().inv_cdf((1 + PROBABILITY) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
