"""Compare the values of one field of an experiment: each serves the same requests, for several seeds.

Used by `compare_policies.py` and `compare_admission.py`, which say what is varied and measured, and by
`experiment_commands.py`. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mooncake_lite.simulator.experiment import Experiment
from mooncake_lite.simulator.outcome import Outcome

Measure = Callable[[Experiment, Outcome], float]
"""What counts of a run. Raises ConfigError when the run was too short to tell."""

Told = Callable[[], None]
"""Is called after each run."""


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one value.

    numbers   a number for each seed, by the name of the measure
    facts     what is one for all seeds
    first     the outcome for the first seed
    """

    name: str
    numbers: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)
    first: Outcome | None = None


Columns = Mapping[str, Callable[[Row], str]]
"""Columns of a table, after that of the names: heading -> the text for a row."""


def of_seeds(
    measure: str, text: str, statistic: Callable[[list[float]], float] = median
) -> Callable[[Row], str]:
    """Return a column: a statistic of a measure over the seeds. text: its format."""
    return lambda row: format(statistic(row.numbers[measure]), text)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison. varied: the field; rate: requests per second."""

    varied: str
    rate: float
    seeds: list[int]
    rows: list[Row]

    def less(self, measure: str, one: str, other: str) -> int | None:
        """Return for how many seeds one value has less of a measure; None if one of them was not run."""
        numbers = {row.name: row.numbers[measure] for row in self.rows}
        if one not in numbers or other not in numbers:
            return None
        return sum(a < b for a, b in zip(numbers[one], numbers[other], strict=True))

    def table(self, columns: Columns) -> list[list[str]]:
        """Return the cells of a table, row by row."""
        return [[row.name, *(text(row) for text in columns.values())] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON file has."""
        rows = [{self.varied: row.name, **row.facts, **row.numbers} for row in self.rows]
        return {"rate": self.rate, "seeds": self.seeds, "rows": rows}


def compare(
    experiment: Experiment,
    varied: str,
    values: Sequence[str],
    seeds: Sequence[int],
    measures: Mapping[str, Measure],
    told: Told,
) -> Comparison:
    """Run every value of a field with every seed."""
    rows = []
    for value in values:
        variant = experiment.on(**{varied: value})
        outcomes = []
        for seed in seeds:
            outcomes.append(variant.run(seed))
            told()
        numbers = {name: [measure(variant, one) for one in outcomes] for name, measure in measures.items()}
        rows.append(Row(value, numbers, first=outcomes[0]))
    return Comparison(varied, experiment.rate, list(seeds), rows)
