"""7e: the time between tokens when a request would get its first one: a TBT that fits its own load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import msgspec

from mooncake_lite.labs.judging import Judge

STEPS = 3


class Seen(msgspec.Struct):
    """What tbt_s() returned, and (at, now, tbt_s) of each load that it asked for."""

    tbt_s: float
    asked: list[tuple[float, float, float]]


@dataclass
class Case:
    """A state and a request. Times are multiples of 1/1024 s, so that sums are exact in any order.

    terms    seconds with this request alone, and for each other sequence
    stairs   (TBT, sequences that decode then) ascending: the load that is predicted from this TBT on
    slots    decode slots of all instances
    held     names of the requests that are held
    """

    terms: tuple[float, float]
    slo_tbt_s: float
    stairs: list[tuple[float, int]]
    running: int = 0
    slots: int = 1000
    held: list[str] = field(default_factory=list)
    held_sequences: int = 0
    request_id: str = "new"
    n: int = 1
    now: float = 100.0
    ttft: float = 5.0

    def load(self, tbt_s: float) -> int:
        return ([0] + [count for from_s, count in self.stairs if from_s <= tbt_s])[-1]

    def found(self, tbt_s: float) -> float:
        """Return the TBT of the load that is predicted with a TBT."""
        others = self.load(tbt_s) + (0 if self.request_id in self.held else self.held_sequences)
        others = min(others, self.slots - self.n)
        return self.terms[0] + self.terms[1] * max(0, others)

    def model(self) -> tuple[float, list[float]]:
        """Return the prediction, and the TBT with which each step has predicted the load."""
        used = [max(self.slo_tbt_s, self.terms[0] + self.terms[1] * self.running)]
        for _ in range(STEPS):
            last = self.found(used[-1])
            if last >= used[-1]:
                break
            used.append(last)
        return last, used[:STEPS]

    def told(self) -> str:
        held = f"; held: {' '.join(self.held)} with {self.held_sequences} sequences" if self.held else ""
        stairs = ", ".join(f"{count} from {ms(from_s)}" for from_s, count in self.stairs[-5:])
        stairs = "... " * (len(self.stairs) > 5) + stairs
        return (
            f"tbt_s() of request {self.request_id!r}, n={self.n}; limit {ms(self.slo_tbt_s)}; TBT is "
            f"{ms(self.terms[0])} alone and {ms(self.terms[1])} more for each other; {self.running} decode "
            f"now; predicted load by TBT: {stairs or '0'}; {self.slots} slots{held}"
        )


def ms(seconds: float) -> str:
    """A time as a message names it."""
    return f"{1000 * seconds:.4g} ms"


def tbt(lab: Judge, cases: list[Case], breaks: str | Callable[[Case], str]) -> list[Seen]:
    """Ask for the predictions of some cases, and expect those of the model."""
    seen = lab.ask("tbt", [asdict(case) for case in cases], list[Seen], cases[0].told())
    for case, after in zip(cases, seen):
        rows = [[str(n + 1), ms(used), ms(case.found(used))] for n, used in enumerate(case.model()[1])]
        rows += [
            [f"you, {n + 1}", ms(used), ms(case.found(used))] for n, (_, _, used) in enumerate(after.asked)
        ]
        title = f"limit {ms(case.slo_tbt_s)}, {case.running} decode now: {ms(after.tbt_s)} came back"
        columns = ["step", "TBT that predicts the load", "TBT of that load"]
        lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
        rule = breaks if isinstance(breaks, str) else breaks(case)
        lab.expect(ms(after.tbt_s), ms(case.model()[0]), case.told(), rule)
    return seen


def in_s(parts: int) -> float:
    return parts / 1024


LIMIT_S = in_s(50)
TERMS = (in_s(20), in_s(1))


def test_a_load_over_the_limit_is_found_in_the_first_step(lab: Judge) -> None:
    others = lab.random.randint(40, 80)
    case = Case(TERMS, LIMIT_S, [(in_s(10), others)])
    (seen,) = tbt(
        lab, [case], "TBT of the load that is predicted with the limit is over the limit: it is returned"
    )
    lab.expect(
        [ms(used) for _, _, used in seen.asked],
        [ms(LIMIT_S)],
        f"{case.told()} (TBT with which loads were predicted)",
        "the search begins at the limit, and ends with the first step that finds no lower TBT",
    )


def test_steps_that_are_too_long_now_begin_the_search(lab: Judge) -> None:
    running = lab.random.randint(45, 70)
    now_s = TERMS[0] + TERMS[1] * running
    stairs = [(in_s(10), 10), (LIMIT_S, 20), (now_s, 28)]
    case = Case(TERMS, LIMIT_S, stairs, running, slots=lab.random.randint(32, 40))
    (seen,) = tbt(
        lab, [case], "while steps take longer than the limit, the search begins with their present time"
    )
    lab.expect(
        ms(seen.asked[0][2] if seen.asked else 0.0),
        ms(now_s),
        f"{case.told()} (TBT with which the first load was predicted)",
        "TBT with what decodes now is alone + other x running; the slots do not bound `running`",
    )


def test_each_step_predicts_with_the_tbt_that_the_step_before_has_found(lab: Judge) -> None:
    a, b = lab.random.randint(20, 28), lab.random.randint(8, 14)
    case = Case(TERMS, LIMIT_S, [(in_s(10), 4), (in_s(20 + b), b), (in_s(20 + a), b), (LIMIT_S, a)])
    (seen,) = tbt(lab, [case], "a lower TBT means a lower load, whose TBT the next step finds")
    lab.expect(
        [ms(used) for _, _, used in seen.asked],
        [ms(used) for used in case.model()[1]],
        f"{case.told()} (TBT with which loads were predicted)",
        "the first step predicts with the limit, each other one with what the step before has found",
    )


def test_the_search_ends_after_its_steps(lab: Judge) -> None:
    first = lab.random.randint(26, 29)
    stairs = [(in_s(20 + count), count - 3) for count in range(4, first + 1)] + [(LIMIT_S, first)]
    case = Case(TERMS, LIMIT_S, stairs)
    (seen,) = tbt(lab, [case], f"after {STEPS} steps the TBT that the last one has found is returned")
    lab.expect(
        len(seen.asked),
        STEPS,
        f"{case.told()} (loads predicted)",
        f"each of the first steps finds a lower TBT, so the search takes {STEPS} steps, and no more",
    )


def test_requests_that_are_held_begin_before_a_new_one_alone(lab: Judge) -> None:
    held = lab.random.randint(3, 9)
    stairs = [(in_s(10), lab.random.randint(5, 15))]
    cases = [
        Case(TERMS, LIMIT_S, stairs, held=["a", "b"], held_sequences=held, request_id=name)
        for name in ("new", "a", "b")
    ]
    tbt(
        lab, cases, "the sequences that are held count for a new request, and not for one that is held itself"
    )


def test_slots_bound_the_others(lab: Judge) -> None:
    n = lab.random.randint(1, 4)
    slots = lab.random.randint(12, 20)
    cases = [
        Case(TERMS, LIMIT_S, [(0.0, load)], slots=slots, n=n, held=["a"], held_sequences=held)
        for load, held in ((slots - n, 0), (slots - n - 1, 0), (slots - n - 1, 1), (slots + 9, 3), (2, slots))
    ]
    tbt(lab, cases, "the others, those that are held included, are at most the slots that the request leaves")
    cases = [Case(TERMS, LIMIT_S, [(0.0, 5)], slots=few, n=3) for few in (2, 3)]
    tbt(lab, cases, "the others are at least 0")


def test_the_load_is_asked_for_at_the_time_of_the_first_token(lab: Judge) -> None:
    now, ttft = lab.random.randint(1, 400) / 4, lab.random.randint(1, 80) / 4
    case = Case(TERMS, LIMIT_S, [(0.0, 8)], now=now, ttft=ttft)
    (seen,) = tbt(lab, [case], "TBT is that of the load when the first token comes")
    lab.expect(
        sorted({(at, present) for at, present, _ in seen.asked}),
        [(now + ttft, now)],
        f"{case.told()}; now {now:g}, ttft {ttft:g} (at and now of the predicted loads)",
        "the load is predicted for ttft from now",
    )


def random_case(lab: Judge) -> Case:
    froms = sorted(lab.random.sample(range(5, 90), lab.random.randint(1, 8)))
    counts = sorted(lab.random.randint(0, 70) for _ in froms)
    held = lab.random.choice([[], ["a"], ["a", "b"]])
    return Case(
        (in_s(lab.random.randint(5, 30)), in_s(lab.random.randint(1, 2))),
        in_s(lab.random.randint(30, 80)),
        [(in_s(one), count) for one, count in zip(froms, counts)],
        running=lab.random.randint(0, 60),
        slots=lab.random.choice([30, 60, 1000]),
        held=held,
        held_sequences=lab.random.randint(1, 6) if held else 0,
        request_id=lab.random.choice(["new", "a"]),
        n=lab.random.randint(1, 3),
    )


def test_random_states_give_the_tbt_that_the_search_finds(lab: Judge) -> None:
    cases = [random_case(lab) for _ in range(150)]
    tbt(lab, cases, "the docstring says where the search begins, what a step finds, and when it ends")


def test_a_step_that_changes_nothing_is_the_last_one(lab: Judge) -> None:
    alone_s, limit_s = lab.size.alone_ms / 1000, lab.size.slo_ms / 1000 + 0.0005
    cases = [
        Case((alone_s, 0.001), limit_s, [(0.0, others)], request_id=f"r{others}")
        for others in range(lab.size.asked)
    ]

    def breaks(case: Case) -> str:
        if len(case.model()[1]) == 1:
            return "the first step finds no lower TBT than the limit, so what it found is returned"
        return "the load is the same with each TBT, so the second step finds what the first one has"

    seen = tbt(lab, cases, breaks)
    needed = sum(len(case.model()[1]) for case in cases)
    lab.cost(sum(len(after.asked) for after in seen), needed)
