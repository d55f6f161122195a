"""Scores: what a run of the tests is worth. Pure arithmetic over an Outcome.

Used by `labs check` for its public part and by `grade` for all of it.
Explained in docs/explain/labs.md, "Points".
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_lite.labs.judging import Case, Counted, Outcome
from mooncake_lite.labs.lab import Lab, LabTask


class TaskScore(msgspec.Struct):
    """The points of one task.

    state   "graded", or why its tests were not run
    failed  the messages of the tests that failed, by sentence and seed
    """

    task: str
    state: str
    public: int = 0
    private: int = 0
    cost: int = 0
    tidiness: int = 0
    passed: int = 0
    tests: int = 0
    failed: dict[str, str] = {}
    costs: list[Counted] = []
    untidy: list[str] = []

    def failed_with(self, seed: str) -> dict[str, str]:
        """Return the messages of the tests that failed with this seed, by sentence."""
        return {name: text for name, text in self.failed.items() if name.endswith(f"[{seed}]")}

    def nothing(self, state: str) -> TaskScore:
        """Return the same task without any points, because of a gate that was tried after its tests."""
        return msgspec.structs.replace(self, state=state, public=0, private=0, cost=0, tidiness=0)

    @property
    def points(self) -> int:
        """Return the sum."""
        return self.public + self.private + self.cost + self.tidiness


def not_run(task: LabTask, state: str) -> TaskScore:
    """Return the score of a task whose tests were not run: 0 points and the reason."""
    return TaskScore(task.id, state)


def score(task: LabTask, outcome: Outcome, untidy: list[str]) -> TaskScore:
    """Return the points of a task whose tests were run.

    Tests count in proportion, rounded down; while a key test fails they give at most half. The cost and the
    tidiness count only when all tests have passed.
    """
    cases = [case for case in outcome.cases if case.task == task.id]
    costs = [cost for cost in outcome.costs if cost.task == task.id]
    every = bool(cases) and all(case.passed for case in cases)
    cheap = bool(costs) and all(cost.value <= cost.limit for cost in costs)
    return TaskScore(
        task.id,
        "graded",
        public=_share(task, task.points.public, cases, "public"),
        private=_share(task, task.points.private, cases, "private"),
        cost=task.points.cost if every and cheap else 0,
        tidiness=task.points.tidiness if every and not untidy else 0,
        passed=sum(case.passed for case in cases),
        tests=len(cases),
        failed={f"{case.name} [{case.seed}]": case.message for case in cases if not case.passed},
        costs=costs,
        untidy=untidy,
    )


def _share(task: LabTask, points: int, cases: list[Case], seed: str) -> int:
    mine = {case.name: case.passed for case in cases if case.seed == seed}
    most = points if all(mine.get(name, True) for name in task.key) else points // 2
    return min(most, points * sum(mine.values()) // len(mine)) if mine else 0


def possible(lab: Lab, part: str) -> int:
    """Return how many points a part can give: public, private, cost or tidiness."""
    return sum(getattr(task.points, part) for task in lab.tasks)


def sum_of(scores: Mapping[str, TaskScore], part: str) -> int:
    """Return how many points a part has given."""
    return sum(getattr(each, part) for each in scores.values())
