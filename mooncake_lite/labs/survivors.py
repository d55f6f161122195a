"""Survivors: mutants of a region that all of its tests let pass. `labs dev mutants` lists them.

A mutant that does the same as the reference is named in `attempts/equal.toml` of the lab, with the reason.
That folder is in no release. Explained in docs/explain/labs.md, "Mutants".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.bench import SEEDS, Bench, dealt
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import LabTask
from mooncake_lite.labs.mutants import Mutant, mutants

AT_ONCE = 40
"""Mutants of one run of the tests, which has a limit of time."""


def equal_of(bench: Bench) -> dict[str, dict[str, str]]:
    """Return {task: {mutant: why nothing can notice it}}. Raises LabError for a mutant that there is not."""
    path = bench.root / bench.lab.folder / "attempts" / "equal.toml"
    if not path.exists():
        return {}
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except msgspec.MsgspecError as error:
        raise LabError(f"{path}: {error}") from None
    for task, named in found.items():
        there = {mutant.what for mutant in mutants(bench.region(bench.lab.task(task)))}
        if unknown := sorted(named.keys() - there):
            raise LabError(f"{path}: {task} has no mutant {unknown[0]!r}; see labs dev mutants")
    return found


def unnoticed(outcome: Outcome) -> bool:
    """Tell whether all tests have passed, at no higher cost than is allowed."""
    return all(case.passed for case in outcome.cases) and all(
        cost.value <= cost.limit for cost in outcome.costs
    )


def survivors(benches: Sequence[Bench], task: LabTask) -> Iterator[Mutant]:
    """Yield the mutants of a task that get full marks, equal ones too."""
    found = mutants(benches[0].region(task))
    for begin in range(0, len(found), AT_ONCE):
        part = found[begin : begin + AT_ONCE]
        texts = [mutant.text for mutant in part]
        outcomes = dealt(benches, texts, lambda bench, own: bench.with_regions(task, own, SEEDS, first=True))
        for mutant, outcome in zip(part, outcomes):
            if unnoticed(outcome) and benches[0].lowers(task, mutant.text):
                yield mutant
